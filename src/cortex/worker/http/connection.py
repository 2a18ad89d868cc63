"""HTTP/1.1 server for one trusted client, the gateway, which has parsed, bounded and normalised each request.

A connection parses a request and passes itself to the application in one call, `handle`. The application responds,
at once or later, with `respond` or with `start_stream` … `end_stream`.

Connections are accepted by the supervisor, which keeps a duplicate of each: bytes that this process leaves unread in a
socket are read by its successor. `shared_state` has the states of a connection, their transitions, and their diagram.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from zlib import crc32

from httptools import HttpParserInvalidMethodError, HttpRequestParser

from cortex.payloads.openai_errors import is_openai_path, openai_error_body
from cortex.worker.http.cancellation import CLIENTS
from cortex.worker.http.new_bytes import new_bytes
from cortex.worker.http.responses import (
    BODILESS,
    CLOSING,
    NO_FIELDS,
    NO_HEADERS,
    Header,
    ValidHeaders,
    close_frame,
    error_body,
    error_response,
    framed_chunk,
    response_head,
)
from cortex.worker.monitoring.request_log import REQUEST, log_id, write_log
from cortex.worker.shared_state import ConnectionState

if TYPE_CHECKING:
    from cortex.worker.http.connection_pool import ConnectionPool, GatewayClock
    from cortex.worker.monitoring.exchange_writer import StreamedAnswer
    from cortex.worker.monitoring.spans import RequestSpan

#: Header by which the gateway authenticates itself over TCP. The supervisor checks it; user code never sees it.
SECRET_HEADER = b"x-cortex-gateway"

_VERB = re.compile(rb"[A-Za-z-]+ \S+ HTTP/1\.\d\r?\n")
_REQUEST_ID = re.compile(rb"\r\nx-cortex-request-id: *([!-~]+)", re.IGNORECASE)

#: Size of the receive buffer that all connections share; a new buffer per read would cost page faults.
READ_BYTES = 256 * 1024
_LINGER_S = 2.0
#: Larger bodies are sent separately from the head, smaller ones are copied behind it.
JOIN_BYTES = 64 * 1024
#: If more of a body than this is still to come, it is read past the parser, which would copy it once more. So the first
#: read of a request takes no more than this either.
_UNPARSED_BYTES = 64 * 1024
#: Status in metrics of a request whose client disconnected before the response. Nobody receives it.
CLIENT_CLOSED_REQUEST = 499
#: Mark of a request that is a copy.
_COPY = b"copy"
_RETRY = ValidHeaders(((b"retry-after", b"1"),))

# Globals, because each access to a member of an enumeration takes time on the path of every request.
_IDLE, _READING, _RUNNING = ConnectionState.IDLE, ConnectionState.READING, ConnectionState.RUNNING
_DRAINING = ConnectionState.DRAINING
_IN_CALL = frozenset({_RUNNING, ConnectionState.ANSWERING, ConnectionState.STREAMING, ConnectionState.UPGRADED})
_WITHOUT_RESPONSE = frozenset({ConnectionState.QUEUED, ConnectionState.RUNNING})


class Connection:
    """One connection from the gateway, and its current request. `shared_state` has its states and transitions."""

    may_have_openai_errors = False  #: below `/v1`
    __slots__ = (
        "_abandoned",
        "_answer",
        "_backlog",
        "_body",
        "_body_bytes",
        "_buffer",
        "_clients",
        "_clock",
        "_close_after",
        "_exchanges",
        "_fd",
        "_flushed",
        "_handle",
        "_headers_read",
        "_is_chunked",
        "_loop",
        "_on_close",
        "_parser",
        "_parser_is_behind",
        "_pool",
        "_reading",
        "_recorder",
        "_recv_into",
        "_refused",
        "_rest",
        "_shared",
        "_sock",
        "_state",
        "_unparsed_bytes",
        "_whole",
        "_whole_head",
        "arrived_ns",
        "batched_ns",
        "compared",
        "content_encoding",
        "content_type",
        "endpoint",
        "headers",
        "index",
        "is_cut_off",
        "log_id",
        "open",
        "request_id",
        "requests_info",
        "returned_ns",
        "span",
        "started_ns",
        "task",
        "unsent_bytes",
        "url",
    )

    content_type: bytes | None
    content_encoding: bytes | None  #: of the body as it is now
    url: bytes  #: target of the request: its path and query
    compared: bytes | None  #: `original` or `copy`, if two revisions get the request

    def __init__(
        self,
        sock: socket.socket,
        index: int,
        pool: ConnectionPool,
        clock: GatewayClock | None,
        on_close: Callable[[Connection], None],
    ) -> None:
        self.index = index
        self.open = True
        self.is_cut_off = False  #: no more of the response will be sent than what was written, or the client has left
        self.task: asyncio.Task[None] | None = None  #: the task of the current request
        self.span: RequestSpan | None = None  #: of the current request; None: no traces are exported
        self._sock = sock
        self._fd = sock.fileno()
        self._recv_into = sock.recv_into
        self._clock = clock
        self._on_close = on_close
        self._pool = pool
        self._loop = pool.loop
        self._shared = pool.shared_state
        self._recorder = pool.recorder
        self._exchanges = pool.exchanges
        self._answer: StreamedAnswer | None = None  #: the present one, if it is recorded
        self._handle = pool.handle
        self._buffer = pool.buffer
        self._clients = (self,)
        self._parser_is_behind = True  #: it can't read the next request
        self._whole = b""  #: the body, while its rest is read past the parser
        self._rest: memoryview | None = None  #: the part of `_whole` that is still to be read
        self._state = _IDLE
        self._backlog: deque[memoryview] = deque()
        self.unsent_bytes = 0  #: of the backlog: the gateway has not taken them yet
        self._flushed: asyncio.Event | None = None
        self._reading = False
        self._close_after = False
        self._abandoned = False
        self._reset()

    # The request.

    @property
    def method(self) -> str:
        """Return the HTTP method in upper case."""
        return str(self._parser.get_method().decode("latin-1"))

    @property
    def body(self) -> bytes:
        """Return the complete body."""
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    @property
    def codings(self) -> bytes:
        """Return the values of all headers `Content-Encoding`."""
        return b",".join(value for name, value in self.headers if name == b"content-encoding")

    def set_decoded_body(self, body: bytes) -> None:
        """Replace the body by what it decodes to. Nobody is to decode it again, so the header disappears, too."""
        self._body[:], self._body_bytes = [body], len(body)
        self.headers[:] = [header for header in self.headers if header[0] != b"content-encoding"]
        self.content_encoding = None

    @property
    def is_copy(self) -> bool:
        """Return whether the gateway sent this request for a comparison; its response is discarded."""
        return self.compared == _COPY

    @property
    def is_recordable(self) -> bool:
        """Return whether a recording has requests of this kind."""
        return not self.requests_info

    @property
    def recorded_body(self) -> tuple[bytes, int]:
        """Return the body for a recording, or its beginning, and its size."""
        return self.body, self._body_bytes

    @property
    def path_below(self) -> bytes:
        """Return the path below the endpoint; empty for the endpoint itself."""
        return b"" if self.endpoint is None else path_below(self.url, self.endpoint)

    @property
    def has_openai_errors(self) -> bool:
        """Return whether errors have OpenAI's form."""
        return self.may_have_openai_errors and is_openai_path(self.path_below)

    def gateway_wait_ns(self, now_ns: int) -> int:
        """Return how long the request has been in the gateway; `now_ns` is monotonic.

        The request id begins with the time of arrival there: UNIX time in milliseconds, 13 digits.
        """
        try:
            came_ns = int(self.request_id[:13]) * 1_000_000
        except ValueError:
            return 0
        waited_ns = time.time_ns() - came_ns
        if self._clock is not None:
            waited_ns = self._clock.waited_ns(waited_ns, now_ns)
        return max(waited_ns, 0)

    def enter(self, function: str) -> None:
        """Assign this context to the request: the lines that user code prints, its spans, its cancellation.

        On any thread.
        """
        REQUEST.set(self.log_id)
        CLIENTS.set(self._clients)
        span = self.span  # the event loop removes it when the client disconnects
        if span is not None:
            span.enter(function)

    def leave(self) -> None:
        """Assign this context to no request, for calls that several of them share. On any thread."""
        REQUEST.set(b"")
        CLIENTS.set(())
        span = self.span
        if span is not None:
            span.leave()

    # State.

    @property
    def is_idle(self) -> bool:
        """Return whether the connection has no request."""
        return self._state is _IDLE

    @property
    def is_abandoned(self) -> bool:
        """Return whether the connection was closed and the current call is to end."""
        return not self.open and self._pool.cancels_calls

    def is_cancelled(self) -> bool:
        """As `is_abandoned`, also if the event loop has not noticed it yet: inline calls block it. On any thread."""
        if not self.open or not self._pool.cancels_calls:
            return self.is_abandoned
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def queue(self, deadline_ns: int) -> None:
        """Mark the request as waiting for a slot or a batch, until `deadline_ns` (monotonic)."""
        self._enter_row(deadline_ns)
        self._set_state(ConnectionState.QUEUED)

    def begin(self, deadline_ns: int) -> None:
        """Mark the request as running in user code, until `deadline_ns` (monotonic)."""
        self._state = _RUNNING
        self._enter_row(deadline_ns)

    def _enter_row(self, deadline_ns: int) -> None:
        self._shared.begin(self.index, deadline_ns, self.request_id)
        if self.may_have_openai_errors and self.has_openai_errors:
            self._shared.set_openai_errors(self.index)

    def begin_batch(self, deadline_ns: int) -> None:
        """Mark a queued request as a member of a batch, which sets its number when it runs."""
        self._state = _RUNNING
        self._shared.extend(self.index, deadline_ns)

    def set_batch(self, batch: int) -> None:
        """Move the request to another batch; 0: it waits for one. On any thread."""
        self._shared.set_batch(self.index, batch)

    def extend(self, deadline_ns: int) -> None:
        """Move the deadline of a streaming response."""
        self._shared.extend(self.index, deadline_ns)

    def wait_for_client(self, waits: bool) -> None:
        """Note whether the call waits for the client, and runs no user code. On any thread.

        It has no deadline then, and the supervisor lends its call slot to another request.
        """
        if self._state in _IN_CALL:  # else the response is complete
            self._shared.set_state(self.index, ConnectionState.WAITING if waits else self._state)

    def call_over(self) -> None:
        """Note that user code has finished with the request, which may have been abandoned or cut off meanwhile."""
        if self._abandoned:
            self._abandoned = False
            self._body.clear()
            self._on_close(self)
        elif self.is_cut_off and self.open:
            self._set_state(ConnectionState.LINGERING)

    def resume(self) -> None:
        """Read requests as they arrive."""
        if not self._reading and self.open:
            self._reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def pause(self) -> None:
        """Leave the next request in the socket, where a successor of this process can read it."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def release(self) -> None:
        """Stop serving an idle connection without closing it: another process continues with it."""
        self.open = False
        self.pause()
        self._sock.close()
        self._pool.remove(self)

    def cut_off_slow_client(self, timeout_s: float) -> None:
        """Break off a response whose client has read nothing for `timeout_s`, and log it: no error of the API."""
        request_id = self.request_id.decode("latin-1")
        what = f"it has read nothing for {timeout_s:g} s, so the response is cut off"
        write_log(f"request {request_id} has a slow client: {what}\n")
        self.break_off()

    def abort(self) -> None:
        """Break off a response by a fault of the API, which counts as an error."""
        self.count_aborted()
        self.break_off()

    def count_aborted(self) -> None:
        """Count a response that has begun and will never be complete, unless its client has disconnected."""
        if self.open:
            (self._recorder if self.compared != _COPY else self._recorder.of_copies).abort()

    def break_off(self) -> None:
        """Close in the middle of a response, after what was sent of it.

        The gateway counts the request until its client has read that. Until then the connection is that of a slow
        client, whose call slot is lent to another request once `call_over` is called.
        """
        self.is_cut_off = True
        if self.open and self._backlog:
            self._close_after = True
        else:
            self.close()

    def close(self) -> None:
        """Close immediately, by a shutdown that the peer sees although the supervisor has a duplicate."""
        if not self.open:
            return
        self.open, self.is_cut_off = False, True
        self.pause()
        self._loop.remove_writer(self._fd)
        if self._flushed is not None:
            self._flushed.set()
        with contextlib.suppress(OSError):  # the peer has closed already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        # The supervisor enforces the deadline of a running call only while it has the connection.
        self._abandoned = self._state in _IN_CALL
        if self.span is not None:
            self._end_span("connection_closed")
        # A reference cycle with the parser delays the destruction of this object: free large buffers now.
        self._answer = None
        self._whole, self._rest = b"", None
        self._backlog.clear()
        self.unsent_bytes = 0
        if not self._abandoned:
            self._body.clear()
            self._on_close(self)
        self._pool.remove(self)
        if self.task is not None and self._pool.cancels_calls:
            # Not before its first step: the task would not run at all, and not free its slot.
            self._loop.call_soon(self.task.cancel)

    def _set_state(self, state: ConnectionState) -> None:
        self._state = state
        self._shared.set_state(self.index, state)

    def close_after_response(self) -> None:
        """Close the connection once the next response is sent."""
        self._close_after = True

    # Reading. The parser calls the on_… methods.

    def _on_readable(self) -> None:
        is_new = self._state is _IDLE
        if is_new:
            self._set_state(_READING)  # before the read: if the process dies in between, the connection was not idle
        data = None
        try:
            if is_new:
                size = self._recv_into(self._buffer, _UNPARSED_BYTES)
            elif self._unparsed_bytes:
                data = self._sock.recv(min(self._unparsed_bytes, READ_BYTES))
                size = len(data)
            else:
                size = self._recv_into(self._rest or self._buffer)
        except (BlockingIOError, InterruptedError):
            if is_new:
                self._set_state(_IDLE)
            return
        except OSError:
            size = 0
        if not size:
            self._receive_end()
        elif self._rest is not None:  # a part of a large body, which was read to its place in the whole one
            self._rest = self._rest[size:]
            if not self._rest:
                self._body[:] = [self._whole]
                self._whole, self._rest = b"", None
                self.on_message_complete()
        elif data is not None:
            self._receive_unparsed(data)
        elif self._state is _READING and not self._refused:
            self._feed(size)
        else:
            self._receive_late(size)

    def _awaits_body(self) -> bool:
        """Return whether a request has yet to arrive as a whole, and nothing of its response has been sent."""
        return self._state is _READING and self._headers_read

    def _receive_late(self, size: int) -> None:
        """Handle bytes that arrive after the request was passed on or refused."""
        if not self._refused:  # else discard the rest of the request
            self.close()  # the gateway never pipelines

    def _receive_end(self) -> None:
        """Close; a client that may have ended only its side, in the middle of its request, receives the reason."""
        if self._awaits_body() and not self._refused:
            message = "the connection ended before the request body was complete"
            self._send(error_response(400, message, self.request_id.decode("latin-1"), self.has_openai_errors))
        if self._state in _WITHOUT_RESPONSE:
            self._last_headers(CLIENT_CLOSED_REQUEST)
        self.close()

    def _receive_unparsed(self, data: bytes) -> None:
        """Handle a further part of a large body that is passed on in parts."""
        self._unparsed_bytes -= len(data)
        is_complete = not self._unparsed_bytes
        self.on_body(data)
        if is_complete:
            self.on_message_complete()

    def _feed(self, size: int) -> None:
        try:
            self._parser.feed_data(self._buffer[:size])
        except Exception as error:  # of httptools, or raised by one of the callbacks
            if self.open and self._state is _READING and not self._refused:
                self._refuse(*self._problem(error, size))
        if self._state is _READING:
            self._bypass_parser()

    def _problem(self, error: Exception, size: int) -> tuple[int, str]:
        """Return status and message for a request that can't be parsed."""
        if not self._headers_read and (found := _REQUEST_ID.search(self._buffer[:size])):
            self.request_id = self.log_id = found[1]  # the parser has stopped before the headers
        if not isinstance(error, HttpParserInvalidMethodError) or not _VERB.match(self._buffer[:size]):
            return 400, "the request is not valid HTTP"
        return 501, "the verb of the request is unknown"

    def _bypass_parser(self) -> None:
        """Read the rest of an incomplete request without the parser, if it is a large part of a body."""
        length = dict(self.headers).get(b"content-length") if self._headers_read and not self._refused else None
        if length is not None and int(length) - self._body_bytes > _UNPARSED_BYTES:
            self._parser_is_behind = True
            self._read_unparsed(int(length))

    def _read_unparsed(self, length: int) -> None:
        """Read the rest of a body of this length to its place behind what has arrived, or refuse the request."""
        if length > self._pool.limits.max_body_bytes:
            self._refuse_body()
            return
        self._whole, place = new_bytes(length)
        place[: self._body_bytes] = self.body
        rest = place[self._body_bytes :]
        self._body_bytes += len(rest)
        self._rest = rest

    def on_url(self, url: bytes) -> None:
        """Append a part of the request target."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Append a header. Trailers are ignored, because the gateway does not check them."""
        name = name.lower()
        if name != SECRET_HEADER and not self._headers_read:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Extract the headers that matter here, and let a waiting client send its body."""
        self._headers_read = True
        if not self.url.startswith(b"/"):  # `GET http://host/path`
            self.url = b"/" + self.url.partition(b"://")[2].partition(b"/")[2]
        headers = dict(self.headers)
        self.content_type = headers.get(b"content-type")
        self.content_encoding = headers.get(b"content-encoding")
        self.request_id = self.log_id = headers.get(b"x-cortex-request-id", b"")
        if b"traceparent" in headers:
            self.log_id = log_id(self.request_id, headers[b"traceparent"])
        self.requests_info = b"x-cortex-info" in headers
        self.compared = headers.get(b"x-cortex-compared")
        self.endpoint = headers.get(b"x-cortex-endpoint")  # set by the gateway for paths below the endpoint
        if b"expect" in headers:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Append a part of the body."""
        if self._refused:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._pool.limits.max_body_bytes:
            self._refuse_body()
            return
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Pass the complete request to the application."""
        self._replace_ended_parser()
        if not self._refused:
            self._handle(self)

    def _replace_ended_parser(self) -> None:
        """Read the next request with another parser, if this one takes the request that is complete for the last one.

        It does so for `Proxy-Connection: close`, and for `Connection: close` in a trailer: these come from the client,
        and do not end the connection of the gateway.
        """
        if not self._parser.should_keep_alive():
            self._parser_is_behind = True

    def _refuse_body(self) -> None:
        self._refuse(413, f"the request body is larger than {self._pool.limits.max_body_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Respond with an error before the request is complete; the connection closes after it."""
        self._refused = self._close_after = True
        self._unparsed_bytes = 0
        self._body.clear()
        self.respond_error(status, message)

    def _reset(self) -> None:
        self.url = b""
        self.content_type = self.content_encoding = None
        self.request_id = self.log_id = b""
        self.requests_info = False
        self.compared = None
        self.endpoint = None
        self.headers: list[Header] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._unparsed_bytes = 0  #: of a body that is passed on in parts, still to be read past the parser
        self._headers_read = False
        self._is_chunked = False  #: the response is sent in chunks
        self._whole_head = b""  #: of a stream whose status has no body: the response, which is sent at its end
        if self._parser_is_behind:
            self._parser = HttpRequestParser(self)
            self._parser_is_behind = False
        self._refused = False
        # Times of the request, monotonic; see `RequestRecorder.finish`.
        self.arrived_ns = self.batched_ns = self.started_ns = self.returned_ns = 0

    # Writing.

    def respond(self, status: int, media_type: bytes | None, body: bytes, headers: ValidHeaders = NO_HEADERS) -> None:
        """Write a complete response; the connection is then ready for the next request."""
        if not self.open:
            return
        if self.compared is not None and status == HTTPStatus.OK:
            self._pool.store_answer(self, media_type, body)
        if status in BODILESS:
            body = b""
        start = b"%b%bcontent-length: %d\r\n\r\n" % (
            response_head(status, media_type, headers),
            self._last_headers(status),
            len(body),
        )
        if len(body) < JOIN_BYTES:
            self._send(start + body)
        else:
            self._send(start)
            self._send(body)
        exchanges = self._exchanges
        if exchanges is not None and crc32(self.request_id) < exchanges.limit and self.open and not self._refused:
            if exchanges.is_paused:
                exchanges.skipped += 1
            else:
                exchanges.add(self, status, media_type, headers, body)
        self._finish_response()

    def end_with_process(self, reason: str) -> None:
        """Answer the request, unless its response has begun, or one that is still in the socket: the process ends."""
        self._close_after = True
        if self._state is _IDLE:
            self._handle = lambda connection: None
            self._on_readable()
        if self._state is _IDLE:
            self.close()  # now: a request that arrives while the process ends would get no response
        elif self._state is _RUNNING:
            self._respond_end(500, f"the process that handled this request ended: {reason}")
        elif self._state in (_READING, ConnectionState.QUEUED):
            self._respond_end(503, f"the process ended before it ran this request: {reason}", _RETRY)
        elif self._state is ConnectionState.UPGRADED:
            self._send(close_frame(reason))

    def _respond_end(self, status: int, message: str, headers: ValidHeaders = NO_HEADERS) -> None:
        self.respond_error(status, message, headers)

    def respond_error(
        self, status: int, message: str, headers: ValidHeaders = NO_HEADERS, fields: Mapping[str, Any] = NO_FIELDS
    ) -> None:
        """Write a JSON error response, whose body also has `fields`."""
        request_id = self.request_id.decode("latin-1")
        if self.has_openai_errors:
            body = openai_error_body(status, message, request_id, fields)
        else:
            body = error_body(message, request_id, fields)
        self.respond(status, b"application/json", body, headers)

    def start_stream(
        self, status: int, media_type: bytes | None, headers: ValidHeaders = NO_HEADERS, chunk: bytes = b""
    ) -> None:
        """Begin a response of unknown length; its first chunk goes with its head if it is small."""
        if self.open:
            if self._exchanges is not None:
                self._answer = self._exchanges.begin(self, status, media_type, headers)
            head = response_head(status, media_type, headers)
            end = b"\r\n" if status in BODILESS else self._frame_body()
            head += self._last_headers(status) + end
            self._set_state(ConnectionState.ANSWERING)
            if status in BODILESS:  # the gateway may send the next request as soon as it has the head
                self._whole_head = head
                return
            if len(chunk) < JOIN_BYTES:
                if self._answer is not None:
                    self._answer.append(chunk)
                self._send(head + self._framed(chunk))
            else:
                self._send(head)
                self.stream(chunk)

    def stream(self, chunk: bytes) -> None:
        """Write a chunk of a response of unknown length."""
        if self.open and chunk and not self._whole_head:
            if self._answer is not None:
                self._answer.append(chunk)
            self._send(self._framed(chunk))

    def end_stream(self) -> None:
        """End a response of unknown length."""
        if self.open:
            self._send(self._whole_head or (b"0\r\n\r\n" if self._is_chunked else b""))
            self._finish_response()

    async def flushed(self) -> None:
        """Wait until the gateway has taken everything or disconnected."""
        if self._backlog and self.open:
            self._flushed = self._flushed or asyncio.Event()
            await self._flushed.wait()

    async def flushed_in_time(self, timeout_s: float) -> bool:
        """As `flushed`; return False once the gateway has taken nothing for `timeout_s`, because the client is slow."""
        while self._backlog and self.open:
            unsent = self.unsent_bytes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.flushed()
            if self.open and self.unsent_bytes >= unsent:
                return False
        return True

    def _frame_body(self) -> bytes:
        """Return the end of the head of a response of unknown length.

        HTTP/1.0 has no chunks: there, the end of the connection is that of the body (RFC 9112, section 6.3).
        """
        self._is_chunked = self._parser.get_http_version() != "1.0"
        if self._is_chunked:
            return b"transfer-encoding: chunked\r\n\r\n"
        self._close_after = True
        return b"\r\n"

    def _framed(self, data: bytes) -> bytes:
        """Return a part of the body as it is sent."""
        return framed_chunk(data) if self._is_chunked else data

    def _last_headers(self, status: int) -> bytes:
        """Count the response; return its last header lines: `Server-Timing`, and that the connection closes if it does.

        Without that line, the gateway could send the request of another client before it notices the end.
        """
        if self.span is not None:
            self.span.respond(status, self._durations_ns())
        recorder = self._recorder if self.compared != _COPY else self._recorder.of_copies
        timing = recorder.finish(status, self.arrived_ns, self.batched_ns, self.started_ns, self.returned_ns)
        return timing + CLOSING if self._close_after else timing

    def _durations_ns(self) -> dict[str, int]:
        """Return the parts of `Server-Timing` that the request has reached."""
        if not self.started_ns:
            return {}
        now_ns = time.monotonic_ns()
        returned_ns = self.returned_ns or now_ns
        durations_ns = {
            "queue": (self.batched_ns or self.started_ns) - self.arrived_ns,
            "handler": returned_ns - self.started_ns,
            "encode": now_ns - returned_ns,
        }
        return durations_ns | {"batch": self.started_ns - self.batched_ns} if self.batched_ns else durations_ns

    def _end_span(self, error_type: str = "") -> None:
        assert self.span is not None
        self.span.end(error_type)
        self.span = None

    def _send(self, data: bytes) -> None:
        if not self.open:
            return
        if self._backlog:
            self._backlog.append(memoryview(data))
            self.unsent_bytes += len(data)
            return
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self._backlog.append(memoryview(data)[sent:])
            self.unsent_bytes = len(data) - sent
            self._loop.add_writer(self._fd, self._on_writable)

    def _on_writable(self) -> None:
        while self._backlog:
            data = self._backlog[0]
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.close()
                return
            self.unsent_bytes -= sent
            if sent < len(data):
                self._backlog[0] = data[sent:]
                return
            self._backlog.popleft()
        self._loop.remove_writer(self._fd)
        if self._flushed is not None:
            self._flushed.set()
            self._flushed = None
        if self._state is _DRAINING or self.is_cut_off:
            self._next_request()

    def _finish_response(self) -> None:
        if not self.open:
            return
        if self.span is not None:
            self._end_span()
        if self._answer is not None and self._exchanges is not None:
            self._exchanges.end(self, self._answer)
            self._answer = None
        if self._backlog:
            self._set_state(_DRAINING)
        else:
            self._next_request()

    def _next_request(self) -> None:
        if self._close_after:
            self._linger()
            return
        self._reset()
        self._state = _IDLE
        self._shared.set_state(self.index, _IDLE)
        self._pool.on_idle(self)

    def _linger(self) -> None:
        """Close after the peer has read the response: a close with unread input would reset the connection."""
        self._refused = True
        if not self.is_cut_off:  # else user code may still run
            self._set_state(ConnectionState.LINGERING)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self.resume()
        self._loop.call_later(_LINGER_S, self.close)


def path_below(target: bytes, endpoint: bytes) -> bytes:
    """Return the path of a request target below an endpoint; empty for the endpoint itself."""
    return target.partition(b"?")[0].removeprefix(endpoint.rstrip(b"/"))
