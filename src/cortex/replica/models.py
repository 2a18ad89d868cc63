"""A worker's models: what it is to load, and what it tells its supervisor of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cortex.models.spec import Catalogue, Version
from cortex.replica.channel import Channel, encodable

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

    def requested(self, model: str, version: Version) -> None:
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
