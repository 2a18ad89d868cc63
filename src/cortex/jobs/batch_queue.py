"""Queue of a job's batches: enqueue, lease, report, retry. Each function runs inside a transaction of the caller.

                add_batches            finish_enqueuing              exchange
    submission ────────────> batches ──────────────────> pending ──────────────> leases
                                                            ^                      │ report: next moves on
                                                            │                      ├──> succeeded (results)
                                                            │ retry, split, lease  ├──> dead_letters
                                                            └──────────────────────┘
                                                              expired or released

The last range is the completion hook, `on_job_complete`: `add_hook` appends it once all batches are resolved and their
results are written. Its report ends the job; an exception is final, and only the death of its process is retried.

An unresolved batch is in exactly one place: one range of `pending`, or one lease at or after its `next`. A report and
a renewal name the lease's token, so a worker that lost its lease changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, literal, select, update

from cortex.errors import ConflictError, InputError, NotFoundError
from cortex.jobs.records import JobLedger, Presence, make_visible, open_ledger
from cortex.jobs.retry_policy import FailedBatch, FailureAction, delay_s, failure_action, split_payload
from cortex.jobs.spec import HOOK_SEQ, BatchFailure, Lease, LeasedBatch, LeaseReply, NewBatch, Report
from cortex.lifecycle import JobStatus
from cortex.state.tables import (
    KEYS_PER_JOB,
    batches,
    dead_letters,
    first_key,
    insert_rows,
    jobs,
    leases,
    pending,
    results,
)

#: Duration of a lease without a renewal.
LEASE_S = 30.0

#: Maximum number of processes that may die in the completion hook.
_HOOK_ATTEMPTS = 3

NO_DATA_FOUND = "unable to enqueue batches because no data was found"

_KEY_RANGE = batches.c.key.between(bindparam("first"), bindparam("last"))
_ITEMS = select(func.sum(batches.c["items"])).where(_KEY_RANGE)
_SHAPES = select(batches.c.key, batches.c.first_item, batches.c["items"]).where(_KEY_RANGE)
_SIZES = (
    select(
        batches.c.key,
        func.sum(func.length(batches.c.payload)).over(order_by=batches.c.key).label("upto"),
        func.count().over().label("there"),
    )
    .where(_KEY_RANGE)
    .subquery()
)
# Drivers fetch the whole result of a query, so the database itself has to limit its size.
_PAYLOADS = (
    select(batches.c.key, batches.c.payload, _SIZES.c.there)
    .join(_SIZES, _SIZES.c.key == batches.c.key)
    .where((_SIZES.c.upto <= bindparam("max_bytes")) | (_SIZES.c.key == bindparam("first")))
    .order_by(batches.c.key)
)
_BATCH = select(batches).where(batches.c.key == bindparam("at"))
_DELETE_BATCH = delete(batches).where(batches.c.key == bindparam("at"))

_LEASE_BY_TOKEN = select(leases).where(leases.c.token == bindparam("token"))
_INSERT_LEASE = insert(leases).inline()
_ADVANCE_LEASE = update(leases).where(leases.c.id == bindparam("lease")).values(next=bindparam("new_next"))
_DELETE_LEASE = delete(leases).where(leases.c.id == bindparam("lease"))

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
_SHORTEN_RANGE = update(pending).where(*_RANGE).values(first=bindparam("new_first"))
_DELETE_RANGE = delete(pending).where(*_RANGE)
_INSERT_RANGE = insert(pending)

_FAILURE_COLUMNS = ("attempts", "error", "traceback", "failed_at")
_INSERT_DEAD_LETTER = insert(dead_letters).from_select(
    ["key", "first_item", "items", "payload", *_FAILURE_COLUMNS],
    select(
        *(batches.c[name] for name in ("key", "first_item", "items", "payload")),
        *(bindparam(f"its_{name}", type_=dead_letters.c[name].type) for name in _FAILURE_COLUMNS),
    ).where(batches.c.key == bindparam("at")),
)


# Enqueue.


def enqueuing_ledger(connection: Connection, job_id: str) -> JobLedger:
    """Return the ledger of a job that accepts batches. Raises: NotFoundError, ConflictError."""
    ledger = open_ledger(connection, job_id)
    if ledger is None:
        raise NotFoundError(f"unable to find BatchAPI job {job_id}")
    if ledger.status is not JobStatus.ENQUEUING:
        raise ConflictError(f"job {job_id} accepts no more batches: it is {ledger.status.message}")
    return ledger


def add_batches(connection: Connection, number: int, new: Sequence[NewBatch]) -> None:
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
    _add_to_totals(connection, number, len(new), first_item - row.items)


def add_dead_letters(connection: Connection, number: int, old_number: int, after: int, limit: int) -> int | None:
    """Append up to `limit` dead letters of another job, those after its batch `after`.

    Return the last one's number, None once there are no more. They keep their position in the input of the old job.
    """
    base = first_key(old_number)
    selected = dead_letters.c.key.between(base + after + 1, first_key(old_number + 1) - 1)
    chosen = select(dead_letters.c.key).where(selected).order_by(dead_letters.c.key).limit(limit).subquery()
    count, last = connection.execute(select(func.count(), func.max(chosen.c.key)).select_from(chosen)).one()
    if not count:
        return None
    selected = dead_letters.c.key.between(base + after + 1, last)
    next_key = select(jobs.c.next_seq + first_key(number) - 1).where(jobs.c.number == number).scalar_subquery()
    copied = select(
        next_key + func.row_number().over(order_by=dead_letters.c.key),
        dead_letters.c["items"],
        dead_letters.c.first_item,
        dead_letters.c.payload,
    ).where(selected)
    items = connection.execute(select(func.sum(dead_letters.c["items"])).where(selected)).scalar_one()
    connection.execute(insert(batches).from_select(["key", "items", "first_item", "payload"], copied))
    _add_to_totals(connection, number, count, items)
    return int(last) - base


def remove_last_batches(connection: Connection, job_id: str, count: int) -> bool:
    """Remove the last `count` batches of a job that is enqueuing; return False once there are none."""
    ledger = enqueuing_ledger(connection, job_id)
    first = max(0, ledger.next_seq - count)
    if first == ledger.next_seq:
        return False
    items = count_items(connection, ledger.number, first, ledger.next_seq - 1)
    base = first_key(ledger.number)
    connection.execute(delete(batches).where(batches.c.key.between(base + first, base + ledger.next_seq - 1)))
    _add_to_totals(connection, ledger.number, first - ledger.next_seq, -items)
    return True


def finish_enqueuing(connection: Connection, job_id: str, now: float) -> None:
    """Make the batches of a job available to workers; a job without batches becomes `enqueue_failed`."""
    ledger = enqueuing_ledger(connection, job_id)
    if ledger.next_seq:
        _insert_range(connection, ledger.number, 0, ledger.next_seq - 1)
        ledger.move(JobStatus.PENDING, now)
    else:
        ledger.move(JobStatus.ENQUEUE_FAILED, now, NO_DATA_FOUND)
    ledger.save(connection, now)


def publish_job(connection: Connection, number: int, job_id: str, now: float) -> None:
    """Make a completely stored job visible, and its batches available to workers."""
    make_visible(connection, number)
    finish_enqueuing(connection, job_id, now)


def discard_unpublished(connection: Connection, number: int | None = None) -> None:
    """Mark jobs as deleted whose batches were not all stored: one of them, or all after a crash of the operator."""
    unpublished = jobs.c.presence == Presence.STORING
    where = (unpublished,) if number is None else (unpublished, jobs.c.number == number)
    connection.execute(update(jobs).where(*where).values(presence=Presence.DELETED))


# Lease and report.


def exchange(
    connection: Connection,
    job_id: str,
    worker: str,
    pid: int,
    reports: Sequence[Report],
    max_batches: int,
    max_bytes: int,
    now: float,
) -> LeaseReply:
    """Record the reports of a worker, then lease it up to `max_batches` of one range.

    At most `max_bytes` of payload are leased, unless the first batch alone is larger.
    Raises: InputError for a report that contradicts itself.
    """
    ledger = open_ledger(connection, job_id)
    if ledger is None or not ledger.is_leasable:
        return LeaseReply(lost=tuple(report.token for report in reports), is_done=True)
    lost = tuple(report.token for report in reports if not _record(connection, ledger, worker, pid, report, now))
    lease = opens_at = None
    if max_batches > 0:
        lease = _lease(connection, ledger, (worker, pid), max_batches, max_bytes, now)
        if lease is None:
            opens_at = connection.execute(_OPENS_AT, {"job": ledger.number}).scalar()
    ledger.save(connection, now)
    is_done = ledger.status not in (JobStatus.PENDING, JobStatus.RUNNING)
    return LeaseReply(lease, lost, is_done, opens_at)


def return_to_pending(connection: Connection, ledger: JobLedger, lease: Row[Any], first: int, last: int) -> None:
    """Return a part of a lease to `pending`, available at once and without a failed attempt."""
    if first <= last:
        _insert_range(connection, ledger.number, first, last, lease.attempts, lease.is_part)


def record_failures(connection: Connection, ledger: JobLedger, failures: list[FailedBatch], now: float) -> None:
    """Apply the retry policy to each failed batch."""
    retries = []
    for failed in failures:
        ledger.failed_attempts += 1
        action = failure_action(failed, ledger.max_attempts, ledger.isolate_failures)
        if action is FailureAction.SPLIT and _split(connection, ledger, failed):
            continue
        if action is FailureAction.RETRY:
            retries.append(_retry_range(ledger, failed.failure.seq, failed, now + delay_s(failed.attempts)))
        else:
            _add_dead_letter(connection, ledger, failed, now)
    if retries:
        connection.execute(_INSERT_RANGE, retries)


# The completion hook.


def has_hook(connection: Connection, number: int) -> bool:
    """Return whether the completion hook of a job has been added to its queue."""
    return connection.execute(_BATCH, {"at": first_key(number) + HOOK_SEQ}).first() is not None


def add_hook(connection: Connection, job_id: str) -> None:
    """Append the completion hook to the queue of a completing job, once."""
    ledger = open_ledger(connection, job_id)
    if ledger is None or ledger.status is not JobStatus.COMPLETING or has_hook(connection, ledger.number):
        return
    row = {"key": first_key(ledger.number) + HOOK_SEQ, "items": 0, "first_item": ledger.items, "payload": b""}
    insert_rows(connection, batches, [row])
    _insert_range(connection, ledger.number, HOOK_SEQ, HOOK_SEQ)


def fail_hook(connection: Connection, ledger: JobLedger, lease: Row[Any], cause: str, now: float) -> None:
    """Count a death in the completion hook: the hook runs again, or the job ends."""
    attempts = lease.attempts + 1
    if attempts < _HOOK_ATTEMPTS:
        _insert_range(connection, ledger.number, HOOK_SEQ, HOOK_SEQ, attempts)
    else:
        message = f"the worker's process died {attempts} times in on_job_complete, the last time: {cause}"
        ledger.move(JobStatus.WORKER_ERROR, now, message)


def _end_job(ledger: JobLedger, failures: Sequence[BatchFailure], now: float) -> None:
    """End a job whose completion hook has run."""
    if failures:
        error, traceback = failures[0].error, failures[0].traceback
        ledger.move(JobStatus.WORKER_ERROR, now, f"on_job_complete raised {error}", traceback)
    elif ledger.failed:
        message = f"{ledger.failed} of {ledger.batches} batches are dead letters"
        ledger.move(JobStatus.COMPLETED_WITH_FAILURES, now, message)
    else:
        ledger.move(JobStatus.SUCCEEDED, now)


def count_items(connection: Connection, number: int, first: int, last: int) -> int:
    """Count the items of a range of batches."""
    base = first_key(number)
    return int(connection.execute(_ITEMS, {"first": base + first, "last": base + last}).scalar() or 0)


def _add_to_totals(connection: Connection, number: int, count: int, items: int) -> None:
    connection.execute(
        update(jobs)
        .where(jobs.c.number == number)
        .values(
            next_seq=jobs.c.next_seq + count, batches=jobs.c.batches + count, items=jobs.c["items"] + literal(items)
        )
    )


def _insert_range(
    connection: Connection, number: int, first: int, last: int, attempts: int = 0, is_part: bool = False
) -> None:
    values = {"number": number, "not_before": 0.0, "first": first, "last": last}
    connection.execute(_INSERT_RANGE, {**values, "attempts": attempts, "is_part": is_part})


def _record(connection: Connection, ledger: JobLedger, worker: str, pid: int, report: Report, now: float) -> bool:
    """Record a report; return False if its token is lost.

    Batches that were reported before are skipped: a worker that missed the reply sends its report again.
    """
    lease = connection.execute(_LEASE_BY_TOKEN, {"token": report.token}).first()
    if lease is None or (lease.number, lease.worker, lease.pid) != (ledger.number, worker, pid):
        return False
    if report.upto > lease.last:
        return False
    if report.upto < lease.next:
        return True
    failures = [failure for failure in report.failures if failure.seq >= lease.next]
    returned = [result for result in report.results if result[0] >= lease.next]
    _check_report(report, {failure.seq for failure in failures})
    if lease.last == HOOK_SEQ:
        _end_job(ledger, failures, now)
        return True
    if failures or returned:
        shapes = _shapes(connection, ledger.number, lease.next, report.upto)
        items = sum(shape.items for shape in shapes.values())
    else:
        shapes = {}
        items = count_items(connection, ledger.number, lease.next, report.upto)
    failed = [FailedBatch(f, lease.attempts + 1, lease.is_part, shapes[f.seq].items) for f in failures]
    ledger.succeeded += report.upto - lease.next + 1 - len(failed)
    ledger.succeeded_items += items - sum(failure.items for failure in failed)
    ledger.seconds += report.seconds
    _store_results(connection, ledger, shapes, returned)
    record_failures(connection, ledger, failed, now)
    if report.upto == lease.last:
        connection.execute(_DELETE_LEASE, {"lease": lease.id})
    else:
        connection.execute(_ADVANCE_LEASE, {"lease": lease.id, "new_next": report.upto + 1})
    return True


def _check_report(report: Report, failed: set[int]) -> None:
    """Raise InputError if a report contradicts itself."""
    for name, seqs in (
        ("failures", [failure.seq for failure in report.failures]),
        ("results", [seq for seq, _ in report.results]),
    ):
        if any(later <= earlier for earlier, later in pairwise(seqs)) or (seqs and seqs[-1] > report.upto):
            raise InputError(f"the {name} of a report must ascend up to batch {report.upto}; got {seqs}")
    if not failed.isdisjoint(seq for seq, _ in report.results):
        raise InputError("a report lists a batch both as failed and with a result")


def _shapes(connection: Connection, number: int, first: int, last: int) -> dict[int, Row[Any]]:
    base = first_key(number)
    rows: Iterable[Row[Any]] = connection.execute(_SHAPES, {"first": base + first, "last": base + last})
    return {row.key - base: row for row in rows}


def _store_results(
    connection: Connection, ledger: JobLedger, shapes: dict[int, Row[Any]], returned: list[tuple[int, bytes]]
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
    connection: Connection, ledger: JobLedger, holder: tuple[str, int], max_batches: int, max_bytes: int, now: float
) -> Lease | None:
    """Lease a prefix of the next range, so that only this range's row changes; return None if no batch is due."""
    found = connection.execute(_NEXT_RANGE, {"job": ledger.number, "now": now}).first()
    if found is None:
        return None
    end = min(found.last, found.first + max_batches - 1)
    leased = _payloads(connection, ledger.number, found.first, end, max_bytes)
    last = found.first + len(leased) - 1
    where = {"job": ledger.number, "was_open_at": found.not_before, "was_first": found.first}
    if last == found.last:
        connection.execute(_DELETE_RANGE, where)
    else:
        connection.execute(_SHORTEN_RANGE, {**where, "new_first": last + 1})
    token = secrets.token_hex(8)
    values = {"token": token, "number": ledger.number, "worker": holder[0], "pid": holder[1], "next": found.first}
    values |= {"last": last, "attempts": found.attempts, "is_part": found.is_part, "expires_at": now + LEASE_S}
    connection.execute(_INSERT_LEASE, values)
    if ledger.status is JobStatus.PENDING:
        ledger.move(JobStatus.RUNNING, now)
    return Lease(token, leased)


def _payloads(connection: Connection, number: int, first: int, last: int, max_bytes: int) -> tuple[LeasedBatch, ...]:
    base = first_key(number)
    wanted = {"first": base + first, "last": base + last, "max_bytes": max_bytes}
    found = connection.execute(_PAYLOADS, wanted).all()
    if not found or found[0].there != last - first + 1:
        raise RuntimeError(f"batches {first} to {last} of job {number} are incomplete")
    return tuple(LeasedBatch(row.key - base, row.payload) for row in found)


def _add_dead_letter(connection: Connection, ledger: JobLedger, failed: FailedBatch, now: float) -> None:
    ledger.failed += 1
    ledger.failed_items += failed.items
    values = {
        "at": first_key(ledger.number) + failed.failure.seq,
        "its_attempts": failed.attempts,
        "its_error": failed.failure.error,
        "its_traceback": failed.failure.traceback,
        "its_failed_at": now,
    }
    connection.execute(_INSERT_DEAD_LETTER, values)


def _split(connection: Connection, ledger: JobLedger, failed: FailedBatch) -> bool:
    """Replace a batch by two halves; return False if its payload cannot be cut."""
    key = first_key(ledger.number) + failed.failure.seq
    batch = connection.execute(_BATCH, {"at": key}).one()
    halves = split_payload(batch.payload, failed.items)
    if halves is None:
        return False
    left_items = failed.items // 2
    shapes = ((left_items, batch.first_item), (failed.items - left_items, batch.first_item + left_items))
    rows = []
    for seq, (items, first_item), payload in zip((ledger.next_seq, ledger.next_seq + 1), shapes, halves, strict=True):
        new_key = first_key(ledger.number) + seq
        rows.append({"key": new_key, "items": items, "first_item": first_item, "payload": payload})
    connection.execute(insert(batches), rows)
    connection.execute(_DELETE_BATCH, {"at": key})
    part = FailedBatch(failed.failure, attempts=0, is_part=True, items=0)
    connection.execute(_INSERT_RANGE, [_retry_range(ledger, ledger.next_seq + half, part, 0.0) for half in (0, 1)])
    ledger.next_seq += 2
    ledger.batches += 1
    return True


def _retry_range(ledger: JobLedger, seq: int, failed: FailedBatch, not_before: float) -> dict[str, object]:
    return {
        "number": ledger.number,
        "not_before": not_before,
        "first": seq,
        "last": seq,
        "attempts": failed.attempts,
        "is_part": failed.is_part,
    }
