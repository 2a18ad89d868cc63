"""The shared memory in which a worker writes, per connection, what it is doing; its supervisor reads it.

It survives the worker's death, so the supervisor knows which requests were inside, and it is written with plain
stores, so it is right even while the worker is stuck in C code and holds the interpreter lock.
"""

from __future__ import annotations

import mmap
from enum import IntEnum

from cortex.replica.request_journal import KeptRequests

#: Connections that one process can hold, those of slow clients included.
MAX_CONNECTIONS = 8192

_ROW_BYTES = 80
_ROW_CELLS = _ROW_BYTES // 8
_ID_OFFSET = 32
_ID_MAX_BYTES = _ROW_BYTES - _ID_OFFSET


class ConnectionState(IntEnum):
    """What the request on one connection is at."""

    IDLE = 0  #: no byte of a request was read; whatever lies in the socket can be read by a successor
    READING = 1  #: part of a request was read
    QUEUED = 2  #: read whole; waits for its turn
    RUNNING = 3  #: the user's code has it, and no byte of the answer was written
    ANSWERING = 4  #: the answer has begun and the user's code still produces it
    DRAINING = 5  #: the user's code is done; the client has yet to take the answer
    AGAIN = 6  #: a process died with a request inside, which is kept; the next one is to begin with it


#: Plain numbers: an enumeration's member would have to be turned into one for each request.
_QUEUED, _RUNNING = int(ConnectionState.QUEUED), int(ConnectionState.RUNNING)


class Cells:
    """Rows of one process: state, deadline (monotonic ns), batch, request id; one row per connection index."""

    def __init__(self, keeps_requests: bool = False) -> None:
        #: The requests themselves, for APIs that batch.
        self.kept = KeptRequests(MAX_CONNECTIONS) if keeps_requests else None
        self._memory = mmap.mmap(-1, MAX_CONNECTIONS * _ROW_BYTES)
        self._bytes = memoryview(self._memory)
        self._cells = self._bytes.cast("q")

    def clear(self, index: int) -> None:
        """Make a row that of a new, idle connection."""
        self._cells[index * _ROW_CELLS] = ConnectionState.IDLE

    def state(self, index: int) -> ConnectionState:
        """Return what the connection is at."""
        return ConnectionState(self._cells[index * _ROW_CELLS])

    def set_state(self, index: int, state: int) -> None:
        """Say what the connection is at."""
        self._cells[index * _ROW_CELLS] = state

    def begin(self, index: int, deadline_ns: int, request_id: bytes) -> None:
        """Say that the user's code gets this request now, and until when (monotonic ns) it may keep it."""
        base = index * _ROW_CELLS
        self._cells[base + 1] = deadline_ns
        length = min(len(request_id), _ID_MAX_BYTES)
        self._cells[base + 2] = length
        self._cells[base + 3] = 0
        start = index * _ROW_BYTES + _ID_OFFSET
        self._bytes[start : start + length] = request_id[:length]
        self._cells[base] = _RUNNING

    def join(self, index: int, batch: int) -> None:
        """Say that the user's code gets this request now, with the others of a batch; 0: it does not have it now."""
        base = index * _ROW_CELLS
        self._cells[base + 3] = batch
        self._cells[base] = _RUNNING if batch else _QUEUED

    def batch(self, index: int) -> int:
        """Return the number of the batch in which the request runs; 0 if it runs in none."""
        return self._cells[index * _ROW_CELLS + 3]

    def extend(self, index: int, deadline_ns: int) -> None:
        """Move the deadline of a streaming answer."""
        self._cells[index * _ROW_CELLS + 1] = deadline_ns

    def deadline_ns(self, index: int) -> int:
        """Return until when (monotonic ns) the call may run; meaningless unless RUNNING or ANSWERING."""
        return self._cells[index * _ROW_CELLS + 1]

    def request_id(self, index: int) -> str:
        """Return the id of the last request that ran on the connection."""
        start = index * _ROW_BYTES + _ID_OFFSET
        length = self._cells[index * _ROW_CELLS + 2]
        return bytes(self._bytes[start : start + length]).decode("latin-1")
