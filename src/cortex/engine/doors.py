"""The doors of a replica: where connections for each of its processes come in."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cortex.engine.entrance import Entrance
from cortex.engine.sockets import accept_one, address_of, listen, listen_over_tcp
from cortex.replica.spec import ReplicaSpec


@dataclass(frozen=True)
class _Far:
    """Where connections over TCP come in for one process: they wait in its entrance until they are let in."""

    listener: socket.socket
    entrance: Entrance

    def accept(self) -> None:
        """Take the connections that wait at the listening socket."""
        while (sock := accept_one(self.listener)) is not None:
            sock.setblocking(False)
            self.entrance.receive(sock)


class Doors:
    """A unix socket per process, by its index, and a TCP port where gateways of other machines have to reach it.

    Who may open the unix socket is let in at once; its process accepts there.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        admit: Callable[[int, socket.socket], None],
        watch: Callable[[int, Callable[[], object]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        """Open nothing yet; `admit` is given the connections over TCP that are let in."""
        self._spec = spec
        self._admit = admit
        self._watch = watch
        self._unwatch = unwatch
        self._listeners: list[socket.socket] = []
        self._far: list[_Far] = []

    def open(self) -> ReplicaSpec:
        """Listen; returns the spec without the secret. Raises: OSError, with the path if that is what is wrong."""
        spec = self._spec
        if spec.jobs_socket is not None:
            return spec
        with contextlib.ExitStack() as unless_all_are_open:
            for path in spec.sockets:
                self._listeners.append(unless_all_are_open.enter_context(listen(path)))
            for index in range(len(spec.sockets) if spec.listen_host else 0):
                entrance = Entrance(spec.gateway_secret, partial(self._admit, index), self._watch, self._unwatch)
                listener = unless_all_are_open.enter_context(listen_over_tcp(spec.listen_host))
                self._far.append(_Far(listener, entrance))
            unless_all_are_open.pop_all()
        for far in self._far:
            self._watch(far.listener.fileno(), far.accept)
        return replace(spec, gateway_secret="")

    def listener(self, index: int) -> socket.socket:
        """Return the unix socket of a process."""
        return self._listeners[index]

    def address(self, index: int) -> str:
        """Return where a process is reached over TCP, `host:port`; empty if it is not."""
        return address_of(self._far[index].listener) if self._far else ""

    @property
    def is_busy(self) -> bool:
        """Tell whether `tick` has something to look at soon."""
        return any(far.entrance.is_busy for far in self._far)

    def tick(self, now: float) -> None:
        """Look after those who have yet to be let in; `now` is monotonic."""
        for far in self._far:
            far.entrance.tick(now)

    def close_far(self) -> None:
        """Take no new connections over TCP; those that wait for their turn are let in still."""
        for far in self._far:
            if far.listener.fileno() >= 0:
                self._unwatch(far.listener.fileno())
                far.accept()
                far.listener.close()

    def remove(self) -> None:
        """Leave nothing behind."""
        for far in self._far:
            far.entrance.close()
        for path in self._spec.sockets:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
