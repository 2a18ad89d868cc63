"""Nodes that the last operator followed, so that the next one can reach them even while Ray is away."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cortex.cluster.placement import NodeAddress
from cortex.errors import CortexError
from cortex.state.queries.key_values import KeyValueStore

#: Limit on the number of stored nodes; the oldest are dropped first.
_MAX_NODES = 10_000
_FACT = "nodes"


class KnownNodes:
    """A set of node addresses, loaded from the database once and written as a whole.

    `former` is the file in which version 0.1.0 kept them without PostgreSQL.
    """

    def __init__(self, facts: KeyValueStore, former: Path | None = None) -> None:
        self._facts = facts
        text = facts.get(_FACT)
        self._is_changed = text is None
        if text is None and former is not None and former.exists():
            text = former.read_text()
        self._nodes = {address.host: address for address in _parse(text or "[]")}

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
        """Write the nodes if they changed; the next call tries again if it fails. Blocks: call it in a thread."""
        if not self._is_changed:
            return
        self._is_changed = False
        newest = self.all()[-_MAX_NODES:]
        try:
            self._facts.put(_FACT, json.dumps([asdict(node) for node in newest]))
        except (OSError, CortexError):  # a full disk, or a database that is away
            self._is_changed = True


def _parse(text: str) -> list[NodeAddress]:
    try:
        return [NodeAddress(**node) for node in json.loads(text)]
    except (ValueError, TypeError):
        return []
