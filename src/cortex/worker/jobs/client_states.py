"""State machine of `LeaseClient`: the main thread's activity, which decides what to request from the operator. Pure."""

from __future__ import annotations

from enum import Enum, auto


class ClientState(Enum):
    """Activity of the main thread, and requests that the client may make meanwhile."""

    JOINING = auto()  #: it waits for a job
    CONSTRUCTING = auto()  #: it constructs the user's object, and can run nothing yet
    IDLE = auto()  #: it waits for a lease: long polls
    FETCHING_AHEAD = auto()  #: it runs a lease that ends soon: the next one is requested meanwhile
    RUNNING = auto()  #: it runs a lease; no further one is requested
    JOB_OVER = auto()  #: the job has no more work; it runs the leases that are there
    ENDING = auto()  #: the batch that it runs is the last
    FINISHED = auto()  #: it runs nothing any more: only the last reports remain


class ClientEvent(Enum):
    """An event that changes the state."""

    ASSIGNED = auto()  #: the operator assigned a job
    CONSTRUCTED = auto()  #: the user's object can run batches
    QUICK_LEASE = auto()  #: the main thread took a lease that ends soon
    SLOW_LEASE = auto()  #: … or another one
    LEASE_DONE = auto()  #: the main thread asks for the next lease
    NOTHING_LEASED = auto()  #: the operator had no lease
    JOB_OVER = auto()  #: the operator has no more work in this job
    STOPPED = auto()  #: the process ends after the current batch
    FINISHED = auto()  #: the main thread has ended its work


_S, _E = ClientState, ClientEvent
_AT_WORK = {
    _E.QUICK_LEASE: _S.FETCHING_AHEAD,
    _E.SLOW_LEASE: _S.RUNNING,
    _E.LEASE_DONE: _S.IDLE,
    _E.JOB_OVER: _S.JOB_OVER,
}
_TRANSITIONS: dict[ClientState, dict[ClientEvent, ClientState]] = {
    _S.JOINING: {_E.ASSIGNED: _S.CONSTRUCTING},
    _S.CONSTRUCTING: {_E.CONSTRUCTED: _S.IDLE},
    _S.IDLE: _AT_WORK,
    _S.FETCHING_AHEAD: _AT_WORK | {_E.NOTHING_LEASED: _S.RUNNING},
    _S.RUNNING: _AT_WORK,
    _S.JOB_OVER: {},
    _S.ENDING: {},
    _S.FINISHED: {},
}


def state_after(state: ClientState, event: ClientEvent) -> ClientState:
    """Return the state after an event; an event that a state does not list changes nothing."""
    if state is _S.FINISHED or event is _E.FINISHED:
        return _S.FINISHED
    return _S.ENDING if event is _E.STOPPED else _TRANSITIONS[state].get(event, state)
