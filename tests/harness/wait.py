"""Waiting in tests: on a condition with a deadline, never for a fixed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: Only paces the polling; no test depends on it.
_PAUSE = threading.Event()
#: On a machine that does other things too, everything takes longer. Only a test that fails waits so long.
SLACK = 4
#: What a process, thread or task may take that is sure to come to its end.
PATIENCE_S = 60.0


def wait_until(predicate: Callable[[], T], timeout_s: float = 10.0, message: str = "") -> T:
    """Return the first truthy value of `predicate`; `timeout_s` is ample on an idle machine. Raises: AssertionError."""
    timeout_s *= SLACK
    deadline = time.monotonic() + timeout_s
    while True:
        asked_at = time.monotonic()
        value = predicate()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"not true within {timeout_s} s: {message or predicate}")
        # What takes long to ask, such as a command, would keep a core busy.
        _PAUSE.wait(min(max(0.02, now - asked_at), 0.3))


def has_ended(pid: int) -> bool:
    """Return whether no thread of a process runs any more, so that the kernel has closed its files and sockets.

    A killed process may be a zombie while some of its threads still run: the first thread can end before the others.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
    except (FileNotFoundError, ProcessLookupError):
        return not Path(f"/proc/{pid}").exists()
    return all(state in "ZX" for state in states)
