"""Rings of samples: fixed size, gaps, averages; quantiles of histograms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.operator.dashboard.samples import ApiSample, SampleRing, average, duration_buckets, quantile
from cortex.worker.monitoring.metrics import SeriesKind, series_key


def test_a_ring_returns_one_sample_per_interval_oldest_first() -> None:
    ring = SampleRing(5, 4)
    for at in (100, 105, 111, 112):
        ring.add(at, ApiSample(requests_per_s=at))
    read = ring.read(114)
    assert [at for at, _ in read] == [95, 100, 105, 110]
    assert [sample.requests_per_s if sample else None for _, sample in read] == [None, 100, 105, 112]


def test_samples_that_are_too_old_are_gaps() -> None:
    ring = SampleRing(5, 3)
    ring.add(0, ApiSample(in_flight=1))
    assert [sample for _, sample in ring.read(15)] == [None, None, None]


@given(st.lists(st.integers(0, 400), max_size=60).map(sorted), st.integers(0, 400))
def test_a_ring_returns_the_last_sample_of_each_interval_in_reach(times: list[int], later: int) -> None:
    ring = SampleRing(5, 12)
    for at in times:
        ring.add(at, ApiSample(queued=at))
    now = max([*times, 0]) + later
    expected = {at // 5: at for at in times if at // 5 > now // 5 - 12}
    assert {int(at) // 5: sample.queued for at, sample in ring.read(now) if sample} == expected


def test_unknown_values_do_not_count_in_an_average() -> None:
    found = average([ApiSample(requests_per_s=1, p99_s=0.5), ApiSample(requests_per_s=3, p99_s=0.1), ApiSample()])
    assert (found.requests_per_s, found.p99_s) == (2, 0.5)
    assert math.isnan(found.in_flight)
    assert all(math.isnan(value) for value in average([]))


@pytest.mark.parametrize(
    ("q", "buckets", "expected"),
    [
        (0.5, {}, math.nan),
        (0.5, {0.1: 0, math.inf: 0}, math.nan),
        (0.5, {0.1: 10, 0.2: 0}, 0.05),
        (0.5, {0.1: 5, 0.2: 5}, 0.1),
        (0.99, {0.1: 0, 0.2: 100}, 0.199),
        (0.99, {0.1: 1, math.inf: 99}, 0.1),
    ],
)
def test_quantiles_are_interpolated_inside_their_bucket(q: float, buckets: dict[float, float], expected: float) -> None:
    assert quantile(q, buckets) == pytest.approx(expected, nan_ok=True)


@given(
    st.dictionaries(st.sampled_from([0.001, 0.01, 0.1, 1.0, math.inf]), st.integers(0, 50), min_size=1),
    st.floats(0.01, 0.99),
)
def test_a_quantile_is_between_zero_and_the_last_bound(buckets: dict[float, float], q: float) -> None:
    found = quantile(q, buckets)
    assert math.isnan(found) == (sum(buckets.values()) == 0)
    assert math.isnan(found) or 0 <= found <= 1.0


def test_durations_are_summed_over_the_labels_of_their_histogram() -> None:
    name = "cortex_request_duration_seconds"
    numbers = {
        series_key(SeriesKind.BUCKET, name, {"le": "0.1", "method": "post"}): 2.0,
        series_key(SeriesKind.BUCKET, name, {"le": "0.1", "method": "get"}): 3.0,
        series_key(SeriesKind.BUCKET, name, {"le": "+Inf"}): 1.0,
        series_key(SeriesKind.SUM, name): 7.0,
        series_key(SeriesKind.COUNTER, f"{name}_of_a_user"): 9.0,
    }
    assert duration_buckets(numbers) == {0.1: 5.0, math.inf: 1.0}
