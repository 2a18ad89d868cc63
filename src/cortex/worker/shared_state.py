r"""Memory that a request worker shares with its supervisor: the state of each connection, and its current request.

It survives the worker, so that the supervisor finds out which requests were running when it died. It is written with
plain stores, so that it is correct even while the worker is stuck in C code and holds the interpreter lock.

                 .--------------------------.
                 |                          v   first chunk
    IDLE ---> READING ---> QUEUED <---> RUNNING ---------> ANSWERING
     ^           |            |             |                  |
     |           v            v             v                  v
     +-------- the response is written, and taken by the gateway
     |                        | if some of it is unsent
     `-------------------- DRAINING

The worker makes these transitions (`worker/http/connection.py`):

    from                        event                                               to
    IDLE                        the first bytes of a request arrive                 READING
    READING                     the request is complete, a slot is free             RUNNING
    READING                     the request is complete, no slot or thread is free  QUEUED
    READING                     the request waits for a batch                       QUEUED
    READING                     its body is to be decompressed                      QUEUED
    READING                     refused: body too large, or not valid HTTP          LINGERING, then closed
    QUEUED                      a slot is free, or its batch begins                 RUNNING
    QUEUED                      timed out, or its body can't be decompressed        IDLE or DRAINING
    RUNNING                     its batch failed or timed out, it will be retried   QUEUED
    RUNNING                     first chunk of a streaming response                 ANSWERING
    READING RUNNING ANSWERING   response complete and taken by the gateway          IDLE
    READING RUNNING ANSWERING   response complete, bytes are unsent                 DRAINING
    RUNNING ANSWERING           the gateway has all chunks of a gRPC response       STREAMING
    STREAMING                   a further message of a gRPC response                ANSWERING
    RUNNING                     an application accepts a WebSocket                  UPGRADED
    UPGRADED                    the WebSocket is closed                             DRAINING or LINGERING, then closed
    RUNNING ANSWERING STREAMING the call waits for a slow client                    WAITING, and back
    DRAINING                    the gateway has taken the rest                      IDLE, or LINGERING, then closed
    RUNNING ANSWERING WAITING   cut off, some of it is unsent, user code is over    LINGERING, then closed
    any                         the gateway closes, or cut off: user code is over   closed
    IDLE                        the process retires                                 released, stays open

The supervisor acts when a process dies or a deadline passes (`supervisor/connection_table.py`,
`supervisor/request_worker_slot.py`):

    state       the process dies                               the deadline passes
    IDLE        kept for the next process                      -
    READING     503                                            -
    QUEUED      503                                            504
    RUNNING     500, or 504 if overdue                         504, and the process is condemned or killed
    ANSWERING   closed                                         as RUNNING, without a response
    STREAMING   trailers with the cause, then closed           likewise
    UPGRADED    a close frame, then closed                     likewise
    WAITING     closed                                         -
    DRAINING    closed                                         -
    LINGERING   closed                                         -

Responses that begin and are never complete are counted: by the worker, or by the supervisor if the process dies or is
late in ANSWERING, WAITING, DRAINING or UPGRADED.

A call whose response is cut off keeps its row, also that of a closed connection, until its user code has cleaned up. If
it does that on a thread, which nothing else can end, it has a deadline then.
"""

from __future__ import annotations

import mmap
from enum import IntEnum

#: Connections that one process can have, including those of slow clients.
MAX_CONNECTIONS = 8192

_WORD = 8
# Words of a row, then the bytes of the request id.
_STATE, _DEADLINE, _ID_BYTES, _BATCH = range(4)
_ROW_BYTES = 80
_ROW_WORDS = _ROW_BYTES // _WORD
_ID_OFFSET = 32
_ID_MAX_BYTES = _ROW_BYTES - _ID_OFFSET
#: Bit of the word `_ID_BYTES`: errors for this request have OpenAI's form.
_OPENAI_ERRORS = 1 << 8
#: Likewise: the request is a call in JSON of a gRPC API.
_JSON_CALL = 1 << 9
#: The word after the rows.
_SHORT_CALLS = MAX_CONNECTIONS * _ROW_WORDS


class ConnectionState(IntEnum):
    """State of the request on a connection; the docstring of this module has the transitions."""

    IDLE = 0  #: no byte of a request has been read; a successor can read what is in the socket
    READING = 1  #: part of a request has been read
    QUEUED = 2  #: a complete request waits for a slot or a batch
    RUNNING = 3  #: user code runs, and no byte of the response has been written
    ANSWERING = 4  #: user code produces a streaming response that has begun
    WAITING = 10  #: as RUNNING or ANSWERING; user code is suspended until a slow client has taken what was sent
    DRAINING = 5  #: the response is complete, and the client has yet to take the rest
    LINGERING = 9  #: nothing more is produced, and the connection closes once the client has read what was sent
    UPGRADED = 7  #: the connection is a WebSocket
    STREAMING = 8  #: as ANSWERING, of a gRPC call: the gateway has only whole chunks, which trailers can follow


#: Plain integers, because converting a member of an enumeration takes time on the path of every request.
_QUEUED, _RUNNING = int(ConnectionState.QUEUED), int(ConnectionState.RUNNING)


class SharedConnectionState:
    """One row per connection index: state, deadline (monotonic ns), batch number, request id."""

    def __init__(self) -> None:
        """Allocate the memory."""
        self._memory = mmap.mmap(-1, MAX_CONNECTIONS * _ROW_BYTES + _WORD)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("q")

    @property
    def has_short_calls(self) -> bool:
        """True if the calls of the process are short; see `CallDurations` in `worker/requests/runner.py`."""
        return bool(self._words[_SHORT_CALLS])

    @has_short_calls.setter
    def has_short_calls(self, value: bool) -> None:
        self._words[_SHORT_CALLS] = value

    def clear(self, index: int) -> None:
        """Initialize the row of a new connection."""
        self._words[index * _ROW_WORDS] = ConnectionState.IDLE

    def state(self, index: int) -> ConnectionState:
        """Return the state of a connection."""
        return ConnectionState(self._words[index * _ROW_WORDS])

    def set_state(self, index: int, state: int) -> None:
        """Set the state of a connection."""
        self._words[index * _ROW_WORDS] = state

    def begin(self, index: int, deadline_ns: int, request_id: bytes) -> None:
        """Set the request id and the deadline of a connection, and its state to RUNNING."""
        base = index * _ROW_WORDS
        self._words[base + _DEADLINE] = deadline_ns
        length = min(len(request_id), _ID_MAX_BYTES)
        self._words[base + _ID_BYTES] = length
        self._words[base + _BATCH] = 0
        start = index * _ROW_BYTES + _ID_OFFSET
        self._bytes[start : start + length] = request_id[:length]
        self._words[base] = _RUNNING

    def set_openai_errors(self, index: int) -> None:
        """Note that an error response to the current request has OpenAI's form; the next `begin` forgets it."""
        self._words[index * _ROW_WORDS + _ID_BYTES] |= _OPENAI_ERRORS

    def has_openai_errors(self, index: int) -> bool:
        """Return whether an error response to the last request that ran on a connection has OpenAI's form."""
        return bool(self._words[index * _ROW_WORDS + _ID_BYTES] & _OPENAI_ERRORS)

    def set_json_call(self, index: int) -> None:
        """Note that the current request of a gRPC API is a call in JSON; the next `begin` forgets it."""
        self._words[index * _ROW_WORDS + _ID_BYTES] |= _JSON_CALL

    def is_json_call(self, index: int) -> bool:
        """Return whether the last request that ran on a connection of a gRPC API is a call in JSON."""
        return bool(self._words[index * _ROW_WORDS + _ID_BYTES] & _JSON_CALL)

    def set_batch(self, index: int, batch: int) -> None:
        """Set the batch in which a request runs; 0: it runs in none and is QUEUED."""
        base = index * _ROW_WORDS
        self._words[base + _BATCH] = batch
        self._words[base] = _RUNNING if batch else _QUEUED

    def batch(self, index: int) -> int:
        """Return the number of the batch in which a request runs; 0 for none."""
        return self._words[index * _ROW_WORDS + _BATCH]

    def extend(self, index: int, deadline_ns: int) -> None:
        """Move the deadline of a request."""
        self._words[index * _ROW_WORDS + _DEADLINE] = deadline_ns

    def deadline_ns(self, index: int) -> int:
        """Return the deadline of a call; meaningless unless RUNNING or ANSWERING."""
        return self._words[index * _ROW_WORDS + _DEADLINE]

    def request_id(self, index: int) -> str:
        """Return the id of the last request that ran on a connection."""
        start = index * _ROW_BYTES + _ID_OFFSET
        length = self._words[index * _ROW_WORDS + _ID_BYTES] & (_OPENAI_ERRORS - 1)
        return bytes(self._bytes[start : start + length]).decode("latin-1")
