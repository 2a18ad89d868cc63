"""HTTP/1.1 for one trusted peer, the gateway: reads requests from a connection, writes answers to it.

The gateway has already parsed, bounded and normalised each request. Connections are accepted by the supervisor, which
keeps a duplicate of each: what this process leaves unread in a socket, its successor can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

from httptools import HttpRequestParser

from cortex.replica.application import Application
from cortex.replica.gateway_clock import GatewayClock
from cortex.replica.response_head import BODILESS, SECRET_HEADER, Header, head
from cortex.replica.shared_state import Cells, ConnectionState

#: Size of the buffer that all connections of a process read into; a fresh one per read would cost page faults.
READ_BYTES = 256 * 1024
_LINGER_S = 2.0
#: Above this the body is sent beside its head instead of copied behind it.
_JOIN_BYTES = 64 * 1024


# Looked up for each request: attributes of an enumeration are slow.
_IDLE, _READING, _RUNNING = ConnectionState.IDLE, ConnectionState.READING, ConnectionState.RUNNING
_DRAINING = ConnectionState.DRAINING


class Connection:
    """One connection from the gateway, and the request that is inside."""

    __slots__ = (
        "_abandoned",
        "_app",
        "_backlog",
        "_body",
        "_body_bytes",
        "_cells",
        "_close_after",
        "_fd",
        "_flushed",
        "_loop",
        "_on_close",
        "_headers_read",
        "_kept",
        "_parser",
        "_reading",
        "_buffer",
        "_recv_into",
        "_refused",
        "_sock",
        "_state",
        "arrived_ns",
        "asks_for_info",
        "batched_ns",
        "clock",
        "content_type",
        "headers",
        "index",
        "open",
        "request_id",
        "returned_ns",
        "started_ns",
        "task",
        "url",
    )

    def __init__(
        self,
        sock: socket.socket,
        index: int,
        app: Application,
        cells: Cells,
        loop: asyncio.AbstractEventLoop,
        buffer: memoryview,
        on_close: Callable[[Connection], None],
    ) -> None:
        self.index = index
        self.open = True
        self.clock: GatewayClock | None = None  #: of the gateway, where that is on another machine
        self.content_type: bytes | None = None
        self.task: asyncio.Task[None] | None = None  #: what answers the request, where that takes a task
        self._sock = sock
        self._fd = sock.fileno()
        self._buffer = buffer
        self._recv_into = sock.recv_into
        self._kept = cells.kept
        self._app = app
        self._cells = cells
        self._loop = loop
        self._on_close = on_close
        self._parser = HttpRequestParser(self)
        self._state = _IDLE
        self._backlog: deque[memoryview] = deque()
        self._flushed: asyncio.Event | None = None
        self._reading = False
        self._close_after = False
        self._abandoned = False
        self._reset()

    # What the application reads.

    @property
    def method(self) -> str:
        """The verb in upper case."""
        return str(self._parser.get_method().decode("latin-1"))

    @property
    def body(self) -> bytes:
        """The whole body."""
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    # Life of the connection.

    def resume(self) -> None:
        """Read requests as they come."""
        if not self._reading and self.open:
            self._reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def pause(self) -> None:
        """Leave the next request in the socket, where a successor of this process could read it."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    @property
    def is_idle(self) -> bool:
        """Tell whether no request is inside."""
        return self._state is _IDLE

    def set_state(self, state: ConnectionState) -> None:
        """Say what the request is at, here and in the cell."""
        self._state = state
        self._cells.set_state(self.index, state)

    def begin(self, deadline_ns: int) -> None:
        """Say that the user's code gets the request, until `deadline_ns` (monotonic)."""
        self._state = _RUNNING
        self._cells.begin(self.index, deadline_ns, self.request_id)

    def join(self, batch: int, deadline_ns: int) -> None:
        """Say that the user's code gets the request, which has begun, with the others of its batch."""
        self._state = _RUNNING
        self._cells.extend(self.index, deadline_ns)
        self._cells.join(self.index, batch)

    def rejoin(self, batch: int) -> None:
        """Say on any thread that it gets it in another batch now; with 0, that it does not have it at the moment."""
        self._cells.join(self.index, batch)

    def extend(self, deadline_ns: int) -> None:
        """Give a streaming answer more time."""
        self._cells.extend(self.index, deadline_ns)

    def close(self) -> None:
        """Close at once; the peer sees it although the supervisor keeps a duplicate."""
        if not self.open:
            return
        self.open = False
        self.pause()
        self._loop.remove_writer(self._fd)
        if self._flushed is not None:
            self._flushed.set()
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        # The supervisor enforces the deadline of a call for as long as it knows the connection.
        self._abandoned = self._state in (_RUNNING, ConnectionState.ANSWERING)
        # This object and its parser refer to each other, so it is freed some time later: the big things go now.
        self._backlog.clear()
        if not self._abandoned:
            self._body.clear()
            self._on_close(self)
        self._app.gone(self)

    def release(self) -> None:
        """Let go of an idle connection and leave it open: another process carries on with it."""
        self.open = False
        self.pause()
        self._sock.close()
        self._app.gone(self)

    def call_over(self) -> None:
        """Learn that the user's code is done with a request of this connection, which may have closed meanwhile."""
        if self._abandoned:
            self._abandoned = False
            self._body.clear()
            self._on_close(self)

    # Reading. The parser calls the on_… methods.

    def _on_readable(self) -> None:
        is_new = self._state is _IDLE
        if is_new:
            if self._kept is not None:
                self._kept.begin(self.index)
            self.set_state(_READING)  # first: a process that dies from here on has not left the connection idle
        try:
            size = self._recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            if is_new:
                self.set_state(_IDLE)
            return
        except OSError:
            size = 0
        if not size:
            self.close()
            return
        if self._refused:
            return  # the rest of what was refused
        if self._state is not _READING:
            self.close()  # the gateway never pipelines
            return
        if self._kept is not None:
            self._kept.keep(self.index, self._buffer[:size])
        self._feed(size)

    def read_again(self) -> None:
        """Begin with the request that a process before this one had when it died."""
        if self._kept is not None:
            self.set_state(_READING)
            self._feed(self._kept.restore(self.index, self._buffer))

    def _feed(self, size: int) -> None:
        try:
            self._parser.feed_data(self._buffer[:size])
        except Exception:  # httptools raises its own kinds and re-raises ours
            if self.open and self._state is _READING and not self._refused:
                self._refuse(self._app.malformed)

    def on_url(self, url: bytes) -> None:
        """Take (a part of) the request target."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; names come in any case. Trailers are not headers: the gateway has not looked at them."""
        name = name.lower()
        if name != SECRET_HEADER and not self._headers_read:  # the supervisor has looked at that one
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Read what we need of the headers; let a waiting client send its body."""
        self._headers_read = True
        headers = dict(self.headers)
        self.content_type = headers.get(b"content-type")
        self.request_id = headers.get(b"x-cortex-request-id", b"")
        self.asks_for_info = b"x-cortex-info" in headers
        if b"expect" in headers:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        if self._refused:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._app.max_body_bytes:
            self._refuse(self._app.too_large)
            return
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Hand the request over."""
        if not self._refused:
            self._app.handle(self)

    def _refuse(self, answer: Callable[[Connection], None]) -> None:
        self._refused = self._close_after = True
        self._body.clear()
        answer(self)

    def _reset(self) -> None:  # the moments are those of `recorder.Timed`
        self.url = b""
        self.content_type = None
        self.request_id = b""
        self.asks_for_info = False
        self.headers: list[Header] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._headers_read = False
        self._refused = False
        self.arrived_ns = self.batched_ns = self.started_ns = self.returned_ns = 0

    # Writing.

    def answer(
        self, status: int, media_type: bytes | None, body: bytes, headers: tuple[Header, ...] = (), timing: bytes = b""
    ) -> None:
        """Write a whole answer and make the connection ready for the next request; `timing` is a line of its head."""
        if not self.open:
            return
        if status in BODILESS:
            body = b""
        start = b"%b%bcontent-length: %d\r\n\r\n" % (head(status, media_type, headers), timing, len(body))
        if len(body) < _JOIN_BYTES:
            self._send(start + body)
        else:
            self._send(start)
            self._send(body)
        self._finish()

    def start_stream(
        self, status: int, media_type: bytes | None, headers: tuple[Header, ...] = (), timing: bytes = b""
    ) -> None:
        """Begin an answer whose length is not known."""
        if self.open:
            self._close_after = status in BODILESS  # what chunks it has must not be taken for the next answer
            self.set_state(ConnectionState.ANSWERING)
            self._send(head(status, media_type, headers) + timing + b"transfer-encoding: chunked\r\n\r\n")

    def stream(self, chunk: bytes) -> None:
        """Write a piece of such an answer."""
        if self.open and chunk:
            self._send(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def end_stream(self) -> None:
        """End such an answer."""
        if self.open:
            self._send(b"0\r\n\r\n")
            self._finish()

    @property
    def unsent_bytes(self) -> int:
        """How much waits here for the gateway to take it."""
        return sum(map(len, self._backlog))

    async def flushed(self) -> None:
        """Wait until the gateway has taken everything, or is gone."""
        if self._backlog and self.open:
            self._flushed = asyncio.Event()
            await self._flushed.wait()

    def _send(self, data: bytes) -> None:
        if not self.open:
            return
        if self._backlog:
            self._backlog.append(memoryview(data))
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
            if sent < len(data):
                self._backlog[0] = data[sent:]
                return
            self._backlog.popleft()
        self._loop.remove_writer(self._fd)
        if self._flushed is not None:
            self._flushed.set()
            self._flushed = None
        if self._state is _DRAINING:
            self._next_request()

    def _finish(self) -> None:
        if not self.open:
            return
        if self._backlog:
            self.set_state(_DRAINING)
        else:
            self._next_request()

    def _next_request(self) -> None:
        if self._close_after:
            self._linger()
            return
        self._reset()
        self._state = _IDLE
        self._cells.set_state(self.index, _IDLE)
        self._app.idle(self)

    def _linger(self) -> None:
        """Close once the peer has read the answer: closing over unread bytes would reset the connection."""
        self._refused = True
        self.set_state(_DRAINING)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._loop.call_later(_LINGER_S, self.close)
