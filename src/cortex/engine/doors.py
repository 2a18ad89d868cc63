"""The doors of a replica: the listening socket of each of its processes, unix or TCP, and what comes in there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from cortex.engine.entrance import Entrance
from cortex.engine.sockets import address_of, listen, listen_over_tcp
from cortex.replica.spec import ReplicaSpec


class Doors:
    """One door per process, by its index. Connections over TCP are let in by an entrance, others at once."""

    def __init__(
        self,
        spec: ReplicaSpec,
        admit: Callable[[int, socket.socket], None],
        watch: Callable[[int, Callable[[], object]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        """Open nothing yet; `admit` is given what an entrance lets in."""
        self._spec = spec
        self._admit = admit
        self._watch = watch
        self._unwatch = unwatch
        self._listeners: list[socket.socket] = []
        self._entrances: list[Entrance] = []

    def open(self) -> ReplicaSpec:
        """Listen; returns the spec with the sockets as they are, and no secret. Raises: OSError."""
        spec = self._spec
        if spec.jobs_socket is not None:
            return spec
        if not spec.listen_host:
            self._listeners = [listen(path) for path in spec.sockets]
            return spec
        try:
            for _ in spec.sockets:
                self._listeners.append(listen_over_tcp(spec.listen_host))
        except OSError:
            for listener in self._listeners:
                listener.close()
            raise
        for index in range(len(spec.sockets)):
            admit = partial(self._admit, index)
            self._entrances.append(Entrance(spec.gateway_secret, admit, self._watch, self._unwatch))
        return replace(spec, sockets=tuple(map(address_of, self._listeners)), gateway_secret="")

    def listener(self, index: int) -> socket.socket:
        """Return the listening socket of a process."""
        return self._listeners[index]

    def receive(self, index: int) -> Callable[[socket.socket], None] | None:
        """Return what takes accepted connections; None if their process takes them itself."""
        return self._entrances[index].receive if self._entrances else None

    @property
    def is_busy(self) -> bool:
        """Tell whether `tick` has something to look at soon."""
        return any(entrance.is_busy for entrance in self._entrances)

    def tick(self, now: float) -> None:
        """Look after those who have yet to be let in; `now` is monotonic."""
        for entrance in self._entrances:
            entrance.tick(now)

    def remove(self) -> None:
        """Leave nothing behind."""
        for entrance in self._entrances:
            entrance.close()
        if not self._spec.listen_host:
            for path in self._spec.sockets:
                with contextlib.suppress(FileNotFoundError):
                    Path(path).unlink()
