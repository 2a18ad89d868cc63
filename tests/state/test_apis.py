from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from cortex.config.schema import Api
from cortex.state.database import Where, open_state
from cortex.state.queries.apis import ApiChange, ApiStore, StoredFailure
from cortex.state.revision import Revision

START = datetime(2026, 1, 1, tzinfo=UTC)
Open = Callable[[], ApiStore]


@pytest.fixture
def open_store(where: Where) -> Iterator[Open]:
    """Return a function that reopens the database like a restarted operator; its clock advances 1 s per call."""
    ticks = iter(range(1_000_000))

    def now() -> datetime:
        return START + timedelta(seconds=next(ticks))

    engines: list[Engine] = []

    def open_again() -> ApiStore:
        engines.append(open_state(where))
        return ApiStore(engines[-1], now)

    yield open_again
    for engine in engines:
        engine.dispose()


def spec(name: str = "iris", **sections: object) -> Api:
    handler = {"interface": "handler", "type": "python", "path": "handler.py", "config": {"a": [1, 2.5, None]}}
    return Api.model_validate({"name": name, "handler": handler, **sections})


def change(revision: str, api: Api | None = None) -> ApiChange:
    return ApiChange(Revision(revision, api or spec(), "project"), "nonce", f"spec-{revision}")


def test_apis_survive_a_restart(open_store: Open) -> None:
    full = spec(deployment="flowers", networking={"timeout_s": 1.5}, autoscaling={"min_replicas": 3})
    open_store().write([change("r1", full)])
    record = open_store().get("iris")
    assert record is not None
    assert (record.target, record.kind, record.deployment) == (
        Revision("r1", full, "project"),
        "RealtimeAPI",
        "flowers",
    )
    assert record.created_at == record.updated_at


def test_an_update_keeps_the_creation_time_and_adds_a_version(open_store: Open) -> None:
    store = open_store()
    store.write([change("r1")])
    first = store.get("iris")
    store.write([change("r2")])
    second = store.get("iris")
    assert first and second
    assert second.created_at == first.created_at < second.updated_at
    assert [version.api_id for version in store.versions("iris")] == [second.api_id, first.api_id]
    assert second.api_id < first.api_id


def test_apis_are_listed_by_name(open_store: Open) -> None:
    store = open_store()
    store.write([change("r", spec(name)) for name in ("b", "c", "a")])
    assert [record.name for record in store.records()] == ["a", "b", "c"]


def test_a_write_is_atomic(open_store: Open) -> None:
    store = open_store()
    store.write([change("r1")])
    broken = ApiChange(Revision("r2", spec("other"), None), "nonce", "spec")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="(?i)not.null"):
        store.write([change("r2"), broken], ["iris"])
    assert [record.revision for record in store.records()] == ["r1"]
    assert [record.revision for record in open_store().records()] == ["r1"]


def test_a_ready_revision_is_kept_when_a_newer_one_fails(open_store: Open) -> None:
    store = open_store()
    store.write([change("r1")])
    store.mark_serving("iris", Revision("r1", spec(), "project"))
    store.write([change("r2")])
    store.mark_failed("iris", "r2", StoredFailure("ValueError: bad", "line 1"))
    record = open_store().get("iris")
    assert record and record.serving == Revision("r1", spec(), "project")
    assert record.failure == StoredFailure("ValueError: bad", "line 1")


def test_a_failure_is_cleared_by_the_next_revision_or_when_it_becomes_ready(open_store: Open) -> None:
    store = open_store()
    store.write([change("r1")])
    store.mark_failed("iris", "r1", StoredFailure("bad"))
    store.write([change("r2")])
    assert store.records()[0].failure is None
    store.mark_failed("iris", "r2", StoredFailure("bad"))
    store.mark_serving("iris", Revision("r2", spec(), "project"))
    assert store.records()[0].failure is None


def test_ignores_updates_of_an_outdated_revision(open_store: Open) -> None:
    store = open_store()
    store.write([change("r2")])
    store.mark_failed("iris", "r1", StoredFailure("bad"))
    store.mark_serving("gone", Revision("r1", spec("gone"), "project"))
    assert [(record.name, record.failure) for record in store.records()] == [("iris", None)]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_deletion_keeps_the_versions_on_request(open_store: Open, keeps: bool) -> None:
    store = open_store()
    store.write([change("r1")])
    store.mark_serving("iris", Revision("r1", spec(), "project"))
    store.write([], ["iris"], keep_versions=keeps)
    assert open_store().get("iris") is None
    assert len(store.versions("iris")) == keeps
    store.write([change("r2")])
    record = store.get("iris")
    assert record is not None and record.serving is None


def test_the_history_survives_a_restart_with_who_deployed_and_what_changed(open_store: Open) -> None:
    store = open_store()
    store.write([change("r1")])
    store.mark_serving("iris", Revision("r1", spec(), "project"))
    update = ApiChange(Revision("r2", spec(), "other"), "nonce", "spec", "patch", "ana", ("compute.cpu: 1 → 2",))
    store.write([update])
    newest, oldest = open_store().history("iris")
    assert (newest.number, newest.action, newest.deployed_by, newest.changes) == (2, "patch", "ana", update.differences)
    assert (oldest.number, oldest.spec, oldest.deployed_by) == (1, spec(), "")
    assert oldest.live_at is not None and newest.live_at is None
    assert store.history_projects() == {"project", "other"}
    record = store.get("iris")
    assert record and (record.number, record.live_number) == (2, 1)
    store.write([], ["iris"])
    assert (store.history("iris"), store.history_projects()) == ([], frozenset())


def test_a_restart_changes_the_newest_entry_of_the_history_in_place(open_store: Open) -> None:
    store = open_store()
    store.write([change("r1")])
    store.write([ApiChange(Revision("r2", spec(), "project"), "nonce2", "spec", is_restart=True)])
    (entry,) = store.history("iris")
    assert (entry.number, entry.revision, entry.nonce, entry.action) == (1, "r2", "nonce2", "deploy")


def test_rejects_a_spec_that_cannot_be_read_back(open_store: Open) -> None:
    store = open_store()
    store.write([change("r1")])
    unreadable = spec("rose")
    object.__setattr__(unreadable.networking, "timeout_s", float("nan"))
    with pytest.raises(ValueError, match="timeout_s"):
        store.write([change("r2", unreadable)])
    assert [record.name for record in store.records()] == ["iris"]
