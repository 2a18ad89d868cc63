"""Queries for the results and dead letters of a job, page by page. Each runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, func, select

from cortex.jobs.records import Presence
from cortex.jobs.spec import BatchResult, DeadLetter, error_kind
from cortex.state.tables import KEYS_PER_JOB, dead_letters, first_key, jobs, results

#: Characters of an error by which dead letters are grouped.
_MAX_ERROR = 1_000
#: Maximum size of a page, unless its first row alone is larger.
MAX_BYTES = 4 * 2**20


def _last_within(sizes: Iterable[Any], max_bytes: int) -> int:
    """Return the last key of a page, given rows of key and size; a page has at least one row.

    Drivers fetch the whole result of a query, so its size is queried first.
    """
    last, total = -1, 0
    for key, size in sizes:
        total += size
        if last >= 0 and total > max_bytes:
            break
        last = key
    return last


def read_results(connection: Connection, job_id: str, after: int = -1, limit: int = 1000) -> list[BatchResult]:
    """Return the results after batch `after`, by seq: up to `limit`, fewer if they are large, none at the end."""
    base = _first_key(connection, job_id)
    if base is None:
        return []
    size = func.length(results.c.value)
    return [
        BatchResult(row.key - base, row.first_item, row.items, row.value)
        for row in _page(connection, results, size, base, after, limit)
    ]


def read_dead_letters(connection: Connection, job_id: str, after: int = -1, limit: int = 1000) -> list[DeadLetter]:
    """Return the dead letters after batch `after`, by seq: up to `limit`, fewer if they are large, none at the end."""
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
        for row in _page(connection, dead_letters, size, base, after, limit)
    ]


@dataclass(frozen=True)
class ErrorGroup:
    """Dead letters whose errors differ only in numbers."""

    error: str  #: of the first one, shortened
    first_seq: int
    batches: int
    items: int


def group_errors(connection: Connection, job_id: str, limit: int = 2_000) -> list[ErrorGroup]:
    """Return the errors of the first `limit` dead letters of a job, those of the most batches first."""
    base = _first_key(connection, job_id)
    if base is None:
        return []
    error = func.substr(dead_letters.c.error, 1, _MAX_ERROR).label("error")
    query = select(dead_letters.c.key, dead_letters.c["items"], error)
    query = query.where(dead_letters.c.key.between(base, base + KEYS_PER_JOB - 1)).order_by(dead_letters.c.key)
    groups: dict[str, ErrorGroup] = {}
    for key, items, text in connection.execute(query.limit(limit)):
        name = error_kind(text)
        group = groups.get(name) or ErrorGroup(text, key - base, 0, 0)
        groups[name] = replace(group, batches=group.batches + 1, items=group.items + items)
    return sorted(groups.values(), key=lambda group: -group.batches)


def _first_key(connection: Connection, job_id: str) -> int | None:
    query = select(jobs.c.number).where(jobs.c.id == job_id, jobs.c.presence == Presence.VISIBLE)
    number = connection.execute(query).scalar()
    return None if number is None else first_key(number)


def _page(
    connection: Connection, table: Table, size: ColumnElement[int], base: int, after: int, limit: int
) -> Sequence[Row[Any]]:
    key, first = table.c.key, base + after + 1
    following = key.between(first, base + KEYS_PER_JOB - 1)
    last = _last_within(connection.execute(select(key, size).where(following).order_by(key).limit(limit)), MAX_BYTES)
    return connection.execute(select(table).where(key.between(first, last)).order_by(key)).all()
