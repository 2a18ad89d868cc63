from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from cortex.processes import priority
from cortex.processes.priority import enter_background, in_background, leave_background
from harness.wait import PATIENCE_S, wait_until


def threads() -> list[int]:
    return [int(thread) for thread in os.listdir("/proc/self/task")]  # noqa: PTH208


def of_threads(look: Callable[[int], int]) -> set[int]:
    """Look at each thread; one of another test may end meanwhile."""
    found = set()
    for thread in threads():
        with suppress(ProcessLookupError):
            found.add(look(thread))
    return found


def policies() -> set[int]:
    return of_threads(os.sched_getscheduler)


def niceness() -> set[int]:
    return of_threads(lambda thread: os.getpriority(os.PRIO_PROCESS, thread))


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Start from the normal priority, which `leave_background` restores; pytest may run at a lower one."""
    if os.getpriority(os.PRIO_PROCESS, 0) and not may_raise_priority():
        pytest.skip("these tests run at a low priority that they may not raise")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    leave_background()
    yield
    for thread in threads():
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def may_raise_priority() -> bool:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    return True


def is_usual() -> bool:
    return policies() == {os.SCHED_OTHER} and niceness() == {0}


def is_quiet() -> bool:
    return policies() == {os.SCHED_BATCH} or niceness() == {19}


def test_all_threads_are_in_the_background_during_the_block_only() -> None:
    started, over = threading.Event(), threading.Event()

    def other() -> None:
        started.set()
        over.wait(PATIENCE_S)

    assert is_usual()
    thread = threading.Thread(target=other, daemon=True)
    try:
        with in_background():
            thread.start()
            assert started.wait(PATIENCE_S)
            assert is_quiet()
        assert is_usual()
    finally:
        over.set()
    thread.join(PATIENCE_S)


def test_priority_stays_normal_if_not_wanted() -> None:
    with in_background(wanted=False):
        assert is_usual()


def test_background_ends_after_its_longest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "PATIENCE_S", 0.05)
    with in_background():
        wait_until(is_usual)


def test_schedules_as_batch_where_the_niceness_may_not_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    enter_background()
    try:
        assert policies() == {os.SCHED_BATCH}
    finally:
        leave_background()
    assert policies() == {os.SCHED_OTHER}
