"""Opens the databases, SQLite files or PostgreSQL, and brings their schema up to date; knows nothing of what is stored.

With PostgreSQL both are schemas of one database. Operators that open it at once take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, Engine, insert, inspect, select, update
from sqlalchemy.exc import DatabaseError

from cortex.errors import CortexError
from cortex.state import fencing as fence
from cortex.state import postgresql
from cortex.state.fencing import READ_ONLY
from cortex.state.migrations import JOB_MIGRATIONS, MIGRATIONS, Migration
from cortex.state.postgresql import DatabaseAddressError
from cortex.state.sqlite import JOB_PRAGMAS, PRAGMAS, sqlite_engine
from cortex.state.tables import schema_version

#: Where a database is: a file, or the URL of a PostgreSQL database.
Where = Path | str

STATE_SCHEMA, JOBS_SCHEMA = "cortex_state", "cortex_jobs"

_SCHEMES = ("postgresql://", "postgres://")


class DatabaseVersionError(CortexError):
    """The database was written by a newer version of cortex, or is not one of ours."""

    code = "database_version"


def open_state(where: Where, epoch: int | None = None) -> Engine:
    """Open (and make) the database of what is wanted, migrated to this version's schema.

    With an `epoch`, PostgreSQL takes no writes any more of an operator that has an older one, and of this one only
    until there is a newer one. Raises: DatabaseAddressError, DatabaseVersionError.
    """
    if isinstance(where, Path):
        return open_sqlite(where)
    return open_postgresql(where, STATE_SCHEMA, MIGRATIONS, epoch)


def open_jobs(where: Where, epoch: int | None = None) -> Engine:
    """Open (and make) the database of jobs; otherwise as `open_state`."""
    if isinstance(where, Path):
        return open_jobs_sqlite(where)
    return open_postgresql(where, JOBS_SCHEMA, JOB_MIGRATIONS, epoch)


def parse_where(text: str) -> Where:
    """Read what a user gave as a database. Raises: DatabaseAddressError."""
    if text.startswith(_SCHEMES):
        return text
    if "://" in text:
        raise DatabaseAddressError("the URL of a database must begin with postgresql://; without one, SQLite is used")
    return Path(text)


def shown(where: Where) -> str:
    """Return where a database is, without passwords: for people to read."""
    return str(where) if isinstance(where, Path) else postgresql.shown(where)


def open_sqlite(path: Path, migrations: Sequence[Migration] = MIGRATIONS, pragmas: Sequence[str] = PRAGMAS) -> Engine:
    """Open (and make) the SQLite database at `path`, migrated to this version's schema.

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
    """Open (and make) the SQLite database of jobs at `path`; otherwise as `open_sqlite`."""
    return open_sqlite(path, JOB_MIGRATIONS, JOB_PRAGMAS)


def open_postgresql(url: str, schema: str, migrations: Sequence[Migration], epoch: int | None = None) -> Engine:
    """Open (and make) a schema of a PostgreSQL database; see `open_state`."""
    engine = postgresql.postgresql_engine(url, schema)
    try:
        with engine.begin() as connection:
            _take_turns(connection, schema)
            if not inspect(connection).has_table("fence"):
                fence.create_fence(connection)
            if epoch is not None:
                fence.raise_fence(connection, epoch)
        migrate(engine, migrations, schema)
    except BaseException:
        engine.dispose()
        raise
    fence.keep_fence(engine, epoch)
    return engine


def reading(engine: Engine) -> Engine:
    """Return the same database for transactions that only read: they wait for no writer, and see one moment."""
    if engine.dialect.name != "postgresql":
        return engine.execution_options(**{READ_ONLY: True})
    return engine.execution_options(**{READ_ONLY: True}, isolation_level="REPEATABLE READ", postgresql_readonly=True)


def migrate(engine: Engine, migrations: Sequence[Migration] = MIGRATIONS, name: str = "") -> None:
    """Apply the migrations that are missing, each in its own transaction. Repeating it changes nothing.

    Whoever migrates the database of that `name` at the same time takes turns.
    """
    while _migrate_once(engine, migrations, name):
        pass


def _migrate_once(engine: Engine, migrations: Sequence[Migration], name: str) -> bool:
    """Apply the next migration; False if there is none."""
    with engine.begin() as connection:
        _take_turns(connection, name)
        if not inspect(connection).has_table(schema_version.name):
            schema_version.create(connection)
            connection.execute(insert(schema_version).values(version=0))
        version = connection.execute(select(schema_version.c.version)).scalar_one()
        if version > len(migrations):
            raise DatabaseVersionError(
                f"the database has schema {version}, this cortex knows up to {len(migrations)}: "
                "it was used by a newer version; upgrade cortex, or choose another CORTEX_HOME"
            )
        if version == len(migrations):
            return False
        migrations[version](connection)
        connection.execute(update(schema_version).values(version=version + 1))
        return True


def _take_turns(connection: Connection, name: str) -> None:
    if connection.dialect.name == "postgresql":  # SQLite has but one writer
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('cortex'), hashtext(%s))", (name,))
