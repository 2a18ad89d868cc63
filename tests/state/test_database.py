from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, insert, inspect, text, update
from sqlalchemy.exc import OperationalError

from cortex.config.schema import Api
from cortex.errors import DatabaseUnavailableError, DatabaseVersionError
from cortex.state.database import MIGRATIONS, open_jobs_sqlite, open_sqlite
from cortex.state.queries.apis import ApiStore
from cortex.state.tables import apis, metadata, schema_version, serving_revisions
from harness import TESTS

pytestmark = pytest.mark.usefixtures("real_databases")

#: Migrations of version 0.1.0, which kept no history.
_BEFORE_HISTORY = 7


def test_opening_creates_all_tables_and_is_idempotent(tmp_path: Path) -> None:
    for _ in range(2):
        engine = open_sqlite(tmp_path / "state.db")
        assert set(inspect(engine).get_table_names()) == set(metadata.tables)
        engine.dispose()


@pytest.mark.parametrize(("name", "open_file"), [("state.db", open_sqlite), ("jobs.db", open_jobs_sqlite)])
def test_migrations_bring_a_database_of_version_0_1_0_to_the_schema_of_a_new_one(
    name: str, open_file: Callable[[Path], Engine], tmp_path: Path
) -> None:
    with tarfile.open(TESTS / "fixtures" / "home_0_1_0" / "home.tar.gz") as archive:
        archive.extract(name, tmp_path)
    assert columns(open_file(tmp_path / name)) == columns(open_file(tmp_path / "new.db"))


def test_the_history_of_an_older_database_begins_with_what_serves_and_what_does_not_yet(tmp_path: Path) -> None:
    engine = open_sqlite(tmp_path / "state.db", MIGRATIONS[:_BEFORE_HISTORY])
    row = {
        "kind": "RealtimeAPI",
        "project_hash": "p",
        "nonce": "n",
        "spec_id": "s",
        "created_at": 1.0,
        "updated_at": 2.0,
    }
    with engine.begin() as connection:
        for name in ("good", "failing", "new"):
            data = spec(name).model_dump_json()
            connection.execute(insert(apis).values(**row, name=name, spec=data, revision="r2", api_id=name))
            if name != "new":
                served = {"spec": data, "revision": "r2" if name == "good" else "r1", "project_hash": "p"}
                connection.execute(insert(serving_revisions).values(api=name, **served))
    engine.dispose()
    store = ApiStore(open_sqlite(tmp_path / "state.db"))
    found = {
        name: [(entry.number, entry.revision, entry.action, entry.live_at is not None) for entry in store.history(name)]
        for name in ("good", "failing", "new")
    }
    assert found == {
        "good": [(1, "r2", "upgrade", True)],
        "failing": [(2, "r2", "upgrade", False), (1, "r1", "upgrade", True)],
        "new": [(1, "r2", "upgrade", False)],
    }


def spec(name: str) -> Api:
    handler = {"interface": "handler", "type": "python", "path": "handler.py"}
    return Api.model_validate({"name": name, "handler": handler})


def columns(engine: Engine) -> dict[str, dict[str, str]]:
    """Return the type of each column of each table."""
    found = inspect(engine)
    return {
        table: {column["name"]: str(column["type"]) for column in found.get_columns(table)}
        for table in found.get_table_names()
    }


def test_rejects_a_database_of_a_newer_version(tmp_path: Path) -> None:
    engine = open_sqlite(tmp_path / "state.db")
    with engine.begin() as connection:
        connection.execute(update(schema_version).values(version=len(MIGRATIONS) + 1))
    engine.dispose()
    with pytest.raises(DatabaseVersionError, match="newer version; upgrade cortex"):
        open_sqlite(tmp_path / "state.db")


def test_rejects_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_text("hello " * 1000)
    with pytest.raises(DatabaseVersionError, match=r"state\.db can't be read as a database"):
        open_sqlite(tmp_path / "state.db")


def test_a_full_disk_and_a_lock_make_the_database_unavailable(tmp_path: Path) -> None:
    engine = open_sqlite(tmp_path / "state.db", pragmas=["journal_mode = WAL", "busy_timeout = 1"])
    with engine.begin() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    is_full = pytest.raises(DatabaseUnavailableError, match=r"state\.db can't be used now: database or disk is full")
    with is_full, engine.begin() as connection:
        connection.execute(text("CREATE TABLE large AS SELECT zeroblob(1000000) AS bytes"))
    with engine.begin(), pytest.raises(DatabaseUnavailableError, match="database is locked"), engine.begin():
        pass
    with engine.begin() as connection, pytest.raises(OperationalError, match="no such table"):
        connection.execute(text("SELECT * FROM missing"))


def test_a_failed_migration_is_rolled_back(tmp_path: Path) -> None:
    open_sqlite(tmp_path / "state.db").dispose()

    def broken(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE half_done (id INTEGER)"))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        open_sqlite(tmp_path / "state.db", (*MIGRATIONS, broken))
    engine = open_sqlite(tmp_path / "state.db")
    assert "half_done" not in inspect(engine).get_table_names()


def test_writes_are_durable_and_foreign_keys_enforced(tmp_path: Path) -> None:
    engine = open_sqlite(tmp_path / "state.db")
    with engine.connect() as connection:
        pragmas = ("journal_mode", "synchronous", "foreign_keys")
        values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas]
    assert values == ["wal", 2, 1]
