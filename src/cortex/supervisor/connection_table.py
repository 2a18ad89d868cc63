"""The connections that a supervisor holds for one process: their rows in the cells, last answers, orderly closing.

It knows nothing of processes and messages.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

from cortex.lifecycle import DeathCause
from cortex.replica.errors import error_answer
from cortex.replica.shared_state import MAX_CONNECTIONS, Cells, ConnectionState
from cortex.replica.spec import Death
from cortex.supervisor.batch_bisection import Suspects
from cortex.supervisor.held_connections import Held, has_unread

#: How long a connection stays open after its last answer, so that the answer is read before the close is seen.
LINGER_S = 2.0

_NOT_RUN = (ConnectionState.READING, ConnectionState.QUEUED, ConnectionState.AGAIN)
_SLOW_CLIENT_STATES = (ConnectionState.READING, ConnectionState.DRAINING)


class Holding:
    """Duplicates of one process's connections, by the index of their row. `on_answer` is told of each last answer."""

    def __init__(self, on_answer: Callable[[int], None], keeps_requests: bool = False) -> None:
        self._on_answer = on_answer
        self.cells = Cells(keeps_requests)
        self.held: dict[int, Held] = {}
        self.failed_requests: list[str] = []  #: ids of those that were answered here
        self._lingering: list[tuple[float, socket.socket]] = []
        self._late_batches: set[int] = set()
        self._ended: set[int] = set()  # answered here; the process has yet to say that it closed them
        self._free_indexes: list[int] = []
        self._next_index = 0

    @property
    def is_busy(self) -> bool:
        """Tell whether a request is inside."""
        return any(state is not ConnectionState.IDLE for _, state in self.states())

    @property
    def lent(self) -> int:
        """Count the connections that only a slow client holds."""
        return sum(held.slow for held in self.held.values())

    def states(self) -> Iterator[tuple[int, ConnectionState]]:
        """Go through the connections and what they are at."""
        return ((index, self.cells.state(index)) for index in self.held)

    def add(self, sock: socket.socket) -> int | None:
        """Hold a connection and return its index; without a row for it, it is closed."""
        if self._free_indexes:
            index = self._free_indexes.pop()
        elif self._next_index < MAX_CONNECTIONS:
            index = self._next_index
            self._next_index += 1
        else:
            sock.close()
            return None
        self.cells.clear(index)
        self.held[index] = Held(sock)
        return index

    def take(self, index: int) -> socket.socket | None:
        """Give a connection away; the process has let go of it."""
        held = self.held.pop(index, None)
        if held is None:
            return None
        self._free_indexes.append(index)
        return held.sock

    def mark_slow_clients(self) -> None:
        """Note, once per tick, which connections only a slow client holds."""
        for index, held in self.held.items():
            slow = self.cells.state(index) in _SLOW_CLIENT_STATES
            held.slow, held.was_slow = slow and held.was_slow, slow

    def on_closed(self, index: int) -> None:
        """Learn that the process closed a connection."""
        if index in self._ended:
            self._ended.discard(index)
            self._free_indexes.append(index)
        else:
            self.close(index)

    # Answers on behalf of a process that can't.

    def answer_inside(self, death: Death, suspects: Suspects | None = None) -> None:
        """Answer what was inside a process that died, with the cause; connections without a request stay.

        With `suspects`, the requests of batches are not answered: the next process begins with them.
        """
        now_ns = time.monotonic_ns()
        again = self._suspected(suspects, death, now_ns) if suspects is not None else set()
        for index, state in list(self.states()):
            if index in again:
                self.cells.set_state(index, ConnectionState.AGAIN)
            elif state is ConnectionState.IDLE:
                self.held[index].slow = False
            elif state in (ConnectionState.ANSWERING, ConnectionState.DRAINING):
                self.close(index)
            elif state is ConnectionState.RUNNING:
                expired = death.cause is DeathCause.TIMED_OUT and self.cells.deadline_ns(index) < now_ns
                message = death.message if expired else f"the process that handled this request died: {death.message}"
                self.end(index, 504 if expired else 500, message)
            else:
                self.end(index, 503, f"the process died before it ran this request: {death.message}")
        self._ended.clear()
        self._late_batches.clear()
        self._free_indexes = [index for index in range(self._next_index) if index not in self.held]

    def _suspected(self, suspects: Suspects, death: Death, now_ns: int) -> set[int]:
        """Blame the batches that were inside; return who is to come again, those that did not run yet included."""
        kept = self.cells.kept
        again, batches = set[int](), dict[int, list[int]]()
        for index, state in self.states():
            if kept is None or state is ConnectionState.IDLE:
                continue
            if state is ConnectionState.READING and kept.is_empty(index):
                self.cells.clear(index)  # it is in the socket still
            is_late = death.cause is DeathCause.TIMED_OUT and self.cells.deadline_ns(index) < now_ns
            if not kept.is_whole(index):
                continue
            if state in _NOT_RUN and not (state is ConnectionState.QUEUED and is_late):
                again.add(index)
            elif state is ConnectionState.RUNNING and self.cells.batch(index) and not is_late:
                batches.setdefault(self.cells.batch(index), []).append(index)
        blamed = [[self.cells.request_id(index) for index in members] for members in batches.values()]
        # One whose mates were answered with a time-out may be innocent; one that was alone is not.
        is_guilty = len(batches) == 1 and len(blamed[0]) == 1 and not self._late_batches.intersection(batches)
        if blamed and not is_guilty:
            again.update(index for members in batches.values() for index in members)
            suspects.blame(blamed)
        suspects.keep({self.cells.request_id(index) for index in again})
        return again

    def end_late(self, index: int, message: str) -> None:
        """Write to a connection that its time is over."""
        if batch := self.cells.batch(index):
            self._late_batches.add(batch)
        self.end(index, 504, message)

    @property
    def has_late_batch(self) -> bool:
        """Tell whether a batch has members whose time was over."""
        return bool(self._late_batches)

    def answer_waiting(self, reason: str) -> None:
        """While there is no process: answer the requests that wait in the sockets."""
        for index, held in list(self.held.items()):
            unread = self.cells.state(index) is ConnectionState.AGAIN or has_unread(held.sock)
            if unread:
                self.end(index, 503, f"no replica is ready: {reason}")
                self.on_closed(index)
            elif unread is None:
                self.close(index)

    def answer_again(self) -> None:
        """Answer the requests that no process will begin with again: they are in no socket any more."""
        for index, state in list(self.states()):
            if state is ConnectionState.AGAIN:
                self.end(index, 503, "the process that was to run this request once more was stopped")

    def end(self, index: int, status: int, message: str) -> None:
        """Write a last answer to a connection and close it once the peer has had time to read it.

        The process may still write to the row: its index comes back with the process's word or its death.
        """
        held = self.held.pop(index)
        self._on_answer(status)
        request_id = self.cells.request_id(index) if status != 503 else ""
        if request_id:
            self.failed_requests.append(request_id)
        try:
            held.sock.send(error_answer(status, message, request_id))
            held.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the peer is gone
        self._lingering.append((time.monotonic() + LINGER_S, held.sock))
        self._ended.add(index)

    # Closing.

    def close(self, index: int) -> None:
        """Close a connection; an unknown index is ignored."""
        held = self.held.pop(index, None)
        if held is None:
            return
        with contextlib.suppress(OSError):  # what the user's code started may have inherited the connection
            held.sock.shutdown(socket.SHUT_RDWR)
        held.sock.close()
        self._free_indexes.append(index)

    def close_all(self) -> None:
        """Close everything, those that linger too."""
        for index in list(self.held):
            self.close(index)
        for _, sock in self._lingering:
            sock.close()
        self._lingering.clear()

    def close_lingering(self, now: float) -> None:
        """Close those whose peer has had its time."""
        while self._lingering and self._lingering[0][0] < now:
            self._lingering.pop(0)[1].close()
