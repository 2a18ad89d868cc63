from __future__ import annotations

import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, insert, inspect, select, text, update
from sqlalchemy.exc import OperationalError

from cortex.config.schema import Api
from cortex.errors import DatabaseUnavailableError, DatabaseVersionError
from cortex.jobs.batch_queue import LEASE_S, add_hook, exchange
from cortex.jobs.lease_expiry import expire
from cortex.jobs.records import put_mark, read_job, read_marks
from cortex.jobs.spec import Report
from cortex.lifecycle import JobStatus
from cortex.state.database import (
    JOB_MIGRATIONS,
    JOBS_SCHEMA,
    MIGRATIONS,
    Where,
    open_jobs,
    open_jobs_sqlite,
    open_postgresql,
    open_sqlite,
)
from cortex.state.queries.apis import ApiStore
from cortex.state.tables import apis, leases, metadata, pending, schema_version, serving_revisions
from harness import TESTS
from harness.jobs.job_checks import check_jobs, put_job

pytestmark = pytest.mark.usefixtures("real_databases")

#: Migrations of version 0.1.0, which kept no history.
_BEFORE_HISTORY = 7
#: The lease of a completion hook in versions that kept it in a mark.
HELD = '{"token":"NAME","worker":"NAME","pid":7}'


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


#: Marks of a completing job in such a version, and what becomes of it: status, message, (pid, deaths) or deaths.
HOOKS: dict[str, tuple[dict[str, str], tuple[JobStatus, str, list[Any]]]] = {
    "not begun": ({"worker:w": ""}, (JobStatus.COMPLETING, "", [])),
    "held": ({"hook": HELD}, (JobStatus.COMPLETING, "", [(7, 0)])),
    "held after two deaths": ({"hook": HELD, "hook_deaths": "2"}, (JobStatus.COMPLETING, "", [(7, 2)])),
    "lost": ({"hook": "", "hook_deaths": "1"}, (JobStatus.COMPLETING, "", [1])),
    "raised": (
        {"hook": HELD, "hook_outcome": '{"error":"E: x","traceback":"tb"}'},
        (JobStatus.WORKER_ERROR, "on_job_complete raised E: x", []),
    ),
    "succeeded": ({"hook": HELD, "hook_outcome": '{"error":"","traceback":""}'}, (JobStatus.SUCCEEDED, "", [])),
}


def test_the_completion_hooks_of_an_older_database_continue_where_they_are(where: Where) -> None:
    before = JOB_MIGRATIONS[:4]
    old = open_sqlite(where, before) if isinstance(where, Path) else open_postgresql(where, JOBS_SCHEMA, before)
    stored = {}
    with old.begin() as connection:
        for name, (marks, _) in HOOKS.items():
            job = stored[name] = put_job(connection, 1)
            leased = exchange(connection, job, "w", 7, [], 1, 100, 1000.0).lease
            assert leased is not None
            exchange(connection, job, "w", 7, [Report(leased.token, 0)], 0, 0, 1000.0)
            for key, value in marks.items():
                put_mark(connection, job, key, value.replace("NAME", name))
    old.dispose()
    engine = open_jobs(where)
    with engine.begin() as connection:
        for name, (marks, expected) in HOOKS.items():
            record = read_job(connection, stored[name])
            assert record is not None
            held = select(leases.c.pid, leases.c.attempts).where(leases.c.token == name, leases.c.worker == name)
            waiting = select(pending.c.attempts).where(pending.c.number == record.number)
            found = [*map(tuple, connection.execute(held)), *connection.execute(waiting).scalars()]
            assert (record.status, record.message, found) == expected
            assert record.traceback == ("tb" if name == "raised" else "")
            assert read_marks(connection, record.id) == {key: "" for key in marks if key.startswith("worker:")}
            add_hook(connection, record.id)
        check_jobs(connection, has_results=False)
        expire(connection, time.time() + LEASE_S)
        runs = {name: exchange(connection, job, "w", 8, [], 1, 100, 2000.0).lease for name, job in stored.items()}
        assert {name for name, lease in runs.items() if lease} == {"not begun", "held", "lost"}
    engine.dispose()


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
