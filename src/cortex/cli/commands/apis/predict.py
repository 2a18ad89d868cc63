"""`cortex predict`: send one request to an API and print the response as it arrives."""

from __future__ import annotations

import argparse
import time
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote

from cortex.cli.arguments import add_api, add_env, read_sample
from cortex.cli.session import Session
from cortex.client.client import Client, needs_key, open_api
from cortex.client.transport import describe_error
from cortex.errors import CortexError, InputError
from cortex.lifecycle import ApiKind

_CHUNK_BYTES = 65536
#: Characters of a path and its query that stay as they are written.
_UNQUOTED = "/?&=%:@+,;~!$'()*"
#: Handler interfaces that support `?debug=true`.
_DEBUG_INTERFACES = ("functions", "predictor", "older_request_handler", "request_handler")
#: Prefixes of the last log line of a request.
_LAST_LINES = ("prediction: ", "post_inference: ", "failed:")
_LOG_TIMEOUT_S, _POLL_S = 2.0, 0.05
_TAIL = 2000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    parser.add_argument(
        "sample",
        metavar="SAMPLE",
        nargs="?",
        help="file to send; its suffix determines the content type; `-` is JSON from stdin; without it, send no body",
    )
    add_env(parser)
    parser.add_argument(
        "--api-key", metavar="KEY", help="key for an API with `auth: api_key`; default: the variable CORTEX_API_KEY"
    )
    parser.add_argument(
        "--path",
        metavar="PATH",
        default="",
        help="path below the endpoint, with its query, of an application, a command or a route, such as /v1/models",
    )
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="HTTP method; default: POST with a SAMPLE, else GET; of a gRPC API: the method of its service to call, in"
        " JSON; default: the only one",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="send `?debug=true` and print status, headers, time, and the logged sample and prediction",
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Send the sample; return 0 unless the API responds with an error."""
    body, content_type = read_sample(arguments.sample) if arguments.sample is not None else (None, "")
    client = session.client(arguments.env)
    api = client.get_api(arguments.api)
    endpoint, verb = _target(client.environment.check_host(str(api["endpoint"])), api, arguments)
    began = time.monotonic()
    key = arguments.api_key or session.environ.get("CORTEX_API_KEY") if needs_key(api) else None
    trust = client.environment.connect().trust
    connection, response = open_api(endpoint, body, content_type, None, key, trust, verb)
    try:
        if arguments.debug:
            _print_head(response, time.monotonic() - began, session)
        ends_in_newline = _copy(response, endpoint, session)
    finally:
        connection.close()
    if session.console.out_is_terminal and not ends_in_newline:
        session.console.line()
    if arguments.debug:
        session.console.flush()
        _print_debug_log(client, api, response.getheader("x-cortex-request-id", ""), session)
    if response.status >= 400:
        reason = response.getheader("grpc-message")  # errors of the gateway for gRPC APIs have no body
        lacks_key = response.status == HTTPStatus.UNAUTHORIZED and needs_key(api)
        hint = "; write --api-key KEY, or set CORTEX_API_KEY" if lacks_key else ""
        session.console.error(
            f"{arguments.api} answered with status {response.status}{f': {reason}' if reason else ''}{hint}"
        )
        return 1
    return 0


def _target(endpoint: str, api: dict[str, Any], arguments: argparse.Namespace) -> tuple[str, str | None]:
    """Return the URL and the HTTP method of the request. Raises: InputError."""
    path, verb = str(arguments.path), arguments.method
    if (api["spec"].get("handler") or {}).get("protobuf_path"):
        if path or arguments.sample is None:
            wrong = (
                "--path is not for gRPC APIs; name the method of the service with --method"
                if path
                else ("a call of a gRPC API needs a SAMPLE: the message of the request as JSON")
            )
            raise InputError(wrong)
        return endpoint + (f"/{verb}" if verb else ""), None
    if path:
        if not path.startswith("/"):
            raise InputError(f"--path {path}: begin with a slash; the path is below the endpoint {endpoint}")
        endpoint = endpoint.rstrip("/") + quote(path, safe=_UNQUOTED)
    if arguments.debug:
        endpoint += f"{'&' if '?' in path else '?'}debug=true"
    if verb is not None and not verb.isalpha():
        raise InputError(f"--method {verb}: write an HTTP method, such as POST")
    return endpoint, verb.upper() if verb else None


def _print_head(response: HTTPResponse, seconds: float, session: Session) -> None:
    session.console.note(f"{response.status} {response.reason} after {seconds * 1000:.1f} ms")
    for name, value in response.getheaders():
        session.console.note(f"{name.lower()}: {value}")


def _print_debug_log(client: Client, api: dict[str, Any], request_id: str, session: Session) -> None:
    """Print the log lines of the request, which are available shortly after the response."""
    if api["spec"].get("kind") != ApiKind.REALTIME:
        return
    if api["spec"]["handler"]["interface"] not in _DEBUG_INTERFACES:
        session.console.note("`?debug=true` has no effect on a Handler class; log the values in its code instead")
        return
    deadline = time.monotonic() + _LOG_TIMEOUT_S
    mark = f"request {request_id} "
    while True:
        found = [line.partition(mark)[2] for line in client.api_logs(api["spec"]["name"], tail=_TAIL) if mark in line]
        if any(line.startswith(_LAST_LINES) for line in found) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for line in found:
        session.console.note(line)


def _copy(response: HTTPResponse, endpoint: str, session: Session) -> bool:
    """Print the body as it arrives; return whether it ends with a line break."""
    last = b"\n"
    try:
        while chunk := response.read1(_CHUNK_BYTES):
            session.console.raw(chunk)
            last = chunk
    except BrokenPipeError:
        raise
    except (OSError, HTTPException) as error:
        raise CortexError(
            f"{endpoint} closed the connection before the end of the response ({describe_error(error)})"
        ) from None
    return last.endswith(b"\n")
