from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.worker.http.connection_pool import GatewayClock

S = 1_000_000_000


def test_the_first_request_has_no_wait_at_any_clock_offset() -> None:
    for skew_s in (-3600, -1, 0, 1, 3600):
        assert GatewayClock().waited_ns(skew_s * S, 0) == 0


def test_wait_is_measured_relative_to_the_smallest_apparent_wait() -> None:
    clock = GatewayClock()
    clock.waited_ns(-5 * S, 0)
    assert clock.waited_ns(-3 * S, 1 * S) == 2 * S


def test_clock_set_back_applies_at_once_and_clock_set_ahead_within_a_minute() -> None:
    clock = GatewayClock()
    clock.waited_ns(10 * S, 0)
    assert clock.waited_ns(4 * S, 1 * S) == 0
    assert clock.waited_ns(10 * S, 2 * S) == 6 * S
    assert clock.waited_ns(10 * S, 31 * S) == 6 * S
    assert clock.waited_ns(10 * S, 62 * S) == 0


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**10)), min_size=1))
def test_wait_is_never_overestimated(skew_ns: int, requests: list[tuple[int, int]]) -> None:
    clock, now_ns = GatewayClock(), 0
    for later_ns, waited_ns in requests:
        now_ns += later_ns
        assert 0 <= clock.waited_ns(skew_ns + waited_ns, now_ns) <= waited_ns
