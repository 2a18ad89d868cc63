"""Simulations and traffic traces."""

from __future__ import annotations

import math

import pytest

from cortex.errors import InputError
from cortex.operator.autoscaling.queueing_theory import ServiceTime
from cortex.operator.autoscaling.simulation import Assumptions, Outcome, simulate, slots
from cortex.operator.autoscaling.traffic import SHAPES, Trace, read_trace, shaped
from harness.replicas.fleet import api

CALLS = ServiceTime(0.1, 0.5)
STEP = Trace((0.0, 60.0, 300.0), (1.0, 40.0, 1.0), 1800.0)


def simulated(trace: Trace = STEP, startup_s: float = 5.0, seed: int = 1, **autoscaling: object) -> Outcome:
    periods = {"upscale_stabilization_period_s": 0, "downscale_stabilization_period_s": 60, "window_s": 10}
    found = api(autoscaling={**periods, "max_upscale_factor": 3, **autoscaling})
    return simulate(found, trace, Assumptions(CALLS, startup_s, seed=seed))


def test_replicas_follow_the_load_with_the_start_up_delay() -> None:
    outcome = simulated()
    assert outcome.points[0].requested == outcome.points[-1].requested == 1
    assert 4 < outcome.most_replicas < 100
    late = simulated(startup_s=60.0)
    assert (late.p95_s or 0) > (outcome.p95_s or 0)
    assert outcome.is_exact
    assert outcome.p50_s is not None and outcome.p50_s > 0.08


def test_the_same_arguments_give_the_same_outcome() -> None:
    assert simulated() == simulated()
    assert simulated() != simulated(seed=2)


@pytest.mark.heavy
def test_ten_thousand_replicas_are_simulated_as_fast_as_ten() -> None:
    trace = shaped("diurnal", 5_000, 90_000, 10_800)
    outcome = simulated(trace, max_replicas=20_000, target_replica_concurrency=0.8)
    assert not outcome.is_exact
    assert 10_000 < outcome.most_replicas < 14_000
    assert outcome.refused == outcome.timed_out == 0
    assert outcome.p95_s == pytest.approx(dict(simulated_parts())[0.95], rel=0.1)


def simulated_parts() -> list[tuple[float, float]]:
    """Return the quantiles of the service times, without waiting."""
    below, found = 0.0, []
    for time_s, share in CALLS.parts():
        below += share
        found.append((round(below, 3), time_s))
    return found


def test_scales_to_zero_and_back() -> None:
    trace = Trace((0.0, 60.0, 300.0), (5.0, 0.0, 5.0), 400.0)
    outcome = simulated(trace, min_replicas=0)
    assert min(point.requested for point in outcome.points) == 0
    assert outcome.points[-1].requested >= 1
    assert outcome.refused == outcome.timed_out == 0
    waking = next(made for made in outcome.decisions if made.current == 0)
    assert waking.requested == 1
    assert waking.at < 303


def test_the_ceiling_limits_the_replicas() -> None:
    found = api(autoscaling={"upscale_stabilization_period_s": 0})
    outcome = simulate(found, STEP, Assumptions(CALLS, 5.0, ceiling=2))
    assert outcome.most_replicas == 2
    assert outcome.refused or outcome.timed_out


def test_a_batch_runs_at_once_and_workloads_have_no_timeout() -> None:
    handler = {"interface": "handler", "type": "python", "path": "handler.py"}
    batching = {"max_batch_size": 8, "batch_interval_s": 0.1}
    assert slots(api(processes=3)) == 3
    assert slots(api(handler={**handler, "server_side_batching": batching, "processes_per_replica": 2})) == 16
    jobs = api("jobs", kind="AsyncAPI", autoscaling={"max_replicas": 2}, networking={"timeout_s": 1.0})
    outcome = simulate(jobs, STEP, Assumptions(CALLS, 5.0))
    assert outcome.refused == outcome.timed_out == 0
    assert (outcome.p95_s or 0) > 60


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_stay_between_base_and_peak_and_reach_both(shape: str) -> None:
    trace = shaped(shape, 10.0, 50.0, 3600.0)
    assert min(trace.rates) == pytest.approx(10, abs=2)
    assert max(trace.rates) == pytest.approx(50, abs=1)
    assert trace.duration_s == 3600


CSV = "time_s,requests_per_s\n100,1\n110,2.5\n120,0\n"


def test_a_trace_starts_at_zero_and_ends_with_its_last_entry() -> None:
    expected = Trace((0.0, 10.0), (1.0, 2.5), 20.0)
    assert read_trace(CSV, "t.csv") == expected
    lines = '{"time_s": 100, "requests_per_s": 1}\n\n{"time_s": 110, "requests_per_s": 2.5}\n'
    assert read_trace(lines + '{"time_s": 120, "requests_per_s": 0}', "t.ndjson") == expected
    assert [expected.rate(at) for at in (-1, 0, 9.9, 10, 99)] == [0, 1, 1, 2.5, 2.5]
    assert expected.requests == 35
    assert [expected.mean_rate(0, 20), expected.mean_rate(9, 11)] == [1.75, 1.75]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the first line must name the columns"),
        ("a,b\n1,2\n", "the first line must name the columns"),
        ("time_s,requests_per_s\n0,1\n", "at least two entries"),
        (CSV + "120,1\n", r"must grow from line to line \(entry 4 has 120\)"),
        (CSV + "130,x\n", "t:5: time_s and requests_per_s must be numbers"),
        (CSV + "130,-1\n", "t:5: .* not negative"),
        (CSV + f"{math.inf},1\n", "t:5: time_s must be finite"),
        ('{"time_s": 1', "t:1: this is not JSON"),
        ('{"time_s": 1}', "t:1: .* must be numbers"),
    ],
)
def test_rejects_an_invalid_trace_with_its_position(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_trace(text, "t")


def test_rejects_invalid_numbers_of_a_shape() -> None:
    with pytest.raises(InputError, match="peak"):
        shaped("spike", 2.0, 1.0, 10.0)
