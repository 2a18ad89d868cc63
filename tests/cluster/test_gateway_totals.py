"""Totals of responses over gateways that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.cluster.gateways import GatewayTotals
from cortex.gateway.statistics import BackendStats


def told(**counts: int) -> dict[str, BackendStats]:
    return {api: BackendStats(0, 0, responses={2: count}) for api, count in counts.items()}


@pytest.fixture
def totals(tmp_path: Path) -> GatewayTotals:
    return GatewayTotals(tmp_path / "totals.json")


def test_totals_sum_all_nodes(totals: GatewayTotals) -> None:
    totals.add("n1", "x", told(a=3))
    totals.add("n2", "y", told(a=4, b=1))
    assert totals.of("a") == {2: 7}
    assert totals.of("b") == {2: 1}
    assert totals.of("c") == {}


def test_late_and_repeated_counters_change_nothing(totals: GatewayTotals) -> None:
    totals.add("n1", "x", told(a=3))
    totals.add("n1", "x", told(a=2))
    totals.add("n1", "x", {})
    assert totals.of("a") == {2: 3}


def test_counters_that_restart_are_added(totals: GatewayTotals) -> None:
    for counts, count in (("x", 3), ("y", 1), ("z", 0), ("z", 2)):
        totals.add("n1", counts, told(a=count))
    assert totals.of("a") == {2: 6}


def test_the_next_operator_continues_the_totals(totals: GatewayTotals, tmp_path: Path) -> None:
    totals.add("n1", "x", told(a=3))
    totals.add("n1", "y", told(a=1))
    totals.save()
    again = GatewayTotals(tmp_path / "totals.json")
    again.load()
    assert again.of("a") == {2: 4}
    again.add("n1", "y", told(a=2))
    assert again.of("a") == {2: 5}


def test_an_invalid_file_is_replaced(totals: GatewayTotals, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"n1": {}}', '{"n1": {"counts": "x", "newest": {"a": 1}, "before": {}}}'):
        (tmp_path / "totals.json").write_text(text)
        totals.load()
        assert totals.of("a") == {}


def test_totals_of_deleted_apis_are_dropped(totals: GatewayTotals) -> None:
    totals.add("n1", "x", told(a=3, b=2))
    totals.forget({"b"})
    assert (totals.of("a"), totals.of("b")) == ({}, {2: 2})
