"""A command for curl that works when it is pasted, for an API of `cortex dev`; and the request of `--sample`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from cortex.config.schema import Api
from cortex.dev.terminal import format_body
from cortex.lifecycle import ApiKind, JobStatus, WorkloadStatus
from cortex.payloads.curl import FILE, curl
from cortex.payloads.openapi.inference import row_of_zeros
from cortex.payloads.openapi.schemas import NoExampleError, example_of, example_with_keys
from cortex.payloads.signature import ApiSignature, RouteSignature, parse_signature
from cortex.predictor.applications import example_request
from cortex.predictor.checks.request_arguments import RequestArguments, request_arguments

_SAMPLE_FILE = "sample.json"
_TIMEOUT_S = 600.0
_JOB_POLL_S = 0.02


def curl_command(api: Api, url: str, signature: str, folder: Path) -> str:
    """Return a command that calls an API; the user's file is `folder / sample.json`, if it exists."""
    if api.kind is ApiKind.TASK:
        return curl("POST", url)
    if api.runs_command:
        return curl("GET", f"{url}/")
    if api.is_application:
        verb, path = example_request(_source(api, folder) or "")
        return curl(verb, url.rstrip("/") + path)
    if api.kind is ApiKind.BATCH:
        body = {"workers": 1, "item_list": {"items": [1, 2], "batch_size": 2}}
        return curl("POST", url, json.dumps(body))
    known = parse_signature(signature) if signature else ApiSignature()
    if known.routes and not known.methods:  # nothing answers at the endpoint
        return _route_command(known.routes[0], url)
    if known.models and not known.methods:  # likewise; handle_v2() does not say which inputs it takes
        inputs = [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]
        return curl("POST", f"{url.rstrip('/')}/v2/models/{known.models[0].name}/infer", json.dumps({"inputs": inputs}))
    sample = next((name for name in (api.readiness, _SAMPLE_FILE) if name and (folder / name).is_file()), None)
    arguments = _arguments(api, folder)
    verb = arguments.verb if arguments is not None else "POST"
    query = "&".join(f"{key}=1" for key in arguments.query_keys) if arguments is not None else ""
    if arguments is None and len(known.models) > 1:  # models without code
        query = urlencode({"model": known.models[0].name}, quote_via=quote)
    target = f"{url}?{query}" if query else url
    if arguments is not None and arguments.payload_keys is None:
        return curl(verb, target)
    # The path is for the folder in which `cortex dev` was started.
    file = f"@{os.path.relpath(folder / sample)}" if sample is not None else None
    return curl(verb, target, file or _data(known, arguments))


class SampleRequest:
    """Sends the sample of the command line to APIs. Blocks, for the duration of a job too."""

    def __init__(self, host: str, port: int, content: bytes, content_type: str) -> None:
        """Send to `cortex dev` at this address."""
        self._address = host, port
        self._content = content
        self._content_type = content_type

    def response(self, api: Api) -> str:
        """Return the response as lines that can be compared; of a job or workload, its outcome.

        Raises: OSError, HTTPException; ValueError for a sample that is not JSON.
        """
        body, content_type = sample_body(api, self._content, self._content_type)
        status, answered, data = self._call("POST", api.networking.endpoint, body, content_type)
        if api.kind is not ApiKind.REALTIME and status in (200, 202):
            return self._outcome(api, json.loads(data))
        return format_body(status, answered, data)

    def _outcome(self, api: Api, submitted: dict[str, Any]) -> str:
        """Wait for the end of a job or workload, and return its outcome without what differs each time."""
        is_async = api.kind is ApiKind.ASYNC
        path = f"{api.networking.endpoint.rstrip('/')}/{submitted['id' if is_async else 'job_id']}"
        while True:
            found = json.loads(self._call("GET", f"{path}?wait=10" if is_async else path, b"", "")[2])
            if is_async and WorkloadStatus(found["status"]).is_over:
                shown = {key: found[key] for key in ("status", "result", "error") if key in found}
                return json.dumps(shown, indent=2)
            if not is_async and JobStatus(status := found["job_status"]["status"]).is_over:
                shown = {"status": status, "results": found["results"], "failures": found["failures"]}
                return json.dumps(shown, indent=2)
            time.sleep(_JOB_POLL_S)

    def _call(self, method: str, path: str, body: bytes, content_type: str) -> tuple[int, str, bytes]:
        connection = HTTPConnection(*self._address, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body or None, {"content-type": content_type} if content_type else {})
            response = connection.getresponse()
            return response.status, response.getheader("content-type", ""), response.read()


def sample_body(api: Api, content: bytes, content_type: str) -> tuple[bytes, str]:
    """Return the body and content type of the request for a sample; for a BatchAPI, a job with one item, or a list."""
    if api.kind is not ApiKind.BATCH:
        return content, content_type
    value = json.loads(content)
    if isinstance(value, dict) and {"item_list", "file_path_lister", "delimited_files"} & value.keys():
        return content, content_type
    items = value if isinstance(value, list) else [value]
    body = {"workers": 1, "item_list": {"items": items, "batch_size": max(1, len(items))}}
    return json.dumps(body).encode(), "application/json"


def _arguments(api: Api, folder: Path) -> RequestArguments | None:
    handler, text = api.handler, _source(api, folder)
    if text is None:
        return None
    return request_arguments(text, handler.interface, handler.type, handler.models is not None, api.kind)


def _source(api: Api, folder: Path) -> str | None:
    """Return the user's file; None without one that can be read."""
    path = api.handler.path
    if path is None or not path.endswith(".py"):
        return None
    try:
        return (folder / path).read_text(errors="replace")
    except OSError:
        return None


def _route_command(route: RouteSignature, url: str) -> str:
    """Return a command that calls a route, with examples of its parameters."""
    path = route.path
    for parameter in route.parameters:
        path = path.replace(f"{{{parameter.name}}}", str(example_of(parameter.schema, {}) or "text"))
    method = route.method
    if method.payload is None:
        return curl(method.verb, url + path)
    try:
        schema = method.payload.schema
        data = json.dumps(example_of(schema, schema.get("$defs", {}), is_exact=True) or {})
    except NoExampleError:
        data = FILE
    return curl(method.verb, url + path, data)


def _data(known: ApiSignature, arguments: RequestArguments | None) -> str:
    """Return the body for curl; a file that the user has to write, if no example matches the annotated type."""
    try:
        return json.dumps(_example(known, arguments))
    except NoExampleError:
        return FILE


def _example(known: ApiSignature, arguments: RequestArguments | None) -> Any:
    """Return a payload: a row of zeros for a model, otherwise the keys that the method reads or its type declares.

    Raises: NoExampleError.
    """
    schema = known.methods[0].payload.schema if known.methods and known.methods[0].payload is not None else {}
    keys = (arguments.payload_keys if arguments is not None else None) or ()
    if (example := example_with_keys(schema, schema.get("$defs", {}), keys)) is not None:
        return example
    if known.models and (row := row_of_zeros(known.models[0])) is not None:
        return {"instances": [row]}
    return dict.fromkeys(keys, 1)
