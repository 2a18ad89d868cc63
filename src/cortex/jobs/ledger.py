"""A job's row while one transaction works with it: read once, changed in memory, written once.

The one place where counts and statuses of jobs change once batches are leased.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, select, update

from cortex.jobs.records import Presence
from cortex.lifecycle import JOB_TRANSITIONS, JobStatus
from cortex.state.job_tables import jobs, leases

#: Columns that a ledger reads, and of these the ones that it writes.
_COUNTS = (
    *("next_seq", "batches", "items", "succeeded", "succeeded_items", "failed", "failed_items"),
    *("failed_attempts", "results", "seconds"),
)
_CHANGING = (*_COUNTS, "status", "started_at", "ended_at", "message", "traceback")
_READ = [jobs.c[name] for name in ("number", "max_attempts", "isolate_failures", *_CHANGING)]

_THERE = jobs.c.presence.in_((Presence.HERE, Presence.STANDING))
_BY_ID = select(*_READ).where(jobs.c.id == bindparam("job_id"), _THERE).with_for_update()
_BY_NUMBER = select(*_READ).where(jobs.c.number == bindparam("job"), _THERE).with_for_update()
_WRITE = update(jobs).where(jobs.c.number == bindparam("job")).values({n: bindparam(f"new_{n}") for n in _CHANGING})
_FORGET_LEASES = delete(leases).where(leases.c.number == bindparam("job"))


@dataclass
class Ledger:
    """What a transaction knows and changes of a job."""

    number: int
    max_attempts: int
    isolate_failures: bool
    next_seq: int
    batches: int
    items: int
    succeeded: int
    succeeded_items: int
    failed: int
    failed_items: int
    failed_attempts: int
    results: int
    seconds: float
    status: JobStatus
    started_at: float | None
    ended_at: float | None
    message: str
    traceback: str
    _read: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def is_leasable(self) -> bool:
        """Tell whether batches of the job are given away and reports on them taken."""
        return self.status in (JobStatus.PENDING, JobStatus.RUNNING)

    @property
    def open(self) -> int:
        """Count the batches that still have to be resolved."""
        return self.batches - self.succeeded - self.failed

    def move(self, status: JobStatus, now: float, message: str = "", traceback: str = "") -> bool:
        """Change the status, with what goes with it; False if that is not allowed from where the job is."""
        if status not in JOB_TRANSITIONS[self.status]:
            return False
        self.status, self.message, self.traceback = status, message, traceback
        if status is JobStatus.RUNNING:
            self.started_at = now
        if status.is_over:
            self.ended_at = now
        return True

    def save(self, connection: Connection, now: float) -> None:
        """Write what changed. A running job without open batches is completing from here on."""
        if self.status is JobStatus.RUNNING and not self.open:
            self.move(JobStatus.COMPLETING, now)
        if self._changing() == self._read:
            return
        values = {f"new_{name}": value for name, value in zip(_CHANGING, self._changing(), strict=True)}
        connection.execute(_WRITE, {"job": self.number, **values})
        if self.status.is_over:
            connection.execute(_FORGET_LEASES, {"job": self.number})
        self._read = self._changing()

    def _changing(self) -> tuple[Any, ...]:
        return (
            *(self.next_seq, self.batches, self.items, self.succeeded, self.succeeded_items),
            *(self.failed, self.failed_items, self.failed_attempts, self.results, self.seconds),
            *(self.status, self.started_at, self.ended_at, self.message, self.traceback),
        )


def open_ledger(connection: Connection, job_id: str) -> Ledger | None:
    """Read the ledger of a job; None if there is no such job."""
    return _ledger(connection.execute(_BY_ID, {"job_id": job_id}).first())


def open_numbered_ledger(connection: Connection, number: int) -> Ledger | None:
    """Read the ledger of the job with that number; None if there is none."""
    return _ledger(connection.execute(_BY_NUMBER, {"job": number}).first())


def _ledger(row: Row[Any] | None) -> Ledger | None:
    if row is None:
        return None
    values = {**row._mapping, "status": JobStatus(row.status)}
    ledger = Ledger(**values)
    ledger._read = ledger._changing()
    return ledger
