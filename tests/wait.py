"""Waiting in tests: on a condition with a deadline, never for a fixed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Only paces the polling; no test depends on it.
_PAUSE = threading.Event()


def wait_until(predicate: Callable[[], T], timeout_s: float = 10.0, message: str = "") -> T:
    """Return the first truthy value of `predicate`. Raises: AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {timeout_s} s: {message or predicate}")
        _PAUSE.wait(0.02)
