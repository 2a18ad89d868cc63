"""Batches on their way into a job. Each function is part of a transaction."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, func, insert, literal, select, update

from cortex.errors import ConflictError, InputError, NotFoundError
from cortex.jobs.ledger import Ledger, open_ledger
from cortex.jobs.queue import add_range, count_items
from cortex.jobs.records import Presence, reveal
from cortex.jobs.spec import NewBatch
from cortex.lifecycle import JobStatus
from cortex.state.columns import insert_rows
from cortex.state.job_tables import KEYS_PER_JOB, batches, dead_letters, first_key, jobs

NOTHING_FOUND = "unable to enqueue batches because no data was found"


def enqueuing_ledger(connection: Connection, job_id: str) -> Ledger:
    """Read the ledger of a job that takes batches. Raises: NotFoundError, ConflictError."""
    ledger = open_ledger(connection, job_id)
    if ledger is None:
        raise NotFoundError(f"unable to find BatchAPI job {job_id}")
    if ledger.status is not JobStatus.ENQUEUING:
        raise ConflictError(f"job {job_id} takes no more batches: it is {ledger.status.message}")
    return ledger


def add(connection: Connection, number: int, new: Sequence[NewBatch]) -> None:
    """Append batches to a job that is enqueuing. Raises: InputError if it has too many."""
    if not new:
        return
    row = connection.execute(select(jobs.c.next_seq, jobs.c["items"]).where(jobs.c.number == number)).one()
    if row.next_seq + 2 * len(new) > KEYS_PER_JOB:
        raise InputError("the job has too many batches; use a larger batch_size")
    key, first_item, rows = first_key(number) + row.next_seq, row.items, []
    for batch in new:
        rows.append({"key": key, "items": batch.items, "first_item": first_item, "payload": batch.payload})
        key += 1
        first_item += batch.items
    insert_rows(connection, batches, rows)
    _grow(connection, number, len(new), first_item - row.items)


def add_dead_letters(connection: Connection, number: int, old_number: int, after: int, limit: int) -> int | None:
    """Append dead letters of an old job, from its batch `after` (excluded) on; return the last one's, None at the end.

    They keep their position in the input of the old job.
    """
    base = first_key(old_number)
    there = dead_letters.c.key.between(base + after + 1, first_key(old_number + 1) - 1)
    chosen = select(dead_letters.c.key).where(there).order_by(dead_letters.c.key).limit(limit).subquery()
    total = select(func.count(), func.max(chosen.c.key)).select_from(chosen)
    count, last = connection.execute(total).one()
    if not count:
        return None
    there = dead_letters.c.key.between(base + after + 1, last)
    next_key = select(jobs.c.next_seq + first_key(number) - 1).where(jobs.c.number == number).scalar_subquery()
    copied = select(
        next_key + func.row_number().over(order_by=dead_letters.c.key),
        dead_letters.c["items"],
        dead_letters.c.first_item,
        dead_letters.c.payload,
    ).where(there)
    items = connection.execute(select(func.sum(dead_letters.c["items"])).where(there)).scalar_one()
    connection.execute(insert(batches).from_select(["key", "items", "first_item", "payload"], copied))
    _grow(connection, number, count, items)
    return int(last) - base


def remove_last(connection: Connection, job_id: str, count: int) -> bool:
    """Take the last batches out of a job that is enqueuing; False once there are none."""
    ledger = enqueuing_ledger(connection, job_id)
    first = max(0, ledger.next_seq - count)
    if first == ledger.next_seq:
        return False
    items = count_items(connection, ledger.number, first, ledger.next_seq - 1)
    connection.execute(delete(batches).where(batches.c.key.between(*_keys(ledger, first))))
    _grow(connection, ledger.number, first - ledger.next_seq, -items)
    return True


def finish(connection: Connection, job_id: str, now: float) -> None:
    """Open the batches of a job to workers; a job without any failed to enqueue."""
    ledger = enqueuing_ledger(connection, job_id)
    if ledger.next_seq:
        add_range(connection, ledger.number, ledger.next_seq - 1)
        ledger.move(JobStatus.PENDING, now)
    else:
        ledger.move(JobStatus.ENQUEUE_FAILED, now, NOTHING_FOUND)
    ledger.save(connection, now)


def arrive(connection: Connection, number: int, job_id: str, now: float) -> None:
    """Show a job whose batches are all stored, and open them to workers. Raises: InputError if there are none."""
    reveal(connection, number)
    finish(connection, job_id, now)


def give_up(connection: Connection, number: int) -> None:
    """Drop a job whose batches did not all arrive."""
    arriving = jobs.c.presence == Presence.ARRIVING
    connection.execute(update(jobs).where(jobs.c.number == number, arriving).values(presence=Presence.GONE))


def drop_arriving(connection: Connection) -> None:
    """Give up the jobs that were being stored when the operator ended: nobody was told of them."""
    arriving = jobs.c.presence == Presence.ARRIVING
    connection.execute(update(jobs).where(arriving).values(presence=Presence.GONE))


def _grow(connection: Connection, number: int, count: int, items: int) -> None:
    connection.execute(
        update(jobs)
        .where(jobs.c.number == number)
        .values(
            next_seq=jobs.c.next_seq + count, batches=jobs.c.batches + count, items=jobs.c["items"] + literal(items)
        )
    )


def _keys(ledger: Ledger, first: int) -> tuple[int, int]:
    base = first_key(ledger.number)
    return base + first, base + ledger.next_seq - 1
