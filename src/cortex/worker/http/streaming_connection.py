"""A connection whose requests reach the application from their head on, while their body arrives.

Ordinary connections (`connection.py`) deliver a request once it is complete. Here the pool's server is called
after the head and sets `call`. The body is read as fast as the application takes it. The states in shared memory are
those of `shared_state`, and mean the same to the supervisor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from httptools import HttpParserUpgrade

from cortex.recording.exchange import MAX_BODY_BYTES
from cortex.worker.http.connection import JOIN_BYTES, Connection
from cortex.worker.http.responses import BODILESS, NO_HEADERS, Header, ValidHeaders, response_head
from cortex.worker.shared_state import ConnectionState

#: The connection is not read while more bytes than this wait for the application.
MAX_UNREAD_BYTES = 256 * 1024


class ConnectionCall(Protocol):
    """The application's call for the current request of a connection. Event-loop thread only."""

    status: int  #: of the response; 0 until it has begun

    def wake(self) -> None:
        """Wake the call: more of the body has arrived, or the request ended and `connection.call` is another one."""

    def receive_data(self, data: bytes) -> None:
        """Handle bytes that arrived after an upgrade."""


class StreamingConnection(Connection):
    """A connection from the gateway for the requests of an application."""

    _request: list[bytes] | None  #: copy of the body for a recording

    __slots__ = ("_is_bodiless", "_is_upgraded", "_request", "call", "is_complete", "is_upgrade")

    # The request.

    @property
    def has_body(self) -> bool:
        """Return whether a part of the body waits to be taken."""
        return bool(self._body)

    @property
    def is_recordable(self) -> bool:
        """Return whether a recording has requests of this kind: no WebSockets."""
        return not self.is_upgrade

    @property
    def recorded_body(self) -> tuple[bytes, int]:
        """Return the body for a recording, or its beginning, and its size; one more if the rest was not awaited."""
        content = b"".join(self._request or ())
        return content, self._body_bytes if self.is_complete else max(self._body_bytes, len(content) + 1)

    def take_body(self) -> bytes:
        """Return the part of the body that has arrived, and read the next one."""
        data = self.body
        self._body.clear()
        self.resume()
        return data

    def break_off(self) -> None:
        """Close in the middle of a response, after what was sent of it; the call ends now."""
        super().break_off()
        if self._flushed is not None:
            self._flushed.set()
            self._flushed = None
        self._end_call()

    def close(self) -> None:
        """Close immediately; the call notices it."""
        super().close()
        self._end_call()

    # Reading. The parser calls the on_… methods.

    def on_headers_complete(self) -> None:
        """Pass the request to the application."""
        super().on_headers_complete()
        if self._parser.should_upgrade():
            self.is_upgrade = dict(self.headers).get(b"upgrade", b"").lower() == b"websocket"
        if self._exchanges is not None and not self.is_upgrade:
            self._request = []
        if not self._refused:
            self._handle(self)

    def on_body(self, data: bytes) -> None:
        """Append a part of the body, and pause reading while the application lags behind."""
        if self._refused or self.call is None:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._pool.limits.max_body_bytes:
            self._fail(413, f"the request body is larger than {self._pool.limits.max_body_bytes} bytes")
            return
        self._body.append(data)
        if self._request is not None and self._body_bytes <= MAX_BODY_BYTES:
            self._request.append(data)
        if sum(map(len, self._body)) > MAX_UNREAD_BYTES:
            self.pause()
        self.call.wake()

    def _awaits_body(self) -> bool:
        """Return whether a request has yet to arrive as a whole, and nothing of its response has been sent."""
        is_body = self._headers_read and not (self.is_complete or self.is_upgrade)
        return is_body and self._state in (ConnectionState.READING, ConnectionState.RUNNING)

    def _read_unparsed(self, length: int) -> None:
        """Pass the rest of a body of this length on in parts."""
        self._unparsed_bytes = length - self._body_bytes

    def on_message_complete(self) -> None:
        """Note that the body is complete."""
        self._replace_ended_parser()
        self.is_complete = True
        if self.call is not None:
            self.call.wake()

    def _receive_late(self, size: int) -> None:
        """Handle bytes that arrive after the head: the rest of the body, or the other protocol."""
        if self._refused:
            pass  # discard the rest of a refused request
        elif self._is_upgraded and self.call is not None:
            self.call.receive_data(bytes(self._buffer[:size]))
        elif self.is_complete:
            self.close()  # the gateway never pipelines
        else:
            self._feed(size)

    def _feed(self, size: int) -> None:
        try:
            self._parser.feed_data(self._buffer[:size])
        except HttpParserUpgrade:
            pass  # clients send nothing more before the response
        except Exception as error:  # of httptools, or raised by one of the callbacks
            if self.open and not self._refused:
                self._fail(*self._problem(error, size))
        if not self.is_complete:
            self._bypass_parser()

    def _fail(self, status: int, message: str) -> None:
        """End the request: respond with an error if the response has not begun, else close."""
        if self._state is ConnectionState.ANSWERING:
            self.close()
        else:
            if self.call is not None:
                self.call.status = status
            self._refuse(status, message)

    def _reset(self) -> None:
        super()._reset()
        self.call: ConnectionCall | None = None
        self._request = None
        self.is_complete = False  #: the whole body has arrived; some of it may wait to be taken
        self.is_upgrade = False  #: the client asks for a WebSocket
        self._is_upgraded = False
        self._is_bodiless = False

    # Writing.

    def respond(self, status: int, media_type: bytes | None, body: bytes, headers: ValidHeaders = NO_HEADERS) -> None:
        """Write a complete response; the connection is then ready for the next request."""
        self._close_if_incomplete()
        super().respond(status, media_type, body, headers)

    def begin_response(
        self, status: int, headers: ValidHeaders, length: int | None, is_head: bool, body: bytes
    ) -> None:
        """Write the head of a response and the first part of its body; `length` is None if it is not known."""
        if not self.open:
            return
        self._is_bodiless = is_head or status in BODILESS
        if self._request is not None and self._exchanges is not None and not is_head:
            self._answer = self._exchanges.begin(self, status, None, headers)
        if self._is_bodiless or length == len(body):
            self._close_if_incomplete()
        head = response_head(status, None, headers)
        if length is not None:
            end = b"content-length: %d\r\n\r\n" % length
        else:
            end = b"\r\n" if self._is_bodiless else self._frame_body()
        start = head + self._last_headers(status) + end
        self._set_state(ConnectionState.ANSWERING)
        self._write(start, body)

    def write_body(self, data: bytes) -> None:
        """Write a further part of the body."""
        self._write(b"", data)

    def _write(self, start: bytes, data: bytes) -> None:
        """Write `start` and a part of the body, together if the part is small."""
        if self._answer is not None and not self._is_bodiless:
            self._answer.append(data)
        data = b"" if self._is_bodiless else self._framed(data)
        if len(data) < JOIN_BYTES:
            start, data = start + data, b""
        if start:
            self._send(start)
        if data:
            self._send(data)

    def end_response(self) -> None:
        """End the body; the connection is then ready for the next request."""
        if self._is_chunked:
            self.end_stream()
        else:
            self._finish_response()

    def upgrade(self, head: bytes) -> None:
        """Write the head that switches to another protocol; what arrives from now on goes to `receive_data`."""
        self._last_headers(101)
        self._is_upgraded = self._close_after = True
        self._set_state(ConnectionState.UPGRADED)
        self._send(head)

    def write_raw(self, data: bytes) -> None:
        """Write bytes of the other protocol."""
        self._send(data)

    def end_upgrade(self) -> None:
        """Note that the last bytes of the other protocol are written: if the process dies now, nothing is missing."""
        self._set_state(ConnectionState.LINGERING)

    def finish(self) -> None:
        """Close once the gateway has taken everything."""
        self._finish_response()

    def _on_writable(self) -> None:
        super()._on_writable()
        if self.call is not None:
            self.call.wake()  # a part of a large response has moved

    def _finish_response(self) -> None:
        self._close_if_incomplete()
        self._end_call()
        super()._finish_response()

    def _close_if_incomplete(self) -> None:
        """Close after the response if a part of the request is missing, which must not be parsed as the next one."""
        if self.is_upgrade or not self.is_complete:
            self._close_after = True

    def _end_call(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call.wake()


def declared_length(headers: Iterable[Header]) -> int | None:
    """Return the valid `Content-Length` of a response; None without one."""
    value = next((value for name, value in headers if name.lower() == b"content-length"), None)
    return int(value) if value is not None and value.isdigit() else None
