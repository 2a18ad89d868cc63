"""Fencing on PostgreSQL: every writing transaction first updates the one row of the table `fence` in its schema.

This one statement does three things:

- It serializes writers, as SQLite does: a transaction that reads before it writes needs no further locks.
- It checks this leader's epoch: an operator that was superseded updates no row, and its transaction fails.
- It leaves a token: after a connection broke during a commit, the token shows if the commit happened.
"""

from __future__ import annotations

import secrets
import time

from sqlalchemy import Connection, Engine, event

from cortex.errors import SupersededError

#: Execution options of connections that only read, and that query the fence itself.
READ_ONLY, UNFENCED = "cortex_read_only", "cortex_unfenced"

_TOKEN, _EPOCH = "cortex_token", "cortex_epoch"
_CREATE = (
    "CREATE TABLE fence (id INTEGER PRIMARY KEY, epoch BIGINT NOT NULL, token TEXT NOT NULL)",
    "INSERT INTO fence VALUES (1, 0, '')",
)
_LOCK = "SELECT 1 FROM fence FOR UPDATE SKIP LOCKED"
_TERMINATE_HOLDER = """
SELECT pg_terminate_backend(holder.pid), pg_stat_clear_snapshot()
FROM fence JOIN pg_stat_activity AS holder ON holder.backend_xid = fence.xmax AND holder.usename = current_user"""
_POLL_S = 0.05


def create_fence(connection: Connection) -> None:
    """Create the fence of a schema."""
    for statement in _CREATE:
        connection.exec_driver_sql(statement)


def raise_fence(connection: Connection, epoch: int) -> None:
    """Reject all older epochs from here on, and abort their open transactions. Raises: SupersededError.

    The operator of such a transaction may be frozen: waiting for it could take a minute.
    """
    while not connection.exec_driver_sql(_LOCK).first():
        connection.exec_driver_sql(_TERMINATE_HOLDER)
        time.sleep(_POLL_S)
    raised = connection.exec_driver_sql("UPDATE fence SET epoch = %s WHERE epoch <= %s", (epoch, epoch))
    if not raised.rowcount:
        raise SupersededError("another operator is the leader now")


def keep_fence(engine: Engine, epoch: int | None) -> None:
    """Begin every writing transaction of an engine with the fence; without an epoch it rejects nobody."""
    mine, more = ("", ()) if epoch is None else (" WHERE epoch = %s", (epoch,))
    engine.update_execution_options(**{_EPOCH: epoch})

    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        connection.info.pop(_TOKEN, None)
        if options.get(READ_ONLY) or options.get(UNFENCED):
            return
        token = secrets.token_hex(8)
        if not connection.exec_driver_sql(f"UPDATE fence SET token = %s{mine}", (token, *more)).rowcount:
            raise SupersededError("another operator is the leader now; this one can no longer write")
        connection.info[_TOKEN] = token

    event.listen(engine, "begin", begin)


def token_of(connection: Connection) -> str | None:
    """Return the token that the transaction leaves in the fence; None without a fence."""
    token: str | None = connection.info.get(_TOKEN)
    return token


def was_committed(engine: Engine, token: str) -> bool:
    """Return True if the last transaction of this writer was committed; waits while the server still works on it.

    The next transaction must not have begun. Raises: SupersededError if another operator has written since, so that
    the outcome is unknown.
    """
    query = "SELECT token, epoch FROM fence FOR UPDATE"
    with engine.connect().execution_options(**{UNFENCED: True}) as connection:
        found, epoch = connection.exec_driver_sql(query).one()
    if found != token and engine.get_execution_options()[_EPOCH] not in (None, epoch):
        raise SupersededError("another operator is the leader now; the outcome of this one's last change is unknown")
    return bool(found == token)
