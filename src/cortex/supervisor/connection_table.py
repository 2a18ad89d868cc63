"""The supervisor's table of one process's connections: a duplicate of each socket, by the index of its row.

The worker writes the state of each row to shared memory. When it dies, the supervisor reads the rows and answers for
it: `worker/shared_state.py` has the states, and the response of the supervisor in each of them. One of
`_SLOW_CLIENT_STATES` for two ticks in a row means that only a slow client keeps the connection: its call slot is lent.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cortex.lifecycle import DeathCause
from cortex.payloads.openai_errors import is_openai_path
from cortex.worker.grpc.trailers import supervisor_response, supervisor_status, supervisor_trailers
from cortex.worker.http.connection import path_below
from cortex.worker.http.responses import close_frame, error_response
from cortex.worker.shared_state import MAX_CONNECTIONS, ConnectionState, SharedConnectionState
from cortex.worker.spec import Death

#: Time that a connection stays open after its last response, so that the client reads the response before the close.
LINGER_S = 2.0
#: States in which user code runs.
CALL_STATES = (
    ConnectionState.RUNNING,
    ConnectionState.ANSWERING,
    ConnectionState.STREAMING,
    ConnectionState.UPGRADED,
)
#: States in which a request has a deadline.
DEADLINE_STATES = (*CALL_STATES, ConnectionState.QUEUED)
#: A call that takes longer is long, whatever the average is: nothing is sent to wait behind it.
LONG_CALL_S = 0.1
#: Time for a call whose client has disconnected to end by itself.
ABANDONED_CALL_S = 1.0

_SLOW_CLIENT_STATES = (
    ConnectionState.READING,
    ConnectionState.WAITING,
    ConnectionState.DRAINING,
    ConnectionState.LINGERING,
)
#: States in which a response has begun, and is broken if nothing more is sent.
_BEGUN = (ConnectionState.ANSWERING, ConnectionState.WAITING, ConnectionState.DRAINING, ConnectionState.UPGRADED)
_STALL_CHECK_S = 0.5
#: More than the gateway lets pass as the head of a request.
_HEAD_BYTES = 160 * 1024


@dataclass
class OpenConnection:
    """The supervisor's duplicate of one connection."""

    sock: socket.socket
    once: bool = False  #: closes after one response
    was_slow: bool = False  #: at the last tick, only a slow client kept it busy
    slow: bool = False  #: and at the tick before as well: its call slot is lent
    call: str = ""  #: request id of the call that ran at the last check
    call_since: float = 0.0  #: monotonic; when that call was first seen
    abandoned_since: float | None = None  #: monotonic; when a call was first seen whose client had disconnected


class ConnectionTable:
    """The connections of one process.

    `on_end` receives the status of each response sent by the supervisor, and None for each that is cut off, because the
    process has begun it and will not complete it.
    """

    def __init__(
        self,
        on_end: Callable[[int | None], None],
        is_grpc: bool = False,
        may_have_openai_errors: bool = False,
    ) -> None:
        """Create an empty table.

        With `is_grpc`, all requests are gRPC calls; with `may_have_openai_errors`, errors below `/v1` have that form.
        """
        self._on_end = on_end
        self._is_grpc = is_grpc
        self._may_have_openai_errors = may_have_openai_errors
        self.shared_state = SharedConnectionState()
        self.open: dict[int, OpenConnection] = {}
        self.failed_requests: list[str] = []  #: ids of requests answered here
        self._lingering: list[tuple[float, socket.socket]] = []
        self._late_batches: set[int] = set()
        self._ended: set[int] = set()  # answered here; the process has yet to confirm that it closed them
        self._free_indexes: list[int] = []
        self._next_index = 0

    @property
    def is_busy(self) -> bool:
        """Return whether any connection has a request."""
        return any(state is not ConnectionState.IDLE for _, state in self.states())

    @property
    def lent(self) -> int:
        """The number of connections that only slow clients keep busy."""
        return sum(connection.slow for connection in self.open.values())

    @property
    def has_late_batch(self) -> bool:
        """Return whether a request of a running batch has passed its deadline."""
        return bool(self._late_batches)

    def states(self) -> Iterator[tuple[int, ConnectionState]]:
        """Yield the index and the state of each connection."""
        return ((index, self.shared_state.state(index)) for index in self.open)

    def add(self, sock: socket.socket, once: bool = False) -> int | None:
        """Add a connection and return its index. If no row is free, close it and return None."""
        if self._free_indexes:
            index = self._free_indexes.pop()
        elif self._next_index < MAX_CONNECTIONS:
            index = self._next_index
            self._next_index += 1
        else:
            sock.close()
            return None
        self.shared_state.clear(index)
        self.open[index] = OpenConnection(sock, once)
        return index

    def unread(self) -> list[int]:
        """Return the connections whose next request no process has read; not those of WebSockets, and the like."""
        return [
            index
            for index, state in self.states()
            if state is ConnectionState.IDLE and is_unread_request(self.open[index].sock)
        ]

    def remove(self, index: int) -> socket.socket | None:
        """Remove a connection that no process has, and return its socket."""
        connection = self.open.pop(index, None)
        if connection is None:
            return None
        self._free_indexes.append(index)
        return connection.sock

    def mark_slow_clients(self) -> None:
        """Update the marks of slow clients; call it once per tick."""
        for index, connection in self.open.items():
            slow = self.shared_state.state(index) in _SLOW_CLIENT_STATES
            connection.slow, connection.was_slow = slow and connection.was_slow, slow

    def has_long_call(self, now: float) -> bool:
        """Return whether a call has been running for `LONG_CALL_S`; call it at each tick."""
        found = False
        for index, connection in self.open.items():
            call = self.shared_state.request_id(index) if self.shared_state.state(index) in CALL_STATES else ""
            if call != connection.call:
                connection.call, connection.call_since = call, now
            found = found or (call != "" and now - connection.call_since > LONG_CALL_S)
        return found

    def abandoned(self, now: float) -> set[int]:
        """Return the connections with calls that continue although their client disconnected; call it at each tick."""
        found = set()
        for index, connection in self.open.items():
            if self.shared_state.state(index) not in CALL_STATES or has_unread(connection.sock) is not None:
                connection.abandoned_since = None
            elif connection.abandoned_since is None:
                connection.abandoned_since = now
            elif now - connection.abandoned_since > ABANDONED_CALL_S:
                found.add(index)
        return found

    def end_abandoned(self, index: int) -> None:
        """Close a connection whose call will be killed; the process has counted the request."""
        connection = self.open.pop(index)
        connection.sock.close()
        if request_id := self.shared_state.request_id(index):
            self.failed_requests.append(request_id)
        self._ended.add(index)

    def on_closed(self, index: int) -> None:
        """Handle the process's message that it closed a connection."""
        if index in self._ended:
            self._ended.discard(index)
            self._free_indexes.append(index)
        else:
            self.close(index)

    # Responses on behalf of the process.

    def answer_after_death(self, death: Death) -> None:
        """Answer the requests of a process that died; connections without a request stay open."""
        now_ns = time.monotonic_ns()
        states = list(self.states())
        running = [index for index, state in states if state is ConnectionState.RUNNING]
        batches = Counter(map(self.shared_state.batch, running))
        for index, state in states:
            if state is ConnectionState.IDLE:
                self.open[index].slow = False
            elif state is ConnectionState.LINGERING:
                self.close(index)
            elif state in (ConnectionState.ANSWERING, ConnectionState.WAITING, ConnectionState.DRAINING):
                self._count(index, state, 500)
                self.close(index)
            elif state in (ConnectionState.STREAMING, ConnectionState.UPGRADED):
                self.end(index, 500, death.message)
            elif state is ConnectionState.RUNNING:
                expired = death.cause is DeathCause.TIMED_OUT and self.shared_state.deadline_ns(index) < now_ns
                message = death.message
                if not expired:
                    others = batches[batch] - 1 if (batch := self.shared_state.batch(index)) else 0
                    where = f", in a batch with {others} other request{'s' * (others > 1)}" if others else ""
                    message = f"the process that handled this request died: {message}{where}"
                self.end(index, 504 if expired else 500, message)
            else:
                self.end(index, 503, f"the process died before it ran this request: {death.message}")
        self._ended.clear()
        self._late_batches.clear()
        self._free_indexes = [index for index in range(self._next_index) if index not in self.open]

    def end_late(self, index: int, message: str) -> None:
        """Answer a request that has passed its deadline."""
        if batch := self.shared_state.batch(index):
            self._late_batches.add(batch)
        self.end(index, 504, message)

    def answer_waiting(self, reason: str) -> None:
        """Answer the requests that wait in the sockets while there is no process."""
        for index, connection in list(self.open.items()):
            unread = has_unread(connection.sock)
            if unread:
                self.end(index, 503, f"no replica is ready: {reason}")
                self.on_closed(index)
            elif unread is None:
                self.close(index)

    def end(self, index: int, status: int, message: str) -> None:
        """Send a last response, or the close frame of a WebSocket, and close once the client has had time to read it.

        The process may still write to the row: the index is reused only after the process confirms or dies.
        """
        connection = self.open.pop(index)
        state = self.shared_state.state(index)
        self._count(index, state, status)
        request_id = self.shared_state.request_id(index) if status != 503 else ""
        if request_id:
            self.failed_requests.append(request_id)
        try:
            if state is not ConnectionState.ANSWERING:
                connection.sock.send(self._response(connection, index, state, status, message, request_id))
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the client is gone
        self._lingering.append((time.monotonic() + LINGER_S, connection.sock))
        self._ended.add(index)

    def _count(self, index: int, state: ConnectionState, status: int) -> None:
        """Count the end of a request: by a status, unless its response has begun and was counted then."""
        is_grpc = self._speaks_grpc(index, state)
        is_counted = state is ConnectionState.DRAINING if is_grpc else state in _BEGUN  # gRPC calls: at their end
        self._on_end(None if is_counted else supervisor_status(status) if self._is_grpc else status)

    def _speaks_grpc(self, index: int, state: ConnectionState) -> bool:
        """Return whether a connection has a gRPC call; the row has nothing yet of one that is being read."""
        is_read = state not in (ConnectionState.IDLE, ConnectionState.READING)
        return self._is_grpc and not (is_read and self.shared_state.is_json_call(index))

    def _response(
        self,
        connection: OpenConnection,
        index: int,
        state: ConnectionState,
        status: int,
        message: str,
        request_id: str,
    ) -> bytes:
        if state is ConnectionState.UPGRADED:
            return close_frame(message)
        if state is ConnectionState.STREAMING:
            return supervisor_trailers(status, message)
        if self._speaks_grpc(index, state):
            return supervisor_response(status, message)
        if self._is_grpc:
            status = supervisor_status(status)
        if state is ConnectionState.IDLE:
            in_openai_form = self._may_have_openai_errors and is_unread_openai_request(connection.sock)
        else:
            in_openai_form = state is not ConnectionState.READING and self.shared_state.has_openai_errors(index)
        return error_response(status, message, request_id, in_openai_form)

    # Closing.

    def close(self, index: int) -> None:
        """Close a connection; an unknown index is ignored."""
        connection = self.open.pop(index, None)
        if connection is None:
            return
        with contextlib.suppress(OSError):  # a process started by the user's code may have inherited the connection
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.sock.close()
        self._free_indexes.append(index)

    def close_all(self) -> None:
        """Close all connections, lingering ones included."""
        for index in list(self.open):
            self.close(index)
        for _, sock in self._lingering:
            with contextlib.suppress(OSError):  # a close with unread input would discard the response
                while sock.recv(_HEAD_BYTES, socket.MSG_DONTWAIT):
                    pass
            sock.close()
        self._lingering.clear()

    def close_lingering(self, now: float) -> None:
        """Close the lingering connections whose time has passed."""
        while self._lingering and self._lingering[0][0] < now:
            self._lingering.pop(0)[1].close()


class StallDetector:
    """Detects a process that runs no call and reads no request: the user's code blocks its event loop."""

    def __init__(self) -> None:
        self._next_check = 0.0
        self._stalled_since: float | None = None

    def stalled_s(
        self, now: float, connections: Mapping[int, OpenConnection], shared_state: SharedConnectionState
    ) -> float:
        """Return for how long the process has been stalled; checks every half second at most."""
        if now >= self._next_check:
            self._next_check = now + _STALL_CHECK_S
            states = {index: shared_state.state(index) for index in connections}
            is_stalled = not any(state in DEADLINE_STATES for state in states.values()) and any(
                state is ConnectionState.IDLE and has_unread(connections[index].sock) for index, state in states.items()
            )
            self._stalled_since = (self._stalled_since or now) if is_stalled else None
        return now - self._stalled_since if self._stalled_since is not None else 0.0


def is_unread_openai_request(sock: socket.socket) -> bool:
    """Return whether the unread data of a socket is a request whose errors have OpenAI's form."""
    try:
        head = sock.recv(_HEAD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT).partition(b"\r\n\r\n")[0]
    except OSError:
        return False
    line, *fields = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
    endpoint = headers.get(b"x-cortex-endpoint")  # set by the gateway for paths below the endpoint
    target = line.split(b" ")[1:2]
    return endpoint is not None and bool(target) and is_openai_path(path_below(target[0], endpoint))


def is_unread_request(sock: socket.socket) -> bool:
    """Return whether the unread data of a socket begins with the whole head of a request that asks for no upgrade."""
    try:
        head, end, _ = sock.recv(_HEAD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT).partition(b"\r\n\r\n")
    except OSError:
        return False
    return end != b"" and b"\r\nupgrade:" not in head.lower()


def has_unread(sock: socket.socket) -> bool | None:
    """Return whether a socket has unread data; None once the peer has closed and left none."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) or None
    except BlockingIOError:
        return False
    except OSError:
        return None
