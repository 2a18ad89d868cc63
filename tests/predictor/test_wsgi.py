"""The body of a request, as a WSGI application reads it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cortex.predictor.applications import as_asgi
from harness.wait import PATIENCE_S

LINES = b"one\ntwo\n\nrest"


@pytest.mark.parametrize("pieces", [[LINES], [b"o", b"ne\nt", b"", b"wo\n\nrest"], [LINES, b""]])
@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda body: [body.read()], [LINES]),
        (lambda body: [body.read(-1), body.read(), body.read(3), body.readline()], [LINES, b"", b"", b""]),
        (lambda body: [body.read(0), body.read(3), body.read(100)], [b"", LINES[:3], LINES[3:]]),
        (lambda body: [body.readline(), body.readline(2), body.readline(9)], [b"one\n", b"tw", b"o\n"]),
        (lambda body: [body.readline(100), body.read(1), body.readline()], [b"one\n", b"t", b"wo\n"]),
        (lambda body: body.readlines(), [b"one\n", b"two\n", b"\n", b"rest"]),
        (lambda body: body.readlines(5), [b"one\n", b"two\n"]),
        (list, [b"one\n", b"two\n", b"\n", b"rest"]),
    ],
)
def test_a_body_is_read_by_every_method_of_pep_3333(
    read: Callable[[Any], list[bytes]], expected: list[bytes], pieces: list[bytes]
) -> None:
    assert _read(read, pieces) == expected


@pytest.mark.parametrize(
    "read",
    [lambda body: [body.read()], lambda body: [body.readline(7)], lambda body: [*body.readlines(), *body, b""]],
)
def test_an_empty_body_is_at_its_end(read: Callable[[Any], list[bytes]]) -> None:
    assert _read(read, [b""]) == [b""]


def test_a_line_is_read_as_soon_as_it_has_arrived() -> None:
    was_read = threading.Event()

    def read(body: Any) -> list[bytes]:
        first = body.readline()
        was_read.set()
        return [first, body.read()]

    assert _read(read, [b"one\n", b"two"], lambda: was_read.wait(PATIENCE_S)) == [b"one\n", b"two"]


def test_a_body_that_its_client_does_not_complete_is_an_error() -> None:
    with pytest.raises(ConnectionResetError, match="disconnected before its request was complete"):
        _read(lambda body: [body.read()], [b"one", None])


@pytest.mark.parametrize("size", [0, 5, 3_000_000])
def test_a_body_of_unknown_length_has_its_length_once_it_has_arrived(size: int) -> None:
    pieces = [b"x" * 100_000] * (size // 100_000) or [b"x" * size]
    environ: dict[str, Any] = {}
    found = _read(lambda body: [body.read(size), body.read()], pieces, environ=environ)
    assert (found, environ["CONTENT_LENGTH"]) == ([b"x" * size, b""], str(size))
    assert "HTTP_TRANSFER_ENCODING" not in environ  # Werkzeug reads nothing of a chunked body


def _read(
    read: Callable[[Any], list[bytes]],
    pieces: list[bytes] | list[bytes | None],
    before_last: Callable[[], object] = bool,
    environ: dict[str, Any] | None = None,
) -> list[bytes]:
    """Return what a WSGI application reads of a body that arrives in pieces; None: its client disconnects.

    With `environ`, the body is of unknown length, and `environ` is filled.
    """
    result: list[bytes] = []

    def app(received: Any, start_response: Any) -> list[bytes]:
        if environ is not None:
            environ.update(received)
        result.extend(read(received["wsgi.input"]))
        start_response("200 OK", [])
        return []

    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if len(left) == 1:
            await asyncio.to_thread(before_last)
        piece = left.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message: Any) -> None:
        pass

    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/", "query_string": b""}
    scope["headers"] = [] if environ is None else [(b"transfer-encoding", b"chunked")]
    asyncio.run(as_asgi(app, "wsgi", 1)(scope, receive, send))
    return result


def test_a_response_is_closed_once_its_last_part_is_sent() -> None:
    events: list[Any] = []

    class Parts(list[bytes]):
        def close(self) -> None:
            events.append("closed")

    def application(environ: dict[str, Any], start_response: Any) -> Parts:
        start_response("200 OK", [])
        return Parts([b"one", b"two"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        events.append(message.get("body", b"head"))

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "root_path": ""}
    asyncio.run(as_asgi(application, "wsgi", 1)({**scope, "http_version": "1.1", "scheme": "http"}, receive, send))
    assert events == [b"head", b"one", b"two", b"", "closed"]


def _error_page(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    try:
        raise ValueError("late")
    except ValueError:
        start_response("500 Internal Server Error", [], sys.exc_info())
    return [b"page"]


def _late_error_page(environ: Any, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", [])
    yield b"first"
    try:
        raise ValueError("late")
    except ValueError:
        start_response("500 Internal Server Error", [], sys.exc_info())


def _writes(environ: Any, start_response: Any) -> list[bytes]:
    write = start_response("201 Created", [])
    write(b"one")
    return [b"two"]


def _starts_with_nothing(environ: Any, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", [])
    yield b""
    start_response("404 Not Found", [])


class _ClosesBadly(list[bytes]):
    def close(self) -> None:
        raise StopIteration


def _stops_at_its_end(environ: Any, start_response: Any) -> _ClosesBadly:
    start_response("200 OK", [])
    return _ClosesBadly([b"one"])


def _stops(environ: Any, start_response: Any) -> list[bytes]:
    raise StopIteration


@pytest.mark.parametrize(
    ("application", "expected"),
    [
        (_error_page, [500, b"page", b""]),
        (_late_error_page, [200, b"first", "ValueError: late"]),
        (_writes, [201, b"one", b"two", b""]),
        (_starts_with_nothing, ["RuntimeError: the application called start_response a second time, without exc_info"]),
        (_stops, ["RuntimeError: the application raised StopIteration"]),
        (_stops_at_its_end, [200, b"one", b"", "RuntimeError: the response of the application raised StopIteration"]),
        (lambda *_: [b"x"], ["RuntimeError: the application has not called start_response"]),
        (lambda *_: [], ["RuntimeError: the application has not called start_response"]),
    ],
)
def test_a_response_begins_with_its_first_bytes(application: Callable[..., Any], expected: list[Any]) -> None:
    events: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        events.append(message.get("status", message.get("body")))

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "root_path": ""}
    try:
        asyncio.run(as_asgi(application, "wsgi", 1)({**scope, "http_version": "1.1", "scheme": "http"}, receive, send))
    except Exception as error:
        events.append(f"{type(error).__name__}: {error}")
    assert events == expected


def test_write_raises_what_its_client_does() -> None:
    written: list[int] = []

    def application(environ: Any, start_response: Any) -> list[bytes]:
        write = start_response("200 OK", [])
        for number in range(1000):
            write(b"x")
            written.append(number)
        return []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            raise ConnectionResetError("the client has disconnected")

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "root_path": ""}
    with pytest.raises(ConnectionResetError):
        asyncio.run(as_asgi(application, "wsgi", 1)({**scope, "http_version": "1.1", "scheme": "http"}, receive, send))
    assert len(written) < 1000
