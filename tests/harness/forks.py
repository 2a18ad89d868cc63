"""Forks of the test process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from harness.wait import PATIENCE_S, SLACK, wait_until


def in_forks(number: int, work: Callable[[], object]) -> list[int]:
    """Run `work` in this many forks, and return their exit statuses.

    No fork returns to pytest or outlives the call: it would keep the pipes of pytest-xdist open, which then waits for
    ever.
    """
    pids: list[int] = []
    statuses: list[int] = []
    try:
        for _ in range(number):
            pid = os.fork()
            if pid == 0:
                try:
                    work()
                    os._exit(0)
                finally:
                    os._exit(1)
            pids.append(pid)
        for pid in pids:
            _, status = wait_until(lambda pid=pid: _ended(pid), PATIENCE_S / SLACK)  # type: ignore[misc]
            statuses.append(status)
        return statuses
    finally:
        for pid in pids[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _ended(pid: int) -> tuple[int, int] | None:
    ended = os.waitpid(pid, os.WNOHANG)
    return ended if ended[0] else None
