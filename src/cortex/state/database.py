"""Open and migrate the two databases, state and jobs: SQLite files, or two schemas of one PostgreSQL database.

Operators that open a PostgreSQL database at the same time migrate it one after the other.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, inspect, select, update
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import ConnectionPoolEntry

from cortex.errors import DatabaseUnavailableError, DatabaseVersionError
from cortex.state import fencing, postgresql
from cortex.state.fencing import READ_ONLY
from cortex.state.migrations import JOB_MIGRATIONS, MIGRATIONS, Migration
from cortex.state.tables import schema_version

#: Time that a statement waits for another process's write before it fails.
BUSY_TIMEOUT_MS = 10_000

#: Pragmas of every connection. An acknowledged write survives a power cut.
PRAGMAS = (f"busy_timeout = {BUSY_TIMEOUT_MS}", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON")

#: Pragmas that also return the space of deleted payloads to the disk; `auto_vacuum` must precede the first write.
JOB_PRAGMAS = ("auto_vacuum = INCREMENTAL", *PRAGMAS, f"journal_size_limit = {64 * 2**20}", "cache_size = -16384")

#: Location of a database: a file, or the URL of a PostgreSQL database.
Where = Path | str

STATE_SCHEMA, JOBS_SCHEMA = "cortex_state", "cortex_jobs"


def open_state(where: Where, epoch: int | None = None) -> Engine:
    """Open the state database, created and migrated if needed.

    With an `epoch`, PostgreSQL rejects writes of operators with an older epoch, and those of this one as soon as there
    is a newer epoch. Raises: DatabaseAddressError, DatabaseVersionError.
    """
    if isinstance(where, Path):
        return open_sqlite(where)
    return open_postgresql(where, STATE_SCHEMA, MIGRATIONS, epoch)


def open_jobs(where: Where, epoch: int | None = None) -> Engine:
    """Open the database of jobs; otherwise as `open_state`."""
    if isinstance(where, Path):
        return open_jobs_sqlite(where)
    return open_postgresql(where, JOBS_SCHEMA, JOB_MIGRATIONS, epoch)


def check_address(url: str) -> None:
    """Check that an operator can use the PostgreSQL database at a URL. Raises: DatabaseAddressError."""
    postgresql.check_database(url, (STATE_SCHEMA, JOBS_SCHEMA))


def check_version(url: str) -> None:
    """Check that no newer version has used the PostgreSQL database at a URL.

    Raises: DatabaseVersionError, DatabaseAddressError.
    """
    for schema, migrations in ((STATE_SCHEMA, MIGRATIONS), (JOBS_SCHEMA, JOB_MIGRATIONS)):
        engine = postgresql.postgresql_engine(url, schema)
        try:
            with reading(engine).begin() as connection:
                if inspect(connection).has_table(schema_version.name):
                    _known_version(connection, migrations)
        finally:
            engine.dispose()


def shown(where: Where) -> str:
    """Return a location without passwords, for messages."""
    return str(where) if isinstance(where, Path) else postgresql.shown(where)


def open_sqlite(path: Path, migrations: Sequence[Migration] = MIGRATIONS, pragmas: Sequence[str] = PRAGMAS) -> Engine:
    """Open the SQLite database at `path`, created and migrated if needed.

    Raises: DatabaseVersionError if it is newer than this code or can't be read as a database.
    """
    engine = sqlite_engine(path, pragmas)
    try:
        migrate(engine, migrations)
    except DatabaseError as error:
        engine.dispose()
        raise DatabaseVersionError(f"{path} can't be read as a database: {error.orig}") from error
    path.chmod(0o600)
    return engine


def open_jobs_sqlite(path: Path) -> Engine:
    """Open the SQLite database of jobs at `path`; otherwise as `open_sqlite`."""
    return open_sqlite(path, JOB_MIGRATIONS, JOB_PRAGMAS)


def open_postgresql(url: str, schema: str, migrations: Sequence[Migration], epoch: int | None = None) -> Engine:
    """Open a schema of a PostgreSQL database; see `open_state`."""
    engine = postgresql.postgresql_engine(url, schema)
    try:
        with engine.begin() as connection:
            _lock_schema(connection, schema)
            if not inspect(connection).has_table("fence"):
                fencing.create_fence(connection)
            if epoch is not None:
                fencing.raise_fence(connection, epoch)
        migrate(engine, migrations, schema)
    except BaseException:
        engine.dispose()
        raise
    fencing.keep_fence(engine, epoch)
    return engine


def reading(engine: Engine) -> Engine:
    """Return the engine for transactions that only read: they wait for no writer, and read a consistent snapshot."""
    if engine.dialect.name != "postgresql":
        return engine.execution_options(**{READ_ONLY: True})
    return engine.execution_options(**{READ_ONLY: True}, isolation_level="REPEATABLE READ", postgresql_readonly=True)


def migrate(engine: Engine, migrations: Sequence[Migration] = MIGRATIONS, name: str = "") -> None:
    """Apply the missing migrations in one transaction: a failure leaves the database as it was.

    Concurrent migrations of the database with that `name` run one after the other.
    """
    with engine.begin() as connection:
        _lock_schema(connection, name)
        if not inspect(connection).has_table(schema_version.name):
            schema_version.create(connection, checkfirst=False)
            connection.execute(insert(schema_version).values(version=0))
        version = _known_version(connection, migrations)
        if version < len(migrations):
            for apply in migrations[version:]:
                apply(connection)
            connection.execute(update(schema_version).values(version=len(migrations)))


def _known_version(connection: Connection, migrations: Sequence[Migration]) -> int:
    """Return the number of migrations that the database has. Raises: DatabaseVersionError if it has more."""
    version: int = connection.execute(select(schema_version.c.version)).scalar_one()
    if version > len(migrations):
        raise DatabaseVersionError(
            f"the database has schema {version}, this cortex knows up to {len(migrations)}: "
            "it was used by a newer version; upgrade cortex, or choose another CORTEX_HOME"
        )
    return version


def _lock_schema(connection: Connection, name: str) -> None:
    if connection.dialect.name == "postgresql":  # SQLite has only one writer
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('cortex'), hashtext(%s))", (name,))


def sqlite_engine(path: Path, pragmas: Sequence[str]) -> Engine:
    """Return an engine for the file at `path`, which is created readable by its owner only."""
    with contextlib.suppress(OSError):  # SQLite raises a better error
        path.touch(mode=0o600)  # SQLite gives the files beside it the same mode
    engine = create_engine(URL.create("sqlite", database=str(path)))
    event.listen(engine, "connect", partial(_configure, pragmas))
    event.listen(engine, "begin", _begin)

    def convert_error(context: ExceptionContext) -> BaseException | None:
        error = context.original_exception
        # The general code is that of mistakes in SQL; others are those of the disk, or of a lock.
        if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
            return DatabaseUnavailableError(
                f"the database {path} can't be used now: {error}; check its disk, path and lock"
            )
        return None

    event.listen(engine, "handle_error", convert_error, retval=True)
    return engine


def _configure(pragmas: Sequence[str], connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    # The driver's implicit BEGIN leaves DDL outside the transaction; `_begin` sends an explicit one.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in pragmas:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection, *_: Any) -> None:
    # BEGIN IMMEDIATE waits for the write lock. A transaction that reads first would fail if another wrote meanwhile.
    is_reading = connection.get_execution_options().get(READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")
