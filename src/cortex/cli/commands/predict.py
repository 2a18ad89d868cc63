"""`cortex predict`: one request to an API, its answer as it comes."""

from __future__ import annotations

import argparse
import time
from http.client import HTTPException, HTTPResponse

from cortex.cli.arguments import add_api, add_env
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.cli.samples import read_sample
from cortex.client.api import open_api
from cortex.client.transport import reason
from cortex.errors import CortexError

_CHUNK_BYTES = 65536


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser)
    parser.add_argument(
        "sample", metavar="SAMPLE", help="file to send, its content type told by its suffix; `-` is JSON from stdin"
    )
    add_env(parser)
    parser.add_argument("--debug", action="store_true", help="show status, headers and time; send `?debug=true`")


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Send the sample; the exit code tells whether the API answered without an error."""
    body, content_type = read_sample(arguments.sample)
    endpoint = client_of(context, arguments.env).get_api(arguments.api)["endpoint"]
    began = time.monotonic()
    connection, response = open_api(endpoint, body, content_type, {"debug": True} if arguments.debug else None)
    try:
        if arguments.debug:
            _tell(response, time.monotonic() - began, context)
        ends_in_newline = _copy(response, endpoint, context)
    finally:
        connection.close()
    if context.console.out_is_terminal and not ends_in_newline:
        context.console.line()
    if response.status >= 400:
        context.console.error(f"{arguments.api} answered with status {response.status}")
        return 1
    return 0


def _tell(response: HTTPResponse, seconds: float, context: Context) -> None:
    context.console.note(f"{response.status} {response.reason} after {seconds * 1000:.1f} ms")
    for name, value in response.getheaders():
        context.console.note(f"{name.lower()}: {value}")


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
