"""The connections of a process: which of them are read, and which another process continues to serve."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.worker.http.connection import READ_BYTES, Connection
from cortex.worker.monitoring.metrics import RequestRecorder
from cortex.worker.shared_state import SharedConnectionState
from cortex.worker.spec import RequestLimits

if TYPE_CHECKING:
    from cortex.worker.monitoring.answers import AnswerDigests
    from cortex.worker.monitoring.exchange_writer import ExchangeWriter

#: Clocks drift or are adjusted: minima older than two windows are discarded.
_CLOCK_WINDOW_NS = 30_000_000_000
_INFINITE_NS = 1 << 64


class ConnectionPool:
    """The connections of this process. Event-loop thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        shared_state: SharedConnectionState,
        recorder: RequestRecorder,
        handle: Callable[[Connection], None],
        limits: RequestLimits,
        new_connection: Callable[..., Connection] = Connection,
    ) -> None:
        """Create a pool; `handle` is called with each connection that has received a complete request."""
        self._new_connection = new_connection
        self.loop = loop
        self.shared_state = shared_state
        self.recorder = recorder
        self.handle = handle
        self.limits = limits  #: of subsequent requests
        self.exchanges: ExchangeWriter | None = None  #: records requests of connections that are added later
        self.answers_folder: Path | None = None  #: of digests of answers; None: they are not compared
        self._answers: AnswerDigests | None = None
        self.buffer = memoryview(bytearray(READ_BYTES))
        #: The least recently served first: they are the first to be read when a slot is free again.
        self._connections: dict[Connection, None] = {}
        self.is_paused = False  #: no request is read at the moment
        self._is_closed = False
        self._on_release: Callable[[Connection], None] | None = None
        self._clocks: dict[str, GatewayClock] = {}  #: by the address of the gateway

    @property
    def cancels_calls(self) -> bool:
        """Return whether a call is cancelled if its client disconnects."""
        return self.limits.on_disconnect != "finish"

    def add(
        self,
        sock: socket.socket,
        index: int,
        on_close: Callable[[Connection], None],
        once: bool = False,
    ) -> None:
        """Serve a connection; with `once`, close it after one response."""
        sock.setblocking(False)
        connection = self._new_connection(sock, index, self, self._clock_of(sock), on_close)
        if once:
            connection.close_after_response()
        self._connections[connection] = None
        if self._on_release is not None:
            self._release(connection)
        elif not self.is_paused:
            connection.resume()

    def set_paused(self, is_paused: bool) -> None:
        """Stop or resume reading requests: they stay in their sockets, where this process cannot take them down."""
        is_paused = is_paused or self._is_closed
        if is_paused == self.is_paused:
            return
        self.is_paused = is_paused
        for connection in self._connections:
            if not is_paused:
                connection.resume()
            elif connection.is_idle:
                connection.pause()

    def stop_reading(self) -> None:
        """Read no request from now on."""
        self._is_closed = True
        self.set_paused(True)

    def retire(self, on_release: Callable[[Connection], None]) -> None:
        """Release each connection once it has no request; another process serves it from then on."""
        self._on_release = on_release
        for connection in [connection for connection in self._connections if connection.is_idle]:
            self._release(connection)

    def end_all(self, reason: str) -> None:
        """Answer every request, also those that are still in their sockets: the process is about to end."""
        for connection in list(self._connections):
            connection.end_with_process(reason)

    def move_to_end(self, connection: Connection) -> None:
        """Mark a connection as the most recently served."""
        self._connections.pop(connection, None)
        self._connections[connection] = None

    def on_idle(self, connection: Connection) -> None:
        """Give back a connection without a request, or pause it, if this process reads no more requests."""
        if self._on_release is not None:
            self._release(connection)
        elif self.is_paused:
            connection.pause()

    def store_answer(self, connection: Connection, media_type: bytes | None, body: bytes) -> None:
        """Store the digest of the answer to a request that another revision gets, too."""
        if self._answers is None and self.answers_folder is not None:
            from cortex.worker.monitoring.answers import AnswerDigests  # noqa: PLC0415 - workers start faster

            self._answers = AnswerDigests(self.answers_folder)
        if self._answers is not None:
            self._answers.add(connection.request_id, media_type, body, connection.is_copy)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that was closed or released."""
        self._connections.pop(connection, None)

    def _release(self, connection: Connection) -> None:
        assert self._on_release is not None
        connection.release()
        self._on_release(connection)

    def _clock_of(self, sock: socket.socket) -> GatewayClock | None:
        """Return the clock of the gateway at the other end; None if it is on this machine."""
        if sock.family == socket.AF_UNIX:
            return None
        try:
            host = sock.getpeername()[0]
        except OSError:  # the gateway has disconnected
            return None
        return self._clocks.setdefault(host, GatewayClock())


class GatewayClock:
    """Estimate of the clock offset of a gateway on another machine.

    Of the requests of the last 30 to 60 seconds, the one with the smallest apparent wait is assumed not to have waited,
    so its apparent wait is the clock offset. If every request waited, waits are underestimated: callers get more time
    than their timeout, never less.
    """

    def __init__(self) -> None:
        self._minimum_ns = _INFINITE_NS
        self._previous_minimum_ns = _INFINITE_NS
        self._offset_ns = 0  #: the smaller of both
        self._window_ends_ns = 0

    def waited_ns(self, apparent_ns: int, now_ns: int) -> int:
        """Return the actual wait of a request that arrived `apparent_ns` ago by both clocks; `now_ns` is monotonic."""
        if now_ns >= self._window_ends_ns:
            self._previous_minimum_ns, self._minimum_ns = self._minimum_ns, apparent_ns
            self._window_ends_ns = now_ns + _CLOCK_WINDOW_NS
            self._offset_ns = min(self._minimum_ns, self._previous_minimum_ns)
        elif apparent_ns < self._minimum_ns:
            self._minimum_ns = apparent_ns
            self._offset_ns = min(self._minimum_ns, self._previous_minimum_ns)
        return apparent_ns - self._offset_ns
