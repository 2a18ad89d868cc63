"""The listening sockets of a replica: one unix socket per process, and a TCP port for gateways of other machines."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.processes.sockets import accept_one, address_of, listen, listen_over_tcp, refuse
from cortex.worker.spec import ReplicaSpec

if TYPE_CHECKING:
    from cortex.supervisor.pending_connections import PendingConnections

#: Interval of checks that the path of a unix socket still leads to it.
_CHECK_S = 1.0

Watch = Callable[[int, Callable[[], object]], None]
Unwatch = Callable[[int], None]


class Listener:
    """A listening socket, and the receiver of its connections."""

    def __init__(
        self, sock: socket.socket, receive: Callable[[socket.socket], None], watch: Watch, unwatch: Unwatch
    ) -> None:
        self.sock = sock
        self._receive = receive
        self._watch = watch
        self._unwatch = unwatch
        watch(sock.fileno(), self.accept)

    @property
    def is_open(self) -> bool:
        """Return whether it accepts connections."""
        return self.sock.fileno() >= 0

    def accept(self) -> None:
        """Accept the waiting connections."""
        while (sock := accept_one(self.sock)) is not None:
            sock.setblocking(False)
            self._receive(sock)

    def close(self) -> None:
        """Accept the waiting connections, and then no others."""
        self.accept()
        self.drop()

    def drop(self) -> None:
        """Accept no more connections."""
        self._unwatch(self.sock.fileno())
        self.sock.close()


class UnixListener(Listener):
    """A unix socket that is created again if its file is removed, as cleaners of temporary files do."""

    def __init__(self, path: str, receive: Callable[[socket.socket], None], watch: Watch, unwatch: Unwatch) -> None:
        """Listen. Raises: OSError, with the path."""
        super().__init__(listen(path), receive, watch, unwatch)
        self.path = path
        self._file = _file_at(path)
        self._check_at = 0.0

    def tick(self, now: float) -> None:
        """Check now and then that the path still leads to the socket; `now` is monotonic."""
        if now < self._check_at or not self.is_open:
            return
        self._check_at = now + _CHECK_S
        if _file_at(self.path) != self._file:
            with contextlib.suppress(OSError):  # the folder is gone too; checked again later
                renewed = listen(self.path)
                self.close()
                self.sock, self._file = renewed, _file_at(self.path)
                self._watch(renewed.fileno(), self.accept)

    def close(self) -> None:
        """Accept the waiting connections, and then no others."""
        refuse(self.sock)  # first: one that arrives after the last was accepted would be reset
        super().close()

    def remove(self) -> None:
        """Remove the file."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a `Path` costs more than this
    except OSError:
        return None
    return found.st_dev, found.st_ino


class ReplicaListeners:
    """The listeners of all processes of a replica.

    Connections to the unix sockets are admitted at once, because only the operator's user can open them. Connections
    over TCP are pending until they present the gateway's secret.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        admit: Callable[[int, socket.socket], None],
        watch: Watch,
        unwatch: Unwatch,
    ) -> None:
        """Open nothing yet; `admit` receives the index of a process and a connection for it."""
        self._spec = spec
        self._admit = admit
        self._watch = watch
        self._unwatch = unwatch
        self._unix: list[UnixListener] = []
        self._tcp: list[Listener] = []
        self._pending: list[PendingConnections] = []
        self._addresses: list[str] = []

    def open(self) -> ReplicaSpec:
        """Listen; return the spec without the secret. Raises: OSError, with the path if that is the cause."""
        spec = self._spec
        if spec.jobs_socket is not None:
            return spec
        try:
            for index, path in enumerate(spec.sockets):
                admit = partial(self._admit, index)
                self._unix.append(UnixListener(path, admit, self._watch, self._unwatch))
                if spec.listen_host:
                    self._open_tcp(admit)
        except OSError:
            for listener in (*self._unix, *self._tcp):
                listener.drop()
            self.remove()
            self._unix, self._tcp, self._pending, self._addresses = [], [], [], []
            raise
        return replace(spec, gateway_secret="")

    def _open_tcp(self, admit: Callable[[socket.socket], None]) -> None:
        from cortex.supervisor.pending_connections import PendingConnections  # noqa: PLC0415 - others start sooner

        sock = listen_over_tcp(self._spec.listen_host)
        pending = PendingConnections(self._spec.gateway_secret, admit, self._watch, self._unwatch)
        self._tcp.append(Listener(sock, pending.add, self._watch, self._unwatch))
        self._pending.append(pending)
        self._addresses.append(address_of(sock))  # needed after it is closed, too

    def address(self, index: int) -> str:
        """Return the TCP address of a process, `host:port`; empty if it has none."""
        return self._addresses[index] if self._addresses else ""

    @property
    def is_busy(self) -> bool:
        """Return whether `tick` is due soon."""
        return any(pending.is_busy for pending in self._pending)

    def tick(self, now: float) -> None:
        """Check pending connections and sockets; `now` is monotonic."""
        for pending in self._pending:
            pending.tick(now)
        for listener in self._unix:
            listener.tick(now)

    def close(self) -> None:
        """Accept the waiting connections, and then no others; pending connections may still be admitted."""
        for listener in (*self._unix, *self._tcp):
            if listener.is_open:
                listener.close()

    def remove(self) -> None:
        """Close pending connections and remove the socket files."""
        for pending in self._pending:
            pending.close()
        for listener in self._unix:
            listener.remove()
