"""A thread that does what no request should wait for: it loads newer versions, and unloads what has left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from cortex.models.loaded_models import Shelf

#: How often it looks whether what has left is still in use; ever more rarely, up to the limit.
_FIRST_LOOK_S, _MAX_LOOK_S = 0.1, 5.0


class Renewals:
    """Starts its thread when there is something to do; the thread ends when there is nothing left.

    `renew` does what is to be done for a model, and returns when to do it again (monotonic, seconds) or None;
    `dispose` unloads what it can, and tells whether something is left.
    """

    def __init__(self, shelf: Shelf[Any], renew: Callable[[str], float | None], dispose: Callable[[], bool]) -> None:
        self._changed = shelf.changed  # guards all below
        self._renew = renew
        self._dispose = dispose
        self._due: dict[str, float] = {}  #: when, by model
        self._look_at: float | None = None  #: when to dispose of what has left
        self._look_s = _FIRST_LOOK_S
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, name: str) -> None:
        """Renew a model now; the caller holds the shelf's condition."""
        self._due[name] = 0.0
        self._start()

    def wake(self) -> None:
        """Unload what has left; the caller holds the shelf's condition."""
        self._look_at, self._look_s = 0.0, _FIRST_LOOK_S
        self._start()

    def close(self) -> None:
        """Start nothing more, and wait for what is being done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="cortex-model-renewals", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while (name := self._next()) is not None:
            retry_at = self._renew(name) if name else None
            is_left = self._dispose()
            with self._changed:
                if retry_at is not None:
                    self._due.setdefault(name, retry_at)
                self._look_at = time.monotonic() + self._look_s if is_left else None
                self._look_s = min(self._look_s * 2, _MAX_LOOK_S)

    def _next(self) -> str | None:
        """Wait for a model to renew; "" if there is only something to dispose of, None to end."""
        with self._changed:
            while not self._is_closed and (self._due or self._look_at is not None):
                now = time.monotonic()
                due = [name for name, at in self._due.items() if at <= now]
                if due:
                    del self._due[due[0]]
                    return due[0]
                if self._look_at is not None and self._look_at <= now:
                    return ""
                times = [*self._due.values(), *([] if self._look_at is None else [self._look_at])]
                self._changed.wait(min(times) - now)
            self._thread = None
            return None
