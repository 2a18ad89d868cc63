"""The client: every operation of an operator as a method. Knows the routes; nothing of how the operator works."""

from __future__ import annotations

import copy
import json
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from cortex.client.environments import Environment
from cortex.client.feedback import FeedbackClient
from cortex.client.jobs import JobClient
from cortex.client.keys import KeyClient
from cortex.client.packaging import Package, dump_specs, find_config, pack_file, pack_specs
from cortex.client.routes import api_path
from cortex.client.source import save_class
from cortex.client.transport import SYSTEM, Answer, Trust, distrust, encode_query, open_response, read, reason
from cortex.errors import CortexError, InputError, NotFoundError, UserError
from cortex.lifecycle import ApiKind

#: Unpacking, checking and storing a project of the largest size.
_DEPLOY_TIMEOUT_S = 300.0
#: How long the operator may hold one question for an API's status.
_POLL_S = 30.0
_PREDICT_TIMEOUT_S = 3600.0

ApiSpec = Mapping[str, Any]


class Client(JobClient, FeedbackClient, KeyClient):
    """Talks to one environment's operator. Methods raise the errors of `cortex.errors`; threads may share it."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    # Deploying.

    def deploy(
        self,
        api_spec: ApiSpec | Sequence[ApiSpec],
        project_dir: str | Path,
        force: bool = True,
        wait: bool = False,
    ) -> list[dict[str, str]]:
        """Deploy one specification or several, with the code in `project_dir`; see `upload` for the answer.

        With `wait`, return once the APIs are live. Raises: UserError if one can't become so.
        """
        specs = [api_spec] if isinstance(api_spec, Mapping) else list(api_spec)
        for spec in specs:
            _check_name(spec)
        return self._finish(self.upload(pack_specs(specs, Path(project_dir)), force), wait)

    def deploy_file(self, config_file: str | Path, force: bool = True, wait: bool = False) -> list[dict[str, str]]:
        """Deploy a configuration file with the folder around it; otherwise as `deploy`."""
        return self._finish(self.upload(pack_file(find_config(Path(config_file))), force), wait)

    def deploy_realtime_api(
        self,
        api_spec: ApiSpec,
        handler: type,
        requirements: Sequence[str] = (),
        conda_packages: Sequence[str] = (),
        force: bool = True,
        wait: bool = False,
    ) -> dict[str, str]:
        """Deploy a class; its `handler.path` is filled in. See `source.save_class` for what travels with it."""
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
    ) -> dict[str, str]:
        """As `deploy_realtime_api`, for an API that runs jobs."""
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
    ) -> dict[str, str]:
        """As `deploy_realtime_api`, for an API whose answers are fetched later."""
        _check_kind(api_spec, ApiKind.ASYNC)
        return self._deploy_class(api_spec, "handler", handler, requirements, conda_packages, force, wait)

    def deploy_task_api(
        self,
        api_spec: ApiSpec,
        task: type,
        requirements: Sequence[str] = (),
        conda_packages: Sequence[str] = (),
        force: bool = True,
        wait: bool = False,
    ) -> dict[str, str]:
        """As `deploy_realtime_api`, for a class that is called once per job; `definition.path` is filled in."""
        _check_kind(api_spec, ApiKind.TASK)
        return self._deploy_class(api_spec, "definition", task, requirements, conda_packages, force, wait)

    def deploy_traffic_splitter(self, api_spec: ApiSpec, force: bool = True, wait: bool = False) -> dict[str, str]:
        """Deploy what shares its requests out to other APIs, which has no code."""
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
        task: type | None = None,
    ) -> list[dict[str, str]]:
        """Deploy a class with a `predictor` or `definition` section, or the code in `project_dir`: the older name.

        A TrafficSplitter needs neither.
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

    def upload(self, package: Package, force: bool = False) -> list[dict[str, str]]:
        """Deploy a package; return `api`, `message` and `error` (empty if there is none) for each API in it."""
        results: list[dict[str, str]] = self._call(
            "POST",
            "/v1/deploy",
            query={"config": package.config_name, "force": force},
            body=package.archive,
            content_type="application/zip",
            timeout_s=_DEPLOY_TIMEOUT_S,
        )
        return results

    # Changing.

    def patch(self, api_spec: ApiSpec | Sequence[ApiSpec], force: bool = False) -> list[dict[str, str]]:
        """Change what is deployed to these specifications, keeping each API's code."""
        specs = [api_spec] if isinstance(api_spec, Mapping) else list(api_spec)
        for spec in specs:
            _check_name(spec)
        return self.patch_text(dump_specs(specs).encode(), force)

    def patch_text(self, config: bytes, force: bool = False) -> list[dict[str, str]]:
        """As `patch`, with the content of a configuration file."""
        results: list[dict[str, str]] = self._call(
            "POST",
            "/v1/patch",
            query={"force": force},
            body=config,
            content_type="application/yaml",
        )
        return results

    def refresh(self, api: str, force: bool = False) -> dict[str, Any]:
        """Replace every replica by a new one of the same specification."""
        answer: dict[str, Any] = self._call("POST", f"{api_path(api)}/refresh", query={"force": force})
        return answer

    def delete(self, api: str, keep_cache: bool = False, force: bool = True) -> dict[str, Any]:
        """Delete an API; with `keep_cache`, its project and model files stay on disk."""
        answer: dict[str, Any] = self._call("DELETE", api_path(api), query={"keep_cache": keep_cache, "force": force})
        return answer

    def delete_api(self, api: str, keep_cache: bool = False) -> dict[str, Any]:
        """Delete an API: the older name of `delete`."""
        return self.delete(api, keep_cache)

    # Looking.

    def get_api(self, api: str) -> dict[str, Any]:
        """Return an API's specification, status, metrics and endpoint. Raises: NotFoundError."""
        answer: dict[str, Any] = self._call("GET", api_path(api))
        return answer

    def list_apis(self) -> list[dict[str, Any]]:
        """Return all APIs, each as `get_api` does."""
        answer: list[dict[str, Any]] = self._call("GET", "/v1/apis")
        return answer

    def wait_api(self, api: str, timeout_s: float = _POLL_S) -> dict[str, Any]:
        """Return the API, as `get_api` does, once it is not `updating` any more or `timeout_s` is over."""
        answer: dict[str, Any] = self._call(
            "GET", f"{api_path(api)}/wait", query={"timeout": timeout_s}, timeout_s=timeout_s + _POLL_S
        )
        return answer

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
        """Yield log lines of all replicas, or of one; with `follow`, go on until the caller stops.

        `request` is the id of the request that lines were printed for, `as_json` makes each line an object, and with
        `access` the lines are the gateway's, one per request.
        """
        query = {"follow": follow, "replica": replica, "tail": tail, "request": request}
        forms = {name: True for name, is_wanted in (("json", as_json), ("access", access)) if is_wanted}
        return self.environment.connect().lines(f"{api_path(api)}/logs", query | forms)

    def stream_api_logs(self, api: str) -> None:
        """Print an API's log lines as they are written, until interrupted."""
        for line in self.api_logs(api, follow=True):
            print(line, flush=True)

    def get_scaling(self, api: str) -> dict[str, Any]:
        """Return how many replicas an API is to have, its policy, and the last decisions with inputs and reasons.

        Raises: NotFoundError; InputError if the API has no replicas.
        """
        answer: dict[str, Any] = self._call("GET", f"{api_path(api)}/scaling")
        return answer

    def operator_status(self) -> dict[str, Any]:
        """Return what runs: operator, gateway, replicas."""
        answer: dict[str, Any] = self._call("GET", "/v1/status")
        return answer

    # Using.

    def predict(self, api: str, payload: Any, content_type: str | None = None, *, api_key: str | None = None) -> Any:
        """Send one request to an API and return its answer: decoded JSON, text, or bytes.

        Bytes are sent as they are, anything else as JSON; with `content_type`, text is sent as it is, too. `api_key`
        is for an API that asks for one.
        Raises: NotFoundError, InputError (the API refused the request), UserError (its code raised).
        """
        raw = isinstance(payload, bytes) or (content_type is not None and isinstance(payload, str))
        body = (payload.encode() if isinstance(payload, str) else payload) if raw else json.dumps(payload).encode()
        kind = content_type or ("application/octet-stream" if raw else "application/json")
        answer = call_api(self.get_api(api)["endpoint"], body, kind, api_key, self.environment.connect().trust)
        if answer.status >= 400:
            raise _prediction_error(api, answer)
        answered = answer.headers.get("content-type", "").partition(";")[0].strip()
        if answered == "application/json" or answered.endswith("+json"):
            return answer.json()
        return answer.body.decode(errors="replace") if answered.startswith("text/") else answer.body

    def _deploy_class(
        self,
        api_spec: ApiSpec,
        section: str,
        target: type,
        requirements: Sequence[str],
        conda_packages: Sequence[str],
        force: bool,
        wait: bool,
    ) -> dict[str, str]:
        if isinstance(requirements, str) or isinstance(conda_packages, str):
            raise ValueError("`requirements` and `conda_packages` must be a list each (got a string)")
        if not isinstance(target, type):
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

    def _finish(self, results: list[dict[str, str]], wait: bool) -> list[dict[str, str]]:
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
                f"{api} can't become live: {failure.get('message') or status['message']}", failure.get("traceback", "")
            )


_PREDICTORS = {"tensorflow": "TensorFlowPredictor", "onnx": "ONNXPredictor"}


def call_api(
    endpoint: str, body: bytes, content_type: str, api_key: str | None = None, trust: Trust = SYSTEM
) -> Answer:
    """Post one request to an API's endpoint and read the whole answer. Raises: CortexError if nothing answers."""
    connection, response = open_api(endpoint, body, content_type, api_key=api_key, trust=trust)
    try:
        return read(response)
    except (OSError, HTTPException) as error:
        raise CortexError(f"{endpoint} broke off its answer ({reason(error)})") from None
    finally:
        connection.close()


def open_api(
    endpoint: str,
    body: bytes,
    content_type: str,
    query: dict[str, Any] | None = None,
    api_key: str | None = None,
    trust: Trust = SYSTEM,
) -> tuple[HTTPConnection, HTTPResponse]:
    """As `call_api`, but return the connection, to be closed by the caller, and the answer as it begins to come."""
    url = endpoint + encode_query(query)
    try:
        headers = {"content-type": content_type} | ({"x-api-key": api_key} if api_key else {})
        return open_response("POST", url, body, headers, _PREDICT_TIMEOUT_S, trust)
    except ssl.SSLError as error:
        raise CortexError(f"{endpoint}: {distrust(error)}") from None
    except (OSError, HTTPException) as error:
        raise CortexError(f"{endpoint} does not answer ({reason(error)}); `cortex status` shows what runs") from None


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
    return UserError(f"{text}; `cortex logs {api}` has the traceback") if answer.status == 500 else CortexError(text)
