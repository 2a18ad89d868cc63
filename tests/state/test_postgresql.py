"""Opening PostgreSQL: concurrently, with errors, and with fencing."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, Engine, inspect, select, text, update

from cortex.errors import DatabaseVersionError, InputError, SupersededError
from cortex.jobs.store import JobStore
from cortex.state.database import (
    MIGRATIONS,
    STATE_SCHEMA,
    check_address,
    check_version,
    open_jobs,
    open_postgresql,
    open_state,
    shown,
)
from cortex.state.queries.key_values import KeyValueStore
from cortex.state.tables import facts, job_metadata, metadata, schema_version
from harness.servers.postgres import Postgres

pytestmark = pytest.mark.processes


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """A list of engines that are disposed of at the end."""
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.dispose()


def test_operators_that_start_concurrently_create_each_table_once(postgresql_url: str, engines: list[Engine]) -> None:
    with ThreadPoolExecutor(8) as pool:
        opening = [pool.submit(open_, postgresql_url) for open_ in (open_state, open_jobs) * 4]
    engines += [each.result() for each in opening]
    state, jobs = (set(inspect(engine).get_table_names()) for engine in engines[:2])
    assert state == {*metadata.tables, "fence"}
    assert jobs == {*job_metadata.tables, "fence", "schema_version"}


def test_rejects_a_database_of_a_newer_version(postgresql_url: str, engines: list[Engine]) -> None:
    check_version(postgresql_url)
    engines.append(open_state(postgresql_url))
    check_version(postgresql_url)
    with engines[0].begin() as connection:
        connection.execute(update(schema_version).values(version=len(MIGRATIONS) + 1))
    for open_ in (open_state, check_version):
        with pytest.raises(DatabaseVersionError, match="newer version; upgrade cortex"):
            open_(postgresql_url)


def test_a_failed_migration_is_rolled_back(postgresql_url: str, engines: list[Engine]) -> None:
    def broken(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE half_done (id INTEGER)"))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        open_postgresql(postgresql_url, STATE_SCHEMA, (*MIGRATIONS, broken))
    engines.append(open_state(postgresql_url))
    assert "half_done" not in inspect(engines[0]).get_table_names()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("p%40ss", "other"), "password authentication failed"),
        (("/test_", "/nothing_"), 'database "nothing_'),
        (("127.0.0.1:", "127.0.0.1:1"), "can't be reached|can't be read"),
        (("%40ss", "%zzss"), "with % and two hexadecimal digits"),
        (("127.0.0.1", "nowhere.invalid"), "nowhere.invalid"),
    ],
)
def test_an_invalid_address_is_reported_in_one_line_without_the_password(
    postgresql_url: str, change: tuple[str, str], message: str
) -> None:
    for use in (open_state, check_address):
        with pytest.raises(InputError, match=message) as raised:
            use(postgresql_url.replace(*change))
        error = str(raised.value)
        assert raised.value.exit_code == 2 and "\n" not in error
        assert all(secret not in error for secret in (Postgres.password, "wo:rd", "wo%3Ard", "other", "zzss"))


def test_a_check_of_an_address_changes_nothing(postgresql_url: str) -> None:
    check_address(postgresql_url)
    with psycopg.connect(postgresql_url) as connection:
        schemas = connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'cortex%'").fetchone()
    assert schemas == (0,)
    open_state(postgresql_url).dispose()
    check_address(postgresql_url)


def test_rejects_a_database_with_another_encoding(postgres: Postgres) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    for use in (open_state, check_address):
        with pytest.raises(InputError, match="has the encoding LATIN1; make one with UTF8"):
            use(postgres.url("latin"))
    postgres.drop_database(postgres.url("latin"))


def test_a_user_without_the_right_to_create_schemas_gets_an_error_with_the_grant(
    postgres: Postgres, postgresql_url: str
) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE USER guest PASSWORD 'guest'")
    for use in (open_state, check_address):
        with pytest.raises(InputError, match="grant its user CREATE on the database"):
            use(postgresql_url.replace("cortex:p%40ss%2Fwo%3Ard%20%251", "guest:guest"))
    with postgres.connect() as connection:
        connection.execute("DROP USER guest")


def test_a_missing_driver_is_reported_with_the_package_to_install(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InputError, match=r"install cortex-serving\[postgresql\]"):
        open_state(postgresql_url)


def test_logs_and_errors_do_not_contain_the_password(
    postgresql_url: str, engines: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engines.append(open_state(postgresql_url))
    with engines[0].connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        with pytest.raises(Exception, match="nothing") as raised:
            connection.execute(text("SELECT * FROM nothing"))
    assert shown(postgresql_url).startswith("postgresql://cortex@127.0.0.1:") and shown(postgresql_url).endswith(name)
    words = (shown(postgresql_url), repr(engines[0]), repr(raised.value), caplog.text)
    assert all("wo:rd" not in each and "wo%3Ard" not in each for each in words)


def test_commits_are_durable_regardless_of_server_settings(
    postgres: Postgres, postgresql_url: str, engines: list[Engine]
) -> None:
    with postgres.connect() as connection:
        connection.execute(f"ALTER DATABASE {postgresql_url.rpartition('/')[2]} SET synchronous_commit = off")
    engines.append(open_jobs(postgresql_url))
    with engines[0].connect() as opened:
        assert opened.execute(text("SHOW synchronous_commit")).scalar_one() == "on"


def test_text_has_any_length_and_is_sorted_by_code_point(postgresql_url: str, engines: list[Engine]) -> None:
    engines.append(open_state(postgresql_url))
    store = KeyValueStore(engines[0])
    names = ["a-b", "aa", "B", "é", "n" * 500]
    for name in names:
        store.put_if_absent(name, "left\0right")
    with engines[0].connect() as connection:
        assert list(connection.execute(select(facts.c.name).order_by(facts.c.name)).scalars()) == sorted(names)
    assert store.get("aa") == "left\ufffdright"


def test_a_superseded_operator_cannot_write(postgresql_url: str, engines: list[Engine]) -> None:
    engines += [open_state(postgresql_url, 1), open_jobs(postgresql_url, 1)]
    KeyValueStore(engines[0]).put_if_absent("a", "old")
    engines += [open_state(postgresql_url, 2), open_jobs(postgresql_url, 2)]
    with pytest.raises(SupersededError):
        KeyValueStore(engines[0]).put_if_absent("b", "old")
    with pytest.raises(SupersededError):
        asyncio.run(JobStore(engines[1]).startup())
    with pytest.raises(SupersededError):
        open_state(postgresql_url, 1)
    assert KeyValueStore(engines[0]).get("a") == "old"
    assert KeyValueStore(engines[2]).put_if_absent("b", "new") == "new"


def test_an_open_transaction_of_a_frozen_operator_does_not_delay_the_next_one(
    postgresql_url: str, engines: list[Engine]
) -> None:
    engines.append(open_state(postgresql_url, 1))
    with psycopg.connect(postgresql_url) as frozen:  # no watchdog ends it
        frozen.execute("UPDATE cortex_state.fence SET token = 'late'")
        engines.append(open_state(postgresql_url, 2))
        with pytest.raises(psycopg.errors.AdminShutdown):
            frozen.execute("UPDATE cortex_state.fence SET token = 'late'")
    assert KeyValueStore(engines[1]).put_if_absent("a", "new") == "new"


def test_the_location_of_a_file_is_shown_as_its_path() -> None:
    assert shown(Path("/tmp/state.db")) == "/tmp/state.db"
