"""Python client of the operator: one method per operation. Depends on the operator's HTTP routes only."""

from __future__ import annotations

import copy
import json
import re
import ssl
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from types import FunctionType
from typing import Any

from cortex.client.environments import Environment
from cortex.client.jobs import JobClient
from cortex.client.packaging import Package, dump_specs, find_config, pack_file, pack_specs
from cortex.client.source import save_class
from cortex.client.transport import (
    SYSTEM_TRUST,
    Answer,
    Trust,
    api_path,
    describe_error,
    describe_tls_error,
    encode_query,
    open_response,
    path_segment,
    read,
)
from cortex.errors import CortexError, InputError, NotFoundError, UserError
from cortex.lifecycle import ApiKind
from cortex.terminal import print_line

#: Enough for the operator to unpack, check and store a project of the maximum size.
_DEPLOY_TIMEOUT_S = 300.0
#: Duration of one long poll of an API's status.
_POLL_S = 30.0
_PREDICT_TIMEOUT_S = 3600.0
_SIGN_IN = re.compile(r"/dashboard/[A-Za-z0-9/?=_-]+")
#: Maximum body of one feedback request; more feedback is sent in several requests.
_FEEDBACK_PART_BYTES = 8 * 1024 * 1024
_FEEDBACK_TIMEOUT_S = 300.0

ApiSpec = Mapping[str, Any]
Feedback = Mapping[str, Any] | Iterable[Mapping[str, Any]] | bytes


class Client(JobClient):
    """Client of one environment's operator. Methods raise the errors of `cortex.errors`. Thread-safe."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    # Deploying.

    def deploy(
        self,
        api_spec: ApiSpec | Sequence[ApiSpec] | str | Path,
        project_dir: str | Path | None = None,
        force: bool = True,
        wait: bool = False,
    ) -> list[dict[str, Any]]:
        """Deploy one or several API specifications with the code in `project_dir`; return the results of `upload`.

        A path in place of the specifications is that of a configuration file, as in clients of 0.22 to 0.24. With
        `wait`, return once all APIs are live. Raises: UserError if an API fails to become live.
        """
        if isinstance(api_spec, str | Path):
            return self.deploy_file(api_spec, force, wait)
        if project_dir is None:
            raise ValueError("`project_dir` must be given with `api_spec`")
        specs = [api_spec] if isinstance(api_spec, Mapping) else list(api_spec)
        for spec in specs:
            _check_name(spec)
        return self._finish(self.upload(pack_specs(specs, Path(project_dir)), force), wait)

    def deploy_file(self, config_file: str | Path, force: bool = True, wait: bool = False) -> list[dict[str, Any]]:
        """Deploy a configuration file and the folder that contains it. Otherwise like `deploy`."""
        return self._finish(self.upload(pack_file(find_config(Path(config_file))), force), wait)

    def deploy_realtime_api(
        self,
        api_spec: ApiSpec,
        handler: type,
        requirements: Sequence[str] = (),
        conda_packages: Sequence[str] = (),
        force: bool = True,
        wait: bool = False,
    ) -> dict[str, Any]:
        """Deploy a class as a RealtimeAPI and set `handler.path`. `source.save_class` documents the files sent."""
        _check_kind(api_spec, ApiKind.REALTIME)
        return self._deploy_class(api_spec, "handler", handler, requirements, conda_packages, force, wait)

    def deploy_batch_api(
        self,
        api_spec: ApiSpec,
        handler: type,
        requirements: Sequence[str] = (),
        conda_packages: Sequence[str] = (),
        force: bool = True,
        wait: bool = False,
    ) -> dict[str, Any]:
        """Deploy a class as a BatchAPI. Otherwise like `deploy_realtime_api`."""
        _check_kind(api_spec, ApiKind.BATCH)
        return self._deploy_class(api_spec, "handler", handler, requirements, conda_packages, force, wait)

    def deploy_async_api(
        self,
        api_spec: ApiSpec,
        handler: type,
        requirements: Sequence[str] = (),
        conda_packages: Sequence[str] = (),
        force: bool = True,
        wait: bool = False,
    ) -> dict[str, Any]:
        """Deploy a class as an AsyncAPI. Otherwise like `deploy_realtime_api`."""
        _check_kind(api_spec, ApiKind.ASYNC)
        return self._deploy_class(api_spec, "handler", handler, requirements, conda_packages, force, wait)

    def deploy_task_api(
        self,
        api_spec: ApiSpec,
        task: type | FunctionType,
        requirements: Sequence[str] = (),
        conda_packages: Sequence[str] = (),
        force: bool = True,
        wait: bool = False,
    ) -> dict[str, Any]:
        """Deploy a class, or a function of `config`, as a TaskAPI and set the path in its `definition`.

        Otherwise like `deploy_realtime_api`.
        """
        _check_kind(api_spec, ApiKind.TASK)
        return self._deploy_class(api_spec, "definition", task, requirements, conda_packages, force, wait)

    def deploy_traffic_splitter(self, api_spec: ApiSpec, force: bool = True, wait: bool = False) -> dict[str, Any]:
        """Deploy a TrafficSplitter, which has no code."""
        _check_kind(api_spec, ApiKind.SPLITTER)
        with tempfile.TemporaryDirectory(prefix="cortex-") as folder:
            return self.deploy(api_spec, folder, force, wait)[0]

    def create_api(
        self,
        api_spec: ApiSpec,
        predictor: type | None = None,
        requirements: Sequence[str] = (),
        conda_packages: Sequence[str] = (),
        project_dir: str | Path | None = None,
        force: bool = True,
        wait: bool = False,
        task: type | FunctionType | None = None,
    ) -> list[dict[str, Any]]:
        """Deploy a predictor class, a task, or the code in `project_dir`. Older name of the `deploy_…` methods.

        A TrafficSplitter takes none of the three.
        """
        given = [value for value in (predictor, task, project_dir) if value is not None]
        if len(given) > 1:
            raise ValueError("only one of `predictor`, `task` and `project_dir` can be given")
        if predictor is not None:
            _check_kind(api_spec, ApiKind.REALTIME, ApiKind.BATCH, ApiKind.ASYNC)
            return [self._deploy_class(api_spec, "predictor", predictor, requirements, conda_packages, force, wait)]
        if task is not None:
            return [self.deploy_task_api(api_spec, task, requirements, conda_packages, force, wait)]
        if project_dir is None and api_spec.get("kind") == ApiKind.SPLITTER:
            return [self.deploy_traffic_splitter(api_spec, force, wait)]
        if project_dir is None:
            raise ValueError("one of `predictor`, `task` and `project_dir` must be given")
        if requirements or conda_packages:
            raise ValueError("with `project_dir`, list packages in its requirements.txt and conda-packages.txt")
        return self.deploy(api_spec, project_dir, force, wait)

    def upload(self, package: Package, force: bool = False) -> list[dict[str, Any]]:
        """Deploy a package; return the result of each of its APIs.

        A result has `api`, `message`, `error` (empty on success), and `changes`: lines about the differences from the
        revision that is live.
        """
        return self._objects(
            "POST",
            "/v1/deploy",
            query={"config": package.config_name, "force": force},
            body=package.archive,
            content_type="application/zip",
            timeout_s=_DEPLOY_TIMEOUT_S,
        )

    # Changing.

    def patch(self, api_spec: ApiSpec | Sequence[ApiSpec], force: bool = False) -> list[dict[str, Any]]:
        """Change the specifications of deployed APIs; their code stays the same."""
        specs = [api_spec] if isinstance(api_spec, Mapping) else list(api_spec)
        for spec in specs:
            _check_name(spec)
        return self.patch_text(dump_specs(specs).encode(), force)

    def patch_text(self, config: bytes, force: bool = False) -> list[dict[str, Any]]:
        """Like `patch`, with the content of a configuration file."""
        return self._objects(
            "POST",
            "/v1/patch",
            query={"force": force},
            body=config,
            content_type="application/yaml",
        )

    def refresh(self, api: str, force: bool = False) -> dict[str, Any]:
        """Replace all replicas of an API by new ones with the same specification."""
        return self._object("POST", f"{api_path(api)}/refresh", query={"force": force})

    def promote(self, api: str) -> dict[str, Any]:
        """Promote the canary of an API: it replaces the old revision before its trial ends.

        Raises: NotFoundError; ConflictError if no revision is tried.
        """
        return self._object("POST", f"{api_path(api)}/promote")

    def history(self, api: str) -> list[dict[str, Any]]:
        """Return the revisions of an API, the newest first, with `number`, `deployed_at`, `deployed_by` and `changes`.

        Raises: NotFoundError.
        """
        return self._objects("GET", f"{api_path(api)}/history")

    def rollback(
        self, api: str, revision: int | None = None, force: bool = False, wait: bool = False
    ) -> dict[str, Any]:
        """Deploy the revision of an API with this number again; by default, the one that was live before the newest.

        With `wait`, return once the API is live. Raises: NotFoundError; ConflictError during an update, without
        `force`; UserError if the API fails to become live.
        """
        query = {"revision": revision, "force": force}
        return self._finish([self._object("POST", f"{api_path(api)}/rollback", query=query)], wait)[0]

    def delete(self, api: str, keep_cache: bool = False, force: bool = True) -> dict[str, Any]:
        """Delete an API and its history. With `keep_cache`, its jobs and the list of its versions are kept."""
        return self._object("DELETE", api_path(api), query={"keep_cache": keep_cache, "force": force})

    def delete_api(self, api: str, keep_cache: bool = False) -> dict[str, Any]:
        """Delete an API. Older name of `delete`."""
        return self.delete(api, keep_cache)

    # Querying.

    def get_api(self, api: str) -> dict[str, Any]:
        """Return an API's specification, status, metrics and endpoint. Raises: NotFoundError."""
        return self._object("GET", api_path(api))

    def list_apis(self) -> list[dict[str, Any]]:
        """Return all APIs, each in the form of `get_api`."""
        return self._objects("GET", "/v1/apis")

    def wait_api(self, api: str, timeout_s: float = _POLL_S) -> dict[str, Any]:
        """Wait until an API is no longer `updating`, at most `timeout_s`; return it in the form of `get_api`."""
        return self._object("GET", f"{api_path(api)}/wait", query={"timeout": timeout_s}, timeout_s=timeout_s + _POLL_S)

    def api_logs(
        self,
        api: str,
        follow: bool = False,
        replica: str | None = None,
        tail: int | None = None,
        *,
        request: str | None = None,
        as_json: bool = False,
        access: bool = False,
    ) -> Iterator[str]:
        """Yield log lines of all replicas, or of one. With `follow`, also yield new lines until the caller stops.

        `request` selects the lines of one request by its id. With `as_json`, each line is a JSON object. With `access`,
        the lines are those of the gateway's access log, one per request.
        """
        query = {"follow": follow, "replica": replica, "tail": tail, "request": request}
        forms = {name: True for name, is_wanted in (("json", as_json), ("access", access)) if is_wanted}
        return self.environment.connect().lines(f"{api_path(api)}/logs", query | forms)

    def stream_api_logs(self, api: str) -> None:
        """Print an API's log lines as they are written, until interrupted."""
        for line in self.api_logs(api, follow=True):
            print_line(line)

    def get_scaling(self, api: str) -> dict[str, Any]:
        """Return an API's requested number of replicas, its autoscaling policy, and the last decisions with reasons.

        Raises: NotFoundError; InputError if the API has no replicas.
        """
        return self._object("GET", f"{api_path(api)}/scaling")

    def operator_status(self) -> dict[str, Any]:
        """Return the state of operator, gateway and replicas."""
        return self._object("GET", "/v1/status")

    # Predicting.

    def endpoint(self, api: str) -> str:
        """Return the URL of an API. Raises: NotFoundError; InputError if it is on a host that is not the operator's."""
        return self.environment.check_host(str(self.get_api(api).get("endpoint")))

    def predict(self, api: str, payload: Any, content_type: str | None = None, *, api_key: str | None = None) -> Any:
        """Send one request to an API and return the response: decoded JSON, text, or bytes.

        Bytes are sent unchanged, as is text if `content_type` is given; anything else is sent as JSON. `api_key` is
        required by APIs with `auth: api_key`, and sent to no other.
        Raises: NotFoundError, InputError (the API rejected the request), UserError (its code raised).
        """
        raw = isinstance(payload, bytes) or (content_type is not None and isinstance(payload, str))
        try:
            body = (payload.encode() if isinstance(payload, str) else payload) if raw else json.dumps(payload).encode()
        except TypeError as error:
            raise InputError(f"the payload can't be sent as JSON: {error}") from None
        kind = content_type or ("application/octet-stream" if raw else "application/json")
        described = self.get_api(api)
        endpoint = self.environment.check_host(str(described["endpoint"]))
        key = api_key if needs_key(described) else None
        answer = call_api(endpoint, body, kind, key, self.environment.connect().trust)
        if answer.status >= 400:
            raise _prediction_error(api, answer)
        answered = answer.headers.get("content-type", "").partition(";")[0].strip()
        if answered == "application/json" or answered.endswith("+json"):
            return answer.json()
        return answer.body.decode(errors="replace") if answered.startswith("text/") else answer.body

    def get_openapi(self, api: str) -> dict[str, Any]:
        """Return the OpenAPI document of an API. Raises: NotFoundError, also if the API has `docs: false`."""
        url = f"{self.endpoint(api)}/openapi.json"
        answer = call_api(url, None, "", trust=self.environment.connect().trust)
        if answer.status >= 400:
            raise _prediction_error(api, answer)
        document: dict[str, Any] = answer.json()
        return document

    # Feedback.

    def post_feedback(self, api: str, feedback: Feedback) -> dict[str, Any]:
        """Post the true values of earlier predictions.

        `feedback`: a mapping from request id to truth, objects with `request_id` and `truth`, or JSON as bytes. A later
        truth of the same request replaces an earlier one. Large feedback is sent in several requests; if one of them is
        rejected, those before it remain in effect.

        Returns `matched`, `unknown` and some of the `unknown_ids`. Raises: InputError.
        """
        total: dict[str, Any] = {"matched": 0, "unknown": 0, "unknown_ids": []}
        for part in _feedback_parts(feedback):
            counts = self._call("POST", f"{api_path(api)}/feedback", body=part, timeout_s=_FEEDBACK_TIMEOUT_S)
            total = {name: total[name] + counts[name] for name in total}
        return total

    # API keys, for callers of APIs.

    def create_key(self, name: str, apis: Sequence[str] = ()) -> dict[str, Any]:
        """Create an API key for some APIs, deployed or not, or for all if `apis` is empty; return its `id` and `key`.

        The key is valid at once. The operator stores only a hash: `key` can't be shown again. Raises: InputError.
        """
        if isinstance(apis, str):
            raise ValueError("`apis` must be a list (got a string)")
        return self._object("POST", "/v1/keys", body=json.dumps({"name": name, "apis": list(apis)}).encode())

    def list_keys(self) -> list[dict[str, Any]]:
        """Return `id`, `name`, `apis` (empty: all) and `created_at` of every key, oldest first."""
        return self._objects("GET", "/v1/keys")

    def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Revoke a key. Once this returns, no new request is admitted with it. Raises: NotFoundError."""
        return self._object("DELETE", f"/v1/keys/{path_segment(key_id, 'id of the key')}")

    # Operator tokens, for users of the operator.

    def create_token(
        self, scope: str, name: str | None = None, api: str | None = None, expires_in_s: float | None = None
    ) -> dict[str, Any]:
        """Create an operator token and return its `name` and `token`; with `api`, it is limited to this API.

        `scope` is metrics, read, deploy or admin; `name` defaults to the scope and the API. The operator stores only a
        hash: `token` can't be shown again. Raises: InputError, ConflictError.
        """
        body = {"scope": scope, "name": name, "api": api, "expires_in_s": expires_in_s}
        return self._object("POST", "/v1/tokens", body=json.dumps(body).encode())

    def list_tokens(self) -> list[dict[str, Any]]:
        """Return `id`, `name`, `scope`, `api` and times of every token but that of CORTEX_HOME, oldest first."""
        return self._objects("GET", "/v1/tokens")

    def revoke_token(self, token: str) -> dict[str, Any]:
        """Revoke the token with this id or name. Once this returns, requests with it fail. Raises: NotFoundError."""
        return self._object("DELETE", f"/v1/tokens/{path_segment(token, 'id of the token')}")

    def audit_log(
        self, api: str | None = None, since: datetime | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Return the latest changes that clients of the operator requested, the refused ones included, newest first.

        Each has `at`, `token`, `address`, `action`, `api`, `result` and `detail`. With `api` those of one API, with
        `since` those from then on.
        """
        query = {"api": api, "since": since and since.astimezone().isoformat(), "limit": limit}
        return self._objects("GET", "/v1/audit", query=query)

    # The dashboard.

    def create_dashboard_url(self) -> str:
        """Return a URL of the operator's dashboard that signs one browser in, once and within a minute.

        The browser may then do what the token of this environment permits.
        """
        path = str(self._object("POST", "/v1/dashboard/codes").get("path"))
        url = self.environment.connect().url
        if not _SIGN_IN.fullmatch(path):  # such as one that changes the host
            raise InputError(f"{url} is not a cortex operator: {path[:200]!r} is no path of a dashboard")
        return url + path

    def _deploy_class(
        self,
        api_spec: ApiSpec,
        section: str,
        target: type | FunctionType,
        requirements: Sequence[str],
        conda_packages: Sequence[str],
        force: bool,
        wait: bool,
    ) -> dict[str, Any]:
        if isinstance(requirements, str) or isinstance(conda_packages, str):
            raise ValueError("`requirements` and `conda_packages` must be lists (got a string)")
        if not isinstance(target, (type, FunctionType) if section == "definition" else type):
            raise ValueError(f"`{section}` must be a class (got {type(target).__name__})")
        spec: dict[str, Any] = copy.deepcopy(dict(api_spec))
        code = spec.setdefault(section, {}) if section == "definition" else spec.get(section)
        if not isinstance(code, dict) or (section != "definition" and not code.get("type")):
            raise ValueError(f"`api_spec` must have `{section}.type` set, for example to `python`")
        with tempfile.TemporaryDirectory(prefix="cortex-") as folder:
            saved = save_class(target, Path(folder), _class_name(section, code.get("type")))
            code["path"] = saved.path
            _write_lines(Path(folder) / "requirements.txt", [*requirements, *saved.requirements])
            _write_lines(Path(folder) / "conda-packages.txt", conda_packages)
            package = pack_specs([spec], Path(folder))
        return self._finish(self.upload(package, force), wait)[0]

    def _finish(self, results: list[dict[str, Any]], wait: bool) -> list[dict[str, Any]]:
        for result in results if wait else ():
            if result["error"]:
                raise CortexError(f"{result['api']}: {result['error']}")
            self._wait_until_live(result["api"])
        return results

    def _wait_until_live(self, api: str) -> None:
        while (status := self.wait_api(api)["status"])["status_code"] == "updating":
            pass
        if status["status_code"] != "live":
            failure = status.get("failure") or {}
            raise UserError(
                f"{api} failed to become live: {failure.get('message') or status['message']}",
                failure.get("traceback", ""),
            )


_PREDICTORS = {"tensorflow": "TensorFlowPredictor", "onnx": "ONNXPredictor"}


def needs_key(api: dict[str, Any]) -> bool:
    """Return whether callers of an API, as `get_api` returns it, need an API key.

    Operators of older versions don't report it: then a splitter may need one, if an API behind it does.
    """
    spec = api["spec"]
    is_keyed = spec.get("networking", {}).get("auth") == "api_key"
    return bool(api.get("needs_key", is_keyed or spec.get("kind") == ApiKind.SPLITTER))


def call_api(
    endpoint: str, body: bytes | None, content_type: str, api_key: str | None = None, trust: Trust = SYSTEM_TRUST
) -> Answer:
    """Post a body, or with None send a GET, and read the whole response. Raises: CortexError if there is none."""
    connection, response = open_api(endpoint, body, content_type, api_key=api_key, trust=trust)
    try:
        return read(response)
    except (OSError, HTTPException) as error:
        raise CortexError(
            f"{endpoint} closed the connection before the end of the response ({describe_error(error)})"
        ) from None
    finally:
        connection.close()


def open_api(
    endpoint: str,
    body: bytes | None,
    content_type: str,
    query: dict[str, Any] | None = None,
    api_key: str | None = None,
    trust: Trust = SYSTEM_TRUST,
    verb: str | None = None,
) -> tuple[HTTPConnection, HTTPResponse]:
    """Like `call_api`, but return the connection, which the caller must close, and the response before its body.

    Without `verb`, it is POST with a body, else GET.
    """
    url = endpoint + encode_query(query)
    try:
        headers = {"content-type": content_type} if body is not None else {}
        headers |= {"x-api-key": api_key} if api_key else {}
        verb = verb or ("GET" if body is None else "POST")
        return open_response(verb, url, body, headers, _PREDICT_TIMEOUT_S, trust)
    except ssl.SSLError as error:
        raise CortexError(f"{endpoint}: {describe_tls_error(error)}") from None
    except (OSError, HTTPException) as error:
        raise CortexError(
            f"{endpoint} does not answer ({describe_error(error)}); `cortex status` lists the running processes"
        ) from None


def _check_name(spec: ApiSpec) -> None:
    if not isinstance(spec, Mapping) or not spec.get("name"):
        raise ValueError("`api_spec` must be a dictionary with the key `name`")


def _check_kind(spec: ApiSpec, *kinds: str) -> None:
    _check_name(spec)
    if spec.get("kind") not in kinds:
        raise ValueError(f"`kind` must be {' or '.join(kinds)} to deploy a class this way (got {spec.get('kind')})")


def _class_name(section: str, predictor_type: Any) -> str:
    classes = {"handler": "Handler", "definition": "Task"}
    return classes.get(section) or _PREDICTORS.get(predictor_type, "PythonPredictor")


def _write_lines(file: Path, lines: Sequence[str]) -> None:
    if lines:
        file.write_text("\n".join(lines) + "\n")


def _prediction_error(api: str, answer: Answer) -> CortexError:
    try:
        message = str(json.loads(answer.body)["error"])
    except (ValueError, KeyError, TypeError):
        message = answer.body.decode(errors="replace").strip() or "no message"
    text = f"{api} answered with status {answer.status}: {message}"
    if answer.status == 404:
        return NotFoundError(text)
    if answer.status < 500:
        return InputError(text)
    return UserError(text) if answer.status == 500 else CortexError(text)


def _feedback_parts(feedback: Feedback) -> Iterator[bytes]:
    if isinstance(feedback, bytes):
        yield from _split_at_lines(feedback)
        return
    if isinstance(feedback, Mapping):
        feedback = ({"request_id": request_id, "truth": truth} for request_id, truth in feedback.items())
    lines: list[bytes] = []
    size, has_sent = 0, False
    for number, item in enumerate(feedback, start=1):
        lines.append(_feedback_line(number, item))
        size += len(lines[-1]) + 1
        if size >= _FEEDBACK_PART_BYTES:
            yield b"\n".join(lines)
            lines, size = [], 0
            has_sent = True
    if lines or not has_sent:
        yield b"\n".join(lines)


def _feedback_line(number: int, item: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(item).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"truth {number} can't be written as JSON: {error}") from None


def _split_at_lines(body: bytes) -> Iterator[bytes]:
    """Split JSON lines into parts at line ends. A JSON list is not split."""
    start = 0
    has_lines = body.lstrip()[:1] != b"["
    while has_lines and len(body) - start > _FEEDBACK_PART_BYTES:
        end = body.rfind(b"\n", start, start + _FEEDBACK_PART_BYTES) + 1
        if end <= start:
            break
        yield body[start:end]
        start = end
    yield body[start:]
