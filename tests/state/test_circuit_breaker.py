"""An unreachable or unresponsive database server: writes fail fast, and cached reads continue."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from cortex.config.schema import Api
from cortex.errors import DatabaseUnavailableError
from cortex.state.database import open_state
from cortex.state.queries.apis import WRITE_S, ApiChange, ApiStore
from cortex.state.revision import Revision
from harness.servers.postgres import Postgres
from harness.wait import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture
def store(server: Postgres) -> Iterator[ApiStore]:
    url = server.new_database()
    engine = open_state(url)
    store = ApiStore(engine)
    store.write([change("r1")])
    yield store
    engine.dispose()


def change(revision: str) -> ApiChange:
    api = Api.model_validate({"name": "iris", "handler": {"interface": "handler", "type": "python", "path": "h.py"}})
    return ApiChange(Revision(revision, api, "project"), "nonce", f"spec-{revision}")


def revisions(store: ApiStore) -> list[str]:
    return [record.revision for record in store.records()]


def has_written(store: ApiStore, revision: str) -> bool:
    try:
        store.write([change(revision)])
    except DatabaseUnavailableError:
        return False
    return True


def test_a_server_restart_between_two_writes_has_no_effect(server: Postgres, store: ApiStore) -> None:
    for revision, mode in (("r2", "fast"), ("r3", "immediate")):
        server.stop(mode)
        server.start()
        store.write([change(revision)])
        assert revisions(store) == [revision]


def test_reads_continue_during_an_outage_and_writes_after_it(server: Postgres, store: ApiStore) -> None:
    assert revisions(store) == ["r1"]
    server.stop()
    try:
        for _ in range(3):
            assert not has_written(store, "r2")
            assert revisions(store) == ["r1"]
        with pytest.raises(DatabaseUnavailableError, match="can't be reached") as raised:
            store.write([change("r2")])
        assert [version.api_id.split("-")[1] for version in store.versions("iris")] == ["r1"]
        assert server.password not in str(raised.value) and raised.value.http_status == 503
    finally:
        server.start()
    wait_until(lambda: has_written(store, "r2"))
    assert revisions(store) == ["r2"]


def test_an_unresponsive_server_is_disconnected_and_then_fails_fast(server: Postgres, store: ApiStore) -> None:
    assert revisions(store) == ["r1"]
    server.freeze()
    thawing = threading.Timer(60, server.freeze, (False,))  # a failing test must not block forever
    thawing.start()
    try:
        started = time.monotonic()
        assert not has_written(store, "r2")
        waited = time.monotonic() - started
        for _ in range(1000):
            assert not has_written(store, "r2")
            assert revisions(store) == ["r1"]
        assert waited < thawing.interval and thawing.interval > WRITE_S
    finally:
        thawing.cancel()
        server.freeze(False)
    wait_until(lambda: has_written(store, "r3"))
    assert revisions(store) == ["r3"]
