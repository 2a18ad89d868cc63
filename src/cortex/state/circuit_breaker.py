"""Circuit breaker and watchdog for a database server: fail fast while it is unreachable. Contains no SQL.

SQLAlchemy's `pool_pre_ping` and libpq's timeouts do not replace it. They detect a dead host or connection, but not a
server that keeps a connection open and never answers, and with them each caller would wait for its own timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from cortex.errors import DatabaseUnreachableError

#: Interval between two attempts to reach a server.
_PROBE_EVERY_S = 0.2
#: Interval between two checks of the watchdog, and the time after which its idle thread ends.
_CHECK_EVERY_S, _IDLE_S = 0.1, 5.0


class CircuitBreaker:
    """Fails every use of a server while it is unreachable; a thread of its own probes it until it answers.

    `probe` connects to the server, or raises. All methods are thread-safe.
    """

    def __init__(self, probe: Callable[[], None]) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._reason = ""
        self._closed = threading.Event()

    def check(self) -> None:
        """Raise DatabaseUnreachableError while the circuit is open."""
        if reason := self._reason:
            raise DatabaseUnreachableError(reason)

    def trip(self, reason: str) -> None:
        """Open the circuit until the server can be reached again."""
        with self._lock:
            is_new, self._reason = not self._reason, reason
        if is_new and not self._closed.is_set():
            threading.Thread(target=self._probe_until_reachable, name="database-probe", daemon=True).start()

    def shutdown(self) -> None:
        """Stop probing the server."""
        self._closed.set()

    def _probe_until_reachable(self) -> None:
        while not self._closed.is_set():
            try:
                self._probe()
            except Exception:  # any error means that the server is still unreachable
                self._closed.wait(_PROBE_EVERY_S)
            else:
                break
        with self._lock:
            self._reason = ""


class Watchdog:
    """Shuts down sockets on which an answer is overdue, so that the waiting thread gets a connection error."""

    def __init__(self, on_timeout: Callable[[], None]) -> None:
        self._on_timeout = on_timeout
        self._changed = threading.Condition()
        self._watched: dict[int, tuple[float, int]] = {}  #: by key: the deadline, and a descriptor of the socket
        self._is_running = self._is_idle = False

    def watch(self, key: int, descriptor: int, seconds: float) -> None:
        """Shut down a socket after `seconds`, unless `unwatch` is called for `key` first."""
        # A duplicate: the number of a closed descriptor may be given to another socket.
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

    def unwatch(self, key: int) -> None:
        """End a watch, if there is one."""
        with self._changed:
            known = self._watched.pop(key, None)
        if known:
            os.close(known[1])

    @contextlib.contextmanager
    def watching(self, descriptor: int, seconds: float) -> Iterator[None]:
        """Shut down a socket if the body of the context takes longer than `seconds`."""
        key = -descriptor - 1  # never equal to the id of an object
        self.watch(key, descriptor, seconds)
        try:
            yield
        finally:
            self.unwatch(key)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = not self._watched
                is_notified = self._changed.wait(_IDLE_S if self._is_idle else _CHECK_EVERY_S)
                if self._is_idle and not is_notified and not self._watched:
                    self._is_running = False
                    return
                now = time.monotonic()
                late = {key: descriptor for key, (until, descriptor) in self._watched.items() if until <= now}
                for key in late:
                    del self._watched[key]
            for descriptor in late.values():
                _shut_down(descriptor)
                self._on_timeout()


def _shut_down(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as copy, contextlib.suppress(OSError):
        copy.shutdown(socket.SHUT_RDWR)
