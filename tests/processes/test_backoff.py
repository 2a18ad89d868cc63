from __future__ import annotations

import pytest

from cortex.processes.backoff import Backoff


@pytest.mark.parametrize(("failures", "delay_s"), [(0, 0.5), (1, 0.5), (2, 1.0), (3, 2.0), (7, 30.0), (10_000, 30.0)])
def test_delays_double_up_to_the_maximum(failures: int, delay_s: float) -> None:
    assert Backoff(0.5, 30.0).delay_s(failures) == delay_s


def test_delays_grow_by_another_factor() -> None:
    assert Backoff(1.0, 10.0, factor=1.5).delay_s(3) == 2.25


def test_jitter_spreads_delays_around_their_value() -> None:
    delays = {Backoff(1.0, 10.0, jitter=0.1).delay_s(2) for _ in range(100)}

    assert len(delays) > 1
    assert all(1.8 <= delay_s <= 2.2 for delay_s in delays)
