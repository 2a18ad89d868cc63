"""A worker's models: what it is to load, what it tells its supervisor of them, and loading in the background."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cortex.models.spec import Catalogue, Version
from cortex.replica.channel import Channel, encodable

_NICE = 19
#: Of a set of versions, so many go into one message.
_VERSIONS_PER_MESSAGE = 200
_MAX_DETAIL_CHARS = 8 * 1024
_RETRY_S = 0.1


@dataclass(frozen=True)
class ModelStart:
    """What a process begins with."""

    catalogue: Catalogue
    also: tuple[tuple[str, str], ...]  #: (model, version) to load beside the latest
    is_standby: bool  #: another process serves meanwhile and must not feel this one


class ModelEvents:
    """Tells the supervisor what is loaded; may be called from any thread.

    A message that the channel can't take now is told a moment later, by the event loop's thread or by a timer.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._turn = threading.Lock()
        self._told: frozenset[tuple[str, str, str]] = frozenset()
        self._wanted: frozenset[tuple[str, str, str]] = frozenset()
        self._timer: threading.Timer | None = None

    def loading(self, model: str, version: Version) -> None:
        """Say what is about to be loaded: should the process die, this is why."""
        self._channel.send("loading", model=model, version=version.number, digest=version.digest)

    def asked(self, model: str, version: Version) -> None:
        """Say that calls name this version: a process after this one should have it loaded too."""
        self._channel.send("asked", model=model, version=version.number)

    def loaded(self, versions: Sequence[tuple[str, Version]]) -> None:
        """Say which versions are loaded now, all of them."""
        with self._turn:
            self._wanted = frozenset((model, version.number, version.digest) for model, version in versions)
            self._tell()

    def failed(self, model: str, version: Version, message: str, detail: str) -> None:
        """Say that a version could not be loaded while the process serves."""
        fields: dict[str, Any] = {"model": model, "version": version.number, "digest": version.digest}
        self._channel.send(
            "problem", **fields, message=encodable(message[-4096:]), detail=encodable(detail[-_MAX_DETAIL_CHARS:])
        )

    def _tell(self) -> None:
        added, removed = sorted(self._wanted - self._told), sorted(self._told - self._wanted)
        while added or removed:
            first, gone = added[:_VERSIONS_PER_MESSAGE], removed[:_VERSIONS_PER_MESSAGE]
            if not self._channel.send("loaded", added=first, removed=gone):
                self._tell_again()
                return
            self._told = (self._told | frozenset(first)) - frozenset(gone)
            added, removed = added[_VERSIONS_PER_MESSAGE:], removed[_VERSIONS_PER_MESSAGE:]

    def _tell_again(self) -> None:
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(_RETRY_S, self._tell_in_turn)
            self._timer.daemon = True
            self._timer.start()

    def _tell_in_turn(self) -> None:
        with self._turn:
            self._timer = None
            self._tell()


@contextlib.contextmanager
def in_background(wanted: bool) -> Iterator[None]:
    """Leave the processors to others while this lasts, as far as that can be undone.

    The lowest priority, where we may raise it again (root, or a limit on niceness that allows it); else as a batch
    process, which at least interrupts nobody. Threads that libraries start meanwhile inherit it, so it is undone
    for every thread.
    """
    if not wanted:
        yield
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    is_nice = _may_return_to(nice)
    if is_nice:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    else:
        _schedule_all(os.SCHED_BATCH)
    try:
        yield
    finally:
        if is_nice:
            for thread in _threads():
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
        else:
            _schedule_all(os.SCHED_OTHER)


def _may_return_to(nice: int) -> bool:
    """Try it out on the calling thread: one step down and up again."""
    if nice >= _NICE:
        return False
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice + 1)
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError:
        return False
    return True


def _schedule_all(policy: int) -> None:
    for thread in _threads():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]  # noqa: PTH208 - names only
    except OSError:
        return [0]
