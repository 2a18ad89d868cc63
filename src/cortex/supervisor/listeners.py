"""The doors of a replica: where connections for each of its processes come in."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from cortex.processes.sockets import accept_one, address_of, listen, listen_over_tcp, refuse
from cortex.replica.spec import ReplicaSpec
from cortex.supervisor.pending_connections import Entrance

#: How often it is looked whether a unix socket can still be found.
_LOOK_S = 1.0

Watch = Callable[[int, Callable[[], object]], None]
Unwatch = Callable[[int], None]


class Door:
    """A listening socket, and who gets the connections that come in there."""

    def __init__(
        self, listener: socket.socket, receive: Callable[[socket.socket], None], watch: Watch, unwatch: Unwatch
    ) -> None:
        self.listener = listener
        self._receive = receive
        self._watch = watch
        self._unwatch = unwatch
        watch(listener.fileno(), self.accept)

    @property
    def is_open(self) -> bool:
        """Tell whether connections are taken."""
        return self.listener.fileno() >= 0

    def accept(self) -> None:
        """Take the connections that wait."""
        while (sock := accept_one(self.listener)) is not None:
            sock.setblocking(False)
            self._receive(sock)

    def close(self) -> None:
        """Take the connections that wait, and no others."""
        self.accept()
        self.drop()

    def drop(self) -> None:
        """Take nothing more."""
        self._unwatch(self.listener.fileno())
        self.listener.close()


class UnixDoor(Door):
    """A unix socket that is opened again where somebody removed it, as those do who clean up temporary files."""

    def __init__(self, path: str, receive: Callable[[socket.socket], None], watch: Watch, unwatch: Unwatch) -> None:
        """Listen. Raises: OSError, with the path."""
        super().__init__(listen(path), receive, watch, unwatch)
        self.path = path
        self._file = _file_at(path)
        self._look_at = 0.0

    def tick(self, now: float) -> None:
        """Look, now and then, whether the path leads here; `now` is monotonic."""
        if now < self._look_at or not self.is_open:
            return
        self._look_at = now + _LOOK_S
        if _file_at(self.path) != self._file:
            with contextlib.suppress(OSError):  # the folder is gone, too; it is looked at again
                renewed = listen(self.path)
                self.close()
                self.listener, self._file = renewed, _file_at(self.path)
                self._watch(renewed.fileno(), self.accept)

    def close(self) -> None:
        """Take the connections that wait, and no others."""
        refuse(self.listener)  # a process has it open too
        super().close()

    def remove(self) -> None:
        """Leave no file behind."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a `Path` costs more than this
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Doors:
    """A unix socket per process, by its index, and a TCP port where gateways of other machines have to reach it.

    Who may open the unix socket is let in at once. Connections over TCP wait in an entrance until they are let in.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        admit: Callable[[int, socket.socket], None],
        watch: Watch,
        unwatch: Unwatch,
    ) -> None:
        """Open nothing yet; `admit` is given the connections that are let in, and the index of their process."""
        self._spec = spec
        self._admit = admit
        self._watch = watch
        self._unwatch = unwatch
        self._near: list[UnixDoor] = []
        self._far: list[Door] = []
        self._entrances: list[Entrance] = []
        self._addresses: list[str] = []

    def open(self) -> ReplicaSpec:
        """Listen; returns the spec without the secret. Raises: OSError, with the path if that is what is wrong."""
        spec = self._spec
        if spec.jobs_socket is not None:
            return spec
        try:
            for index, path in enumerate(spec.sockets):
                admit = partial(self._admit, index)
                self._near.append(UnixDoor(path, admit, self._watch, self._unwatch))
                if spec.listen_host:
                    self._open_far(admit)
        except OSError:
            for door in (*self._near, *self._far):
                door.drop()
            self.remove()
            self._near, self._far, self._entrances, self._addresses = [], [], [], []
            raise
        return replace(spec, gateway_secret="")

    def _open_far(self, admit: Callable[[socket.socket], None]) -> None:
        listener = listen_over_tcp(self._spec.listen_host)
        entrance = Entrance(self._spec.gateway_secret, admit, self._watch, self._unwatch)
        self._far.append(Door(listener, entrance.receive, self._watch, self._unwatch))
        self._entrances.append(entrance)
        self._addresses.append(address_of(listener))  # asked for when it is closed, too

    def listener(self, index: int) -> socket.socket | None:
        """Return the unix socket of a process; None if it is not open."""
        door = self._near[index] if self._near else None
        return door.listener if door is not None and door.is_open else None

    def address(self, index: int) -> str:
        """Return where a process is reached over TCP, `host:port`; empty if it is not."""
        return self._addresses[index] if self._addresses else ""

    @property
    def is_busy(self) -> bool:
        """Tell whether `tick` has something to look at soon."""
        return any(entrance.is_busy for entrance in self._entrances)

    def tick(self, now: float) -> None:
        """Look after those who have yet to be let in, and after the sockets; `now` is monotonic."""
        for entrance in self._entrances:
            entrance.tick(now)
        for door in self._near:
            door.tick(now)

    def close(self) -> None:
        """Take the connections that wait, and no others; those that wait for their turn are let in still."""
        for door in (*self._near, *self._far):
            if door.is_open:
                door.close()

    def remove(self) -> None:
        """Leave nothing behind."""
        for entrance in self._entrances:
            entrance.close()
        for door in self._near:
            door.remove()
