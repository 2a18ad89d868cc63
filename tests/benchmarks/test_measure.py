"""Search for the highest rate that an open load sustains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.tools.measure import Sample, sustained_peak


def _system(limit: float, tried: list[float] | None = None) -> Callable[[float], Sample]:
    """Measure a system that sustains rates of up to `limit`."""

    def measure_at(rate: float) -> Sample:
        if tried is not None:
            tried.append(rate)
        return Sample("cortex", "noop", "open", rate=rate, p99_us=1.0 if rate <= limit else None)

    return measure_at


@pytest.mark.parametrize("start", [3_000.0, 9_000.0, 10_000.0, 11_000.0, 40_000.0])
def test_the_peak_is_found_from_below_and_from_above(start: float) -> None:
    rate = sustained_peak(_system(10_000), start).rate
    assert rate is not None
    assert 9_300 <= rate <= 10_000


def test_a_rate_that_was_not_sustained_is_tried_again() -> None:
    tried: list[float] = []
    steady = _system(10_000, tried)

    def disturbed_once(rate: float) -> Sample:
        sample = steady(rate)
        return Sample("cortex", "noop", "open", rate=rate) if len(tried) == 1 else sample

    assert (sustained_peak(disturbed_once, 8_000).rate or 0) >= 9_300
    assert tried[:2] == [8_000, 8_000]


def test_a_system_that_sustains_no_rate_has_no_peak() -> None:
    with pytest.raises(ValueError, match="no rate between 125/s and 8000/s was sustained"):
        sustained_peak(_system(0), 8_000)
