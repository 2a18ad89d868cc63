"""Leases that end without a report: released when a job worker stops or dies, or expired without a renewal.

The unresolved batches return to `pending`. If a process died, the batch it was running counts a failed attempt. Each
function runs inside a transaction of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update

from cortex.jobs.batch_queue import LEASE_S, count_items, fail_hook, record_failures, return_to_pending
from cortex.jobs.records import JobLedger, open_numbered_ledger
from cortex.jobs.retry_policy import MAX_DELAY_S, FailedBatch
from cortex.jobs.spec import HOOK_SEQ, BatchFailure
from cortex.state.tables import jobs, leases, pending

#: Error of a batch whose process died.
DEATH_ERROR = "the worker's process died: {cause}"
NO_RENEWAL = f"its lease was not renewed for {LEASE_S:.0f} s"


@dataclass(frozen=True)
class WorkerDeath:
    """Death of a process and the batch it was running; `seq` None: the first unresolved one of its oldest lease."""

    cause: str
    job_id: str | None = None
    seq: int | None = None


def renew(connection: Connection, worker: str, pid: int, tokens: Sequence[str], now: float) -> tuple[str, ...]:
    """Renew leases; return the lost tokens."""
    mine = (leases.c.worker == worker, leases.c.pid == pid, leases.c.token.in_(tokens))
    held = set(connection.execute(select(leases.c.token).where(*mine)).scalars())
    if held:
        connection.execute(update(leases).where(*mine).values(expires_at=now + LEASE_S))
    return tuple(token for token in tokens if token not in held)


def release_others(connection: Connection, worker: str, pid: int, tokens: Sequence[str], now: float) -> None:
    """End all leases of a process except for `tokens`: their replies were lost, so no batch of them has begun."""
    query = select(leases).where(leases.c.worker == worker, leases.c.pid == pid, leases.c.token.not_in(tokens))
    _end(connection, connection.execute(query).all(), None, None, now)


def renew_all(connection: Connection, now: float) -> None:
    """Renew every lease, after a time in which workers could not reach the operator, or when the clock was set.

    If the clock was set back, no batch waits for its next attempt longer than the longest backoff.
    """
    connection.execute(update(leases).values(expires_at=now + LEASE_S))
    latest = now + MAX_DELAY_S
    connection.execute(update(pending).where(pending.c.not_before > latest).values(not_before=latest))


def release(connection: Connection, worker: str, pid: int | None, death: WorkerDeath | None, now: float) -> int:
    """End the leases of a worker, or of one of its processes; return their number."""
    query = select(leases).where(leases.c.worker == worker)
    if pid is not None:
        query = query.where(leases.c.pid == pid)
    rows = connection.execute(query.order_by(leases.c.id)).all()
    for _, of_process in groupby(sorted(rows, key=_process), key=_process):
        ended = list(of_process)
        _end(connection, ended, _failed_batch(connection, ended, death) if death else None, death, now)
    return len(rows)


def expire(connection: Connection, now: float) -> int:
    """End the leases that were not renewed, as if their processes had died; return their number."""
    rows = connection.execute(select(leases).order_by(leases.c.id)).all()
    count = 0
    for _, of_process in groupby(sorted(rows, key=_process), key=_process):
        held = list(of_process)
        expired = [lease for lease in held if lease.expires_at <= now]
        # A process works at its oldest lease. If that one was renewed, the process is alive and ran no other batch.
        failed = (held[0], held[0].next) if held[0] in expired else None
        _end(connection, expired, failed, WorkerDeath(NO_RENEWAL), now)
        count += len(expired)
    return count


def holders(connection: Connection) -> set[tuple[str, int]]:
    """Return the worker and process id of every lease."""
    return {(row.worker, row.pid) for row in connection.execute(select(leases.c.worker, leases.c.pid).distinct())}


def _process(lease: Row[Any]) -> tuple[str, int]:
    return (lease.worker, lease.pid)


def _failed_batch(connection: Connection, ended: list[Row[Any]], death: WorkerDeath) -> tuple[Row[Any], int] | None:
    """Return the lease and number of the batch that was running; None if it was resolved or leased again since."""
    if death.seq is None:
        return ended[0], ended[0].next
    number = connection.execute(select(jobs.c.number).where(jobs.c.id == death.job_id)).scalar()
    for lease in ended:
        if lease.number == number and lease.next <= death.seq <= lease.last:
            return lease, death.seq
    return None


def _end(
    connection: Connection,
    ended: Iterable[Row[Any]],
    failed: tuple[Row[Any], int] | None,
    death: WorkerDeath | None,
    now: float,
) -> None:
    """Delete leases and return their unresolved batches to `pending`, except for the failed one."""
    for lease in ended:
        connection.execute(delete(leases).where(leases.c.id == lease.id))
        ledger = open_numbered_ledger(connection, lease.number)
        if ledger is None or not ledger.is_leasable:
            continue
        if death is not None and failed is not None and failed[0] is lease:
            seq = failed[1]
            return_to_pending(connection, ledger, lease, lease.next, seq - 1)
            return_to_pending(connection, ledger, lease, seq + 1, lease.last)
            _fail(connection, ledger, lease, seq, death.cause, now)
        else:
            return_to_pending(connection, ledger, lease, lease.next, lease.last)
        ledger.save(connection, now)


def _fail(connection: Connection, ledger: JobLedger, lease: Row[Any], seq: int, cause: str, now: float) -> None:
    if seq == HOOK_SEQ:
        fail_hook(connection, ledger, lease, cause, now)
        return
    items = count_items(connection, ledger.number, seq, seq)
    failure = BatchFailure(seq, DEATH_ERROR.format(cause=cause))
    record_failures(connection, ledger, [FailedBatch(failure, lease.attempts + 1, lease.is_part, items)], now)
