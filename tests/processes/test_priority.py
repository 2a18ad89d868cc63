from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from cortex.processes import priority
from cortex.processes.priority import enter_background, in_background, leave_background
from harness.wait import wait_until


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


def is_usual() -> bool:
    return policies() == {os.SCHED_OTHER} and niceness() == {0}


def is_quiet() -> bool:
    return policies() == {os.SCHED_BATCH} or niceness() == {19}


def test_all_threads_are_in_the_background_while_it_lasts_and_not_after() -> None:
    started, over = threading.Event(), threading.Event()

    def other() -> None:
        started.set()
        over.wait()

    assert is_usual()
    with in_background():
        thread = threading.Thread(target=other)
        thread.start()
        started.wait()
        assert is_quiet()
    assert is_usual()
    over.set()
    thread.join()


def test_nothing_changes_where_it_is_not_wanted() -> None:
    with in_background(wanted=False):
        assert is_usual()


def test_what_takes_too_long_goes_on_like_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "PATIENCE_S", 0.05)
    with in_background():
        wait_until(is_usual)


def test_where_there_is_no_way_back_a_process_only_stops_interrupting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    enter_background()
    try:
        assert policies() == {os.SCHED_BATCH}
    finally:
        leave_background()
    assert policies() == {os.SCHED_OTHER}
