"""The nodes that an operator knew, for the next one: they are asked directly, also while the cluster is away."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from cortex.cluster.placement import NodeAddress
from cortex.errors import CortexError
from cortex.state.key_values import FactStore

#: Nodes that were known last; of those that are gone for good, the oldest are forgotten first.
_MOST = 10_000
_FACT = "nodes"


class KnownNodes(Protocol):
    """Remembers nodes."""

    def all(self) -> Sequence[NodeAddress]:
        """Return every node that was added."""

    def add(self, address: NodeAddress) -> None:
        """Remember a node; where its address is known, its new port."""

    def remove(self, host: str) -> None:
        """Forget a node."""

    def save(self) -> None:
        """Write down what was added and removed since the last call."""


class _Nodes:
    """Nodes that are read once, and written whole; `write` may raise OSError and CortexError, and is tried again."""

    def __init__(self, text: str, write: Callable[[str], None]) -> None:
        self._write = write
        self._is_changed = False
        self._nodes = {address.host: address for address in _parse(text)}

    def all(self) -> Sequence[NodeAddress]:
        """Return every node that was added."""
        return list(self._nodes.values())

    def add(self, address: NodeAddress) -> None:
        """Remember a node; where its address is known, its new port."""
        if self._nodes.get(address.host) == address:
            return
        self._nodes.pop(address.host, None)
        self._nodes[address.host] = address
        self._is_changed = True

    def remove(self, host: str) -> None:
        """Forget a node."""
        if self._nodes.pop(host, None):
            self._is_changed = True

    def save(self) -> None:
        """Write down what was added and removed since the last call. Takes a moment: for a thread."""
        if not self._is_changed:
            return
        self._is_changed = False
        newest = self.all()[-_MOST:]
        try:
            self._write(json.dumps([asdict(node) for node in newest]))
        except (OSError, CortexError):  # a disk that is full, a database that is away: not for ever
            self._is_changed = True


class NodesFile(_Nodes):
    """Nodes in a file, for one operator at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path.read_text() if path.exists() else "", self._replace)

    def _replace(self, text: str) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(text)
        part.rename(self._path)


class SharedNodes(_Nodes):
    """Nodes in the database that several operators share: who takes over finds them, whatever Ray knows."""

    def __init__(self, facts: FactStore) -> None:
        super().__init__(facts.get(_FACT) or "", lambda text: facts.put(_FACT, text))


def _parse(text: str) -> list[NodeAddress]:
    try:
        return [NodeAddress(**node) for node in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []
