"""Whether a database server answers: what is asked of one that does not must fail soon, for many ask.

Knows nothing of SQL. A server that was found away is asked again by a thread of its own, and until it answers nobody
else waits for it; a server that keeps a connection open and says nothing is hung up on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from cortex.errors import DatabaseUnavailableError

#: Between two attempts to reach a server that is away.
_PROBE_EVERY_S = 0.2
#: How exact the watchdog is, and how long it stays when there is nothing to watch.
_LOOK_S, _LINGER_S = 0.1, 5.0


class DatabaseUnreachableError(DatabaseUnavailableError):
    """The connection to a database broke, or none can be made; nothing is known of a commit that was under way."""


class CircuitBreaker:
    """Remembers that a server is away. `probe` connects to it, or raises; any thread may call this."""

    def __init__(self, probe: Callable[[], None]) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._reason = ""
        self._closed = threading.Event()

    def check(self) -> None:
        """Do nothing, unless the server is away. Raises: DatabaseAwayError."""
        if reason := self._reason:
            raise DatabaseUnreachableError(reason)

    def begin(self, reason: str) -> None:
        """Note that the server is away, until it can be connected to again."""
        with self._lock:
            is_new, self._reason = not self._reason, reason
        if is_new and not self._closed.is_set():
            threading.Thread(target=self._watch, name="database-probe", daemon=True).start()

    def close(self) -> None:
        """End what looks for the server."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._probe()
            except Exception:  # whatever it is, it is away
                self._closed.wait(_PROBE_EVERY_S)
            else:
                break
        with self._lock:
            self._reason = ""


class Watchdog:
    """Hangs up on servers that do not answer in time: who waits for one is told that the connection broke."""

    def __init__(self, on_silence: Callable[[], None]) -> None:
        self._on_silence = on_silence
        self._changed = threading.Condition()
        self._watched: dict[int, tuple[float, int]] = {}  #: by key: until when, and a descriptor of the socket
        self._is_running = self._is_idle = False

    def watch(self, key: int, descriptor: int, seconds: float) -> None:
        """Hang up on a socket in so many seconds, unless `leave` is called for `key` first."""
        # A copy: the number of a socket that is closed meanwhile may be given to another.
        entry = time.monotonic() + seconds, os.dup(descriptor)
        with self._changed:
            known = self._watched.pop(key, None)
            self._watched[key] = entry
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="database-watchdog", daemon=True).start()
            elif self._is_idle:
                self._changed.notify()
        if known:
            os.close(known[1])

    def leave(self, key: int) -> None:
        """End a watch, if there is one."""
        with self._changed:
            known = self._watched.pop(key, None)
        if known:
            os.close(known[1])

    @contextlib.contextmanager
    def watching(self, descriptor: int, seconds: float) -> Iterator[None]:
        """Hang up on a socket if what is inside takes longer."""
        key = -descriptor - 1  # no id of an object
        self.watch(key, descriptor, seconds)
        try:
            yield
        finally:
            self.leave(key)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = not self._watched
                is_told = self._changed.wait(_LINGER_S if self._is_idle else _LOOK_S)
                if self._is_idle and not is_told and not self._watched:
                    self._is_running = False
                    return
                now = time.monotonic()
                late = {key: descriptor for key, (until, descriptor) in self._watched.items() if until <= now}
                for key in late:
                    del self._watched[key]
            for descriptor in late.values():
                _hang_up(descriptor)
                self._on_silence()


def _hang_up(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as copy, contextlib.suppress(OSError):
        copy.shutdown(socket.SHUT_RDWR)
