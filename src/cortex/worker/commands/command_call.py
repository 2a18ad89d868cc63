"""One request on its way to the server of a command, and its response on the way back.

Bodies are passed on as they arrive, in both directions; a side that lags behind is not read. A WebSocket, or a stream
of events, is passed on byte for byte. If the server's connection ends without a response, its process is probably
about to end: the call waits a moment, so that the supervisor answers with the cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from httptools import HttpParserUpgrade, HttpResponseParser

from cortex.worker.commands.forwarding import request_head, response_headers, server_target, upgrade_head
from cortex.worker.http.responses import (
    BODILESS,
    MAX_RESPONSE_HEAD_BYTES,
    MAX_RESPONSE_HEADERS,
    Header,
    ValidHeaders,
    close_frame,
    framed_chunk,
)
from cortex.worker.http.streaming_connection import StreamingConnection, declared_length

if TYPE_CHECKING:
    from cortex.worker.commands.proxied_server import ProxiedServer
    from cortex.worker.commands.upstream import UpstreamConnection

#: One side is not read while more bytes than this wait for the other.
MAX_UNSENT_BYTES = 256 * 1024
#: A body up to this size is sent to the server in one piece, after it has arrived.
_WHOLE_BODY_BYTES = 64 * 1024
#: Time in which a process ends that has closed its connections.
_DEATH_S = 0.5
#: Time for the server to accept a connection.
_CONNECT_S = 5.0
#: The proxy itself can't be stuck in user code: the supervisor has no deadline to enforce.
_NEVER_NS = 1 << 62
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})

GOING_AWAY, RESTART = 1001, 1012


class CommandCall:
    """The state of one request and its response. Event-loop thread only."""

    death_s = _DEATH_S
    max_headers = MAX_RESPONSE_HEADERS

    def __init__(
        self,
        server: ProxiedServer,
        connection: StreamingConnection,
        deadline_ns: int,
        on_over: Callable[[CommandCall], None],
    ) -> None:
        """Create the call; `on_over` is called once, at its end."""
        self.status = 0  #: of the response; 0 until it has begun
        self.began_at = time.monotonic()
        self._server = server
        self._connection = connection
        self._loop = server.upstream.loop
        self._deadline_ns = deadline_ns  #: monotonic; moves with each byte of the response
        self._connect_until = self._loop.time() + min(_CONNECT_S, server.limits.timeout_s)
        self._on_over = on_over
        self._is_over = self._is_upgraded = False
        # The request.
        self._is_upgrade = connection.is_upgrade
        self._method = connection.method
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in connection.headers)
        self._head = b""  #: until it is sent
        self._waits_for_body = False
        self._is_sent = False
        # The response.
        self._parser = HttpResponseParser(self)
        self._headers: list[Header] = []
        self._head_bytes = 0  #: read until the head was complete
        self._code = 0  #: of the head; 0 until it is complete
        self._has_excess = False  #: the server has sent more than the response, or may do so
        self._is_framed = False  #: the body does not last until the connection ends
        self._holders: list[int] = []  #: if it does, the processes whose end would be that of the connection, too
        self._body: list[bytes] = []
        self._is_complete = False

    @property
    def is_uploading(self) -> bool:
        """Return whether a part of the request has yet to be sent."""
        return not self._is_sent

    def begin(self) -> None:
        """Send the request."""
        connection = self._connection
        target, self._prefix = server_target(connection.url, connection.endpoint, self._server.strips_prefix)
        method = self._method.encode("latin-1")
        headers = connection.headers if connection.span is None else connection.span.propagate(connection.headers)
        self._host = next((value for name, value in headers if name == b"host"), b"")
        self._head = self._request_head(method, target, headers)
        self._head += b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n"
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        self._waits_for_body = not self._is_chunked and not self._is_upgrade and int(length) <= _WHOLE_BODY_BYTES
        connection.begin(_NEVER_NS)
        self._upstream: UpstreamConnection = self._server.upstream.connect(self)
        self._timer = self._loop.call_later(self._delay_s(), self._check)
        self._send_request()

    def _request_head(self, method: bytes, target: bytes, headers: Sequence[Header]) -> bytes:
        return request_head(method, target, headers, self._prefix, self._is_upgrade)

    # Of the connection to the gateway.

    def wake(self) -> None:
        """Pass on what has arrived of the body, or end the call because the request has ended."""
        if self._is_over:
            return
        if self._connection.call is not self:
            if self._connection.open or self._connection.is_abandoned or self._is_upgraded:
                self._end()
            else:
                self._upstream.resume()  # the server finishes, and its response is discarded
            return
        self._touch(self._server.limits.websocket_idle_s if self._is_upgraded else None)
        if not self._is_sent:
            self._send_request()
        if self._connection.unsent_bytes <= MAX_UNSENT_BYTES:
            self._wait_for_client(False)
            self._upstream.resume()

    def receive_data(self, data: bytes) -> None:
        """Pass on what the client sends after an upgrade."""
        self._touch(self._server.limits.websocket_idle_s)
        self._upstream.send(data)
        if self._upstream.unsent_bytes > MAX_UNSENT_BYTES:
            self._connection.pause()

    def _send_request(self) -> None:
        connection = self._connection
        if self._is_sent or self._upstream.unsent_bytes > MAX_UNSENT_BYTES:
            return
        if self._waits_for_body and not connection.is_complete:
            return
        head, self._head = self._head, b""
        is_complete = connection.is_complete or self._is_upgrade
        body = connection.take_body() if connection.has_body else b""
        if self._is_chunked:
            body = framed_chunk(body) + (b"0\r\n\r\n" if is_complete else b"")
        self._is_sent = is_complete
        self._upstream.send(head + body)
        self._touch()

    # Of the connection to the server.

    def on_data(self, data: memoryview) -> None:
        """Pass on data of the response."""
        if self._is_over:
            return
        if self._is_upgraded:
            self._touch(self._server.limits.websocket_idle_s)
            self._server.answered()
            self._connection.write_raw(bytes(data))
        else:
            self._parse(data)
        if not self._is_over and self._connection.unsent_bytes > MAX_UNSENT_BYTES:
            self._upstream.pause()
            self._wait_for_client(True)

    def _wait_for_client(self, waits: bool) -> None:
        if self.status and not self._is_upgraded:
            self._connection.wait_for_client(waits)

    def on_end(self, is_reset: bool) -> None:
        """Handle the end of the server's connection."""
        if self._is_over:
            return
        if self.status and not self._is_upgraded:
            if self._is_framed or is_reset or self._server.has_died(self._holders):
                self._break_off()
            else:
                self._finish()
        else:
            self._timer.cancel()
            self._timer = self._loop.call_later(self.death_s, self._lost)

    def on_sent(self) -> None:
        """Continue with the body, which the server takes again."""
        if self._is_over:
            return
        if not self._is_sent:
            self._send_request()
        elif self._is_upgraded and self._upstream.unsent_bytes <= MAX_UNSENT_BYTES:
            self._connection.resume()

    def _lost(self) -> None:
        """End the call: the server has closed its connection, and continues to run."""
        if self._is_upgraded:
            self._connection.end_upgrade()
            self._finish()
        elif not self._server.is_stopping:
            self._respond_error(502, "the server of the command closed the connection before it answered")

    # Of the parser.

    def _parse(self, data: memoryview) -> None:
        if not self._code:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._upgrade(bytes(data[upgrade.args[0] :]))
            return
        except Exception:  # of httptools, or of on_headers_complete
            self._upstream.close()
            self._respond_error(502, "the response of the command's server is not valid HTTP")
            return
        if self._head_bytes > MAX_RESPONSE_HEAD_BYTES and not self._code:
            self._respond_error(
                502, f"the headers of the response are larger than {MAX_RESPONSE_HEAD_BYTES // 1024} KiB"
            )
        elif self._code:
            self._respond()

    def on_message_begin(self) -> None:
        """Note that the server sends a second response to one request."""
        self._has_excess = bool(self._code)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header. Trailers are ignored: they must not pass for headers (RFC 9110, section 6.5.1)."""
        if not self._code:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Skip interim responses, such as 100 and 103. Raises: ValueError for statuses that don't exist."""
        code = self._parser.get_status_code()
        if code < 100:
            raise ValueError(code)
        if code < 200 and code != 101:
            self._headers.clear()
        elif not self._code:
            self._code = code
            self._is_framed = any(name in _FRAMING for name, _ in self._headers)

    def on_body(self, data: bytes) -> None:
        """Collect a part of the body."""
        if not self._has_excess:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        self._is_complete = bool(self._code)

    # The response.

    def _respond(self) -> None:
        """Pass on what the parser has read."""
        connection = self._connection
        body = b"".join(self._body)
        self._body.clear()
        is_head = self._method == "HEAD"
        is_bodiless = is_head or self._code in BODILESS
        if is_bodiless:
            self._is_complete = True
            self._has_excess = is_head or (self._code == 204 and self._is_framed)  # some servers send a body
        self._touch()
        if self._code < 500:
            self._server.answered()
        if not self.status:
            self.status = self._code
            headers = ValidHeaders(
                response_headers(self._headers, self._prefix, self._server.strips_prefix, self._host)
            )
            if len(headers) > self.max_headers:
                self.status = 0
                what = f"the response of the command's server has {len(headers)} headers"
                self._respond_error(502, f"{what}; the gateway passes on up to {self.max_headers}")
                return
            if self._is_complete and not is_bodiless:
                self._end()
                connection.respond(self.status, None, body, headers)
                return
            connection.begin_response(self.status, headers, declared_length(self._headers), is_head, body)
            if not self._is_framed and not is_bodiless:
                self._holders = self._server.find_holders(self._upstream)
        elif body:
            connection.write_body(body)
        if self._is_complete:
            self._finish()

    def _upgrade(self, rest: bytes) -> None:
        if not self._is_upgrade:
            self._respond_error(502, "the server of the command answered with 101 without a request for it")
            return
        self.status = 101
        self._is_upgraded = True
        self._server.answered()
        self._touch(self._server.limits.websocket_idle_s)
        self._timer.cancel()  # the limit of a WebSocket may be shorter than that of its handshake
        self._timer = self._loop.call_later(self._delay_s(), self._check)
        self._connection.upgrade(upgrade_head(self._headers))
        self._connection.write_raw(rest)

    def _respond_error(self, status: int, message: str) -> None:
        if self._is_over:
            return
        if self._connection.open and not self.status:
            self._end()
            self.status = status
            self._connection.respond_error(status, message)
        else:
            self._break_off()

    def _break_off(self) -> None:
        """Cut the response off, so that no client takes what it has for the whole."""
        self._connection.abort()
        self._end()

    def _finish(self) -> None:
        """End the response, which is complete."""
        self._end()
        connection = self._connection
        if self._is_upgraded:
            connection.finish()
        elif connection.open:
            connection.end_response()

    # Time.

    def _touch(self, silence_s: float | None = None) -> None:
        self._deadline_ns = time.monotonic_ns() + int((silence_s or self._server.limits.timeout_s) * 1e9)

    def _delay_s(self) -> float:
        delay_s = (self._deadline_ns - time.monotonic_ns()) / 1e9
        if not self._upstream.is_connected:
            delay_s = min(delay_s, self._connect_until - self._loop.time())
        return max(0.0, delay_s)

    def _check(self) -> None:
        is_late = time.monotonic_ns() >= self._deadline_ns
        if not is_late and (self._upstream.is_connected or self._loop.time() < self._connect_until):
            self._timer = self._loop.call_later(self._delay_s(), self._check)
        elif self._is_upgraded:
            self.close_websocket(GOING_AWAY, f"no message for {self._server.limits.websocket_idle_s:g} s")
        elif not self._upstream.is_connected:
            self._respond_error(503, f"the server of the command accepts no connection: {self._upstream.error}")
        elif self._connection.unsent_bytes > MAX_UNSENT_BYTES:
            self._connection.cut_off_slow_client(self._server.limits.timeout_s)  # which ends the call
        else:
            self._respond_error(504, f"timed out after {self._server.limits.timeout_s:g} s")

    # End.

    def close_websocket(self, code: int, reason: str) -> None:
        """Send a close frame to the client, if the request is a WebSocket, and end it."""
        if self._is_upgraded and not self._is_over:
            self._connection.write_raw(close_frame(reason, code))
            self._connection.end_upgrade()
            self._end()
            self._connection.finish()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._timer.cancel()
        self._upstream.close()
        self._connection.call_over()  # of a client that has disconnected
        self._on_over(self)
