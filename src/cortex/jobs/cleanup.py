"""Removes what no job needs any more, in steps so small that nobody has to wait for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Column, Connection, Table, delete, select, update

from cortex.jobs.records import Presence
from cortex.jobs.writer import Writer
from cortex.lifecycle import JobStatus
from cortex.state.job_tables import (
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

#: How long one step works before it is written and others get their turn.
STEP_S = 0.005

#: A statement that takes less is followed by one twice as large, one that takes three times as much by a smaller one.
_STATEMENT_S = 0.001

#: Free pages that stay in the file for the next job.
KEPT_PAGES = 4096

#: Removes about so many rows or pages; False if there was none.
Remove = Callable[[Connection, int], bool]

_KEYED = (batches, results, dead_letters, workloads)


@dataclass(frozen=True)
class Target:
    """A job to take rows from."""

    number: int
    is_gone: bool  #: all rows; else only what a job that is over needs no more


class Sweeper:
    """Empties jobs that are over or deleted; one sweep at a time."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._lock = asyncio.Lock()

    async def sweep(self, with_payloads: bool = True) -> None:
        """Remove all that can go: rows of deleted jobs and, `with_payloads`, payloads of jobs that are over."""
        async with self._lock:
            while (target := await self._writer.run(lambda c: _next_target(c, with_payloads))) is not None:
                await self._empty(target)
            await self._repeat(_vacuum)

    async def remove(self, remove: Remove) -> None:
        """Remove something else in the same small steps, until nothing is left."""
        async with self._lock:
            await self._repeat(remove)

    async def _empty(self, target: Target) -> None:
        for table in _KEYED if target.is_gone else (batches,):
            await self._repeat(partial(_take, target.number, table))
        await self._repeat(partial(_take_pending, target.number))
        await self._writer.run(lambda connection: _close(connection, target))

    async def _repeat(self, remove: Remove) -> None:
        """Remove until nothing is left, at half of the time at most: others want the disk too."""
        step = _Step(remove)
        started = time.monotonic()
        while await self._writer.run(step):
            await asyncio.sleep(time.monotonic() - started)
            started = time.monotonic()


@dataclass
class _Step:
    """Removes for a few milliseconds; False once nothing is left."""

    remove: Remove
    size: int = 1  #: of the next statement: it is not known how large the rows are

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


def _next_target(connection: Connection, with_payloads: bool) -> Target | None:
    gone = connection.execute(select(jobs.c.number).where(jobs.c.presence == Presence.GONE).limit(1)).scalar()
    if gone is not None:
        return Target(gone, is_gone=True)
    if not with_payloads:
        return None
    over = jobs.c.status.in_([status for status in JobStatus if status.is_over])
    number = connection.execute(select(jobs.c.number).where(over, jobs.c.is_emptied.is_(False)).limit(1)).scalar()
    return None if number is None else Target(number, is_gone=False)


def _take(number: int, table: Table, connection: Connection, size: int) -> bool:
    """Delete the first rows of a job; False if there is none."""
    key: Column[int] = table.c.key
    there = key.between(first_key(number), first_key(number + 1) - 1)
    keys = connection.execute(select(key).where(there).order_by(key).limit(size)).scalars().all()
    if keys:
        connection.execute(delete(table).where(key.between(keys[0], keys[-1])))
    return bool(keys)


def _take_pending(number: int, connection: Connection, size: int) -> bool:
    rows = connection.execute(select(pending.c.first).where(pending.c.number == number).limit(size)).scalars().all()
    if rows:
        connection.execute(delete(pending).where(pending.c.number == number, pending.c.first.in_(rows)))
    return bool(rows)


def _close(connection: Connection, target: Target) -> None:
    """Note that a job is empty, or delete the last of it."""
    if not target.is_gone:
        connection.execute(update(jobs).where(jobs.c.number == target.number).values(is_emptied=True))
        return
    for table in (leases, job_marks, job_inputs, jobs):
        connection.execute(delete(table).where(table.c.number == target.number))


def _vacuum(connection: Connection, size: int) -> bool:
    """Give free pages back to the disk; only SQLite has to be told to."""
    if connection.dialect.name != "sqlite":
        return False
    free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    for _ in range(min(size, free - KEPT_PAGES)):
        # The driver takes one step of a statement without columns, which is one page, however many are asked for.
        connection.exec_driver_sql("PRAGMA incremental_vacuum(1)").close()
    return bool(free > KEPT_PAGES)
