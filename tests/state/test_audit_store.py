"""The stored audit log."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from cortex.lifecycle import AuditResult
from cortex.state.database import Where, open_state
from cortex.state.queries.audit import AuditEntry, AuditFilter, AuditStore

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def engine(where: Where) -> Iterator[Engine]:
    made = open_state(where)
    yield made
    made.dispose()


def entry(second: int, action: str = "deploy", api: str | None = "iris", token: str | None = "ci") -> AuditEntry:
    at = START + timedelta(seconds=second)
    return AuditEntry(at, token, "10.0.0.7", action, api, AuditResult.SUCCEEDED, f"creating ü {second}")


def test_entries_are_returned_newest_first_and_by_api_and_time(engine: Engine) -> None:
    store = AuditStore(engine)
    assert list(store.entries()) == []
    entries = [entry(1), entry(2, api="sum"), entry(3, api=None, token=None), entry(4)]
    store.add(entries[:3])
    store.add(entries[3:])
    assert list(store.entries()) == entries[::-1]
    assert list(store.entries(limit=2)) == [entries[3], entries[2]]
    assert list(store.entries(AuditFilter(api="iris"))) == [entries[3], entries[0]]
    assert list(store.entries(AuditFilter(since=START + timedelta(seconds=3)))) == [entries[3], entries[2]]


def test_entries_are_filtered_and_continue_after_a_page(engine: Engine) -> None:
    store = AuditStore(engine)
    entries = [entry(1), entry(2, token="ops"), entry(3, "delete"), entry(4, token=None), entry(5)]
    store.add(entries)
    assert list(store.entries(AuditFilter(token="ci"))) == [entries[4], entries[2], entries[0]]
    assert list(store.entries(AuditFilter(token="ci", action="delete"))) == [entries[2]]
    first = store.entries(limit=2)
    second = store.entries(AuditFilter(before=first[-1].number), limit=2)
    assert [*first, *second] == entries[:0:-1]
    assert list(store.entries(AuditFilter(before=second[-1].number))) == [entries[0]]


def test_the_newest_entries_of_each_action_are_kept(engine: Engine) -> None:
    store = AuditStore(engine, max_entries=10, entries_per_cleanup=20)
    store.add([entry(0, "delete")])
    for second in range(1, 101):
        store.add([entry(second), entry(second, token=None)])
    store = AuditStore(engine, max_entries=10)  # the next operator
    store.add([entry(101)])
    kept = store.entries(limit=1000)
    assert [each.at for each in kept if each.action == "delete"] == [START]
    own = [each for each in kept if each.action == "deploy" and each.token]
    assert [each.at for each in own] == [START + timedelta(seconds=second) for second in range(101, 91, -1)]
    assert len([each for each in kept if each.token is None]) == 10


def test_the_log_is_bounded_while_one_operator_runs(engine: Engine) -> None:
    store = AuditStore(engine, max_entries=10, entries_per_cleanup=20)
    for second in range(200):
        store.add([entry(second)])
    assert 10 <= len(store.entries(limit=1000)) < 30
