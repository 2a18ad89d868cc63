"""Run this process in the background: at the lowest priority, so that processes which serve requests are not slowed.

The background is niceness 19 where the kernel permits returning from it (root, or RLIMIT_NICE), else SCHED_BATCH, which
at least does not preempt other processes. Both are attributes of threads that new threads inherit, so they are set for
all threads. SCHED_IDLE is several times worse (measured): the kernel treats a CPU that runs an idle task as free and
wakes other tasks on it, which then wait until the idle task leaves the kernel.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

#: The background ends after this time, so that work on a busy machine completes.
PATIENCE_S = 30.0
_LOWEST = 19


@contextlib.contextmanager
def in_background(wanted: bool = True) -> Iterator[None]:
    """Run the block in the background if `wanted`, for `PATIENCE_S` at most."""
    if not wanted:
        yield
        return
    patience = threading.Timer(PATIENCE_S, leave_background)
    patience.daemon = True
    enter_background()
    try:
        patience.start()  # not before: it would end the background while it is being entered
        yield
    finally:
        patience.cancel()
        leave_background()


def enter_background() -> None:
    """Lower the priority of all threads."""
    if _may_return():
        _set_all(_LOWEST)
    else:
        _schedule_all(os.SCHED_BATCH)


def leave_background() -> None:
    """Restore the normal priority of all threads."""
    _set_all(0)
    _schedule_all(os.SCHED_OTHER)


def _may_return() -> bool:
    """Test on this thread whether niceness can be lowered again: one step up and down needs the same permission."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(nice + 1, _LOWEST))
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError:
        return False
    return nice < _LOWEST  # at the lowest, the test changed nothing


def _set_all(nice: int) -> None:
    for thread in _threads():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def _schedule_all(policy: int) -> None:
    for thread in _threads():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]  # noqa: PTH208 - names only
    except OSError:
        return [0]
