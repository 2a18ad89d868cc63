"""Time that a batch waits for further requests (pure functions)."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable

import pytest

from cortex.worker.requests.batch_timing import BatchTiming

MS = 1_000_000


def timing_after(*calls: tuple[int, int, int], interval_s: float = 0.1, max_size: int = 64) -> tuple[BatchTiming, int]:
    """Return the timing and the end of the last of these calls: (size, still waiting, duration in ms)."""
    timing, now_ns = BatchTiming(max_size, interval_s), 0
    for size, waiting, duration_ms in calls:
        now_ns += duration_ms * MS
        timing.record(size, waiting, duration_ms * MS, now_ns)
    return timing, now_ns


def test_a_single_caller_does_not_wait() -> None:
    assert BatchTiming(64, 1.0).wait_ns(1, 0, 0) == 0
    timing, now_ns = timing_after(*[(1, 0, 50)] * 20)
    assert timing.wait_ns(1, now_ns, now_ns) == 0


def test_detects_that_a_request_is_alone() -> None:
    timing, now_ns = timing_after(*[(1, 0, 0)] * 3)
    assert timing.is_alone(now_ns + 50_000)
    assert not timing.is_alone(now_ns + 5_000), "the request arrived during another call"
    assert not timing_after((2, 0, 0))[0].is_alone(MS), "two requests ran a moment ago"
    assert not timing_after((1, 0, 2))[0].is_alone(50 * MS), "others may have arrived during such a long call"


def test_waits_for_callers_that_were_just_answered() -> None:
    timing, now_ns = timing_after(*[(8, 0, 20)] * 50)
    first_ns = now_ns + MS
    assert 0 < timing.wait_ns(3, first_ns, first_ns) <= 10 * MS
    assert timing.wait_ns(8, first_ns, first_ns + 2 * MS) == 0


def test_the_end_of_a_wait_does_not_depend_on_who_joins() -> None:
    timing, now_ns = timing_after(*[(8, 0, 20)] * 50)
    first_ns = now_ns + MS
    ends = {at + timing.wait_ns(count, first_ns, at) for count, at in ((1, first_ns), (4, first_ns + 5 * MS))}
    assert len(ends) == 1
    assert timing.wait_ns(5, first_ns, ends.pop()) == 0


def test_callers_are_waited_for_after_a_call_without_them() -> None:
    """Otherwise they would be called one by one for as long as each call keeps their processor busy."""
    timing, now_ns = timing_after(*[(64, 0, 20)] * 50, (1, 0, 5))
    assert timing.wait_ns(1, now_ns, now_ns) > MS
    timing, now_ns = timing_after(*[(64, 0, 20)] * 50, *[(1, 0, 5)] * 30)
    assert timing.wait_ns(1, now_ns, now_ns) == 0


def test_a_wait_is_at_most_the_interval() -> None:
    timing, now_ns = timing_after(*[(8, 0, 500)] * 50, interval_s=0.003)
    assert timing.wait_ns(1, now_ns, now_ns) == 3 * MS
    assert timing.wait_ns(1, now_ns, now_ns + 3 * MS) == 0


@pytest.mark.parametrize(
    ("waiting", "first_ms", "now_ms", "left_ms"),
    [
        (1, -19, 0, 5),  # the request arrived during the last call: the interval starts at its end
        (15, -19, 1, 4),
        (15, -1, 5, 0),
        (16, -19, 0, 0),
        (1, 2, 2, 5),  # the request arrived after the end
        (3, 2, 6, 1),
        (1, 7, 7, 3),  # the limit is half a call
    ],
)
def test_the_interval_starts_when_the_first_request_could_run(
    waiting: int, first_ms: int, now_ms: int, left_ms: int
) -> None:
    timing, ended_ns = timing_after(*[(16, 0, 20)] * 50, interval_s=0.005, max_size=16)
    left_ns = timing.wait_ns(waiting, ended_ns + first_ms * MS, ended_ns + now_ms * MS)
    assert left_ns == pytest.approx(left_ms * MS, abs=MS // 10)


@pytest.mark.parametrize("apart", [1, 5, 15])
def test_two_groups_of_callers_are_merged(apart: int) -> None:
    """Merge two groups of callers that alternate: those just answered are waited for before the next call."""
    timing, now_ns = timing_after(
        *[(apart, 16 - apart, 20), (16 - apart, apart, 20)] * 5, interval_s=0.005, max_size=16
    )
    came_ns = now_ns - 19 * MS
    assert timing.wait_ns(16 - apart, came_ns, now_ns) > 2 * MS
    assert timing.wait_ns(16, came_ns, now_ns + MS) == 0


def test_a_request_long_after_the_last_call_does_not_wait() -> None:
    timing, now_ns = timing_after(*[(8, 0, 20)] * 50)
    assert timing.wait_ns(1, now_ns + 11 * MS, now_ns + 11 * MS) == 0


def test_there_is_no_wait_when_calls_are_quick() -> None:
    timing, now_ns = timing_after(*[(8, 0, 1)] * 50)
    assert timing.wait_ns(1, now_ns, now_ns) == 0


def test_a_full_batch_does_not_wait() -> None:
    timing, now_ns = timing_after(*[(16, 30, 20)] * 10, max_size=16)
    assert timing.target == 16
    assert timing.wait_ns(16, now_ns, now_ns) == 0


def test_futile_waits_become_shorter() -> None:
    timing, now_ns = timing_after(*[(8, 0, 40)] * 50)
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


def throughput(timing: BatchTiming, clients: int, call: Callable[[int], int], travel_ns: int, end_ns: int) -> float:
    """Simulate clients that send a request as soon as they get a response; return the requests per ms.

    `call` returns the duration of a call by its size. Responses and requests travel one after the other, which takes
    `travel_ns` for each.
    """
    arrivals = [0] * clients  # of requests that are not in a call, in order
    now_ns = path_free_ns = done = 0
    while now_ns < end_ns:
        now_ns = max(now_ns, arrivals[0])
        waiting = bisect_right(arrivals, now_ns)
        if wait_ns := timing.wait_ns(waiting, arrivals[0], now_ns):
            target = arrivals[timing.target - 1] if timing.target <= clients else now_ns + wait_ns
            now_ns = min(now_ns + wait_ns, target)
            waiting = bisect_right(arrivals, now_ns)
            if timing.wait_ns(waiting, arrivals[0], now_ns):
                continue
        size = timing.size(waiting)
        duration_ns = call(size)
        now_ns += duration_ns
        del arrivals[:size]
        path_free_ns = max(path_free_ns, now_ns)
        timing.record(size, bisect_right(arrivals, now_ns), duration_ns, now_ns)
        for _ in range(size):
            path_free_ns += travel_ns
            arrivals.append(path_free_ns)
        done += size
    return done / (end_ns / MS)


def growing(size: int) -> int:
    """A matrix product on a processor: the duration grows with the size."""
    return int(1.5 * MS) + size * MS // 10


def constant(size: int) -> int:
    """A model on a device that is as fast with a full batch."""
    return 12 * MS


@pytest.mark.parametrize(
    ("call", "travel_us", "together", "divided"),
    [
        (growing, 60, 64 / (7.9 + 3.8), 64 / (2 * 4.7)),  # requests per ms, as one batch and as two
        (constant, 60, 64 / (12 + 3.8), 64 / (2 * 12)),
        (growing, 2, 64 / (7.9 + 0.1), 64 / (2 * 4.7)),
    ],
)
def test_clients_are_divided_where_that_has_more_throughput(
    call: Callable[[int], int], travel_us: int, together: float, divided: float
) -> None:
    timing = BatchTiming(64, 0.01)
    measured = throughput(timing, 64, call, travel_us * 1000, 60_000 * MS)
    assert measured > 0.95 * max(together, divided)


def test_more_clients_than_a_batch_has_room_for_are_not_divided() -> None:
    timing = BatchTiming(64, 0.01)
    assert throughput(timing, 128, growing, 60_000, 60_000 * MS) > 0.95 * 64 / 7.9


def test_requests_run_singly_when_a_batch_takes_longer() -> None:
    timing, now_ns = timing_after((1, 1, 1), (2, 0, 8), (16, 0, 8))
    assert timing.size(2) == 1
    assert timing.size(16) == 16
    assert timing.size(100) == 64, "unknown sizes are tried"
    timing.record(2, 2, 8 * MS, now_ns)
    assert timing.wait_ns(1, now_ns, now_ns) > 0
    timing, now_ns = timing_after((1, 3, 1), (4, 0, 8))
    assert timing.wait_ns(1, now_ns, now_ns) == 0, "no wait for a batch that would not be formed"


@pytest.mark.parametrize("seed", range(5))
def test_other_programs_on_the_processor_do_not_make_batches_seem_slow(seed: int) -> None:
    """Long calls are interrupted most of the time, single ones seldom: the shortest of each can't be compared."""
    chance = random.Random(seed)

    def call(size: int) -> int:
        own_ns = MS // 5 if size == 1 else 3 * MS // 10 + size * 9 * MS // 100
        return own_ns + sum(4 * MS for _ in range(own_ns // (MS // 10)) if chance.random() < 0.1)

    measured = throughput(BatchTiming(64, 0.01), 64, call, 2_000, 20_000 * MS)
    assert measured > 0.9 * 64 / (6 + 6 * 4)


def test_the_slower_way_is_tried_occasionally() -> None:
    for together_ms, usual in ((1, 8), (80, 1)):
        timing, _ = timing_after((1, 7, 2), (8, 0, together_ms))
        sizes = [timing.size(8) for _ in range(1024)]
        assert 0.9 < sizes.count(usual) / 1024 < 1
        assert set(sizes) == {1, 8}


def test_a_single_slow_batch_is_forgotten() -> None:
    timing, _ = timing_after((1, 0, 2), (8, 0, 800), (8, 0, 8))
    assert timing.size(8) == 8
