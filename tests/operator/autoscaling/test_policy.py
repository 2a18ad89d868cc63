"""Autoscaling decisions: a table, and properties of all policies and loads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.operator.autoscaling.policy import (
    Ceiling,
    Decision,
    LoadSample,
    Measure,
    Recommendation,
    ScalingHistory,
    ScalingPolicy,
    decide,
)
from harness.replicas.fleet import api

NOW = 10_000.0
#: Long ago: no first period of stabilisation is running.
OLD = ScalingHistory(0.0)


def policy(**changes: object) -> ScalingPolicy:
    found = ScalingPolicy.of(api(autoscaling={"target_replica_concurrency": 4}))
    return replace(found, downscale_stabilization_s=0.0, upscale_stabilization_s=0.0, **changes)  # type: ignore[arg-type]


def flat(load: float, seconds: int = 60) -> list[LoadSample]:
    return [LoadSample(NOW - seconds + 1 + index, load) for index in range(seconds)]


def recommended(*made: tuple[float, int]) -> ScalingHistory:
    return ScalingHistory(0.0, tuple(Recommendation(NOW - ago, replicas) for ago, replicas in made))


@pytest.mark.parametrize(
    ("changes", "load", "current", "expected"),
    [
        ({}, 4.0, 1, 1),
        ({}, 4.1, 1, 1),  # 1.025: within 5 %
        ({}, 4.2, 1, 2),  # 1.05: not below 1.05 any more
        ({}, 8.0, 1, 2),
        ({}, 400.0, 1, 2),  # one more is always allowed
        ({}, 400.0, 10, 15),  # × 1.5
        ({}, 400.0, 11, 17),  # ⌈16.5⌉
        ({"max_upscale_factor": 10.0}, 400.0, 10, 100),
        ({"max_upscale_factor": 20.0}, 4000.0, 10, 100),  # max_replicas
        ({}, 76.2, 20, 20),  # 19.05: above 0.95 × 20
        ({}, 76.0, 20, 19),  # 19: no more than 0.95 × 20
        ({}, 0.0, 20, 15),  # × 0.75
        ({}, 0.0, 3, 2),  # ⌈2.25⌉ would be 3, but one less is always allowed
        ({"max_downscale_factor": 0.0}, 0.0, 20, 1),
        ({"max_downscale_factor": 0.0, "min_replicas": 3}, 0.0, 20, 3),
        ({"min_replicas": 0}, 0.0, 1, 0),
        ({"min_replicas": 0}, 0.0, 4, 3),
        ({"min_replicas": 0}, 0.01, 1, 1),
        ({"min_replicas": 0}, 0.0, 0, 0),
        ({"min_replicas": 0}, 1.0, 0, 1),
        ({"min_replicas": 0}, 1000.0, 0, 1),
    ],
)
def test_recommendation(changes: dict[str, object], load: float, current: int, expected: int) -> None:
    assert decide(policy(**changes), OLD, flat(load), NOW, current).requested == expected


@pytest.mark.parametrize(
    ("history", "load", "expected"),
    [
        (recommended((10, 7), (290, 9)), 4.0, 9),  # down: the highest of the period
        (recommended((10, 7), (300, 9)), 4.0, 8),  # older ones do not count; one step is 10 × 0.75
        (recommended((10, 12)), 4.0, 10),  # holds, and never moves up instead
        (recommended((10, 14), (59, 12)), 60.0, 12),  # up: the lowest
        (recommended((10, 14), (60, 12)), 60.0, 14),
        (recommended((10, 3)), 60.0, 10),
        (recommended((10, 3), (11, 30)), 40.0, 10),  # nothing to change
        (ScalingHistory(NOW - 299), 4.0, 10),  # the first period of stabilisation
        (ScalingHistory(NOW - 300), 4.0, 8),
        (ScalingHistory(NOW - 59), 60.0, 10),
        (ScalingHistory(NOW - 60), 60.0, 15),
    ],
)
def test_stabilisation(history: ScalingHistory, load: float, expected: int) -> None:
    stable = replace(policy(), downscale_stabilization_s=300.0, upscale_stabilization_s=60.0)
    assert decide(stable, history, flat(load), NOW, 10).requested == expected


def test_only_the_window_counts() -> None:
    samples = [LoadSample(NOW - 60, 4000.0), *flat(8.0), LoadSample(NOW + 1, 4000.0)]
    decision = decide(policy(), OLD, samples, NOW, 2)
    assert (decision.average, decision.samples, decision.requested) == (8.0, 60, 2)


def test_changes_nothing_without_samples() -> None:
    decision = decide(policy(), OLD, [LoadSample(NOW - 61, 400.0)], NOW, 3)
    assert (decision.requested, decision.recommended, decision.average) == (3, None, None)
    assert OLD.after(decision, policy()) == OLD
    assert decision.reason == "no samples of the last 60 s"


def test_keeps_the_last_replica_until_a_whole_window_without_requests() -> None:
    idle = policy(min_replicas=0)
    assert decide(idle, OLD, flat(0.0, seconds=40), NOW, 1).requested == 1
    assert decide(idle, OLD, flat(0.0), NOW, 1).requested == 0


def test_ignores_rounding_errors_of_the_average() -> None:
    exact = policy(target=0.7132937170744436, upscale_tolerance=0.0, downscale_tolerance=0.0)
    counts = {decide(exact, OLD, flat(exact.target * 3, seconds), NOW, 3).requested for seconds in range(1, 61)}
    assert counts == {3}


def test_the_ceiling_limits_only_upscaling() -> None:
    ceiling = Ceiling(3, "a replica needs 1 core, but 0 of this machine's 4 are free")
    decision = decide(policy(), OLD, flat(400.0), NOW, 2, replace(ceiling, replicas=2))
    assert decision.requested == 2
    assert decision.reason.endswith("no capacity for more: a replica needs 1 core, but 0 of this machine's 4 are free")
    assert decision.shortage == f"3 replicas are wanted, but there is room for 2: {ceiling.shortage}"
    assert decide(policy(min_replicas=2), OLD, flat(400.0), NOW, 1, replace(ceiling, replicas=1)).requested == 2
    enough = decide(policy(), OLD, flat(36.0), NOW, 9, ceiling)
    assert (enough.requested, enough.shortage) == (9, "")


@pytest.mark.parametrize(
    ("cores", "current", "expected"),
    [
        (0.16, 1, 1),  # 80 % of 0.2
        (0.17, 1, 1),  # 1.0625: within a tenth
        (0.18, 1, 2),
        (4.0, 1, 4),  # at most four, or twice as many
        (4.0, 4, 8),
        (0.45, 3, 3),
        (0.0, 3, 1),
    ],
)
def test_cpu_policy_matches_kubernetes(cores: float, current: int, expected: int) -> None:
    found = ScalingPolicy.of(api(deployment="d"))
    assert (found.measure, found.target) == (Measure.CORES, pytest.approx(0.16))
    assert decide(found, OLD, flat(cores), NOW, current).requested == expected


def test_a_policy_is_read_from_the_api() -> None:
    assert ScalingPolicy.of(api(autoscaling={"target_cpu_utilization": 50}, compute={"cpu": 2})).target == 1.0
    assert ScalingPolicy.of(api(processes=3)).target == 3.0
    assert ScalingPolicy.of(api(kind="AsyncAPI")).measure is Measure.WORKLOADS


def test_the_reason_contains_every_rule_that_applied() -> None:
    history = recommended((10, 15), (20, 11))
    stable = replace(policy(), upscale_stabilization_s=60.0)
    assert decide(stable, history, flat(100.0), NOW, 10).reason == (
        "in flight averaged over 60 s: 100 / target 4 = 25 → 25; not above 15 in one step (max_upscale_factor); "
        "15 waits for upscale_stabilization_period: lowest recommendation of 60 s is 11"
    )


def test_the_reason_says_why_an_idle_api_keeps_a_replica() -> None:
    assert decide(policy(), OLD, flat(0.0), NOW, 1).reason.endswith("= 0 → 0; min_replicas is 1")
    reason = decide(policy(min_replicas=0), OLD, flat(0.0, seconds=40), NOW, 1).reason
    assert reason.endswith("= 0 → 0; not idle for the whole window, so not zero")


# Properties.

COUNTS = st.integers(0, 200)
LOADS = st.floats(0, 5000, allow_nan=False)


@st.composite
def policies(draw: st.DrawFn) -> ScalingPolicy:
    low = draw(st.integers(0, 20))
    return ScalingPolicy(
        draw(st.sampled_from(Measure)),
        draw(st.floats(0.1, 50)),
        low,
        low + draw(st.integers(0 if low else 1, 200)),
        draw(st.sampled_from([10.0, 60.0])),
        draw(st.sampled_from([0.0, 30.0, 300.0])),
        draw(st.sampled_from([0.0, 30.0, 300.0])),
        draw(st.floats(0, 0.99)),
        draw(st.floats(1.01, 10)),
        draw(st.floats(0, 0.5)),
        draw(st.floats(0, 0.5)),
    )


@st.composite
def histories(draw: st.DrawFn) -> ScalingHistory:
    ages = sorted(draw(st.lists(st.floats(1, 400), max_size=10)), reverse=True)
    made = tuple(Recommendation(NOW - age, draw(COUNTS)) for age in ages)
    return ScalingHistory(NOW - draw(st.sampled_from([5.0, 100.0, 1000.0])), made)


def within(chosen: ScalingPolicy, current: int) -> int:
    return min(max(current, chosen.min_replicas), chosen.max_replicas)


@given(policies(), histories(), LOADS, COUNTS)
def test_decisions_respect_bounds_and_step_limits(
    chosen: ScalingPolicy, history: ScalingHistory, load: float, current: int
) -> None:
    current = within(chosen, current)
    decision = decide(chosen, history, flat(load), NOW, current)
    assert chosen.min_replicas <= decision.requested <= chosen.max_replicas
    assert decision.requested <= max(current + 1, math.ceil(current * chosen.max_upscale_factor))
    assert decision.requested >= min(current - 1, math.ceil(current * chosen.max_downscale_factor))
    if decision.requested == 0 and current:
        assert load == 0


@given(policies(), histories(), LOADS, LOADS, COUNTS)
def test_more_load_never_means_fewer_replicas(
    chosen: ScalingPolicy, history: ScalingHistory, one: float, other: float, current: int
) -> None:
    current = within(chosen, current)
    low, high = (decide(chosen, history, flat(load), NOW, current).requested for load in sorted((one, other)))
    assert low <= high


@given(policies(), st.integers(1, 200), st.floats(-1, 1), st.integers(1, 30))
def test_a_load_within_the_tolerance_never_moves_anything(
    chosen: ScalingPolicy, current: int, share: float, ticks: int
) -> None:
    current = within(chosen, current)
    tolerance = chosen.upscale_tolerance if share > 0 else chosen.downscale_tolerance
    load = chosen.target * current * (1 + 0.99 * share * tolerance)
    history = OLD
    for _ in range(ticks):
        decision = decide(chosen, history, flat(load), NOW, current)
        assert decision.requested == current
        history = history.after(decision, chosen)


def replay(chosen: ScalingPolicy, trace: list[float]) -> list[Decision]:
    """Decide on a recorded trace: one load per tick."""
    current, history, made = max(chosen.min_replicas, 1), ScalingHistory(NOW), []
    samples: list[LoadSample] = []
    for index, load in enumerate(trace):
        now = NOW + 10 * index
        samples = [sample for sample in samples if sample.at > now - chosen.window_s - 20]
        samples += [LoadSample(now - 9 + second, load) for second in range(10)]
        decision = decide(chosen, history, samples, now, current)
        history, current = history.after(decision, chosen), decision.requested
        made.append(decision)
    return made


@given(policies(), st.lists(LOADS, max_size=60))
def test_a_recorded_trace_gives_identical_decisions_twice(chosen: ScalingPolicy, trace: list[float]) -> None:
    assert replay(chosen, trace) == replay(chosen, trace)


@given(policies(), LOADS)
def test_a_constant_load_converges(chosen: ScalingPolicy, load: float) -> None:
    numbers = [decision.requested for decision in replay(chosen, [load] * 300)]
    moves = [after - before for before, after in zip(numbers, numbers[1:], strict=False) if after != before]
    assert all(move > 0 for move in moves) or all(move < 0 for move in moves)
