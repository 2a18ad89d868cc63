"""Simulated trials of a new version."""

from __future__ import annotations

import pytest
from benchmarks.canary_trials import CanaryPlan, Regression, main, simulate_canary, slow_rates

from cortex.operator.autoscaling.traffic import Trace, shaped
from cortex.operator.canary.judge import SLOW_TOGETHER

STEADY = Trace((0.0,), (100.0,), 3600.0)
PLAN = CanaryPlan((0.1,))


def test_a_regression_is_found_sooner_the_larger_it_is() -> None:
    small, large = (simulate_canary(Regression(0.01, rate, 0.005), PLAN, STEADY, 10, 1) for rate in (0.03, 0.1))
    assert small.worse == large.worse == 10
    assert large.p50_s is not None and small.p50_s is not None and large.p50_s < small.p50_s <= (small.p90_s or 0)


def test_a_version_that_is_as_good_is_found_not_worse() -> None:
    found = simulate_canary(Regression(0.01, 0.01, 0.02), PLAN, STEADY, 10, 1)
    assert (found.not_worse, found.worse, found.undecided) == (10, 0, 0)


def test_each_step_has_to_be_passed() -> None:
    regression = Regression(0.01, 0.01, 0.02)
    one, all_steps = (simulate_canary(regression, CanaryPlan(steps), STEADY, 10, 1) for steps in ((0.1,), (0.1, 0.5)))
    assert one.not_worse == all_steps.not_worse == 10
    assert one.p50_s is not None and all_steps.p50_s is not None and one.p50_s < all_steps.p50_s


@pytest.mark.heavy
def test_ten_requests_an_hour_decide_nothing_instead_of_something_wrong() -> None:
    trace = Trace((0.0,), (10 / 3600,), 86_400.0)
    found = simulate_canary(Regression(0.01, 0.01, 0.005), CanaryPlan((0.1,), window_s=600.0), trace, 20, 1)
    assert found.undecided == 20
    assert found.p50_s is found.p90_s is found.p50_requests is None


@pytest.mark.heavy
def test_the_time_of_day_is_no_regression() -> None:
    trace = shaped("diurnal", 1, 60, 86_400)
    found = simulate_canary(Regression(0.02, 0.02, 0.0), CanaryPlan((0.05,), window_s=300.0), trace, 20, 1)
    assert found.worse <= 1


def test_the_same_seed_gives_the_same_summary() -> None:
    regression = Regression(0.01, 0.04, 0.005)
    assert simulate_canary(regression, PLAN, STEADY, 3, 1) == simulate_canary(regression, PLAN, STEADY, 3, 1)


@pytest.mark.parametrize(("increase", "worse"), [(0.0, False), (0.09, False), (0.11, True), (0.5, True)])
def test_a_latency_is_worse_if_it_grows_by_more_than_the_margin(increase: float, worse: bool) -> None:
    regression = slow_rates(increase, 0.1, 0.5)
    assert regression.is_worse is worse
    assert regression.cluster == SLOW_TOGETHER
    assert regression.old_rate == pytest.approx(0.01)


def test_the_command_prints_a_row_for_each_regression(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rate", "100", "--duration", "20m", "--trials", "5", "--errors", "10%", "--latency", "100%"])
    lines = capsys.readouterr().out.splitlines()
    for name in ("errors 1.000% → 10.000%", "latency +100%"):
        (row,) = (line for line in lines if line.startswith(name))
        assert row.removeprefix(name).split()[:2] == ["100", "%"], row
