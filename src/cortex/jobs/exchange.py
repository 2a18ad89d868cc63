"""What the operator answers its workers: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.jobs.spec import Lease


@dataclass(frozen=True)
class Stop:
    """The worker is not needed any more."""


@dataclass(frozen=True)
class Leased:
    """What became of reports, and the next lease."""

    lease: Lease | None = None
    lost: tuple[str, ...] = ()  #: tokens that are worth nothing any more
    is_done: bool = False  #: the job is neither pending nor running any more
    opens_at: float | None = None  #: with no lease: when the next retry comes due, UNIX seconds


@dataclass(frozen=True)
class Exchanged:
    """The answer to a worker's reports."""

    lease: Lease | None = None
    lost: tuple[str, ...] = ()
    is_done: bool = False  #: there is no more work in this job for this worker
    hook: str | None = None  #: the token of the job's last lease: `on_job_complete` is this worker's to call
    stop: bool = False


@dataclass(frozen=True)
class Renewed:
    """The answer to a renewal."""

    lost: tuple[str, ...] = ()
    stop: bool = False
