"""What happens to this process when its parent ends, and to its descendants when theirs do (prctl(2))."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Arrange that the kernel kills this process when its parent, process `parent`, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def live_without_parent() -> None:
    """Undo `end_with_parent`, on the thread that called it: this process ends by itself, and answers before."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end, also of those that have left their session."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
