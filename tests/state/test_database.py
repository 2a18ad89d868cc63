from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect, text, update

from cortex.state.database import MIGRATIONS, DatabaseVersionError, open_sqlite
from cortex.state.tables import metadata, schema_version


def test_opening_twice_changes_nothing_and_makes_every_table(tmp_path: Path) -> None:
    for _ in range(2):
        engine = open_sqlite(tmp_path / "state.db")
        assert set(inspect(engine).get_table_names()) == set(metadata.tables)
        engine.dispose()


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    engine = open_sqlite(tmp_path / "state.db")
    with engine.begin() as connection:
        connection.execute(update(schema_version).values(version=len(MIGRATIONS) + 1))
    engine.dispose()
    with pytest.raises(DatabaseVersionError, match="newer version; upgrade cortex"):
        open_sqlite(tmp_path / "state.db")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_text("hello " * 1000)
    with pytest.raises(DatabaseVersionError, match=r"state\.db can't be read as a database"):
        open_sqlite(tmp_path / "state.db")


def test_a_migration_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    open_sqlite(tmp_path / "state.db").dispose()

    def broken(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE half_done (id INTEGER)"))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        open_sqlite(tmp_path / "state.db", (*MIGRATIONS, broken))
    engine = open_sqlite(tmp_path / "state.db")
    assert "half_done" not in inspect(engine).get_table_names()


def test_writes_are_durable_and_foreign_keys_hold(tmp_path: Path) -> None:
    engine = open_sqlite(tmp_path / "state.db")
    with engine.connect() as connection:
        pragmas = ("journal_mode", "synchronous", "foreign_keys")
        values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas]
    assert values == ["wal", 2, 1]
