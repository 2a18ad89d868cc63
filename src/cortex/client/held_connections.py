"""Hold connections to a unix socket while the process that listens there is replaced by another one.

```text
gateway, job workers ──▶ path ──▶ HeldConnections ── once released ──▶ path, at which the next process listens by then
```
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cortex.processes.sockets import replace_listener

_ACCEPT_S = 0.1
_PART_BYTES = 65536


class HeldConnections:
    """Listens at `path` in the place of another process, which keeps the connections that it has accepted.

    Within the block, new connections are accepted and wait. At its end they are forwarded to the process that listens
    at the path by then, or else closed; each lasts until one side ends it, or this process ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_released = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> HeldConnections:
        """Begin to accept. Raises: OSError."""
        self._listener = replace_listener(self._path)
        self._own = self._path.stat().st_ino
        self._listener.settimeout(_ACCEPT_S)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Forward all connections."""
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._own:
                self._path.unlink()  # an operator that still runs listens again then
        self._is_released.set()
        self._accepting.join()
        self._listener.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until all forwarded connections have ended, for a limited time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            was_released = self._is_released.is_set()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if was_released:  # another process has had the path since: nothing can arrive any more
                    return
                continue
            connection.setblocking(True)
            self._threads.append(threading.Thread(target=self._forward, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _forward(self, client: socket.socket) -> None:
        self._is_released.wait()
        with client, socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.connect(str(self._path))
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until the source ends, and then that end."""
    with suppress(OSError):
        while part := source.recv(_PART_BYTES):
            target.sendall(part)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
