"""Drift is flagged, chance is not; the chi-square distribution against published tables."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from cortex.operator.monitoring.drift import (
    KEPT_WINDOWS,
    Drift,
    DriftSettings,
    begin,
    chi_square_quantile,
    compare,
    observe,
)
from cortex.worker.monitoring.tracker import bucket_of

#: Draws counts by category.
Draw = Callable[[Generator, int], dict[str, int]]

SEEDS = 1000
WINDOW = 1000
CLASSES = DriftSettings(counts_classes=True, window=WINDOW, false_alarm_rate=0.01)
NUMBERS = DriftSettings(counts_classes=False, window=WINDOW, false_alarm_rate=0.01)


def classes(*shares: float) -> Draw:
    p = np.array(shares) / sum(shares)
    return lambda rng, n: {f"c{i}": int(count) for i, count in enumerate(rng.multinomial(n, p)) if count}


def numbers(draw: Callable[[Generator, int], np.ndarray]) -> Draw:
    """Return a draw of buckets that have the shares of a sample of numbers."""

    @cache
    def shares() -> tuple[list[str], np.ndarray]:
        found = Counter(map(bucket_of, draw(default_rng(0), 20_000).tolist()))
        return list(map(str, found)), np.array(list(found.values())) / 20_000

    def counts(rng: Generator, n: int) -> dict[str, int]:
        buckets, p = shares()
        return {bucket: int(count) for bucket, count in zip(buckets, rng.multinomial(n, p), strict=True) if count}

    return counts


MANY = classes(*(1 / rank for rank in range(1, 101)))
NORMAL = numbers(lambda rng, n: rng.normal(size=n))


def alarms(
    settings: DriftSettings, before: Draw, after: Draw, baseline: int = WINDOW, seeds: int = SEEDS, window: int = WINDOW
) -> int:
    found = 0
    for seed in range(seeds):
        rng = default_rng(seed)
        psi, threshold = compare(before(rng, baseline), after(rng, window), settings)
        found += psi > threshold
    return found


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("settings", "draw", "baseline"),
    [
        pytest.param(CLASSES, classes(1), WINDOW, id="one class"),
        pytest.param(CLASSES, classes(0.5, 0.5), WINDOW, id="two classes"),
        pytest.param(CLASSES, classes(0.99, 0.01), WINDOW, id="a rare class"),
        pytest.param(CLASSES, classes(0.999, 0.001), 100_000, id="a very rare class"),
        pytest.param(CLASSES, classes(*[1] * 10), WINDOW, id="ten classes"),
        pytest.param(CLASSES, MANY, WINDOW, id="many classes"),
        pytest.param(CLASSES, MANY, 100_000, id="many classes and a large baseline"),
        pytest.param(NUMBERS, NORMAL, WINDOW, id="numbers"),
        pytest.param(
            NUMBERS, numbers(lambda rng, n: rng.choice([0, 1, 2.5, 7], size=n, p=[0.7, 0.2, 0.09, 0.01])), WINDOW,
            id="few numbers",
        ),
    ],
)  # fmt: skip
def test_false_alarms_do_not_exceed_the_given_rate(settings: DriftSettings, draw: Draw, baseline: int) -> None:
    assert alarms(settings, draw, draw, baseline) <= SEEDS * settings.false_alarm_rate


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        pytest.param(CLASSES, classes(0.5, 0.5), classes(0.65, 0.35), id="15 in a hundred move"),
        pytest.param(CLASSES, classes(0.9, 0.1), classes(0.9, 0.05, 0.05), id="a new class"),
        pytest.param(CLASSES, classes(1), classes(0.95, 0.05), id="a second class"),
        pytest.param(CLASSES, classes(1), classes(0, 1), id="another class only"),
        pytest.param(NUMBERS, NORMAL, numbers(lambda rng, n: rng.normal(0.4, size=n)), id="a shifted mean"),
        pytest.param(NUMBERS, NORMAL, numbers(lambda rng, n: rng.normal(0, 1.5, size=n)), id="a wider spread"),
        pytest.param(NUMBERS, numbers(lambda rng, n: np.zeros(n)), NORMAL, id="no constant any more"),
    ],
)
def test_a_shift_is_flagged_by_the_first_window_after_it(settings: DriftSettings, before: Draw, after: Draw) -> None:
    assert alarms(settings, before, after, seeds=100) >= 98


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        pytest.param(CLASSES, classes(1), classes(0, 1), id="another class only"),
        pytest.param(CLASSES, classes(0.5, 0.5), classes(0, 0, 1), id="a third class only"),
        pytest.param(NUMBERS, NORMAL, numbers(lambda rng, n: np.full(n, 9.0)), id="a constant"),
        pytest.param(NUMBERS, numbers(lambda rng, n: np.zeros(n)), NORMAL, id="no constant any more"),
    ],
)
@pytest.mark.parametrize(("baseline", "window"), [(100, 20_000), (20_000, 100)])
def test_flags_a_complete_change_for_any_sample_sizes(
    settings: DriftSettings, before: Draw, after: Draw, baseline: int, window: int
) -> None:
    assert alarms(settings, before, after, baseline, 10, window) == 10


@pytest.mark.parametrize("rare", [0.001, 0.01, 0.03, 0.049, 0.051])
@pytest.mark.parametrize(("baseline", "window"), [(100, 20_000), (20_000, 100)])
def test_a_rare_class_is_no_drift_for_any_sample_sizes(rare: float, baseline: int, window: int) -> None:
    draw = classes(1 - rare, rare)
    assert alarms(CLASSES, draw, draw, baseline, SEEDS, window) <= SEEDS * CLASSES.false_alarm_rate


def stream(drift: Drift, settings: DriftSettings, draw: Draw, totals: dict[str, int], looks: int, step: int) -> Drift:
    rng = default_rng(looks)
    for look in range(looks):
        for name, count in draw(rng, step).items():
            totals[name] = totals.get(name, 0) + count
        drift = observe(drift, totals, settings, float(look))
    return drift


def test_a_window_ends_at_the_first_call_with_enough_predictions() -> None:
    totals: dict[str, int] = {"c0": 17}
    drift = begin("m", totals, {})

    drift = stream(drift, CLASSES, classes(0.5, 0.5), totals, looks=3, step=300)
    assert (drift.baseline, drift.compared) == ({}, 0)
    drift = stream(drift, CLASSES, classes(0.5, 0.5), totals, looks=1, step=300)
    assert sum(drift.baseline.values()) == 1200
    drift = stream(drift, CLASSES, classes(0.5, 0.5), totals, looks=4, step=300)
    assert (drift.compared, drift.drifted) == (1, 0)
    assert drift.last and drift.last.count == 1200 and not drift.last.is_drift
    drift = stream(drift, CLASSES, classes(0.1, 0.9), totals, looks=4, step=300)
    assert (drift.compared, drift.drifted) == (2, 1)
    assert drift.last and drift.last.is_drift
    assert Drift.from_data(json.loads(json.dumps(drift.to_data()))) == drift


def test_compares_a_given_baseline_with_the_first_window() -> None:
    drift = begin("m", {}, {"c0": 900, "c1": 100})

    drift = stream(drift, CLASSES, classes(0.5, 0.5), {}, looks=1, step=WINDOW)

    assert (drift.compared, drift.drifted) == (1, 1)


def test_a_reset_of_the_totals_starts_a_new_window() -> None:
    drift = begin("m", {"c0": 5000}, {})
    drift = observe(drift, {"c0": 400}, CLASSES, 0.0)
    assert drift.mark == {"c0": 400}
    assert observe(drift, {"c0": 1400}, CLASSES, 0.0).baseline == {"c0": 1000}


def test_an_incomplete_window_changes_nothing() -> None:
    drift = begin("m", {"c0": 5000}, {})

    assert observe(drift, {"c0": 5999}, CLASSES, 0.0) is drift


def test_keeps_the_latest_windows() -> None:
    drift = stream(begin("m", {}, {}), CLASSES, classes(0.5, 0.5), {}, looks=KEPT_WINDOWS + 9, step=WINDOW)

    assert len(drift.windows) == KEPT_WINDOWS
    assert drift.compared == KEPT_WINDOWS + 8


@pytest.mark.parametrize(
    ("tail", "degrees", "quantile"),
    [
        (0.05, 1, 3.841), (0.01, 1, 6.635), (0.001, 1, 10.828), (0.95, 10, 3.940), (0.5, 4, 3.357),
        (0.05, 9, 16.919), (0.001, 9, 27.877), (0.05, 30, 43.773), (0.001, 100, 149.449), (0.99, 100, 70.065),
    ],
)  # fmt: skip
def test_quantiles_match_published_tables(tail: float, degrees: int, quantile: float) -> None:
    assert chi_square_quantile(tail, degrees) == pytest.approx(quantile, rel=0.031)


def test_rates_of_almost_zero_have_a_threshold() -> None:
    assert 100 < chi_square_quantile(0.0, 1) < math.inf
