"""Check the invariants of a job database, and create jobs for tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import Connection, select

from cortex.jobs import batch_queue
from cortex.jobs.records import Presence, insert_job
from cortex.jobs.spec import HOOK_SEQ, JobOptions, JobOrigin, NewBatch
from cortex.lifecycle import JobStatus
from cortex.state.tables import batches, dead_letters, first_key, job_metadata, jobs, leases, pending, results

ORIGIN = JobOrigin("digits", "api-1", "spec-1", "rev-1", "hash-1", "{}")


def options(**changed: Any) -> JobOptions:
    return JobOptions(**({"workers": 1} | changed))


def new_batches(count: int, items: int = 1) -> list[NewBatch]:
    """Return `count` batches whose items are consecutive numbers from 0."""
    return [
        NewBatch(items, ("[" + ",".join(map(str, range(first, first + items))) + "]").encode())
        for first in range(0, count * items, items)
    ]


def put_job(connection: Connection, count: int, items: int = 1, now: float = 1000.0, **changed: Any) -> str:
    """Store a pending job of `count` batches; return its id."""
    existing = connection.execute(select(jobs.c.id)).all()
    job_id = f"{len(existing):016x}"
    number = insert_job(connection, job_id, ORIGIN, options(**changed), {}, now)
    batch_queue.add_batches(connection, number, new_batches(count, items))
    batch_queue.finish_enqueuing(connection, job_id, now)
    return job_id


def dump(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table."""
    return {
        name: sorted(map(tuple, connection.execute(select(table))), key=repr)
        for name, table in job_metadata.tables.items()
    }


def open_seqs(connection: Connection, number: int) -> Counter[int]:
    """Count how often each open batch occurs in a pending range or a lease."""
    found: Counter[int] = Counter()
    for row in connection.execute(select(pending).where(pending.c.number == number)):
        assert row.first == row.last or not (row.attempts or row.is_part)
        found.update(range(row.first, row.last + 1))
    for row in connection.execute(select(leases).where(leases.c.number == number)):
        assert row.next <= row.last
        found.update(range(row.next, row.last + 1))
    return found


def check_jobs(connection: Connection, has_results: bool = True) -> None:
    """Check every job. `has_results` states that every successful batch returned a result."""
    for job in connection.execute(select(jobs).where(jobs.c.presence == Presence.VISIBLE)):
        status = JobStatus(job.status)
        there = _rows(connection, job.number, batches)
        dead = _rows(connection, job.number, dead_letters)
        returned = _rows(connection, job.number, results)
        opened = open_seqs(connection, job.number)
        held = connection.execute(select(leases).where(leases.c.number == job.number)).all()
        assert status in (JobStatus.PENDING, JobStatus.RUNNING, JobStatus.COMPLETING) or not held
        has_hook, hooks = there.pop(HOOK_SEQ, None) is not None, opened.pop(HOOK_SEQ, 0)
        assert hooks == (1 if status is JobStatus.COMPLETING and has_hook else 0) or status.is_over
        assert all(count == 1 for count in opened.values()), f"a batch is open twice: {opened}"
        assert job.failed == len(dead)
        assert job.failed_items == sum(row.items for row in dead.values())
        assert job.results == len(returned)
        assert dead.keys().isdisjoint(returned)
        if status is JobStatus.ENQUEUING:
            assert set(there) == set(range(job.next_seq)) and job.batches == job.next_seq and not opened
        if not status.is_over or not job.is_emptied:
            assert job.batches == len(there)
            assert job.items == sum(row.items for row in there.values())
            assert len(_covered(there)) == job.items, "an item is in two batches"
        if status in (JobStatus.PENDING, JobStatus.RUNNING):
            assert job.batches == job.succeeded + job.failed + len(opened)
            assert opened.keys() <= there.keys() - dead.keys() - returned.keys()
            assert job.succeeded or job.failed or status is JobStatus.PENDING or opened
        if status is JobStatus.RUNNING:
            assert opened, "the job is running without open batches"
        if status in (JobStatus.COMPLETING, JobStatus.SUCCEEDED, JobStatus.COMPLETED_WITH_FAILURES):
            assert not opened and job.batches == job.succeeded + job.failed
            assert job.items == job.succeeded_items + job.failed_items
        if has_results and status is not JobStatus.ENQUEUING:
            assert job.succeeded == len(returned)
            assert job.succeeded_items == sum(row.items for row in returned.values())


def _rows(connection: Connection, number: int, table: Any) -> dict[int, Any]:
    base = first_key(number)
    query = select(table).where(table.c.key.between(base, first_key(number + 1) - 1)).order_by(table.c.key)
    return {row.key - base: row for row in connection.execute(query)}


def _covered(there: dict[int, Any]) -> set[int]:
    return {item for row in there.values() for item in range(row.first_item, row.first_item + row.items)}
