"""One HTTP request of an application: the `receive` and `send` of its ASGI call.

The call may go on after its response (background tasks of the framework); the connection is then free for the next
request. When the client disconnects, `receive` returns `http.disconnect`, and `send` raises an exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cortex.predictor.user_forks import end_if_forked, process_id
from cortex.worker.applications.application_scope import Scope, route_template
from cortex.worker.http.responses import BODILESS, Header, ValidHeaders, validate_head
from cortex.worker.http.streaming_connection import StreamingConnection, declared_length
from cortex.worker.monitoring.route_metrics import OTHER
from cortex.worker.requests.payload import validate_part

if TYPE_CHECKING:
    from cortex.worker.monitoring.spans import RequestSpan

Message = dict[str, Any]
#: `send` of the application waits while more bytes than this wait for the gateway.
MAX_UNSENT_BYTES = 256 * 1024
_DISCONNECT: Message = {"type": "http.disconnect"}


class ClientDisconnectedError(OSError):
    """The application sends to a client that has disconnected."""


class HttpCall:
    """The state of one request and its response. Event-loop thread only."""

    def __init__(
        self,
        connection: StreamingConnection,
        scope: Scope,
        on_progress: Callable[[], None],
        on_abandoned: Callable[[], None],
        on_wait: Callable[[bool], None] = lambda waits: None,
        is_wsgi: bool = False,
    ) -> None:
        """Create the call.

        `on_progress` is called when a part of the request or of the response has moved, and `on_abandoned` when the
        client disconnects from a response that has begun while the application does not wait for `http.disconnect`.
        `on_wait` is called before and after the application waits for the client. The head of a WSGI application goes
        with the first part of its body (PEP 3333).
        """
        self.scope = scope
        self.status = 0  #: of the response; 0 until it has begun
        self.is_over = False  #: the response is complete, or the client has disconnected
        self.was_closed = False  #: the connection was closed, or cut off, before the response was complete
        self.over_ns = 0  #: when `is_over` became true, monotonic
        self._connection = connection
        self._on_progress = on_progress
        self._on_abandoned = on_abandoned
        self._on_wait = on_wait
        self._is_wsgi = is_wsgi
        self._endpoint = scope["root_path"]
        self._is_head = scope["method"] == "HEAD"
        # The bare endpoint; pages there need the slash, so that their relative addresses lead below the endpoint.
        self._may_redirect = scope["path"] == scope["root_path"] and scope["method"] in ("GET", "HEAD")
        self._is_read = False  #: the application has received the whole body
        self._head: tuple[int, ValidHeaders] | None = None
        self._length: int | None = None  #: of the body, if the application has declared it
        self._sent_bytes = 0
        self._changed: asyncio.Event | None = None
        self._pid = process_id()

    # Of the connection.

    def wake(self) -> None:
        """Wake the call: more of the body has arrived, or the request has ended."""
        if self._connection.call is not self:
            self.is_over = True
            self.over_ns = time.monotonic_ns()
            self.was_closed = self._connection.is_cut_off
        else:
            self._on_progress()
        if self._changed is not None:
            self._changed.set()
        elif self.was_closed and self.status:
            self._on_abandoned()

    def receive_data(self, data: bytes) -> None:
        """Refuse bytes of other protocols: HTTP requests are never upgraded."""
        raise AssertionError("an HTTP request was upgraded")

    # Of the application.

    async def receive(self) -> Message:
        """Return the next part of the body, or `http.disconnect` after the end of the request."""
        end_if_forked(self._pid)
        connection = self._connection
        while not self.is_over:
            if not self._is_read and (connection.has_body or connection.is_complete):
                body = connection.take_body()
                self._is_read = connection.is_complete
                return {"type": "http.request", "body": body, "more_body": not self._is_read}
            self._changed = asyncio.Event()
            if not self._is_read:
                self._on_wait(True)
            try:
                await self._changed.wait()
            finally:
                self._changed = None
                if not self._is_read:
                    self._on_wait(False)
        return _DISCONNECT

    async def send(self, message: Message) -> None:
        """Send the head or a part of the body.

        Raises: ClientDisconnectedError; UserError, RuntimeError for a message that is not valid now.
        """
        end_if_forked(self._pid)
        kind = message["type"]
        if self._head is None:
            if kind != "http.response.start":
                raise RuntimeError(f"expected the message 'http.response.start', but got {kind!r}")
            self._start(message["status"], tuple(message.get("headers", ())))
            return
        if kind != "http.response.body":
            raise RuntimeError(f"expected the message 'http.response.body', but got {kind!r}")
        if self.was_closed:
            raise ClientDisconnectedError("the client has disconnected")
        if self.is_over:
            return
        self._write(validate_part(message.get("body", b"")), message.get("more_body", False))
        if not self.is_over and self._connection.unsent_bytes > MAX_UNSENT_BYTES:
            self._on_wait(True)
            try:
                await self._connection.flushed()
            finally:
                self._on_wait(False)

    def _start(self, status: int, headers: tuple[Header, ...]) -> None:
        """Send the head at the next turn of the event loop.

        A body that the application sends before that goes with it, and with its length if it is in one piece.
        """
        kept = ValidHeaders(tuple(header for header in validate_head(status, headers) if header[0] != b"date"))
        if status == 404 and self._may_redirect:
            query = self.scope["query_string"]
            location = self.scope["root_path"].encode("latin-1") + b"/" + (b"?" + query if query else b"")
            status, kept = 307, ValidHeaders(((b"location", location),))
            self._length = 0
            self._is_head = True  # drop the body
        elif status not in BODILESS:
            self._length = declared_length(headers)
        self._head = status, kept
        has_body = not (self._is_head or status in BODILESS or self._length == 0)
        if has_body and not self._is_wsgi:
            asyncio.get_running_loop().call_soon(self._send_head)

    def _send_head(self) -> None:
        if not (self.status or self.is_over):
            self._begin(self._length, b"")
            self._on_progress()

    def _begin(self, length: int | None, body: bytes) -> None:
        assert self._head is not None
        self.status, headers = self._head
        connection = self._connection
        name_span(connection.span, self.scope, self._endpoint)
        connection.begin_response(self.status, headers, length, self._is_head, body)
        if self.status >= 500:
            connection.span = None  # frameworks raise the exception after the response: see `_RunningCall`

    def _write(self, body: bytes, more: bool) -> None:
        assert self._head is not None
        connection, length = self._connection, self._length
        self._sent_bytes += len(body)
        if length is not None and not self._is_head:
            problem = ""
            if self._sent_bytes > length:
                problem = f"the body is longer than its content-length, {length}"
            elif self._sent_bytes < length and not more:
                problem = f"the body has {self._sent_bytes} bytes, but its content-length is {length}"
            if problem:
                if self.status:
                    connection.abort()
                raise RuntimeError(problem)
        if self.status:
            connection.write_body(body)
        else:
            if length is None and not (more or self._is_head or self._head[0] in BODILESS):
                length = len(body)
            self._begin(length, body)
        if more:
            self._on_progress()
        elif not self.is_over:
            connection.end_response()


def name_span(span: RequestSpan | None, scope: Scope, endpoint: str) -> None:
    """Name the span of a request by the route that handles it, as soon as it responds."""
    if span is not None and (route := route_template(scope, endpoint)) != OTHER:
        span.set_route(endpoint + route)
