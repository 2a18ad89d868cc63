"""Backups of the SQLite databases while an operator uses them, and their migration on a copy."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from cortex.errors import CortexError, DatabaseUnavailableError
from cortex.state.database import open_jobs_sqlite, open_sqlite
from cortex.state.migrations import MIGRATIONS, Migration


def back_up(databases: Iterable[Path], folder: Path) -> None:
    """Write a consistent copy of each database that exists into a new folder, or none of them.

    Raises: DatabaseUnavailableError.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        partial.mkdir(mode=0o700, parents=True)
        for file in databases:
            if file.exists():
                _copy(file, partial / file.name)
        partial.rename(folder)
    except OSError as error:
        raise DatabaseUnavailableError(f"the databases can't be copied to {folder}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def restore(databases: Iterable[Path], folder: Path) -> None:
    """Replace each database that was migrated since by its copy in `folder`. No operator may run.

    Raises: DatabaseUnavailableError.
    """
    for file in databases:
        copy = folder / file.name
        if copy.exists() and _schema(copy) != _schema(file):
            _copy(copy, file)


def try_migrations(state: Path, jobs: Path, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Migrate copies of the databases in a temporary folder beside them. `migrations`: those of `state`.

    Raises: DatabaseVersionError if a newer version used them; DatabaseUnavailableError; CortexError if it fails.
    """
    with tempfile.TemporaryDirectory(dir=state.parent, prefix="migration-") as folder:
        copies = Path(folder) / "copies"
        back_up((state, jobs), copies)
        try:
            open_sqlite(copies / state.name, migrations).dispose()
            open_jobs_sqlite(copies / jobs.name).dispose()
        except CortexError:
            raise
        except Exception as error:
            raise CortexError(f"a copy of the databases can't be migrated: {error}") from error


def _schema(file: Path) -> int:
    try:
        with contextlib.closing(sqlite3.connect(file)) as connection:
            return int(connection.execute("SELECT version FROM schema_version").fetchone()[0])
    except (sqlite3.Error, TypeError) as error:
        raise DatabaseUnavailableError(f"the schema of {file} can't be read: {error}") from None


def _copy(source: Path, target: Path) -> None:
    try:
        with (
            contextlib.closing(sqlite3.connect(source)) as before,
            contextlib.closing(sqlite3.connect(target)) as after,
        ):
            before.backup(after)
    except sqlite3.Error as error:
        raise DatabaseUnavailableError(f"{source} can't be copied to {target}: {error}") from None
