"""Whether the calls of a process are short, from their durations."""

from __future__ import annotations

import random

import pytest

from cortex.worker.requests.runner import DECAY_CALLS, CallDurations
from cortex.worker.shared_state import SharedConnectionState

MS = 1_000_000


def after(*durations_ms: float) -> bool:
    shared_state = SharedConnectionState()
    durations = CallDurations(shared_state)
    for duration_ms in durations_ms:
        durations.record(int(duration_ms * MS))
    assert shared_state.has_short_calls == durations.are_short
    return durations.are_short


def test_calls_are_not_short_until_enough_of_them_were() -> None:
    assert not after(*[1.0] * (2 * DECAY_CALLS - 1))
    assert after(*[1.0] * 2 * DECAY_CALLS)


def test_the_first_calls_do_not_count() -> None:
    assert after(8000.0, *[1.0] * 2 * DECAY_CALLS)


@pytest.mark.parametrize(("duration_ms", "are_short"), [(0.02, True), (4.0, True), (6.0, False), (2000.0, False)])
def test_equal_calls_are_short_below_the_limit(duration_ms: float, are_short: bool) -> None:
    assert after(*[duration_ms] * 10 * DECAY_CALLS) is are_short


def test_one_long_call_in_thousands_is_enough() -> None:
    assert not after(*[1.0] * 10_000, 8000.0)
    assert not after(*([1.0] * 10_000 + [8000.0]) * 3, *[1.0] * 5_000)


def test_a_long_call_is_forgotten_after_very_many_short_ones() -> None:
    assert after(*[1.0] * DECAY_CALLS, 8000.0, *[1.0] * 200_000)


def test_pauses_of_the_machine_do_not_count() -> None:
    numbers = random.Random(1)
    assert after(*(30.0 if numbers.random() < 0.001 else 0.01 for _ in range(20_000)))
