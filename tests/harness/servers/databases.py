"""Fixtures of databases: a test that takes `where` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.state.database import Where

if TYPE_CHECKING:
    from harness.servers.postgres import Postgres


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
