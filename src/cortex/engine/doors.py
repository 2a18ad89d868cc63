"""The doors of a replica: where connections for each of its processes come in."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cortex.engine.entrance import Entrance
from cortex.engine.sockets import accept_one, address_of, listen, listen_over_tcp, refuse
from cortex.replica.spec import ReplicaSpec

#: How often it is looked whether the unix sockets can still be found.
_LOOK_S = 1.0


@dataclass
class _Door:
    """A listening socket, and who gets the connections that come in there."""

    listener: socket.socket
    receive: Callable[[socket.socket], None]

    @property
    def is_open(self) -> bool:
        return self.listener.fileno() >= 0

    def accept(self) -> None:
        """Take the connections that wait."""
        while (sock := accept_one(self.listener)) is not None:
            sock.setblocking(False)
            self.receive(sock)


class Doors:
    """A unix socket per process, by its index, and a TCP port where gateways of other machines have to reach it.

    Who may open the unix socket is let in at once. Connections over TCP wait in an entrance until they are let in.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        admit: Callable[[int, socket.socket], None],
        watch: Callable[[int, Callable[[], object]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        """Open nothing yet; `admit` is given the connections that are let in, and the index of their process."""
        self._spec = spec
        self._admit = admit
        self._watch = watch
        self._unwatch = unwatch
        self._near: list[_Door] = []
        self._far: list[_Door] = []
        self._entrances: list[Entrance] = []
        self._addresses: list[str] = []
        self._look_at = 0.0

    def open(self) -> ReplicaSpec:
        """Listen; returns the spec without the secret. Raises: OSError, with the path if that is what is wrong."""
        spec = self._spec
        if spec.jobs_socket is not None:
            return spec
        with contextlib.ExitStack() as unless_all_are_open:
            near = [unless_all_are_open.enter_context(listen(path)) for path in spec.sockets]
            hosts = [spec.listen_host] * len(near) if spec.listen_host else []
            far = [unless_all_are_open.enter_context(listen_over_tcp(host)) for host in hosts]
            unless_all_are_open.pop_all()
        for index, listener in enumerate(near):
            self._near.append(_Door(listener, partial(self._admit, index)))
        for index, listener in enumerate(far):
            admit = partial(self._admit, index)
            self._entrances.append(Entrance(spec.gateway_secret, admit, self._watch, self._unwatch))
            self._far.append(_Door(listener, self._entrances[index].receive))
            self._addresses.append(address_of(listener))  # also of one that is closed by then
        for door in (*self._near, *self._far):
            self._watch(door.listener.fileno(), door.accept)
        return replace(spec, gateway_secret="")

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
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._open_again()

    def _open_again(self) -> None:
        """Put the unix sockets where somebody removed them: whoever cleans up folders of temporary files does."""
        for door, path in zip(self._near, self._spec.sockets, strict=False):  # workers of jobs have no doors
            if not door.is_open or os.path.exists(path):  # noqa: PTH110  it never raises
                continue
            with contextlib.suppress(OSError):  # the folder is gone, too; it is looked at again
                door.accept()
                before, door.listener = door.listener, listen(path)
                self._unwatch(before.fileno())
                self._watch(door.listener.fileno(), door.accept)
                before.close()

    def close(self) -> None:
        """Take the connections that wait, and no others; those that wait for their turn are let in still."""
        for door in (*self._near, *self._far):
            if not door.is_open:
                continue
            self._unwatch(door.listener.fileno())
            if door.listener.family == socket.AF_UNIX:
                refuse(door.listener)  # a process has it open too
            door.accept()
            door.listener.close()

    def remove(self) -> None:
        """Leave nothing behind."""
        for entrance in self._entrances:
            entrance.close()
        for path in self._spec.sockets:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
