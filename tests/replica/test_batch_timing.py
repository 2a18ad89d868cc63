"""How long a batch stays open: pure."""

from __future__ import annotations

import pytest

from cortex.replica.batch_timing import BatchTiming

MS = 1_000_000


def after(*calls: tuple[int, int, int], interval_s: float = 0.1, max_size: int = 64) -> tuple[BatchTiming, int]:
    """Return what was learned of calls (size, still waiting, duration in ms), and when the last one ended."""
    timing, now_ns = BatchTiming(max_size, interval_s), 0
    for size, waiting, duration_ms in calls:
        now_ns += duration_ms * MS
        timing.record(size, waiting, duration_ms * MS, now_ns)
    return timing, now_ns


def test_nobody_waits_who_is_alone() -> None:
    assert BatchTiming(64, 1.0).wait_ns(1, 0, 0) == 0
    timing, now_ns = after(*[(1, 0, 50)] * 20)
    assert timing.wait_ns(1, now_ns, now_ns) == 0


def test_who_comes_alone_is_called_without_a_look_for_others() -> None:
    timing, now_ns = after(*[(1, 0, 0)] * 3)
    assert timing.is_alone(now_ns + 50_000)
    assert not timing.is_alone(now_ns + 5_000), "it came while another ran"
    assert not after((2, 0, 0))[0].is_alone(MS), "two were inside a moment ago"
    assert not after((1, 0, 2))[0].is_alone(50 * MS), "others may have come while so long a call ran"


def test_those_that_were_just_answered_are_waited_for() -> None:
    timing, now_ns = after(*[(8, 0, 20)] * 50)
    first_ns = now_ns + MS
    assert 0 < timing.wait_ns(3, first_ns, first_ns) <= 10 * MS
    assert timing.wait_ns(8, first_ns, first_ns + 2 * MS) == 0


def test_wait_ends_at_one_moment_whoever_joins() -> None:
    timing, now_ns = after(*[(8, 0, 20)] * 50)
    first_ns = now_ns + MS
    ends = {at + timing.wait_ns(count, first_ns, at) for count, at in ((1, first_ns), (4, first_ns + 5 * MS))}
    assert len(ends) == 1
    assert timing.wait_ns(5, first_ns, ends.pop()) == 0


def test_wait_is_never_longer_than_the_interval() -> None:
    timing, now_ns = after(*[(8, 0, 500)] * 50, interval_s=0.003)
    assert timing.wait_ns(1, now_ns, now_ns) == 3 * MS
    assert timing.wait_ns(1, now_ns, now_ns + 3 * MS) == 0


@pytest.mark.parametrize(
    ("waiting", "first_ms", "now_ms", "left_ms"),
    [
        (1, -19, 0, 5),  # it came early in the call that has just ended: the interval begins with the end
        (15, -19, 1, 4),
        (15, -1, 5, 0),
        (16, -19, 0, 0),
        (1, 2, 2, 5),  # it came after the end
        (3, 2, 6, 1),
        (1, 7, 7, 3),  # half of a call is the limit
    ],
)
def test_interval_begins_when_the_first_could_be_called(waiting: int, first_ms: int, now_ms: int, left_ms: int) -> None:
    timing, ended_ns = after(*[(16, 0, 20)] * 50, interval_s=0.005, max_size=16)
    left_ns = timing.wait_ns(waiting, ended_ns + first_ms * MS, ended_ns + now_ms * MS)
    assert left_ns == pytest.approx(left_ms * MS, abs=MS // 10)


@pytest.mark.parametrize("apart", [1, 5, 15])
def test_callers_in_two_groups_become_one(apart: int) -> None:
    """Of 16 callers who ask again when answered, some came first: the others are waited for when they are answered."""
    timing, now_ns = after(*[(apart, 16 - apart, 20), (16 - apart, apart, 20)] * 5, interval_s=0.005, max_size=16)
    came_ns = now_ns - 19 * MS
    assert timing.wait_ns(16 - apart, came_ns, now_ns) > 2 * MS
    assert timing.wait_ns(16, came_ns, now_ns + MS) == 0


def test_request_that_comes_long_after_the_last_call_waits_for_nobody() -> None:
    timing, now_ns = after(*[(8, 0, 20)] * 50)
    assert timing.wait_ns(1, now_ns + 11 * MS, now_ns + 11 * MS) == 0


def test_quick_calls_are_not_waited_for() -> None:
    timing, now_ns = after(*[(8, 0, 1)] * 50)
    assert timing.wait_ns(1, now_ns, now_ns) == 0


def test_full_batch_is_closed_at_once() -> None:
    timing, now_ns = after(*[(16, 30, 20)] * 10, max_size=16)
    assert timing.expected == 16
    assert timing.wait_ns(16, now_ns, now_ns) == 0


def test_waits_that_were_in_vain_become_rare() -> None:
    timing, now_ns = after(*[(8, 0, 40)] * 50)
    waited_ns = []
    for _ in range(20):
        left_ns = timing.wait_ns(1, now_ns, now_ns)
        waited_ns.append(left_ns)
        if left_ns:
            assert timing.wait_ns(1, now_ns, now_ns + left_ns) == 0
        now_ns += left_ns + 40 * MS
        timing.record(8, 0, 40 * MS, now_ns)
    assert waited_ns[0] > 15 * MS
    assert max(waited_ns[10:]) < 5 * MS


def test_calls_of_one_are_made_where_a_batch_takes_longer_than_they_do() -> None:
    timing, now_ns = after((1, 1, 1), (2, 0, 8), (16, 0, 8))
    assert timing.size(2) == 1
    assert timing.size(16) == 16
    assert timing.size(100) == 64, "what is not known is tried"
    timing.record(2, 2, 8 * MS, now_ns)
    assert timing.expected == 4
    assert timing.wait_ns(1, now_ns, now_ns) > 0
    timing.record(4, 0, 8 * MS, now_ns)
    assert timing.wait_ns(1, now_ns, now_ns) == 0, "nobody waits for a batch that is not made"


def test_both_ways_are_tried_from_time_to_time() -> None:
    for together_ms, usual in ((1, 8), (80, 1)):
        timing, _ = after((1, 7, 2), (8, 0, together_ms))
        sizes = [timing.size(8) for _ in range(1024)]
        assert 0.9 < sizes.count(usual) / 1024 < 1
        assert set(sizes) == {1, 8}


def test_what_was_slow_once_is_not_slow_for_ever() -> None:
    timing, _ = after((1, 0, 2), (8, 0, 800), (8, 0, 8))
    assert timing.size(8) == 8
