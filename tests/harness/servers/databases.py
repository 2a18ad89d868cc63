"""Fixtures of databases: a test that takes `where` runs on SQLite and on PostgreSQL.

In the process of the tests, new SQLite files are copies of one that has been migrated, and are not synced to the disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine

from cortex.state import database
from cortex.state.database import Where
from cortex.state.migrations import JOB_MIGRATIONS, MIGRATIONS, Migration

if TYPE_CHECKING:
    from harness.servers.postgres import Postgres

_migrate, _configure = database.migrate, database._configure


@pytest.fixture(scope="session", autouse=True)
def quick_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create SQLite databases in a fifth of the time."""
    made: dict[Sequence[Migration], Path] = {}

    def migrate(engine: Engine, migrations: Sequence[Migration] = MIGRATIONS, name: str = "") -> None:
        path = Path(str(engine.url.database))
        is_new = engine.dialect.name == "sqlite" and path.exists() and not path.stat().st_size
        if is_new and migrations in (MIGRATIONS, JOB_MIGRATIONS):
            if migrations not in made:
                made[migrations] = tmp_path_factory.mktemp("migrated") / "database.db"
                pragmas = database.JOB_PRAGMAS if migrations is JOB_MIGRATIONS else database.PRAGMAS
                template = database.sqlite_engine(made[migrations], pragmas)
                _migrate(template, migrations)
                template.dispose()
            shutil.copyfile(made[migrations], path)
        _migrate(engine, migrations, name)

    def configure(pragmas: Sequence[str], *connected: Any) -> None:
        _configure((*pragmas, "synchronous = OFF"), *connected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "migrate", migrate)
        patch.setattr(database, "_configure", configure)
        yield


@pytest.fixture
def real_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create SQLite databases as an operator does."""
    monkeypatch.setattr(database, "migrate", _migrate)
    monkeypatch.setattr(database, "_configure", _configure)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server for all tests of a process."""
    from harness.servers.postgres import Postgres  # most tests need no PostgreSQL installed

    with Postgres() as server:
        yield server


@pytest.fixture
def postgresql_url(postgres: Postgres) -> Iterator[str]:
    """An empty database of the test's own."""
    url = postgres.new_database()
    yield url
    postgres.return_database(url)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    """An empty database of the test's own, of each kind."""
    if request.param == "sqlite":
        return tmp_path / "database.db"
    url: str = request.getfixturevalue("postgresql_url")
    return url
