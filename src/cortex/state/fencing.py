"""What every writing transaction on PostgreSQL begins with: one row of its own schema is changed.

That one statement does three things. Until the transaction ends no other one writes, as SQLite has it: what reads
before it writes needs no further locks. An operator that another has taken over from changes no row, and so nothing
else. And the row tells, after a connection broke in the middle of a commit, whether the commit was made.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, Engine, event

from cortex.errors import DatabaseUnavailableError

#: Execution options of connections: they only read; they look at the fence itself.
READ_ONLY, UNFENCED = "cortex_read_only", "cortex_unfenced"

_TOKEN, _EPOCH = "cortex_token", "cortex_epoch"
_CREATE = (
    "CREATE TABLE fence (id INTEGER PRIMARY KEY, epoch BIGINT NOT NULL, token TEXT NOT NULL)",
    "INSERT INTO fence VALUES (1, 0, '')",
)


class SupersededError(DatabaseUnavailableError):
    """Another operator leads now: what this one wants to write is refused."""


def create_fence(connection: Connection) -> None:
    """Make the row; of another schema each time, and only once."""
    for statement in _CREATE:
        connection.exec_driver_sql(statement)


def raise_fence(connection: Connection, epoch: int) -> None:
    """Shut out whoever has an older epoch; waits for what they are writing. Raises: SupersededError."""
    raised = connection.exec_driver_sql("UPDATE fence SET epoch = %s WHERE epoch <= %s", (epoch, epoch))
    if not raised.rowcount:
        raise SupersededError("another operator leads now")


def keep_fence(engine: Engine, epoch: int | None) -> None:
    """Begin every transaction of an engine that writes with the fence; without an epoch nobody is shut out."""
    mine, more = ("", ()) if epoch is None else (" WHERE epoch = %s", (epoch,))
    engine.update_execution_options(**{_EPOCH: epoch})

    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        connection.info.pop(_TOKEN, None)
        if options.get(READ_ONLY) or options.get(UNFENCED):
            return
        token = secrets.token_hex(8)
        if not connection.exec_driver_sql(f"UPDATE fence SET token = %s{mine}", (token, *more)).rowcount:
            raise SupersededError("another operator leads now; this one may not write any more")
        connection.info[_TOKEN] = token

    event.listen(engine, "begin", begin)


def token_of(connection: Connection) -> str | None:
    """Return what the transaction leaves in the fence; None where there is none."""
    token: str | None = connection.info.get(_TOKEN)
    return token


def was_committed(engine: Engine, token: str) -> bool:
    """Tell whether the last transaction of this writer was committed; waits while the server is still at it.

    The next one must not have begun. Raises: SupersededError if another has written since: nobody knows then.
    """
    query = "SELECT token, epoch FROM fence FOR UPDATE"
    with engine.connect().execution_options(**{UNFENCED: True}) as connection:
        found, epoch = connection.exec_driver_sql(query).one()
    if found != token and engine.get_execution_options()[_EPOCH] not in (None, epoch):
        raise SupersededError("another operator leads now; whether this one's last change was made is not known")
    return bool(found == token)
