"""Delivery: how batches go to workers and come back, exactly once recorded. Each function is part of a transaction.

A batch that is not resolved is in one range of `pending` or in one lease, from `next` on, and in nothing else. What
ends a lease names its token, so whoever lost it changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from cortex.errors import InputError
from cortex.jobs.exchange import Leased
from cortex.jobs.ledger import Ledger, open_ledger
from cortex.jobs.retry_policy import Failed, record_failures
from cortex.jobs.spec import Lease, LeasedBatch, Report
from cortex.lifecycle import JobStatus
from cortex.state.columns import insert_rows
from cortex.state.job_tables import batches, first_key, leases, pending, results

#: How long a lease holds without being renewed.
LEASE_S = 30.0

_BY_TOKEN = select(leases).where(leases.c.token == bindparam("token"))
_ADVANCE = update(leases).where(leases.c.id == bindparam("lease")).values(next=bindparam("new_next"))
_END = delete(leases).where(leases.c.id == bindparam("lease"))
_GRANT = insert(leases).inline()
_ITEMS = select(func.sum(batches.c["items"])).where(batches.c.key.between(bindparam("first"), bindparam("last")))
_SHAPES = select(batches.c.key, batches.c.first_item, batches.c["items"]).where(
    batches.c.key.between(bindparam("first"), bindparam("last"))
)
_SIZES = (
    select(
        batches.c.key,
        func.sum(func.length(batches.c.payload)).over(order_by=batches.c.key).label("upto"),
        func.count().over().label("there"),
    )
    .where(batches.c.key.between(bindparam("first"), bindparam("last")))
    .subquery()
)
# Drivers fetch all that a query finds, so the database has to know how much that may be.
_PAYLOADS = (
    select(batches.c.key, batches.c.payload, _SIZES.c.there)
    .join(_SIZES, _SIZES.c.key == batches.c.key)
    .where((_SIZES.c.upto <= bindparam("max_bytes")) | (_SIZES.c.key == bindparam("first")))
    .order_by(batches.c.key)
)
_NEXT_RANGE = (
    select(pending)
    .where(pending.c.number == bindparam("job"), pending.c.not_before <= bindparam("now"))
    .order_by(pending.c.not_before, pending.c.first)
    .limit(1)
)
_OPENS_AT = select(func.min(pending.c.not_before)).where(pending.c.number == bindparam("job"))
_RANGE = (
    pending.c.number == bindparam("job"),
    pending.c.not_before == bindparam("was_open_at"),
    pending.c.first == bindparam("was_first"),
)
_TAKE_PREFIX = update(pending).where(*_RANGE).values(first=bindparam("new_first"))
_TAKE_ALL = delete(pending).where(*_RANGE)
_PUT_BACK = insert(pending)


def exchange(
    connection: Connection,
    job_id: str,
    worker: str,
    pid: int,
    reports: Sequence[Report],
    max_batches: int,
    max_bytes: int,
    now: float,
) -> Leased:
    """Record the reports of a worker, then lease it up to `max_batches` of one range.

    At most `max_bytes` of payload are leased, unless the first batch alone is larger.
    Raises: InputError for a report that contradicts itself.
    """
    ledger = open_ledger(connection, job_id)
    if ledger is None or not ledger.is_leasable:
        return Leased(lost=tuple(report.token for report in reports), is_done=True)
    lost = tuple(report.token for report in reports if not _resolve(connection, ledger, worker, pid, report, now))
    lease = opens_at = None
    if max_batches > 0:
        lease = _lease(connection, ledger, (worker, pid), max_batches, max_bytes, now)
        if lease is None:
            opens_at = connection.execute(_OPENS_AT, {"job": ledger.number}).scalar()
    ledger.save(connection, now)
    return Leased(lease, lost, not ledger.is_leasable, opens_at)


def put_back(connection: Connection, ledger: Ledger, lease: Row[Any], first: int, last: int) -> None:
    """Return a part of a lease, unblamed, to be leased at once."""
    if first > last:
        return
    values = {"number": ledger.number, "not_before": 0.0, "first": first, "last": last}
    connection.execute(_PUT_BACK, {**values, "attempts": lease.attempts, "is_part": lease.is_part})


def add_range(connection: Connection, number: int, last: int) -> None:
    """Open all batches of a job up to `last`."""
    values = {"number": number, "not_before": 0.0, "first": 0, "last": last, "attempts": 0, "is_part": False}
    connection.execute(_PUT_BACK, values)


def count_items(connection: Connection, number: int, first: int, last: int) -> int:
    """Count the items of a range of batches."""
    base = first_key(number)
    return int(connection.execute(_ITEMS, {"first": base + first, "last": base + last}).scalar() or 0)


def _resolve(connection: Connection, ledger: Ledger, worker: str, pid: int, report: Report, now: float) -> bool:
    """Record a report; False if its token is lost.

    What was reported before is skipped: a worker that did not hear the answer says it again.
    """
    lease = connection.execute(_BY_TOKEN, {"token": report.token}).first()
    if lease is None or (lease.number, lease.worker, lease.pid) != (ledger.number, worker, pid):
        return False
    if report.upto > lease.last:
        return False
    if report.upto < lease.next:
        return True
    failures = [failure for failure in report.failures if failure.seq >= lease.next]
    returned = [result for result in report.results if result[0] >= lease.next]
    _check(report, {failure.seq for failure in failures})
    if failures or returned:
        shapes = _shapes(connection, ledger.number, lease.next, report.upto)
        items = sum(shape.items for shape in shapes.values())
    else:
        shapes = {}
        items = count_items(connection, ledger.number, lease.next, report.upto)
    failed = [Failed(f, lease.attempts + 1, lease.is_part, shapes[f.seq].items) for f in failures]
    ledger.succeeded += report.upto - lease.next + 1 - len(failed)
    ledger.succeeded_items += items - sum(failure.items for failure in failed)
    ledger.seconds += report.seconds
    _store_results(connection, ledger, shapes, returned)
    record_failures(connection, ledger, failed, now)
    if report.upto == lease.last:
        connection.execute(_END, {"lease": lease.id})
    else:
        connection.execute(_ADVANCE, {"lease": lease.id, "new_next": report.upto + 1})
    return True


def _check(report: Report, failed: set[int]) -> None:
    """Raises: InputError."""
    for name, seqs in (
        ("failures", [failure.seq for failure in report.failures]),
        ("results", [seq for seq, _ in report.results]),
    ):
        if any(later <= earlier for earlier, later in pairwise(seqs)) or (seqs and seqs[-1] > report.upto):
            raise InputError(f"the {name} of a report must ascend up to batch {report.upto}; got {seqs}")
    if not failed.isdisjoint(seq for seq, _ in report.results):
        raise InputError("a batch of a report both failed and returned something")


def _shapes(connection: Connection, number: int, first: int, last: int) -> dict[int, Row[Any]]:
    base = first_key(number)
    rows: Iterable[Row[Any]] = connection.execute(_SHAPES, {"first": base + first, "last": base + last})
    return {row.key - base: row for row in rows}


def _store_results(
    connection: Connection, ledger: Ledger, shapes: dict[int, Row[Any]], returned: list[tuple[int, bytes]]
) -> None:
    if not returned:
        return
    ledger.results += len(returned)
    rows = [
        {"key": shape.key, "first_item": shape.first_item, "items": shape.items, "value": value}
        for shape, value in ((shapes[seq], value) for seq, value in returned)
    ]
    insert_rows(connection, results, rows)


def _lease(
    connection: Connection, ledger: Ledger, holder: tuple[str, int], max_batches: int, max_bytes: int, now: float
) -> Lease | None:
    """Take a prefix of the next range, whose row is the only one that changes; None if no batch is open now."""
    taken = connection.execute(_NEXT_RANGE, {"job": ledger.number, "now": now}).first()
    if taken is None:
        return None
    end = min(taken.last, taken.first + max_batches - 1)
    leased = _payloads(connection, ledger.number, taken.first, end, max_bytes)
    last = taken.first + len(leased) - 1
    where = {"job": ledger.number, "was_open_at": taken.not_before, "was_first": taken.first}
    if last == taken.last:
        connection.execute(_TAKE_ALL, where)
    else:
        connection.execute(_TAKE_PREFIX, {**where, "new_first": last + 1})
    token = secrets.token_hex(8)
    values = {"token": token, "number": ledger.number, "worker": holder[0], "pid": holder[1], "next": taken.first}
    values |= {"last": last, "attempts": taken.attempts, "is_part": taken.is_part, "expires_at": now + LEASE_S}
    connection.execute(_GRANT, values)
    if ledger.status is JobStatus.PENDING:
        ledger.move(JobStatus.RUNNING, now)
    return Lease(token, leased)


def _payloads(connection: Connection, number: int, first: int, last: int, max_bytes: int) -> tuple[LeasedBatch, ...]:
    base = first_key(number)
    wanted = {"first": base + first, "last": base + last, "max_bytes": max_bytes}
    found = connection.execute(_PAYLOADS, wanted).all()
    if not found or found[0].there != last - first + 1:
        raise RuntimeError(f"batches {first} to {last} of job {number} are not all there")
    return tuple(LeasedBatch(row.key - base, row.payload) for row in found)
