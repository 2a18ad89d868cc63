"""A supervisor's connection to this machine's model agent: watches the models of an API.

Non-blocking, for the supervisor's loop. The agent may restart at any time: the client reconnects.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable

from cortex.models.protocol import CatalogueUpdate, Request, Using, Watch, read_answer, write
from cortex.models.spec import ModelSource
from cortex.processes.jsonl import LineBuffer

_RETRY_S = 0.25
_READ_BYTES = 65536

WatchFd = Callable[[int, Callable[[], object]], None]
UnwatchFd = Callable[[int], None]


class ModelAgentClient:
    """Calls `on_catalogue` with each update. After a reconnect it sends the contents in use again."""

    def __init__(
        self,
        path: str,
        api: str,
        source: ModelSource,
        watch: WatchFd,
        unwatch: UnwatchFd,
        on_catalogue: Callable[[CatalogueUpdate], None],
    ) -> None:
        self._path = path
        self._api = api
        self._source = source
        self._watch = watch
        self._unwatch = unwatch
        self._on_catalogue = on_catalogue
        self._sock: socket.socket | None = None
        self._lines = LineBuffer()
        self._unsent = b""
        self._using: frozenset[str] = frozenset()
        self._retry_at = 0.0
        self.lost_since: float | None = 0.0  #: monotonic; None while connected

    def set_using(self, digests: Iterable[str]) -> None:
        """Set the contents that must stay on disk."""
        wanted = frozenset(digests)
        if wanted != self._using:
            self._using = wanted
            self._send(Using(wanted))

    def tick(self, now: float) -> None:
        """Connect if that is due; send pending data."""
        if self._sock is None and now >= self._retry_at:
            self._connect(now)
        elif self._unsent:
            self._flush()

    def close(self) -> None:
        """Close the connection."""
        if self._sock is not None:
            self._unwatch(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _connect(self, now: float) -> None:
        self._retry_at = now + _RETRY_S
        self.lost_since = self.lost_since or now
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            return
        self._sock, self._lines, self._unsent, self.lost_since = sock, LineBuffer(), b"", None
        self._watch(sock.fileno(), self._on_readable)
        self._send(Watch(self._api, self._source))
        self._send(Using(self._using))

    def _send(self, message: Request) -> None:
        if self._sock is not None:
            self._unsent += write(message)
            self._flush()

    def _flush(self) -> None:
        if self._sock is None:
            return
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def _on_readable(self) -> None:
        if self._sock is None:
            return
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        for line in self._lines.feed(data):
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):  # of another version, or files are gone
                message = read_answer(line)
                if isinstance(message, CatalogueUpdate):
                    self._on_catalogue(message)
