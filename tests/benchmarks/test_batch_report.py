"""Medians, goals and tables of the comparison of batch jobs."""

from __future__ import annotations

import pytest
from benchmarks.batch import BatchSample, goals, markdown, medians


def sample(system: str, per_s: float, cpu_ms: float = 0.1) -> BatchSample:
    return BatchSample(system, 0.5, 1e6 / per_s, per_s, cpu_ms, 100.0)


def test_each_figure_is_the_median_of_its_own() -> None:
    found = medians([sample("cortex", 100, 3), sample("cortex", 300, 1), sample("cortex", 200, 2)])
    assert [(each.per_s, each.cpu_ms) for each in found] == [(200, 2)]


@pytest.mark.parametrize(
    ("per_s", "cpu_ms", "verdicts"),
    [(300_000, 0.29, [True, True]), (299_999, 0.3, [False, False])],
)
def test_goals_are_held_against_cortex_alone(per_s: float, cpu_ms: float, verdicts: list[bool]) -> None:
    assert [goal.met for goal in goals([sample("cortex", per_s, cpu_ms), sample("celery", 1, 9)])] == verdicts


def test_without_cortex_no_goal_has_a_verdict() -> None:
    assert [goal.met for goal in goals([sample("celery", 1)])] == [None, None]


def test_report_has_the_ratio_to_each_other_system_and_what_failed() -> None:
    text = markdown([sample("cortex", 400_000), sample("celery", 40_000)], {"cores": "2"}, {"ray-data": "no room"})
    assert "| celery | 40,000 | 10.00 |" in text
    assert "| ray-data | no room |" in text
