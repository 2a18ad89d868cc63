"""What users read of a job's batches: results and dead letters, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, func, select

from cortex.jobs.records import Presence
from cortex.jobs.spec import DeadLetter, Result
from cortex.state.job_tables import KEYS_PER_JOB, dead_letters, first_key, jobs, results

#: What one call returns at most, unless the first row alone is larger.
MAX_BYTES = 4 * 2**20


def _last_within(sizes: Iterable[Any], max_bytes: int) -> int:
    """Return the last key of those that are `max_bytes` together, of rows of key and size; at least the first.

    Drivers fetch what a query finds as a whole, so it is asked first how large that is.
    """
    last, total = -1, 0
    for key, size in sizes:
        total += size
        if last >= 0 and total > max_bytes:
            break
        last = key
    return last


def results_of(connection: Connection, job_id: str, after: int, limit: int) -> list[Result]:
    """Return results by seq, those behind `after`."""
    base = _first_key(connection, job_id)
    if base is None:
        return []
    size = func.length(results.c.value)
    return [
        Result(row.key - base, row.first_item, row.items, row.value)
        for row in _behind(connection, results, size, base, after, limit)
    ]


def dead_letters_of(connection: Connection, job_id: str, after: int, limit: int) -> list[DeadLetter]:
    """Return dead letters by seq, those behind `after`."""
    base = _first_key(connection, job_id)
    if base is None:
        return []
    size = func.length(dead_letters.c.payload) + func.length(dead_letters.c.traceback)
    return [
        DeadLetter(
            seq=row.key - base,
            first_item=row.first_item,
            items=row.items,
            attempts=row.attempts,
            error=row.error,
            traceback=row.traceback,
            failed_at=row.failed_at,
            payload=row.payload,
        )
        for row in _behind(connection, dead_letters, size, base, after, limit)
    ]


def _first_key(connection: Connection, job_id: str) -> int | None:
    query = select(jobs.c.number).where(jobs.c.id == job_id, jobs.c.presence == Presence.HERE)
    number = connection.execute(query).scalar()
    return None if number is None else first_key(number)


def _behind(
    connection: Connection, table: Table, size: ColumnElement[int], base: int, after: int, limit: int
) -> Sequence[Row[Any]]:
    """Return rows behind `after`, as many as are not too much together; at least one."""
    key, first = table.c.key, base + after + 1
    there = key.between(first, base + KEYS_PER_JOB - 1)
    last = _last_within(connection.execute(select(key, size).where(there).order_by(key).limit(limit)), MAX_BYTES)
    return connection.execute(select(table).where(key.between(first, last)).order_by(key)).all()
