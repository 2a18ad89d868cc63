"""One WebSocket of an application: the `receive` and `send` of its ASGI call. wsproto has the protocol.

The WebSocket occupies its connection until it is closed, so the gateway counts it as one request in flight. Messages
are not compressed: the state of a compressor takes more memory than everything else of an idle WebSocket.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState as WebSocketState
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Message, Ping, Request, TextMessage
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from cortex.errors import UserError
from cortex.predictor.user_forks import end_if_forked, process_id
from cortex.worker.applications.application_scope import Scope
from cortex.worker.applications.http_call import MAX_UNSENT_BYTES, ClientDisconnectedError, name_span
from cortex.worker.http.responses import ValidHeaders, error_body, validate_head
from cortex.worker.http.streaming_connection import MAX_UNREAD_BYTES, StreamingConnection
from cortex.worker.requests.payload import JSON, validate_part

#: A ping is sent after this much time without one; a client that sent nothing since the last one is disconnected.
PING_S = 20.0
#: Memory of a message that waits for the application, besides its data: clients may send empty ones.
_MESSAGE_BYTES = 256
#: Time for the client's part of the closing handshake.
_CLOSE_S = 2.0

# Close codes of RFC 6455, section 7.4.1, and of its registry.
NORMAL, GOING_AWAY, NO_CODE, ABNORMAL, TOO_BIG, FAILED, RESTART = 1000, 1001, 1005, 1006, 1009, 1011, 1012


class WebSocketCall:
    """The state of one WebSocket. Event-loop thread only."""

    def __init__(
        self,
        connection: StreamingConnection,
        scope: Scope,
        on_progress: Callable[[], None],
        max_message_bytes: int,
    ) -> None:
        """Create the call; `on_progress` is called for each message in either direction."""
        self.scope = scope
        self.status = 0  #: of the response to the handshake; 0 until it is sent
        self.is_over = False  #: nothing can be sent any more
        self.was_closed = False  #: the connection was closed without a closing handshake
        self.over_ns = 0  #: when `is_over` became true, monotonic
        self._endpoint = scope["root_path"]
        self._connection = connection
        self._on_progress = on_progress
        self._max_message_bytes = max_message_bytes
        self._protocol = WSConnection(ConnectionType.SERVER)
        self._received: deque[dict[str, Any]] = deque([{"type": "websocket.connect"}])
        self._unread_bytes = 0
        self._parts: list[Any] = []  #: of the incomplete message
        self._part_bytes = 0
        self._close: tuple[int, str] = (ABNORMAL, "")  #: code and reason for the application
        self._denial: tuple[int, ValidHeaders] | None = None
        self._denial_body = bytearray()
        self._changed: asyncio.Event | None = None
        self._pid = process_id()
        self._heard_at = self._ping_at = time.monotonic()

    @property
    def is_accepted(self) -> bool:
        """Return whether the application has accepted the WebSocket."""
        return self.status == 101

    def begin(self) -> bool:
        """Check the handshake; if it is not valid, respond and return False."""
        try:
            headers = [header for header in self._connection.headers if header[0] != b"content-length"]
            self._protocol.initiate_upgrade_connection(headers, self._connection.url)
            if any(isinstance(event, Request) for event in self._protocol.events()):
                return True
            problem = "the handshake of the WebSocket is not valid"
        except (RemoteProtocolError, LocalProtocolError, ValueError) as error:
            problem = f"the handshake of the WebSocket is not valid: {error}"
        self._connection.respond(400, JSON, self._error(problem))
        return False

    def fail(self, status: int, message: str, code: int = FAILED) -> None:
        """End the WebSocket: with a response of `status` before it is accepted, else with a close frame of `code`."""
        if self.is_accepted:
            self.close(code, message)
        elif not self.is_over:
            self.status = status
            self._connection.respond(status, JSON, self._error(message))

    def close(self, code: int, reason: str = "") -> None:
        """Send a close frame; the connection ends with the client's reply, or soon."""
        if self._protocol.state is not WebSocketState.OPEN:
            return
        self._send(CloseConnection(code, _short(reason)))
        self._connection.end_upgrade()
        self._close = code, reason
        self._end()
        asyncio.get_running_loop().call_later(_CLOSE_S, self._finish)

    def tick(self, now: float) -> None:
        """Send a ping if one is due, and disconnect a client that has not reacted to the last one."""
        if self.is_over or now < self._ping_at + PING_S:
            return
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._heard_at = now  # the application lags behind, so the client's answer is not read
        if self._heard_at < self._ping_at:
            self.close(FAILED, "the client does not answer pings")
            if self._connection.unsent_bytes:
                self._connection.close()  # it does not read either
            return
        self._ping_at = now
        self._send(Ping())

    # Of the connection.

    def wake(self) -> None:
        """Notice that the connection is closed."""
        if self._connection.call is not self:
            self.was_closed = not self._connection.open
            self._end()

    def receive_data(self, data: bytes) -> None:
        """Handle frames of the client."""
        self._heard_at = time.monotonic()
        try:
            self._protocol.receive_data(data)
            for event in self._protocol.events():
                self._handle(event)
        except RemoteProtocolError as error:
            hint = error.event_hint
            code = hint.code if isinstance(hint, CloseConnection) else 1002
            if self._protocol.state is WebSocketState.OPEN:
                self._send(CloseConnection(code, _short(str(error))))
            self._close = code, str(error)
            self._finish()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Message):
            self._add_part(event)
        elif isinstance(event, Ping):
            # A client that does not read gets no answers, which would fill the memory.
            if self._protocol.state is WebSocketState.OPEN and self._connection.unsent_bytes <= MAX_UNSENT_BYTES:
                self._send(event.response())
        elif isinstance(event, CloseConnection):
            # Also the event for an invalid frame, in the state OPEN.
            if self._protocol.state in (WebSocketState.OPEN, WebSocketState.REMOTE_CLOSING):
                self._send(event.response())
                self._close = event.code or NO_CODE, event.reason or ""
            self._finish()

    def _add_part(self, event: Message[Any]) -> None:
        if self.is_over:
            return
        self._part_bytes += len(event.data)
        if self._part_bytes > self._max_message_bytes:
            self.close(TOO_BIG, f"the message is larger than {self._max_message_bytes} bytes")
            return
        if event.data or not self._parts:
            self._parts.append(event.data)
        if not event.message_finished:
            return
        self._on_progress()
        key, empty = ("text", "") if isinstance(event, TextMessage) else ("bytes", b"")
        data: Any = empty.join(self._parts)
        self._received.append({"type": "websocket.receive", key: data if key == "text" else bytes(data)})
        self._unread_bytes += self._part_bytes + _MESSAGE_BYTES
        self._parts, self._part_bytes = [], 0
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._connection.pause()
        self._notify()

    # Of the application.

    async def receive(self) -> dict[str, Any]:
        """Return the next message, or `websocket.disconnect` after the last one."""
        end_if_forked(self._pid)
        while not self._received:
            if self.is_over:
                code, reason = self._close
                return {"type": "websocket.disconnect", "code": code, "reason": reason}
            self._changed = asyncio.Event()
            await self._changed.wait()
        message = self._received.popleft()
        if message["type"] == "websocket.receive":
            self._unread_bytes -= len(message.get("text") or message.get("bytes") or b"") + _MESSAGE_BYTES
            if self._unread_bytes <= MAX_UNREAD_BYTES:
                self._connection.resume()
        return message

    async def send(self, message: dict[str, Any]) -> None:
        """Accept, refuse, send or close. Raises: ClientDisconnectedError; RuntimeError for an invalid message."""
        end_if_forked(self._pid)
        kind = message["type"]
        if self.is_over:
            if kind == "websocket.close":
                return
            raise ClientDisconnectedError("the WebSocket is closed")
        if self.is_accepted:
            await self._send_message(kind, message)
        elif self._denial is not None or kind == "websocket.http.response.start":
            self._deny(kind, message)
        elif kind == "websocket.accept":
            self._accept(message)
        elif kind == "websocket.close":
            self.fail(403, "the application refused the WebSocket")
        else:
            raise RuntimeError(f"expected 'websocket.accept' or 'websocket.close', but got {kind!r}")

    async def _send_message(self, kind: str, message: dict[str, Any]) -> None:
        if kind == "websocket.close":
            code = message.get("code", NORMAL)
            if not isinstance(code, int) or not 1000 <= code < 5000:
                raise UserError(f"a WebSocket is closed with the code {code!r}; use one from 1000 to 4999")
            self.close(code, message.get("reason") or "")
            return
        if kind != "websocket.send":
            raise RuntimeError(f"expected 'websocket.send' or 'websocket.close', but got {kind!r}")
        text = message.get("text")
        self._on_progress()
        self._send(
            TextMessage(text) if text is not None else BytesMessage(validate_part(message["bytes"], "a message"))
        )
        if self._connection.unsent_bytes > MAX_UNSENT_BYTES:
            await self._connection.flushed()

    def _accept(self, message: dict[str, Any]) -> None:
        headers = list(validate_head(200, message.get("headers") or ()))
        head = self._protocol.send(AcceptConnection(subprotocol=message.get("subprotocol"), extra_headers=headers))
        self.status = 101
        name_span(self._connection.span, self.scope, self._endpoint)
        self._connection.upgrade(head)
        self._on_progress()

    def _deny(self, kind: str, message: dict[str, Any]) -> None:
        if self._denial is None:
            self._denial = message["status"], validate_head(message["status"], message.get("headers") or ())
            return
        if kind != "websocket.http.response.body":
            raise RuntimeError(f"expected 'websocket.http.response.body', but got {kind!r}")
        self._denial_body += validate_part(message.get("body", b""))
        if not message.get("more_body", False):
            self.status, headers = self._denial
            self._connection.respond(self.status, None, bytes(self._denial_body), headers)

    # Ends.

    def _send(self, event: Event) -> None:
        self._connection.write_raw(self._protocol.send(event))

    def _finish(self) -> None:
        if self._connection.call is self:
            self._connection.finish()

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.over_ns = time.monotonic_ns()
            self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _error(self, message: str) -> bytes:
        return error_body(message, self._connection.request_id.decode("latin-1"))


def _short(reason: str) -> str:
    """Return a reason that fits into a close frame: at most 123 bytes."""
    return reason.encode()[:123].decode(errors="ignore")
