"""Every status, as data. Nothing outside this file invents one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class ApiKind(StrEnum):
    """What an API does with its code; the value is the `kind` of a file."""

    REALTIME = "RealtimeAPI"  #: replicas answer requests
    ASYNC = "AsyncAPI"  #: replicas work through what was sent; answers are fetched later
    BATCH = "BatchAPI"  #: workers work through the batches of jobs
    TASK = "TaskAPI"  #: one worker per job calls the user's class once
    SPLITTER = "TrafficSplitter"  #: shares its requests out to realtime APIs; has no code

    @property
    def has_replicas(self) -> bool:
        """Tell whether its processes are there before anyone asks for something."""
        return self in (ApiKind.REALTIME, ApiKind.ASYNC)

    @property
    def runs_jobs(self) -> bool:
        """Tell whether its code runs in jobs that are submitted."""
        return self in (ApiKind.BATCH, ApiKind.TASK)


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


class JobStatus(StrEnum):
    """The status of a job; the value is stored. `code` and `message` are what callers read."""

    ENQUEUING = "enqueuing"  #: its input is being split into batches
    PENDING = "pending"  #: every batch is stored; no worker has begun, for want of room or of time
    RUNNING = "running"  #: workers are at work
    COMPLETING = "completing"  #: no batch is open; one worker runs `on_job_complete`, or results are written
    SUCCEEDED = "succeeded"
    COMPLETED_WITH_FAILURES = "completed_with_failures"  #: every batch was resolved, some as dead letters
    ENQUEUE_FAILED = "enqueue_failed"  #: the input could not be read, or held nothing
    WORKER_ERROR = "worker_error"  #: workers can't start, or `on_job_complete` raised
    WORKER_OOM = "worker_oom"  #: as worker_error, and the cause was memory
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"  #: by its user, or with its API
    UNEXPECTED_ERROR = "unexpected_error"  #: something of ours, or the place for the results, failed

    @property
    def is_over(self) -> bool:
        """Tell whether nothing will change any more."""
        return not JOB_TRANSITIONS[self]

    @property
    def code(self) -> str:
        """Return the word of the HTTP API, which knows no `completing`."""
        return JobStatus.RUNNING.value if self is JobStatus.COMPLETING else self.value

    @property
    def message(self) -> str:
        """Say the status in the words of the CLI's column."""
        return _JOB_MESSAGES.get(self, self.code.replace("_", " "))

    @property
    def sources(self) -> tuple[JobStatus, ...]:
        """Return the statuses from which a job may come to this one."""
        return tuple(status for status, allowed in JOB_TRANSITIONS.items() if self in allowed)


_JOB_MESSAGES = {
    JobStatus.ENQUEUE_FAILED: "failed while enqueuing",
    JobStatus.WORKER_OOM: "out of memory",
}
_WORKER_FAILURES = frozenset({JobStatus.WORKER_ERROR, JobStatus.WORKER_OOM})
_ENDED_FROM_OUTSIDE = frozenset({JobStatus.TIMED_OUT, JobStatus.STOPPED, JobStatus.UNEXPECTED_ERROR})

#: Every allowed change of a job's status; nothing else is ever stored.
JOB_TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.ENQUEUING: frozenset({JobStatus.PENDING, JobStatus.ENQUEUE_FAILED}) | _ENDED_FROM_OUTSIDE,
    JobStatus.PENDING: frozenset({JobStatus.RUNNING}) | _WORKER_FAILURES | _ENDED_FROM_OUTSIDE,
    JobStatus.RUNNING: frozenset({JobStatus.COMPLETING}) | _WORKER_FAILURES | _ENDED_FROM_OUTSIDE,
    JobStatus.COMPLETING: frozenset({JobStatus.SUCCEEDED, JobStatus.COMPLETED_WITH_FAILURES})
    | _WORKER_FAILURES
    | _ENDED_FROM_OUTSIDE,
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.COMPLETED_WITH_FAILURES: frozenset(),
    JobStatus.ENQUEUE_FAILED: frozenset(),
    JobStatus.WORKER_ERROR: frozenset(),
    JobStatus.WORKER_OOM: frozenset(),
    JobStatus.TIMED_OUT: frozenset(),
    JobStatus.STOPPED: frozenset(),
    JobStatus.UNEXPECTED_ERROR: frozenset(),
}


class WorkloadStatus(StrEnum):
    """The status of what was sent to an AsyncAPI; the value is what callers read."""

    IN_QUEUE = "in_queue"  #: stored; no replica has it
    IN_PROGRESS = "in_progress"  #: a replica has it
    COMPLETED = "completed"
    FAILED = "failed"  #: the user's code raised, or its process died too often

    @property
    def is_over(self) -> bool:
        """Tell whether nothing will change any more."""
        return self in (WorkloadStatus.COMPLETED, WorkloadStatus.FAILED)


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
