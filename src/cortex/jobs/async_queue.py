"""The queue of an AsyncAPI: a job that never ends and that no list shows. Each function is part of a transaction.

A workload is a batch of one item. What becomes of it moves from where a job keeps it to the workload's own row, in the
transaction in which it is recorded; its payload goes at the same moment.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from cortex.errors import NotFoundError
from cortex.jobs import enqueuing, queue
from cortex.jobs.exchange import Leased
from cortex.jobs.records import Presence
from cortex.jobs.spec import MAX_ATTEMPTS, NewBatch, Report
from cortex.jobs.workload import WorkloadView
from cortex.lifecycle import JobStatus, WorkloadStatus
from cortex.state.columns import insert_rows
from cortex.state.job_tables import (
    KEYS_PER_JOB,
    batches,
    dead_letters,
    first_key,
    jobs,
    leases,
    pending,
    results,
    workloads,
)

#: A job whose last batch is resolved is over, so this one always has a batch more than there are.
_ENDLESS = 1
#: From this number on a queue looks for a moment to begin with 0 again: a job's batches have no more numbers than keys.
_WORN = KEYS_PER_JOB // 2
#: An exception of the user's is final, and so is kept like a result, with this in front; no JSON begins so.
_RAISED = b"!"

_EXTEND = (
    update(pending)
    .where(
        pending.c.number == bindparam("job"),
        pending.c.not_before == 0.0,
        pending.c.last == bindparam("was_last"),
        pending.c.attempts == 0,
        pending.c.is_part.is_(False),
    )
    .values(last=bindparam("new_last"))
)
_RETURNED = select(results.c.key, results.c.value).where(results.c.key.between(bindparam("first"), bindparam("last")))
_BURIED = select(dead_letters.c.key, dead_letters.c.error).where(
    dead_letters.c.key.between(bindparam("first"), bindparam("last"))
)
_END = (
    update(workloads)
    .where(workloads.c.key == bindparam("its_key"))
    .values(status=bindparam("its_status"), ended_at=bindparam("now"), value=bindparam("its_value"))
)
_OPEN = select(jobs.c.batches - jobs.c.succeeded - jobs.c.failed - _ENDLESS).where(jobs.c.number == bindparam("job"))


@dataclass(frozen=True)
class Standing:
    """The job that is an API's queue."""

    api: str
    job_id: str
    number: int


def read_standing(connection: Connection) -> list[Standing]:
    """Return all queues."""
    query = select(jobs.c.api, jobs.c.id, jobs.c.number).where(jobs.c.presence == Presence.STANDING)
    return [Standing(row.api, row.id, row.number) for row in connection.execute(query)]


def open_standing(connection: Connection, api: str, job_id: str, now: float) -> Standing:
    """Store an empty queue."""
    values = {
        "id": job_id,
        "api": api,
        "presence": Presence.STANDING,
        "status": JobStatus.PENDING,
        "created_at": now,
        "max_attempts": MAX_ATTEMPTS,
        "isolate_failures": False,
        "batches": _ENDLESS,
    }
    key = connection.execute(insert(jobs).values(values)).inserted_primary_key
    assert key is not None
    return Standing(api, job_id, int(key.number))


def close_standing(connection: Connection, number: int) -> None:
    """Take a queue out of sight for good; its rows are the sweeper's."""
    connection.execute(delete(leases).where(leases.c.number == number))
    connection.execute(update(jobs).where(jobs.c.number == number).values(presence=Presence.GONE))


def count_open(connection: Connection, number: int) -> int:
    """Count the workloads that are not over."""
    return int(connection.execute(_OPEN, {"job": number}).scalar() or 0)


def append(connection: Connection, number: int, new: Sequence[tuple[uuid.UUID, bytes]], now: float) -> None:
    """Add workloads, as ids and lines, at the end of a queue. Raises: NotFoundError once it is gone."""
    there = (jobs.c.number == number, jobs.c.presence == Presence.STANDING)
    first = connection.execute(select(jobs.c.next_seq).where(*there)).scalar()
    if first is None:
        raise NotFoundError("the API was deleted")
    if first >= _WORN and _is_reusable(connection, number):
        first = 0
        connection.execute(update(jobs).where(jobs.c.number == number).values(next_seq=first))
    enqueuing.add(connection, number, [NewBatch(1, line) for _, line in new])
    base = first_key(number) + first
    rows = [{"key": base + index, "id": name.bytes, "created_at": now} for index, (name, _) in enumerate(new)]
    insert_rows(connection, workloads, rows)
    last = first + len(new) - 1
    if not connection.execute(_EXTEND, {"job": number, "was_last": first - 1, "new_last": last}).rowcount:
        values = {"number": number, "not_before": 0.0, "first": first, "last": last, "attempts": 0, "is_part": False}
        connection.execute(insert(pending), values)


def exchange(
    connection: Connection,
    standing: Standing,
    holder: tuple[str, int],
    reports: Sequence[Report],
    max_batches: int,
    max_bytes: int,
    now: float,
) -> tuple[Leased, list[int]]:
    """Record reports and lease more, as `queue.exchange` does; return the keys of those that are over now, too."""
    told = [_without_failures(report) for report in reports]
    leased = queue.exchange(connection, standing.job_id, *holder, told, max_batches, max_bytes, now)
    return leased, settle(connection, standing.number, now)


def settle(connection: Connection, number: int, now: float) -> list[int]:
    """Write what became of workloads into their rows, and drop all else of them; return their keys."""
    everything = {"first": first_key(number), "last": first_key(number + 1) - 1}
    ends = [(key, *_end_of(value)) for key, value in connection.execute(_RETURNED, everything)]
    ends += [(key, WorkloadStatus.FAILED, _words(error)) for key, error in connection.execute(_BURIED, everything)]
    if not ends:
        return []
    connection.execute(
        _END, [{"its_key": key, "its_status": end, "its_value": value, "now": now} for key, end, value in ends]
    )
    keys = [key for key, _, _ in ends]
    for table in (results, dead_letters, batches):
        connection.execute(delete(table).where(table.c.key.in_(keys)))
    return keys


def look(connection: Connection, number: int, name: uuid.UUID) -> WorkloadView | None:
    """Return how a workload of a queue is; None if there is none of that id."""
    base = first_key(number)
    there = workloads.c.key.between(base, first_key(number + 1) - 1)
    row = connection.execute(select(workloads).where(workloads.c.id == name.bytes, there)).first()
    if row is None:
        return None
    if row.status is not None:
        status = WorkloadStatus(row.status)
        return WorkloadView(name, row.key, status, row.created_at, row.ended_at, row.value or b"")
    held = (leases.c.number == number, leases.c.next <= row.key - base, leases.c.last >= row.key - base)
    is_held = connection.execute(select(leases.c.id).where(*held).limit(1)).first() is not None
    return WorkloadView(
        name, row.key, WorkloadStatus.IN_PROGRESS if is_held else WorkloadStatus.IN_QUEUE, row.created_at
    )


def remove_ended(ended_before: float, connection: Connection, size: int) -> bool:
    """Delete workloads that were over before that time; False once there are none."""
    found = select(workloads.c.key).where(workloads.c.ended_at < ended_before).order_by(workloads.c.ended_at)
    keys: Iterable[int] = connection.execute(found.limit(min(size, 10_000))).scalars().all()
    if keys:
        connection.execute(delete(workloads).where(workloads.c.key.in_(keys)))
    return bool(keys)


def _is_reusable(connection: Connection, number: int) -> bool:
    """Tell whether a queue's numbers may begin anew: nothing is open, and nobody can ask for the first ones."""
    base = first_key(number)
    kept = select(workloads.c.key).where(workloads.c.key.between(base, base + _WORN - 1)).limit(1)
    return not count_open(connection, number) and connection.execute(kept).first() is None


def _without_failures(report: Report) -> Report:
    """Say of exceptions that they are what was returned: only what a death interrupted is tried again."""
    raised = tuple((failure.seq, _RAISED + _words(failure.error)) for failure in report.failures)
    return replace(report, failures=(), results=tuple(sorted((*report.results, *raised))))


def _end_of(value: bytes) -> tuple[WorkloadStatus, bytes]:
    if value.startswith(_RAISED):
        return WorkloadStatus.FAILED, value[len(_RAISED) :]
    return WorkloadStatus.COMPLETED, value


def _words(error: str) -> bytes:
    return error.encode(errors="replace")
