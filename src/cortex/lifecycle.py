"""Every status, as data. Nothing outside this file invents one."""

from __future__ import annotations

from enum import StrEnum


class ApiStatus(StrEnum):
    """What `cortex get` shows of an API; the value is the `status_code` of its JSON."""

    LIVE = "live"  #: the newest revision serves with as many replicas as were asked for
    UPDATING = "updating"  #: replicas of the newest revision are being prepared or started
    ERROR = "error"  #: the newest revision can't start or keeps dying; an older one may still serve
    OOM = "oom"  #: as error, and the cause was memory
    STALLED = "stalled"  #: no machine has the compute that was asked for

    @property
    def message(self) -> str:
        """Say the status in the words of the CLI's column."""
        return _API_MESSAGES[self]


_API_MESSAGES = {
    ApiStatus.LIVE: "live",
    ApiStatus.UPDATING: "updating",
    ApiStatus.ERROR: "error",
    ApiStatus.OOM: "error (out of memory)",
    ApiStatus.STALLED: "compute unavailable",
}


class ProcessState(StrEnum):
    """The state of one process of a replica, as its supervisor sees it."""

    STARTING = "starting"  #: forked; the user's code is being imported and constructed
    READY = "ready"  #: answers requests
    BACKING_OFF = "backing_off"  #: died; waits before the next start
    STOPPING = "stopping"  #: takes no new request; finishes those inside
    STOPPED = "stopped"  #: gone for good


class DeathCause(StrEnum):
    """Why a process of the user's code ended; the value is the words that callers read."""

    OUT_OF_MEMORY = "out of memory"
    SEGMENTATION_FAULT = "segmentation fault"
    TIMED_OUT = "timed out"
    KILLED = "killed"
    EXITED = "exited"
    SIGNALLED = "ended by a signal"
