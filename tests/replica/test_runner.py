"""Inline and threaded calls, and the changes between them, on a real event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import uvloop

from cortex.replica.requests.runner import QUICK_CALLS, Runner


def drive(runner: Runner, loop: asyncio.AbstractEventLoop, pauses_s: list[float]) -> list[tuple[bool, int]]:
    """Make consecutive calls that sleep; return (inline, thread) of each."""
    calls: list[tuple[bool, int]] = []

    def call(pause_s: float, done: Callable[[], None]) -> None:
        inline = runner.inline
        started = time.perf_counter_ns()
        if pause_s:
            deadline = time.perf_counter() + pause_s
            while time.perf_counter() < deadline:
                pass
        calls.append((inline, threading.get_ident()))
        duration = time.perf_counter_ns() - started
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


def test_slow_calls_move_to_a_thread_and_quick_calls_back_to_the_loop() -> None:
    loop = uvloop.new_event_loop()
    calls = drive(Runner(loop, 1), loop, [0.0] * 10 + [0.01] * 5 + [0.0] * (QUICK_CALLS * 3))
    assert all(inline for inline, _ in calls[:10])
    assert not any(inline for inline, _ in calls[12:20])
    assert calls[-1][0]
    assert {thread for _, thread in calls} == {threading.get_ident()}


def test_threads_are_used_from_the_start_if_required() -> None:
    loop = uvloop.new_event_loop()
    calls = drive(Runner(loop, 2, always_threads=True), loop, [0.0] * 50)
    assert not any(inline for inline, _ in calls)


def test_stop_ends_in_both_modes() -> None:
    for always_threads in (False, True):
        loop = uvloop.new_event_loop()
        runner = Runner(loop, 3, always_threads)
        loop.call_later(0.01, runner.stop)
        runner.run()
        assert not any(thread.name.startswith(("event-loop", "handler-")) for thread in threading.enumerate())
