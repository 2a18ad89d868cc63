"""Nodes that the last operator followed, so that the next one can reach them even while Ray is away."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from cortex.cluster.placement import NodeAddress
from cortex.errors import CortexError
from cortex.state.queries.key_values import KeyValueStore

#: Limit on the number of stored nodes; the oldest are dropped first.
_MAX_NODES = 10_000
_FACT = "nodes"


class KnownNodes:
    """A set of node addresses, loaded once and written as a whole.

    `write` may raise OSError or CortexError; the next `save` tries again.
    """

    def __init__(self, text: str, write: Callable[[str], None]) -> None:
        self._write = write
        self._is_changed = False
        self._nodes = {address.host: address for address in _parse(text)}

    def all(self) -> Sequence[NodeAddress]:
        """Return all nodes."""
        return list(self._nodes.values())

    def add(self, address: NodeAddress) -> None:
        """Add a node, or update its port."""
        if self._nodes.get(address.host) == address:
            return
        self._nodes.pop(address.host, None)
        self._nodes[address.host] = address
        self._is_changed = True

    def remove(self, host: str) -> None:
        """Remove a node."""
        if self._nodes.pop(host, None):
            self._is_changed = True

    def save(self) -> None:
        """Write the nodes if they changed. Blocks: call it in a thread."""
        if not self._is_changed:
            return
        self._is_changed = False
        newest = self.all()[-_MAX_NODES:]
        try:
            self._write(json.dumps([asdict(node) for node in newest]))
        except (OSError, CortexError):  # a full disk, or a database that is away
            self._is_changed = True


def nodes_in_file(path: Path) -> KnownNodes:
    """Return the nodes of a file in the home of a single operator."""

    def write(text: str) -> None:
        part = path.with_suffix(".part")
        part.write_text(text)
        part.rename(path)

    return KnownNodes(path.read_text() if path.exists() else "", write)


def nodes_in_database(facts: KeyValueStore) -> KnownNodes:
    """Return the nodes of the database that several operators share."""
    return KnownNodes(facts.get(_FACT) or "", lambda text: facts.put(_FACT, text))


def _parse(text: str) -> list[NodeAddress]:
    try:
        return [NodeAddress(**node) for node in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []
