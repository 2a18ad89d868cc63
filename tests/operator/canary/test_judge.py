"""Judgement of a canary: errors, latency and predictions of two revisions."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest

from cortex.operator.canary.judge import Finding, Judge, RevisionNumbers, overall
from cortex.worker.monitoring.metrics import FINE_BOUNDS_S, HANDLER, SeriesKind, series_key
from harness.replicas.fleet import api

BOUNDS = (*FINE_BOUNDS_S, math.inf)


def judge(**canary: Any) -> Judge:
    tracked = {"max_prediction_shift", "max_disagreement"} & set(canary)
    tracker = {"model_type": "classification", "key": "label"} if tracked else None
    return Judge(api(update_strategy={"canary": canary}, tracker=tracker))


def numbers(
    generator: random.Random, requests: int, error: float = 0.0, slower: float = 1.0, cats: float | None = None
) -> RevisionNumbers:
    """Return a window of one revision: its part of errors, factor of its latency, and part of cats."""
    durations = dict.fromkeys(BOUNDS, 0)
    for _ in range(requests):
        durations[BOUNDS[bisect_left(FINE_BOUNDS_S, 0.02 * slower * math.exp(generator.gauss(0, 0.4)))]] += 1
    errors = sum(generator.random() < error for _ in range(requests))
    classes = {}
    if cats is not None:
        seen = sum(generator.random() < cats for _ in range(requests))
        classes = {"cat": seen, "dog": requests - seen}
    return RevisionNumbers(requests, errors, durations, classes)


def judged(
    subject: Judge, old: dict[str, float], new: dict[str, float], windows: int = 400, seed: int = 1
) -> tuple[Finding, str, int]:
    """Observe windows until there is a verdict; return it, the property that decided, and the canary's requests."""
    generator, seen = random.Random(seed), 0
    for window in range(windows):
        subject.observe(numbers(generator, 90, **old), numbers(generator, 30, **new), True, 5.0 * window)
        seen += 30
        findings = subject.findings()
        if (found := overall(findings)) is not Finding.UNKNOWN:
            return found, next(each.name for each in findings if each.finding is found), seen
    return Finding.UNKNOWN, "", seen


@pytest.mark.parametrize(
    ("new", "decided"),
    [
        ({"error": 0.08}, "errors"),
        ({"slower": 1.8}, "p50"),
        ({"cats": 0.4}, "predictions"),
        ({"cats": 0.0}, "predictions"),
    ],
)
def test_a_worse_revision_is_found_worse_by_the_property_that_is(new: dict[str, float], decided: str) -> None:
    old = {"error": 0.01, "cats": 0.2}
    found = judged(judge(max_prediction_shift="5%"), old, {**old, **new})
    assert (found[0], found[1].split(" ")[0]) == (Finding.WORSE, decided)
    assert found[2] < 2_000


def test_a_revision_within_the_margins_is_found_not_worse() -> None:
    same = {"error": 0.01, "cats": 0.2}
    subject = judge(max_error_increase="3%", max_latency_increase="60%", max_prediction_shift="10%")
    assert judged(subject, same, same)[0] is Finding.NOT_WORSE


@pytest.mark.heavy
def test_few_revisions_at_the_margins_are_found_worse() -> None:
    """In 15 trials at a confidence of 0.9, 1.5 are expected at most."""
    found = [
        judged(judge(confidence=0.9, max_error_increase="2%"), {"error": 0.02}, {"error": 0.04}, 30, seed)[0]
        for seed in range(15)
    ]
    assert found.count(Finding.WORSE) <= 4
    assert Finding.NOT_WORSE not in found


def test_without_enough_requests_nothing_is_known_and_the_missing_ones_are_estimated() -> None:
    subject = judge()
    generator = random.Random(1)
    subject.observe(numbers(generator, 50), numbers(generator, 5), True, 0.0)
    findings = {finding.name: finding for finding in subject.findings()}
    assert overall(findings.values()) is Finding.UNKNOWN
    assert 100 < findings["errors"].missing < 10_000
    assert findings["errors"].to_json()["missing"] == math.ceil(findings["errors"].missing)
    assert judge().findings()[0].to_json()["missing"] is None


def test_a_revision_has_to_be_found_not_worse_in_each_step() -> None:
    subject, generator = judge(max_error_increase="3%", max_latency_increase="60%"), random.Random(5)
    assert judged(subject, {"error": 0.01}, {"error": 0.01})[0] is Finding.NOT_WORSE
    subject.begin_step()
    assert {each.finding for each in subject.findings()} == {Finding.UNKNOWN}
    began_s = 5.0 * 400
    for window in range(40):  # more requests than it can bear
        time_s = began_s + 5.0 * window
        subject.observe(numbers(generator, 60), numbers(generator, 60, error=0.9), True, time_s)
        if (found := overall(subject.findings())) is not Finding.UNKNOWN:
            break
    assert found is Finding.WORSE
    assert time_s - began_s <= 150


@pytest.mark.heavy
def test_a_revision_that_was_good_for_hours_is_soon_found_worse() -> None:
    subject, generator, time_s = judge(), random.Random(5), 0.0
    while time_s < 4 * 3600:
        subject.observe(numbers(generator, 30, error=0.01), numbers(generator, 30, error=0.01), True, time_s)
        time_s += 30.0
    copy = judge()
    copy.load(json.loads(json.dumps(subject.dump())))
    began_s = time_s
    while overall(copy.findings()) is not Finding.WORSE:
        copy.observe(numbers(generator, 30, error=0.01), numbers(generator, 30, error=0.9), True, time_s)
        time_s += 30.0
    assert time_s - began_s <= 300


def test_disagreement_is_known_before_the_first_step() -> None:
    subject, generator = judge(shadow=True, max_disagreement="1%"), random.Random(3)
    for window in range(40):
        subject.observe(numbers(generator, 50), numbers(generator, 50), True, 5.0 * window)
        subject.observe_pairs(100, 0)
    subject.begin_step()
    found = {each.name: each.finding for each in subject.findings()}
    assert (found["errors"], found["disagreement"]) == (Finding.UNKNOWN, Finding.NOT_WORSE)


def test_until_a_verdict_more_requests_are_needed() -> None:
    subject, generator = judge(), random.Random(2)
    for window in range(1000):
        subject.observe(numbers(generator, 50), numbers(generator, 5, error=0.2), True, 5.0 * window)
        errors = subject.findings()[0]
        if errors.finding is Finding.WORSE:
            return
        assert errors.missing > 0
    pytest.fail("found nothing")


@pytest.mark.parametrize(
    ("rate", "finding"), [(0.03, Finding.WORSE), (0.002, Finding.NOT_WORSE), (0.01, Finding.UNKNOWN)]
)
def test_the_disagreement_about_copied_requests_is_judged(rate: float, finding: Finding) -> None:
    subject, generator = judge(shadow=True, max_disagreement="1%"), random.Random(3)
    for window in range(40):
        subject.observe(numbers(generator, 50), numbers(generator, 50), True, 5.0 * window)
        subject.observe_pairs(100, sum(generator.random() < rate for _ in range(100)))
    found = {each.name: each for each in subject.findings()}["disagreement"]
    assert (found.finding, found.old, found.margin) == (finding, None, 0.01)
    assert found.new == pytest.approx(rate, rel=0.5)
    copy = judge(shadow=True, max_disagreement="1%")
    copy.load(json.loads(json.dumps(subject.dump())))
    assert copy.findings() == subject.findings()


@pytest.mark.parametrize(("windows", "finding"), [(6, Finding.UNKNOWN), (13, Finding.WORSE)])
def test_one_burst_of_errors_decides_nothing_and_errors_of_a_minute_do(windows: int, finding: Finding) -> None:
    assert judged(judge(), {"error": 0.0}, {"error": 1.0}, windows)[0] is finding


def narrow(requests: int, slow: int, slow_s: float) -> RevisionNumbers:
    """Return a window whose requests take 50 ms, but for some that take `slow_s`."""
    durations = dict.fromkeys(BOUNDS, 0)
    for duration_s, count in ((0.05, requests - slow), (slow_s, slow)):
        durations[BOUNDS[bisect_left(FINE_BOUNDS_S, duration_s)]] += count
    return RevisionNumbers(requests, 0, durations)


@pytest.mark.parametrize(
    ("old", "new", "decided"),
    [
        ((50, 0.42), (50, 0.546), {"p50": Finding.NOT_WORSE, "p99": Finding.WORSE}),  # both have a slow class
        ((50, 0.42), (50, 0.42), {"p50": Finding.NOT_WORSE, "p99": Finding.NOT_WORSE}),
        ((0, 0.05), (60, 0.065), {"p50": Finding.NOT_WORSE, "p99": Finding.WORSE}),  # only the new revision has one
        ((0, 0.05), (2000, 0.065), {"p50": Finding.WORSE, "p99": Finding.WORSE}),
    ],
)
def test_latencies_with_few_different_values_are_judged(
    old: tuple[int, float], new: tuple[int, float], decided: dict[str, Finding]
) -> None:
    """Their 99th percentile lies within the bucket of a value that many requests have."""
    subject = judge(max_latency_increase="10%")
    for window in range(20):
        subject.observe(narrow(2000, *old), narrow(2000, *new), True, 30.0 * window)
    found = {each.name: each for each in subject.findings()}
    assert {name: found[name].finding for name in decided} == decided
    assert (found["p50"].old, found["p99"].old) == (pytest.approx(0.5), pytest.approx(0.01))


def test_latencies_of_cold_processes_are_not_compared() -> None:
    subject, generator = judge(), random.Random(1)
    for window in range(50):
        subject.observe(numbers(generator, 90), numbers(generator, 30, slower=5.0), False, 5.0 * window)
    assert all(finding.finding is not Finding.WORSE for finding in subject.findings())


def test_the_half_minutes_that_a_verdict_takes_are_known_however_many_requests_come() -> None:
    subject, generator, missing = judge(), random.Random(1), []
    for window in range(18):  # of five seconds
        subject.observe(numbers(generator, 500, error=0.01), numbers(generator, 500, error=0.5), True, 5.0 * window)
        missing.append(subject.findings()[0].missing_blocks)
    assert missing == [3] * 6 + [2] * 6 + [0] * 6


def test_the_state_survives_as_json() -> None:
    subject, generator = judge(max_prediction_shift="5%"), random.Random(1)
    for window in range(5):
        subject.observe(numbers(generator, 90, cats=0.3), numbers(generator, 30, cats=0.3), True, 10.0 * window)
    copy = judge(max_prediction_shift="5%")
    copy.load(json.loads(json.dumps(subject.dump())))
    assert copy.findings() == subject.findings()
    window = numbers(generator, 90, cats=0.3), numbers(generator, 30, cats=0.3)
    for each in (subject, copy):
        each.observe(*window, True, 50.0)
    assert copy.findings() == subject.findings()


def counter(name: str, value: float, **labels: str) -> dict[str, float]:
    return {series_key(SeriesKind.COUNTER, name, labels): value}


def bucket(name: str, value: float, bound: str) -> dict[str, float]:
    return {series_key(SeriesKind.BUCKET, name, {"le": bound}): value}


def test_numbers_are_read_from_the_series_of_replicas() -> None:
    requests = "cortex_replica_requests_total"
    series = {
        **counter(requests, 90, code="200"),
        **counter(requests, 3, code="422"),
        **counter(requests, 2, code="500"),
        **counter(requests, 4, code="499"),
        **counter("cortex_aborted_responses_total", 6),
        **bucket(HANDLER, 7, "0.0125"),
        **bucket(HANDLER, 1, "+Inf"),
        **bucket("cortex_request_queue_seconds", 9, "0.01"),
        **counter("cortex_predictions_total", 5, **{"class": "cat"}),
        "not a key cortex_replica_requests_total": 1,
    }
    assert RevisionNumbers.of(series) == RevisionNumbers(99, 11, {0.0125: 7, math.inf: 1}, {"cat": 5})


@pytest.mark.parametrize(
    ("after", "difference"),
    [
        (RevisionNumbers(9, 2, {0.1: 4}, {"a": 3}), RevisionNumbers(4, 1, {0.1: 4}, {"a": 3})),
        (RevisionNumbers(5, 1), RevisionNumbers()),
        (RevisionNumbers(2, 0), None),
    ],
)
def test_a_window_is_the_difference_of_numbers(after: RevisionNumbers, difference: RevisionNumbers | None) -> None:
    assert after.since(RevisionNumbers(5, 1)) == difference


def test_responses_that_break_off_in_a_later_window_than_they_began_count() -> None:
    subject = judge(max_error_increase="0.5%")
    for window in range(60):
        began = window % 2 == 0  # each second window has requests only, and the other one the ends of their streams
        new = RevisionNumbers(100 if began else 10, 0 if began else 50)
        subject.observe(RevisionNumbers(100, 0), new, False, 10.0 * window)
        subject.load(json.loads(json.dumps(subject.dump())))
    errors = subject.findings()[0]
    assert errors.finding is Finding.WORSE
    assert errors.new == pytest.approx(30 * 50 / (30 * 110), abs=0.02)


def test_requests_are_counted_above_a_bound() -> None:
    found = RevisionNumbers(durations={0.1: 4, 0.2: 2, math.inf: 1})
    slower: Callable[[float], int] = found.slower_than
    assert [slower(bound) for bound in (0.1, 0.2)] == [3, 1]
