"""Whose turn it is to load: one thread at a time, which may take it again, and give it up while it waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """A lock on top of a condition that others wait on too."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._owner: int | None = None
        self._depth = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn."""
        with self._changed:
            self._take(1)
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                self._pass_on()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Let others have it if it is this thread's; the caller holds the condition, now and at the end."""
        depth = self._depth if self._owner == threading.get_ident() else 0
        if depth:
            self._depth = 0
            self._pass_on()
        try:
            yield
        finally:
            if depth:
                self._take(depth)

    def _take(self, depth: int) -> None:
        me = threading.get_ident()
        while self._owner not in (None, me):
            self._changed.wait()
        self._owner = me
        self._depth += depth

    def _pass_on(self) -> None:
        if self._depth == 0:
            self._owner = None
            self._changed.notify_all()
