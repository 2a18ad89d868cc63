"""Leases that end without a report: their workers were stopped, died, or were not heard of any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update

from cortex.jobs.ledger import Ledger, open_numbered_ledger
from cortex.jobs.queue import LEASE_S, count_items, put_back
from cortex.jobs.retry_policy import MAX_DELAY_S, Failed, record_failures
from cortex.jobs.spec import BatchFailure
from cortex.state.job_tables import jobs, leases, pending

#: The error of a batch that was inside a process that died.
DEATH_ERROR = "the worker's process died: {cause}"
UNHEARD = f"nothing was heard of it for {LEASE_S:.0f} s"


@dataclass(frozen=True)
class Blame:
    """Which batch was inside when a process died; `seq` None: the first that is not resolved of the oldest lease."""

    cause: str
    job_id: str | None = None
    seq: int | None = None


def renew(connection: Connection, worker: str, pid: int, tokens: Sequence[str], now: float) -> tuple[str, ...]:
    """Keep leases from expiring; return the tokens that are lost."""
    mine = (leases.c.worker == worker, leases.c.pid == pid, leases.c.token.in_(tokens))
    held = set(connection.execute(select(leases.c.token).where(*mine)).scalars())
    if held:
        connection.execute(update(leases).where(*mine).values(expires_at=now + LEASE_S))
    return tuple(token for token in tokens if token not in held)


def release_others(connection: Connection, worker: str, pid: int, tokens: Sequence[str], now: float) -> None:
    """End the leases of a process but for these: it does not know of them, and has begun nothing of them."""
    query = select(leases).where(leases.c.worker == worker, leases.c.pid == pid, leases.c.token.not_in(tokens))
    _end(connection, connection.execute(query).all(), None, None, now)


def renew_all(connection: Connection, now: float) -> None:
    """Keep every lease from expiring, as after a time in which no worker could be heard, or a clock that was set.

    One that was set back must not keep batches from their next attempt for longer than they ever have to wait.
    """
    connection.execute(update(leases).values(expires_at=now + LEASE_S))
    latest = now + MAX_DELAY_S
    connection.execute(update(pending).where(pending.c.not_before > latest).values(not_before=latest))


def release(connection: Connection, worker: str, pid: int | None, blame: Blame | None, now: float) -> int:
    """End the leases of a worker, or of one of its processes; return how many there were."""
    query = select(leases).where(leases.c.worker == worker)
    if pid is not None:
        query = query.where(leases.c.pid == pid)
    rows = connection.execute(query.order_by(leases.c.id)).all()
    for _, of_process in groupby(sorted(rows, key=_process), key=_process):
        ended = list(of_process)
        _end(connection, ended, _blamed(connection, ended, blame) if blame else None, blame, now)
    return len(rows)


def expire(connection: Connection, now: float) -> int:
    """End the leases that were not renewed, as if their processes had died without a word; return how many."""
    rows = connection.execute(select(leases).order_by(leases.c.id)).all()
    count = 0
    for _, of_process in groupby(sorted(rows, key=_process), key=_process):
        held = list(of_process)
        expired = [lease for lease in held if lease.expires_at <= now]
        # A process works at its oldest lease. If that one is renewed, the process lives and was in no other.
        blamed = (held[0], held[0].next) if held[0] in expired else None
        _end(connection, expired, blamed, Blame(UNHEARD), now)
        count += len(expired)
    return count


def holders(connection: Connection) -> set[tuple[str, int]]:
    """Return each worker that has a lease, with the process that has it."""
    return {(row.worker, row.pid) for row in connection.execute(select(leases.c.worker, leases.c.pid).distinct())}


def _process(lease: Row[Any]) -> tuple[str, int]:
    return (lease.worker, lease.pid)


def _blamed(connection: Connection, ended: list[Row[Any]], blame: Blame) -> tuple[Row[Any], int] | None:
    """Return the lease and the number of the batch that was inside; None if that was resolved or leased anew."""
    if blame.seq is None:
        return ended[0], ended[0].next
    number = connection.execute(select(jobs.c.number).where(jobs.c.id == blame.job_id)).scalar()
    for lease in ended:
        if lease.number == number and lease.next <= blame.seq <= lease.last:
            return lease, blame.seq
    return None


def _end(
    connection: Connection,
    ended: Iterable[Row[Any]],
    blamed: tuple[Row[Any], int] | None,
    blame: Blame | None,
    now: float,
) -> None:
    """Delete leases and return what is left of them to their jobs, but for the blamed batch, which failed."""
    for lease in ended:
        connection.execute(delete(leases).where(leases.c.id == lease.id))
        ledger = open_numbered_ledger(connection, lease.number)
        if ledger is None or not ledger.is_leasable:
            continue
        if blame is not None and blamed is not None and blamed[0] is lease:
            seq = blamed[1]
            put_back(connection, ledger, lease, lease.next, seq - 1)
            put_back(connection, ledger, lease, seq + 1, lease.last)
            _fail(connection, ledger, lease, seq, blame.cause, now)
        else:
            put_back(connection, ledger, lease, lease.next, lease.last)
        ledger.save(connection, now)


def _fail(connection: Connection, ledger: Ledger, lease: Row[Any], seq: int, cause: str, now: float) -> None:
    items = count_items(connection, ledger.number, seq, seq)
    failure = BatchFailure(seq, DEATH_ERROR.format(cause=cause))
    record_failures(connection, ledger, [Failed(failure, lease.attempts + 1, lease.is_part, items)], now)
