"""Test an API with pytest: construct its class as the platform does, and call it without a process.

    import cortex.testing

    def test_an_iris_is_classified():
        with cortex.testing.load("cortex.yaml", "iris") as api:
            response = api.post({"sepal_length": 5.1, "petal_length": 1.4})
            assert response.status == 200
            assert response.json() == "setosa"

`api.post("/path", json=…)` and `api.get("/path")` send to a path below the endpoint.
Requests take the path that they take in a replica: the same parser, types, errors and encodings. User code runs on the
thread of the test, so that breakpoints and coverage work. What it prints, and its tracebacks, are the test's output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json as json_module
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from cortex.client.packaging import find_config
from cortex.config.schema import Api
from cortex.dev.local.api import ApplicationApi, RequestApi, enter_environment
from cortex.dev.local.project import LocalProject, call_in_thread, spec_for_this_process
from cortex.errors import CortexError, InputError, with_article
from cortex.home import Home
from cortex.lifecycle import ApiKind
from cortex.worker.spec import TEST_VARIABLE

if TYPE_CHECKING:
    from cortex.dev.local.jobs import AsyncApi, JobsApi

__all__ = ["IncompleteResponseError", "JobOutcome", "LoadedApi", "Response", "WorkloadOutcome", "load"]

_TIMEOUT_GRACE_S = 5.0


@dataclass(frozen=True)
class Response:
    """The response to a request."""

    status: int
    headers: Mapping[str, str]  #: names in lower case
    body: bytes

    @property
    def text(self) -> str:
        """Return the body as text."""
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """Return the body parsed from JSON. Raises: ValueError."""
        return json_module.loads(self.body)


class IncompleteResponseError(CortexError):
    """The response broke off: user code raised an exception while it was streaming."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"the response broke off after {len(response.body)} bytes; the output shows the traceback")
        self.response = response  #: what was sent until then


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of a job."""

    status: str  #: as `cortex get` shows it: "succeeded", "completed_with_failures", "worker_error"
    results: list[Any]  #: of each batch, in order; None for one that returned nothing, or failed
    errors: list[str]  #: one line for each batch that failed, or why the job could not run

    @property
    def result(self) -> Any:
        """Return the only result: that of a task, or of a job with one batch."""
        (result,) = self.results
        return result


@dataclass(frozen=True)
class WorkloadOutcome:
    """The outcome of a workload of an AsyncAPI."""

    status: str  #: "completed" or "failed"
    result: Any = None
    error: str = ""


def load(config: str | os.PathLike[str] = "cortex.yaml", api: str | None = None) -> LoadedApi:
    """Construct the class of an API, or import its functions or its application.

    `config` is a configuration file or its folder; `api` may be left out if the file has a single API. The packages of
    this interpreter are used: `requirements.txt` is not installed.

    Raises: ConfigError with every mistake in the project; UserError if the code can't be imported or constructed.
    """
    project = LocalProject.read(find_config(Path(config)), os.environ)
    selected = _select(project, api)
    if selected.runs_command:
        raise InputError(f"{selected.name} has type: command, which is a server of its own; test that")
    if selected.is_grpc:
        raise InputError(
            f"{selected.name} serves gRPC, which can't be called in a test; construct its class in the test"
        )
    return LoadedApi(project, selected)


def _select(project: LocalProject, name: str | None) -> Api:
    apis = [each for each in project.diagnosis.apis if each.kind is not ApiKind.SPLITTER]
    names = ", ".join(each.name for each in apis) or "none"
    if name is None:
        if len(apis) != 1:
            raise InputError(f"{project.config_file.name} has several APIs, or none; name one of them: {names}")
        return apis[0]
    for each in apis:
        if each.name == name:
            return each
    raise InputError(f"{project.config_file.name} has no API {name} with code; its APIs are {names}")


class LoadedApi:
    """An API in this process. Close it, or use it in a `with` statement. Not thread-safe."""

    def __init__(self, project: LocalProject, api: Api) -> None:
        self._api = api
        self._folder = project.folder
        self._loop = asyncio.new_event_loop()
        self._numbers = 0
        self._environ = dict(os.environ)
        self._modules = set(sys.modules)
        self._path = list(sys.path)
        home = Home.from_environ(os.environ)
        spec = spec_for_this_process(project, api, home, os.environ)
        self._timeout_s = spec.timeout_s
        self._local: RequestApi | ApplicationApi | JobsApi | AsyncApi
        if api.kind is ApiKind.REALTIME:
            self._local = (ApplicationApi if api.is_application else RequestApi)(spec, self._loop)
        else:
            from cortex.dev.local.jobs import AsyncApi, JobsApi  # noqa: PLC0415 - most tests run no jobs

            self._local = AsyncApi(spec) if api.kind is ApiKind.ASYNC else JobsApi(spec, api, os.environ)
        enter_environment(spec)
        os.environ[TEST_VARIABLE] = "1"
        try:
            with self._in_project():
                if isinstance(self._local, ApplicationApi):
                    call_in_thread(self._local.load)  # the event loop of an asynchronous test may run on this one
                else:
                    self._local.load()
        except BaseException:
            self._leave()
            raise

    def __enter__(self) -> LoadedApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Return the name of the API."""
        return self._api.name

    @property
    def handler(self) -> Any:
        """Return the object of the user's class. None if the API has functions, an application, or runs jobs."""
        return self._local.predictor.instance if isinstance(self._local, RequestApi) else None

    def close(self) -> None:
        """Unload the models, and restore the environment variables and the imported modules."""
        if self._loop.is_closed():
            return
        with self._in_project():
            if isinstance(self._local, ApplicationApi):
                self._local.stop()
                call_in_thread(self._loop.run_forever)
            else:
                self._local.close()
        self._leave()

    # Requests.

    def get(self, path: str = "", **options: Any) -> Response:
        """Send a GET request; `options` are those of `request`."""
        return self.request("GET", path, **options)

    def post(self, *arguments: Any, **options: Any) -> Response:
        """Send a POST request: `post(json)`, or `post(path, json)`; `options` are those of `request`.

        A single argument is the path if the body is in `options`: `post("/texts", json={"text": "one"})`.
        """
        return self._request_with_body("POST", arguments, options)

    def put(self, *arguments: Any, **options: Any) -> Response:
        """Send a PUT request, with the arguments of `post`."""
        return self._request_with_body("PUT", arguments, options)

    def patch(self, *arguments: Any, **options: Any) -> Response:
        """Send a PATCH request, with the arguments of `post`."""
        return self._request_with_body("PATCH", arguments, options)

    def delete(self, path: str = "", **options: Any) -> Response:
        """Send a DELETE request."""
        return self.request("DELETE", path, **options)

    def request(
        self,
        method: str,
        path: str = "",
        *,
        json: Any = None,
        data: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request and wait for the response, streams included.

        `path` is below the endpoint, such as `/v2/models/iris/infer`; `json` is the body as JSON, `data` as it is, with
        its content type in `headers`; `params` are the query. An exception of user code is a response of status 500,
        and its traceback is in the output. Raises: InputError for arguments that can't be sent;
        IncompleteResponseError for a stream that breaks off.
        """
        if not isinstance(self._local, RequestApi | ApplicationApi):
            raise InputError(f"{self.name} is of kind {self._api.kind}: use run_batch, run_task or run_async")
        if not isinstance(path, str):
            raise InputError(f"the path must be text such as /items, not {path!r}")
        body = data.encode() if isinstance(data, str) else data or b""
        sent = {name.lower(): value for name, value in (headers or {}).items()}
        if json is not None or (method in ("POST", "PUT", "PATCH") and data is None):
            body = json_module.dumps(json).encode()
            sent.setdefault("content-type", "application/json")
        endpoint = self._api.networking.endpoint
        if path:
            path = f"/{path.lstrip('/')}"
            sent["x-cortex-endpoint"] = endpoint
        if path == "/info" and isinstance(self._local, RequestApi):
            path = ""
            sent["x-cortex-info"] = "1"
            del sent["x-cortex-endpoint"]
        url = (endpoint.rstrip("/") + path or "/") + (f"?{urlencode(params)}" if params else "")
        self._numbers += 1
        sent["x-cortex-request-id"] = f"{time.time_ns() // 1_000_000}-test-{self._numbers}"
        with self._in_project():
            return self._exchange(self._local, method, url, body, sent)

    def _request_with_body(self, method: str, arguments: Sequence[Any], options: dict[str, Any]) -> Response:
        """Send `(json)` or `(path, json)`; some of both may be in `options`. Raises: InputError."""
        call = f"{method.lower()}({', '.join(map(repr, arguments))})"
        has_body = "json" in options or "data" in options
        wanted = f'{method.lower()}(json), or {method.lower()}("/path", json=…)'
        if len(arguments) > 2 or (len(arguments) == 2 and has_body) or (arguments and has_body and "path" in options):
            raise InputError(f"{call} has too many arguments; write {wanted}")
        if len(arguments) == 2:
            return self.request(method, arguments[0], json=arguments[1], **options)
        if not arguments or has_body:
            return self.request(method, *arguments, **options)
        (json,) = arguments
        if isinstance(json, str) and json.startswith("/") and "path" not in options:
            name = method.lower()
            raise InputError(f"{call}: write {name}(path={json!r}) for a path, or {name}(json={json!r}) for a body")
        return self.request(method, json=json, **options)

    def _exchange(
        self, local: RequestApi | ApplicationApi, method: str, url: str, body: bytes, headers: dict[str, str]
    ) -> Response:
        """Run the event loop and user code on this thread, and the client on another, until the response is there."""
        ours, theirs = socket.socketpair()
        local.add(theirs, lambda connection: None)
        found: list[Response] = []
        errors: list[Exception] = []

        def call() -> None:
            try:
                found.append(_send(ours, method, url, body, headers, self._timeout_s + _TIMEOUT_GRACE_S))
            except Exception as error:
                errors.append(error)
            finally:
                if isinstance(local, RequestApi) and not any(isinstance(each, TimeoutError) for each in errors):
                    local.finish()
                ours.close()
                stop = local.runner.stop if isinstance(local, RequestApi) else self._loop.stop
                self._loop.call_soon_threadsafe(stop)

        client = threading.Thread(target=call, name="test-client")
        client.start()
        if isinstance(local, RequestApi):
            local.runner.run()
        else:
            call_in_thread(self._loop.run_forever)
        client.join()
        if isinstance(local, RequestApi):
            local.open()  # for the next request
        if errors:
            raise errors[0]
        return found[0]

    # Jobs.

    def run_batch(
        self, items: Sequence[Any], *, batch_size: int | None = None, config: Mapping[str, Any] | None = None
    ) -> JobOutcome:
        """Run a job of a BatchAPI to its end; by default, all items are one batch. `config` overrides the API's.

        A batch that fails is not repeated. Raises: SubmissionError; InputError for items that are no list.
        """
        if isinstance(items, Mapping | str | bytes):
            raise InputError(f"items: pass a list of items, not {with_article(type(items).__name__)}")
        size = max(1, len(items)) if batch_size is None else batch_size
        item_list = {"items": list(items), "batch_size": size}
        return self._run_job(ApiKind.BATCH, {"workers": 1, "item_list": item_list}, config)

    def run_task(self, config: Mapping[str, Any] | None = None) -> JobOutcome:
        """Run a job of a TaskAPI; `config` overrides the API's. Raises: SubmissionError."""
        return self._run_job(ApiKind.TASK, {}, config)

    def _run_job(self, kind: ApiKind, body: dict[str, Any], config: Mapping[str, Any] | None) -> JobOutcome:
        from cortex.dev.local.jobs import JobsApi  # noqa: PLC0415 - as above

        if not isinstance(self._local, JobsApi) or self._api.kind is not kind:
            raise InputError(f"{self.name} is of kind {self._api.kind}, not {kind}")
        if config is not None:
            body = {**body, "config": dict(config)}
        job = self._local.submit(body)
        with self._in_project():
            self._local.run(job)
        record, failures = job.record, job.failures
        errors = [failure.error for failure in failures] or ([record.message] if record.message else [])
        return JobOutcome(record.status.code, job.results, errors)

    def run_async(
        self, json: Any = None, *, data: bytes | str | None = None, content_type: str = "application/json"
    ) -> WorkloadOutcome:
        """Run a workload of an AsyncAPI: a JSON body, or `data` as it is with its content type."""
        from cortex.dev.local.jobs import AsyncApi  # noqa: PLC0415 - as above

        if not isinstance(self._local, AsyncApi):
            raise InputError(f"{self.name} is of kind {self._api.kind}, not {ApiKind.ASYNC}")
        body = json_module.dumps(json).encode() if data is None else data.encode() if isinstance(data, str) else data
        with self._in_project():
            view = self._local.run(self._local.submit(content_type, body))
        if view.status.value == "failed":
            return WorkloadOutcome(view.status.value, error=view.value.decode())
        return WorkloadOutcome(view.status.value, json_module.loads(view.value))

    # The state of this process.

    @contextlib.contextmanager
    def _in_project(self) -> Iterator[None]:
        """Make the project the working directory, and hide the event loop of an asynchronous test, as in a replica.

        Raises: InputError once the API is closed.
        """
        if self._loop.is_closed():
            raise InputError(f"{self.name} is closed; call it before `close`, or inside the `with` statement")
        loop_of_test = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            with contextlib.chdir(self._folder):
                yield
        finally:
            asyncio._set_running_loop(loop_of_test)

    def _leave(self) -> None:
        call_in_thread(lambda: self._loop.run_until_complete(_cancel_others()))
        self._loop.close()
        os.environ.clear()
        os.environ.update(self._environ)
        sys.path[:] = self._path
        for name in set(sys.modules) - self._modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(self._folder):  # the next project may have a module of this name
                del sys.modules[name]


class _TestConnection(HTTPConnection):
    """HTTP connection over a socket that is connected already."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        sock.settimeout(timeout_s)
        self.sock = sock


def _send(
    sock: socket.socket, method: str, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float
) -> Response:
    connection = _TestConnection(sock, timeout_s)
    connection.request(method, url, body or None, dict(headers))
    found = connection.getresponse()
    headers = {name.lower(): value for name, value in found.getheaders()}
    try:
        return Response(found.status, headers, found.read())
    except IncompleteRead as error:
        raise IncompleteResponseError(Response(found.status, headers, error.partial)) from None


async def _cancel_others() -> None:
    """Cancel what still runs on the event loop, such as a stream that never ends: threads may wait for it."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
