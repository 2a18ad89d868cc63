"""All statuses and their transitions, as data. No other module defines a status.

The statuses of a job, with `JOB_TRANSITIONS` as the table:

    enqueuing ──> pending ──> running ──> completing ──┬─> succeeded
        │                                              └─> completed_with_failures
        └─> enqueue_failed

    pending, running, completing             ──> worker_error, worker_oom
    enqueuing, pending, running, completing  ──> timed_out, stopped, unexpected_error
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class ApiKind(StrEnum):
    """The kind of an API; the value is its `kind` in cortex.yaml."""

    REALTIME = "RealtimeAPI"  #: replicas answer requests
    ASYNC = "AsyncAPI"  #: replicas process queued workloads; results are fetched later
    BATCH = "BatchAPI"  #: job workers process the batches of jobs
    TASK = "TaskAPI"  #: one job worker per job calls the user's class once
    SPLITTER = "TrafficSplitter"  #: distributes requests to realtime APIs; has no code

    @property
    def has_replicas(self) -> bool:
        """True if its processes run independently of submissions."""
        return self in (ApiKind.REALTIME, ApiKind.ASYNC)

    @property
    def runs_jobs(self) -> bool:
        """True if its code runs in submitted jobs."""
        return self in (ApiKind.BATCH, ApiKind.TASK)


class ApiStatus(StrEnum):
    """The status of an API in `cortex get`; the value is the `status_code` of its JSON."""

    LIVE = "live"  #: the newest revision serves with the requested number of replicas
    UPDATING = "updating"  #: replicas of the newest revision are being prepared or started
    ERROR = "error"  #: the newest revision cannot start or keeps crashing; an older one may still serve
    OOM = "oom"  #: as error, caused by a lack of memory
    STALLED = "stalled"  #: no machine has the requested compute

    @property
    def message(self) -> str:
        """The status as shown by the CLI."""
        return _API_MESSAGES[self]


_API_MESSAGES = {
    ApiStatus.LIVE: "live",
    ApiStatus.UPDATING: "updating",
    ApiStatus.ERROR: "error",
    ApiStatus.OOM: "error (out of memory)",
    ApiStatus.STALLED: "compute unavailable",
}


class TokenScope(StrEnum):
    """Permissions of an operator token; each scope includes those before it."""

    METRICS = "metrics"  #: fetch the metrics
    READ = "read"  #: inspect APIs, jobs, logs and processes
    DEPLOY = "deploy"  #: change APIs and jobs
    ADMIN = "admin"  #: everything: also keys, tokens, the audit log, and the operator's shutdown

    def includes(self, other: TokenScope) -> bool:
        """Return True if this scope permits everything that `other` permits."""
        order = list(TokenScope)
        return order.index(self) >= order.index(other)


class AuditResult(StrEnum):
    """The result of a change in the audit log."""

    SUCCEEDED = "succeeded"
    REFUSED = "refused"  #: by the operator's authentication or authorization
    FAILED = "failed"


class JobStatus(StrEnum):
    """The status of a job; the value is stored. Callers see `code` and `message`."""

    ENQUEUING = "enqueuing"  #: its input is being split into batches
    PENDING = "pending"  #: every batch is stored; no job worker has started yet
    RUNNING = "running"  #: job workers process batches
    COMPLETING = (
        "completing"  #: all batches are resolved; results are written, then one job worker runs `on_job_complete`
    )
    SUCCEEDED = "succeeded"
    COMPLETED_WITH_FAILURES = "completed_with_failures"  #: all batches are resolved, some as dead letters
    ENQUEUE_FAILED = "enqueue_failed"  #: the input could not be read, or was empty
    WORKER_ERROR = "worker_error"  #: job workers cannot start, or `on_job_complete` raised
    WORKER_OOM = "worker_oom"  #: as worker_error, caused by a lack of memory
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"  #: by a user, or with its API
    UNEXPECTED_ERROR = "unexpected_error"  #: cortex itself or the storage of the results failed

    @property
    def is_over(self) -> bool:
        """True if the status is final."""
        return not JOB_TRANSITIONS[self]

    @property
    def code(self) -> str:
        """The status in the HTTP API, which has no `completing`."""
        return JobStatus.RUNNING.value if self is JobStatus.COMPLETING else self.value

    @property
    def message(self) -> str:
        """The status as shown by the CLI."""
        return _JOB_MESSAGES.get(self, self.code.replace("_", " "))


_JOB_MESSAGES = {
    JobStatus.ENQUEUE_FAILED: "failed while enqueuing",
    JobStatus.WORKER_OOM: "out of memory",
}
_WORKER_FAILURES = frozenset({JobStatus.WORKER_ERROR, JobStatus.WORKER_OOM})
_EXTERNAL_ENDS = frozenset({JobStatus.TIMED_OUT, JobStatus.STOPPED, JobStatus.UNEXPECTED_ERROR})

#: Every allowed change of a job's status; no other change is stored.
JOB_TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.ENQUEUING: frozenset({JobStatus.PENDING, JobStatus.ENQUEUE_FAILED}) | _EXTERNAL_ENDS,
    JobStatus.PENDING: frozenset({JobStatus.RUNNING}) | _WORKER_FAILURES | _EXTERNAL_ENDS,
    JobStatus.RUNNING: frozenset({JobStatus.COMPLETING}) | _WORKER_FAILURES | _EXTERNAL_ENDS,
    JobStatus.COMPLETING: frozenset({JobStatus.SUCCEEDED, JobStatus.COMPLETED_WITH_FAILURES})
    | _WORKER_FAILURES
    | _EXTERNAL_ENDS,
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
    """The status of a workload of an AsyncAPI; callers see the value."""

    IN_QUEUE = "in_queue"  #: stored; not claimed by a replica
    IN_PROGRESS = "in_progress"  #: claimed by a replica
    COMPLETED = "completed"
    FAILED = "failed"  #: the user's code raised, or its process crashed too often

    @property
    def is_over(self) -> bool:
        """True if the status is final."""
        return self in (WorkloadStatus.COMPLETED, WorkloadStatus.FAILED)


class ProcessState(StrEnum):
    """The state of one worker of a replica, as tracked by its supervisor."""

    STARTING = "starting"  #: forked; imports and constructs the user's class
    READY = "ready"  #: serves requests
    BACKING_OFF = "backing_off"  #: exited; waits before the next start
    STOPPING = "stopping"  #: drains: finishes requests in progress, accepts no new ones
    STOPPED = "stopped"  #: exited, will not be restarted


class DeathCause(StrEnum):
    """The reason why a worker exited; callers see the value."""

    OUT_OF_MEMORY = "out of memory"
    SEGMENTATION_FAULT = "segmentation fault"
    TIMED_OUT = "timed out"
    KILLED = "killed"
    EXITED = "exited"
    SIGNALLED = "ended by a signal"
    CLIENT_DISCONNECTED = "client disconnected"  #: killed because of `on_disconnect: kill`
