"""Drift is flagged, chance is not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from cortex.operator.monitoring.drift import KEPT_WINDOWS, Drift, Settings, begin, compare, observe
from cortex.replica.prediction_series import bucket_of

#: Draws counts by category.
Draw = Callable[[Generator, int], dict[str, int]]

SEEDS = 1000
WINDOW = 1000
CLASSES = Settings(counts_classes=True, window=WINDOW, false_alarm_rate=0.01)
NUMBERS = Settings(counts_classes=False, window=WINDOW, false_alarm_rate=0.01)


def classes(*shares: float) -> Draw:
    p = np.array(shares) / sum(shares)
    return lambda rng, n: {f"c{i}": int(count) for i, count in enumerate(rng.multinomial(n, p)) if count}


def numbers(draw: Callable[[Generator, int], np.ndarray]) -> Draw:
    return lambda rng, n: {str(b): count for b, count in Counter(map(bucket_of, draw(rng, n).tolist())).items()}


MANY = classes(*(1 / rank for rank in range(1, 101)))
NORMAL = numbers(lambda rng, n: rng.normal(size=n))


def alarms(
    settings: Settings, before: Draw, after: Draw, baseline: int = WINDOW, seeds: int = SEEDS, window: int = WINDOW
) -> int:
    found = 0
    for seed in range(seeds):
        rng = default_rng(seed)
        psi, threshold = compare(before(rng, baseline), after(rng, window), settings)
        found += psi > threshold
    return found


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
def test_false_alarms_are_as_rare_as_stated(settings: Settings, draw: Draw, baseline: int) -> None:
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
def test_a_shift_is_flagged_by_the_first_window_after_it(settings: Settings, before: Draw, after: Draw) -> None:
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
def test_all_that_changes_is_flagged_whatever_the_sizes(
    settings: Settings, before: Draw, after: Draw, baseline: int, window: int
) -> None:
    assert alarms(settings, before, after, baseline, 10, window) == 10


@pytest.mark.parametrize("rare", [0.001, 0.01, 0.03, 0.049, 0.051])
@pytest.mark.parametrize(("baseline", "window"), [(100, 20_000), (20_000, 100)])
def test_a_rare_class_is_no_drift_whatever_the_sizes(rare: float, baseline: int, window: int) -> None:
    draw = classes(1 - rare, rare)
    assert alarms(CLASSES, draw, draw, baseline, SEEDS, window) <= SEEDS * CLASSES.false_alarm_rate


def stream(drift: Drift, settings: Settings, draw: Draw, totals: dict[str, int], looks: int, step: int) -> Drift:
    rng = default_rng(looks)
    for look in range(looks):
        for name, count in draw(rng, step).items():
            totals[name] = totals.get(name, 0) + count
        drift = observe(drift, totals, settings, float(look))
    return drift


def test_a_window_ends_at_the_first_look_with_enough_predictions() -> None:
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


def test_a_given_baseline_is_compared_with_the_first_window() -> None:
    drift = begin("m", {}, {"c0": 900, "c1": 100})

    drift = stream(drift, CLASSES, classes(0.5, 0.5), {}, looks=1, step=WINDOW)

    assert (drift.compared, drift.drifted) == (1, 1)


def test_totals_that_went_back_begin_a_new_window() -> None:
    drift = begin("m", {"c0": 5000}, {})
    drift = observe(drift, {"c0": 400}, CLASSES, 0.0)
    assert drift.mark == {"c0": 400}
    assert observe(drift, {"c0": 1400}, CLASSES, 0.0).baseline == {"c0": 1000}


def test_a_look_without_news_changes_nothing() -> None:
    drift = begin("m", {"c0": 5000}, {})

    assert observe(drift, {"c0": 5999}, CLASSES, 0.0) is drift


def test_the_last_windows_are_kept() -> None:
    drift = stream(begin("m", {}, {}), CLASSES, classes(0.5, 0.5), {}, looks=KEPT_WINDOWS + 9, step=WINDOW)

    assert len(drift.windows) == KEPT_WINDOWS
    assert drift.compared == KEPT_WINDOWS + 8
