"""`cortex predict`: one request to an API, its answer as it comes."""

from __future__ import annotations

import argparse
import time
from http.client import HTTPException, HTTPResponse
from typing import Any

from cortex.cli.arguments import add_api, add_env
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.cli.samples import read_sample
from cortex.client.client import Client, open_api
from cortex.client.transport import reason
from cortex.errors import CortexError
from cortex.lifecycle import ApiKind

_CHUNK_BYTES = 65536
#: Interfaces for which `?debug=true` has an effect, as it had when they were new.
_LOGGED = ("functions", "predictor")
#: What the last line about a request begins with.
_LAST = ("prediction: ", "failed:")
_LOGGED_S, _POLL_S = 2.0, 0.05
_TAIL = 2000


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser)
    parser.add_argument(
        "sample", metavar="SAMPLE", help="file to send, its content type told by its suffix; `-` is JSON from stdin"
    )
    add_env(parser)
    parser.add_argument(
        "--api-key", metavar="KEY", help="for an API that asks for one; in place of the variable CORTEX_API_KEY"
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="send `?debug=true`, which has the sample and the prediction logged; show them, status, headers and time",
    )


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Send the sample; the exit code tells whether the API answered without an error."""
    body, content_type = read_sample(arguments.sample)
    client = client_of(context, arguments.env)
    api = client.get_api(arguments.api)
    endpoint = api["endpoint"]
    began = time.monotonic()
    key = arguments.api_key or context.environ.get("CORTEX_API_KEY")
    query, trust = {"debug": True} if arguments.debug else None, client.environment.connect().trust
    connection, response = open_api(endpoint, body, content_type, query, key, trust)
    try:
        if arguments.debug:
            _tell(response, time.monotonic() - began, context)
        ends_in_newline = _copy(response, endpoint, context)
    finally:
        connection.close()
    if context.console.out_is_terminal and not ends_in_newline:
        context.console.line()
    if arguments.debug:
        context.console.flush()
        _show_logged(client, api, response.getheader("x-cortex-request-id", ""), context)
    if response.status >= 400:
        context.console.error(f"{arguments.api} answered with status {response.status}")
        return 1
    return 0


def _tell(response: HTTPResponse, seconds: float, context: Context) -> None:
    context.console.note(f"{response.status} {response.reason} after {seconds * 1000:.1f} ms")
    for name, value in response.getheaders():
        context.console.note(f"{name.lower()}: {value}")


def _show_logged(client: Client, api: dict[str, Any], request_id: str, context: Context) -> None:
    """Show what the replica logged of the request; the lines are there a moment after the answer."""
    if api["spec"].get("kind") != ApiKind.REALTIME:
        return
    if api["spec"]["handler"]["interface"] not in _LOGGED:
        context.console.note("a Handler has nothing logged by `?debug=true`; print or log what you want to see")
        return
    deadline = time.monotonic() + _LOGGED_S
    mark = f"request {request_id} "
    while True:
        found = [line.partition(mark)[2] for line in client.api_logs(api["spec"]["name"], tail=_TAIL) if mark in line]
        if any(line.startswith(_LAST) for line in found) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for line in found:
        context.console.note(line)


def _copy(response: HTTPResponse, endpoint: str, context: Context) -> bool:
    """Print the body as it comes; return whether it ends in a line break."""
    last = b"\n"
    try:
        while chunk := response.read1(_CHUNK_BYTES):
            context.console.raw(chunk)
            last = chunk
    except BrokenPipeError:
        raise
    except (OSError, HTTPException) as error:
        raise CortexError(f"{endpoint} broke off its answer ({reason(error)})") from None
    return last.endswith(b"\n")
