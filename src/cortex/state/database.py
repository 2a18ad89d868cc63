"""Opens the database and brings its schema up to date; knows nothing of what is stored in it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, inspect, select, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import ConnectionPoolEntry

from cortex.errors import CortexError
from cortex.state.tables import api_versions, apis, schema_version, serving_revisions

#: How long a statement waits for another process's write before it fails.
BUSY_TIMEOUT_MS = 10_000


class DatabaseVersionError(CortexError):
    """The database was written by a newer version of cortex, or is not one of ours."""

    code = "database_version"


def _create_apis(connection: Connection) -> None:
    for table in (apis, serving_revisions, api_versions):
        table.create(connection)


#: Migration N is item N-1. Append only; what was released never changes.
MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_create_apis,)


def open_sqlite(path: Path) -> Engine:
    """Open (and make) the SQLite database at `path`, migrated to this version's schema.

    Raises: DatabaseVersionError if it is newer than this code or can't be read as a database.
    """
    with contextlib.suppress(OSError):  # SQLite says it better
        path.touch(mode=0o600)  # the files that SQLite puts beside it get its mode
    engine = create_engine(URL.create("sqlite", database=str(path)))
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_at_once)
    try:
        migrate(engine)
    except DatabaseError as error:
        engine.dispose()
        raise DatabaseVersionError(f"{path} can't be read as a database: {error.orig}") from error
    path.chmod(0o600)
    return engine


def migrate(engine: Engine) -> None:
    """Apply the migrations that are missing, each in its own transaction. Repeating it changes nothing."""
    version = _version(engine)
    if version > len(MIGRATIONS):
        raise DatabaseVersionError(
            f"the database has schema {version}, this cortex knows up to {len(MIGRATIONS)}: "
            "it was used by a newer version; upgrade cortex, or choose another CORTEX_HOME"
        )
    for number, migration in enumerate(MIGRATIONS[version:], start=version + 1):
        with engine.begin() as connection:
            migration(connection)
            connection.execute(update(schema_version).values(version=number))


def _version(engine: Engine) -> int:
    with engine.begin() as connection:
        if not inspect(connection).has_table(schema_version.name):
            schema_version.create(connection)
            connection.execute(insert(schema_version).values(version=0))
        return int(connection.execute(select(schema_version.c.version)).scalar_one())


def _configure_sqlite(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    # The driver's own implicit BEGIN leaves DDL outside the transaction; `_begin_at_once` sends ours.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # an acknowledged deploy survives a power cut
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_at_once(connection: Connection, *_: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
