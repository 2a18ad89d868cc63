"""Removal of rows that no job needs, in steps so small that no other operation waits for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Column, Connection, Table, delete, select, update

from cortex.jobs.records import Presence
from cortex.jobs.writer import TransactionThread
from cortex.lifecycle import JobStatus
from cortex.state.tables import (
    batches,
    dead_letters,
    first_key,
    job_inputs,
    job_marks,
    jobs,
    leases,
    pending,
    results,
    workloads,
)

#: Duration of one step, after which it is committed and other operations run.
STEP_S = 0.005

#: The next statement is twice as large after one that took less, and half as large after one that took thrice as much.
_STATEMENT_S = 0.001

#: Free pages that stay in the file for the next job.
KEPT_PAGES = 4096

#: Remove about so many rows or pages; return False if there were none.
Remove = Callable[[Connection, int], bool]

_KEYED_TABLES = (batches, results, dead_letters, workloads)


@dataclass(frozen=True)
class _JobToClean:
    """A job with rows to remove."""

    number: int
    is_deleted: bool  #: remove all rows; otherwise only those that a job does not need once it is over


class JobCleaner:
    """Removes rows of jobs that are over or deleted; one removal runs at a time."""

    def __init__(self, writer: TransactionThread) -> None:
        self._writer = writer
        self._lock = asyncio.Lock()

    async def clean(self, with_payloads: bool = True) -> None:
        """Remove the rows of deleted jobs and, `with_payloads`, the payloads of jobs that are over."""
        async with self._lock:
            while (job := await self._writer.run(lambda c: _next_job(c, with_payloads))) is not None:
                await self._clean_job(job)
            await self._repeat(_vacuum)

    async def remove(self, remove: Remove) -> None:
        """Repeat another removal in the same small steps until nothing is left."""
        async with self._lock:
            await self._repeat(remove)

    async def _clean_job(self, job: _JobToClean) -> None:
        for table in _KEYED_TABLES if job.is_deleted else (batches,):
            await self._repeat(partial(_remove_rows, job.number, table))
        await self._repeat(partial(_remove_pending, job.number))
        await self._writer.run(lambda connection: _finish(connection, job))

    async def _repeat(self, remove: Remove) -> None:
        """Remove until nothing is left, during at most half of the time: others use the disk too."""
        step = _Step(remove)
        started = time.monotonic()
        while await self._writer.run(step):
            await asyncio.sleep(time.monotonic() - started)
            started = time.monotonic()


@dataclass
class _Step:
    """Removal for `STEP_S`; returns False once nothing is left."""

    remove: Remove
    size: int = 1  #: of the next statement; starts low because rows may be large

    def __call__(self, connection: Connection) -> bool:
        started = now = time.monotonic()
        while now - started < STEP_S:
            if not self.remove(connection, self.size):
                return False
            before, now = now, time.monotonic()
            if now - before < _STATEMENT_S:
                self.size *= 2
            elif now - before > 3 * _STATEMENT_S:
                self.size = max(1, self.size // 2)
        return True


def _next_job(connection: Connection, with_payloads: bool) -> _JobToClean | None:
    deleted = connection.execute(select(jobs.c.number).where(jobs.c.presence == Presence.DELETED).limit(1)).scalar()
    if deleted is not None:
        return _JobToClean(deleted, is_deleted=True)
    if not with_payloads:
        return None
    over = jobs.c.status.in_([status for status in JobStatus if status.is_over])
    number = connection.execute(select(jobs.c.number).where(over, jobs.c.is_emptied.is_(False)).limit(1)).scalar()
    return None if number is None else _JobToClean(number, is_deleted=False)


def _remove_rows(number: int, table: Table, connection: Connection, size: int) -> bool:
    key: Column[int] = table.c.key
    of_job = key.between(first_key(number), first_key(number + 1) - 1)
    keys = connection.execute(select(key).where(of_job).order_by(key).limit(size)).scalars().all()
    if keys:
        connection.execute(delete(table).where(key.between(keys[0], keys[-1])))
    return bool(keys)


def _remove_pending(number: int, connection: Connection, size: int) -> bool:
    rows = connection.execute(select(pending.c.first).where(pending.c.number == number).limit(size)).scalars().all()
    if rows:
        connection.execute(delete(pending).where(pending.c.number == number, pending.c.first.in_(rows)))
    return bool(rows)


def _finish(connection: Connection, job: _JobToClean) -> None:
    """Mark a job as emptied, or delete its last rows."""
    if not job.is_deleted:
        connection.execute(update(jobs).where(jobs.c.number == job.number).values(is_emptied=True))
        return
    for table in (leases, job_marks, job_inputs, jobs):
        connection.execute(delete(table).where(table.c.number == job.number))


def _vacuum(connection: Connection, size: int) -> bool:
    """Return free pages of an SQLite file to the disk; other databases do this themselves."""
    if connection.dialect.name != "sqlite":
        return False
    free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    for _ in range(min(size, free - KEPT_PAGES)):
        # The driver executes one step of a statement without columns, which frees one page whatever the argument is.
        connection.exec_driver_sql("PRAGMA incremental_vacuum(1)").close()
    return bool(free > KEPT_PAGES)
