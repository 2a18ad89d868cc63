"""Leaves the processors to those who serve, while this process does what nobody waits for.

At the lowest priority, where the kernel lets us return from that (root, or a limit on niceness that allows it); else
as a batch process, which at least interrupts nobody. Both are of threads, and inherited by those that libraries start
meanwhile, so all threads are changed. Not as an idle process: the kernel takes a processor that runs one for free, and
wakes others there, who then wait until it leaves the kernel; measured, that is several times worse.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

#: What has not come to its end after so long, because others take all there is, goes on like any process.
PATIENCE_S = 30.0
_LOWEST = 19


@contextlib.contextmanager
def in_background(wanted: bool = True) -> Iterator[None]:
    """Stay in the background while this lasts, if `wanted`, for `PATIENCE_S` at most."""
    if not wanted:
        yield
        return
    patience = threading.Timer(PATIENCE_S, leave_background)
    patience.daemon = True
    patience.start()
    enter_background()
    try:
        yield
    finally:
        patience.cancel()
        leave_background()


def enter_background() -> None:
    """Let all others go first."""
    if _may_return():
        _set_all(_LOWEST)
    else:
        _schedule_all(os.SCHED_BATCH)


def leave_background() -> None:
    """Take part like any process."""
    _set_all(0)
    _schedule_all(os.SCHED_OTHER)


def _may_return() -> bool:
    """Try it out on the calling thread: one step of niceness down and up again, which takes the same permission."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(nice + 1, _LOWEST))
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError:
        return False
    return nice < _LOWEST  # at the lowest, nothing was tried


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
