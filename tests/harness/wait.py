"""Waiting in tests: on a condition with a deadline, never for a fixed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
