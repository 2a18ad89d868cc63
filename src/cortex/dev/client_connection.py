"""The connection of a client to `cortex dev`, which is parsed and answered as a worker does it for the gateway.

It adds what the gateway does for workers: requests get an id and lose headers that clients can't set, heads have
limits, and a client may send its next request before it has the response.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cortex.gateway.backends import HEAD_MAX_BYTES, HEAD_MAX_COUNT
from cortex.worker.http.connection import CLIENT_CLOSED_REQUEST
from cortex.worker.http.responses import CLOSING, NO_HEADERS, ValidHeaders
from cortex.worker.http.streaming_connection import MAX_UNREAD_BYTES, StreamingConnection, declared_length
from cortex.worker.shared_state import ConnectionState

_FORBIDDEN = (b"x-cortex-", b"x-forwarded-")
_UPGRADE = re.compile(rb"upgrade[ \t]*:", re.IGNORECASE)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class ServedRequest:
    """A request with its status and time, for the terminal."""

    api: str  #: "" if no API has its path
    method: str
    path: str
    status: int  #: 0 if the client disconnected before the response
    seconds: float
    reason: str = ""  #: message of an error response


class DevConnection(StreamingConnection):
    """A connection of a client."""

    def __init__(self, on_response: Callable[[ServedRequest], object], *arguments: Any) -> None:
        """Create a connection; `on_response` gets each request with an `api_name` once its response is over."""
        super().__init__(*arguments)
        self._on_response = on_response
        self._peer = str((self._sock.getpeername() or ("",))[0])
        self._late = b""  #: bytes that follow the request

    def _reset(self) -> None:
        super()._reset()
        self.api_name: str | None = None  #: that the terminal shows; None: it does not show the request
        self.status = 0  #: of the response; 0 until it has begun
        self.reason = ""  #: message of an error response
        self.started = time.perf_counter()
        self._head_bytes = 0

    @property
    def path(self) -> str:
        """Return the path without the query."""
        return self.url.partition(b"?")[0].decode("latin-1")

    # Reading. The parser does not say where a request ends. So it gets a head, or chunks, line by line.

    def _feed(self, size: int) -> None:
        data, start = self._late + self._buffer[:size], 0
        self._late = b""
        while start < len(data) and self.open and not (self.is_complete or self._refused):
            if self._unparsed_bytes:
                end = start + self._unparsed_bytes
                self._receive_unparsed(data[start:end])
            else:
                length = declared_length(self.headers) if self._headers_read else None
                end = start + length - self._body_bytes if length else data.find(b"\n", start) + 1 or len(data)
                piece = data[start:end][: len(self._buffer)]
                end = start + len(piece)
                self._buffer[: len(piece)] = piece
                if self._headers_read or not _UPGRADE.match(piece) or self._is_websocket(piece):
                    super()._feed(len(piece))
            start = end
        if not self._refused:
            self._late = data[start:]

    def _is_websocket(self, upgrade: bytes) -> bool:
        """Return whether this header may ask for a WebSocket; the parser would skip the body before another protocol.

        Java's client asks for HTTP/2 with each request.
        """
        return self.method == "GET" and b"websocket" in upgrade.lower()

    def _receive_late(self, size: int) -> None:
        if not self.is_complete or self._is_upgraded or self._refused:
            super()._receive_late(size)
            return
        self._late += self._buffer[:size]
        if len(self._late) > MAX_UNREAD_BYTES:
            self.pause()

    def _receive_end(self) -> None:
        if self._awaits_body() and not self._refused:
            self._fail(400, "the connection ended before the request body was complete")
        else:
            super()._receive_end()

    def _next_request(self) -> None:
        super()._next_request()
        if self.open and self.is_idle:
            self.resume()
            if self._late:
                self._loop.call_soon(self._read_late)

    def _read_late(self) -> None:
        if self.open and self.is_idle:
            self._set_state(ConnectionState.READING)
            self._feed(0)

    def on_url(self, url: bytes) -> None:
        """Append a part of the request target."""
        super().on_url(url)
        self._grow_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Append a header that clients can set."""
        if not name.lower().startswith(_FORBIDDEN):
            super().on_header(name, value)
        self._grow_head(len(name) + len(value) + len(b": \r\n"))

    def _grow_head(self, size: int) -> None:
        self._head_bytes += size
        if self._headers_read or self._refused:
            return
        if self._head_bytes > HEAD_MAX_BYTES:
            self._fail(431, f"the URL and the headers are larger than {HEAD_MAX_BYTES} bytes")
        elif len(self.headers) > HEAD_MAX_COUNT:
            self._fail(431, f"the request has more than {HEAD_MAX_COUNT} headers")

    def on_headers_complete(self) -> None:
        """Set the headers that the gateway sets, and pass the request on."""
        if self._refused:
            return
        if not self._parser.should_keep_alive() or self._parser.get_http_version() == "1.0":
            self.close_after_response()
        hosts = [(b"x-forwarded-host", value) for name, value in self.headers if name == b"host"]
        self.headers += [(b"x-cortex-request-id", _new_id()), (b"x-forwarded-for", self._peer.encode()), *hosts]
        self.headers.append((b"x-forwarded-proto", b"http"))
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the body is complete."""
        super().on_message_complete()
        self._parser_is_behind = True  # one that was asked for an upgrade reads no further request

    # Writing.

    def respond(self, status: int, media_type: bytes | None, body: bytes, headers: ValidHeaders = NO_HEADERS) -> None:
        """Write a complete response, without its body if that is not asked for."""
        if self.method == "HEAD":
            typed = ((b"content-type", media_type),) if media_type else ()
            self.begin_response(status, ValidHeaders((*typed, *headers)), len(body), True, b"")
            self.end_response()
        else:
            super().respond(status, media_type, body, headers)

    def respond_error(self, status: int, message: str, *arguments: Any) -> None:
        """Write a JSON error response."""
        self.reason = message
        if not self._headers_read:  # the id would be one of the client
            self.request_id = _new_id()
        super().respond_error(status, message, *arguments)

    def upgrade(self, head: bytes) -> None:
        """Write the head that switches to another protocol, and pass on what has arrived of that."""
        line, _, rest = head.partition(b"\r\n")
        super().upgrade(b"%b\r\n%b%b" % (line, self._id_line(), rest))
        late, self._late = self._late, b""
        if late and self.call is not None:
            self.call.receive_data(late)

    def _last_headers(self, status: int) -> bytes:
        """Note the status; return the last header lines, without `Server-Timing`, which the process has written."""
        if status != CLIENT_CLOSED_REQUEST:  # nobody receives it
            self.status = status
        return self._id_line() + CLOSING if self._close_after else self._id_line()

    def _id_line(self) -> bytes:
        return b"x-cortex-request-id: %b\r\n" % self.request_id

    def _end_call(self) -> None:
        name, self.api_name = self.api_name, None
        if name is not None:
            seconds = time.perf_counter() - self.started
            self._on_response(ServedRequest(name, self.method, self.path, self.status, seconds, self.reason))
        super()._end_call()


def _new_id() -> bytes:
    return b"%d-%d-%d" % (time.time_ns() // 1_000_000, os.getpid(), next(_numbers))
