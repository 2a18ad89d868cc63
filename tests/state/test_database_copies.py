from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select, update

from cortex.errors import CortexError, DatabaseUnavailableError, DatabaseVersionError
from cortex.state.database import MIGRATIONS, open_jobs_sqlite, open_sqlite
from cortex.state.database_copies import back_up, restore, try_migrations
from cortex.state.tables import facts, schema_version

pytestmark = pytest.mark.usefixtures("real_databases")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The databases of the version before, in use."""
    state, jobs = tmp_path / "state.db", tmp_path / "jobs.db"
    open_sqlite(state, MIGRATIONS[:-1]).dispose()
    open_jobs_sqlite(jobs).dispose()
    return state, jobs


def test_a_backup_contains_what_was_written_before_it_and_is_restored_after_a_migration(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = open_sqlite(files[0], MIGRATIONS[:-1])
    with engine.begin() as connection:
        connection.execute(insert(facts).values(name="color", value="red"))
    back_up(files, tmp_path / "backup")
    assert sorted(file.name for file in (tmp_path / "backup").iterdir()) == ["jobs.db", "state.db"]
    engine.dispose()
    open_sqlite(files[0]).dispose()
    assert _schema(files[0]) == len(MIGRATIONS)
    restore(files, tmp_path / "backup")
    assert _schema(files[0]) == len(MIGRATIONS) - 1
    restored = open_sqlite(files[0], MIGRATIONS[:-1])
    with restored.connect() as connection:
        assert connection.execute(select(facts.c.value)).scalars().all() == ["red"]


def test_a_database_that_was_not_migrated_is_left_as_it_is(files: tuple[Path, Path], tmp_path: Path) -> None:
    back_up(files, tmp_path / "backup")
    engine = open_sqlite(files[0], MIGRATIONS[:-1])
    with engine.begin() as connection:
        connection.execute(insert(facts).values(name="color", value="red"))
    restore(files, tmp_path / "backup")
    with engine.connect() as connection:
        assert connection.execute(select(facts.c.value)).scalars().all() == ["red"]


def test_migrations_are_tried_on_copies(files: tuple[Path, Path]) -> None:
    try_migrations(*files)
    assert _schema(files[0]) == len(MIGRATIONS) - 1

    def failing(connection: Connection) -> None:
        connection.exec_driver_sql("SELECT * FROM nowhere")

    def raising(connection: Connection) -> None:
        raise ValueError("not in this order")

    for last, message in ((failing, "no such table: nowhere"), (raising, "can't be migrated: not in this order")):
        with pytest.raises(CortexError, match=message):
            try_migrations(*files, (*MIGRATIONS, last))
    engine = open_sqlite(files[0])
    with engine.begin() as connection:
        connection.execute(update(schema_version).values(version=len(MIGRATIONS) + 1))
    engine.dispose()
    with pytest.raises(DatabaseVersionError, match="it was used by a newer version"):
        try_migrations(*files)
    assert not list(files[0].parent.glob("migration-*"))


def test_a_backup_that_fails_leaves_nothing(files: tuple[Path, Path], tmp_path: Path) -> None:
    files[1].write_bytes(b"no database" * 1000)
    with pytest.raises(DatabaseUnavailableError, match="jobs.db can't be copied to "):
        back_up(files, tmp_path / "backup")
    assert not list(tmp_path.glob("backup*"))


def _schema(file: Path) -> int:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return int(connection.execute("SELECT version FROM schema_version").fetchone()[0])
