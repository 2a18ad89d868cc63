"""Inline and threaded calls, and the changes between them, on a real event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import uvloop

from cortex.worker.requests.runner import DECAY_CALLS, QUICK_CALLS, CallDurations, Runner
from cortex.worker.shared_state import SharedConnectionState


def drive(runner: Runner, loop: asyncio.AbstractEventLoop, pauses_s: list[float]) -> list[tuple[bool, int]]:
    """Make consecutive calls that count as this long; return (inline, thread) of each."""
    calls: list[tuple[bool, int]] = []

    def call(pause_s: float, done: Callable[[], None]) -> None:
        inline = runner.inline
        calls.append((inline, threading.get_ident()))
        duration = int(pause_s * 1e9)  # not what it takes, which depends on the machine
        if inline:
            runner.record(duration, may_switch=False)
            done()
        else:
            runner.wake(lambda: (runner.record(duration, may_switch=True), done()))  # type: ignore[func-returns-value]

    async def all_calls() -> None:
        for pause_s in pauses_s:
            done = asyncio.Event()
            if runner.inline:
                call(pause_s, done.set)
            else:
                runner.submit(lambda p=pause_s, d=done: call(p, d.set))  # type: ignore[misc]
            await done.wait()
            await asyncio.sleep(0)
        runner.stop()

    loop.create_task(all_calls())
    runner.run()
    return calls


def create_runner(loop: asyncio.AbstractEventLoop, threads: int, always_threads: bool = False) -> Runner:
    return Runner(loop, threads, CallDurations(SharedConnectionState()), always_threads)


def test_quick_calls_move_to_the_loop_and_slow_calls_back_to_a_thread() -> None:
    loop = uvloop.new_event_loop()
    quick = [0.0] * (QUICK_CALLS * 3)
    calls = drive(create_runner(loop, 1), loop, [*quick, *[0.01] * 5, *quick])
    assert not any(inline for inline, _ in calls[:QUICK_CALLS])
    assert calls[len(quick) - 1][0]
    assert not any(inline for inline, _ in calls[len(quick) + 2 : len(quick) + 10])
    assert calls[-1][0]
    assert {thread for _, thread in calls} == {threading.get_ident()}


def test_calls_of_several_threads_move_to_the_loop_only_if_none_is_long() -> None:
    loop = uvloop.new_event_loop()
    calls = drive(create_runner(loop, 2), loop, [0.0] * DECAY_CALLS + [0.5] + [0.0] * (DECAY_CALLS * 2))
    assert not any(inline for inline, _ in calls)
    loop = uvloop.new_event_loop()
    calls = drive(create_runner(loop, 2), loop, [0.0] * (DECAY_CALLS * 3))
    assert calls[-1][0]


def test_threads_are_always_used_if_required() -> None:
    loop = uvloop.new_event_loop()
    calls = drive(create_runner(loop, 2, always_threads=True), loop, [0.0] * DECAY_CALLS * 3)
    assert not any(inline for inline, _ in calls)


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("has_tasks", [False, True])
def test_plain_calls_see_no_running_loop_but_tasks_do(
    new_loop: Callable[[], asyncio.AbstractEventLoop], has_tasks: bool
) -> None:
    loop, seen = new_loop(), list[object]()
    runner = Runner(loop, 1, CallDurations(SharedConnectionState()), has_tasks=has_tasks)

    def call(number: int, last: Callable[[], object] = lambda: None) -> int:
        seen.append(asyncio._get_running_loop())
        asyncio.Runner(loop_factory=asyncio.new_event_loop).run(asyncio.sleep(0))
        last()
        seen.append(asyncio._get_running_loop())
        return number

    async def task() -> None:
        seen.append(asyncio.get_running_loop())
        assert runner.call_inline(call, 4) == 4
        await asyncio.sleep(0)
        seen.append(asyncio.get_running_loop())
        runner.stop()

    def begin() -> None:
        assert [runner.call_inline(call, 1), runner.call_inline(call, 2)] == [1, 2]
        # As a batch that responds to one of its requests while it runs.
        runner.call_inline(call, 3, lambda: (runner.call_inline(call, 0), loop.create_task(task())))

    loop.call_soon(begin)
    runner.run()
    assert seen == [None] * 8 + [loop, None, None, loop]
    loop.close()


def test_stop_ends_in_both_modes() -> None:
    for always_threads in (False, True):
        loop = uvloop.new_event_loop()
        runner = create_runner(loop, 3, always_threads)
        loop.call_later(0.01, runner.stop)
        runner.run()
        assert not any(thread.name.startswith(("event-loop", "handler-")) for thread in threading.enumerate())
