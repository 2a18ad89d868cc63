"""What the gateways of nodes have answered in all, over their coming and going. Owns a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cortex.gateway.stats import BackendStats
from cortex.home import write_private

#: Answers of each API by class of status.
Counts = dict[str, dict[int, int]]


@dataclass
class _Gateway:
    """What one node's gateway told."""

    counts: str = ""  #: which counts the newest are; a node that was set up anew begins others
    newest: Counts = field(default_factory=dict)
    before: Counts = field(default_factory=dict)  #: of counts that are no more


class GatewayTotals:
    """Totals by API that never go back; those of nodes that are gone are kept for as long as the API is there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._gateways: dict[str, _Gateway] = {}
        self._written = ""

    def load(self) -> None:
        """Go on from where the last operator was; from nothing where that can't be read."""
        try:
            data = json.loads(self._file.read_text())
            self._gateways = {
                str(host): _Gateway(str(each["counts"]), _read(each["newest"]), _read(each["before"]))
                for host, each in data.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._gateways = {}

    def save(self) -> None:
        """Keep what was noted. A disk that is full is tried again next time."""
        text = json.dumps({host: vars(gateway) for host, gateway in self._gateways.items()})
        if text != self._written:
            with contextlib.suppress(OSError):
                write_private(self._file, text)
                self._written = text

    def note(self, host: str, counts: str, stats: Mapping[str, BackendStats]) -> None:
        """Take what a gateway has counted. Of the same `counts`, no number is ever lower than it was."""
        gateway = self._gateways.setdefault(host, _Gateway(counts))
        if gateway.counts != counts:
            for api, responses in gateway.newest.items():
                before = gateway.before.setdefault(api, {})
                for kind, count in responses.items():
                    before[kind] = before.get(kind, 0) + count
            gateway.counts, gateway.newest = counts, {}
        for api, each in stats.items():
            known = gateway.newest.setdefault(api, {})
            for kind, count in each.responses.items():
                known[kind] = max(count, known.get(kind, 0))

    def forget(self, apis: Collection[str]) -> None:
        """Drop the totals of APIs that are not among `apis`."""
        for host, gateway in list(self._gateways.items()):
            for counts in (gateway.newest, gateway.before):
                for name in counts.keys() - set(apis):
                    del counts[name]
            if not gateway.newest and not gateway.before:
                del self._gateways[host]

    def of(self, api: str) -> dict[int, int]:
        """Return the answers of one API by class, over all gateways of nodes that there are and were."""
        total: dict[int, int] = {}
        for gateway in self._gateways.values():
            for counts in (gateway.before, gateway.newest):
                for kind, count in counts.get(api, {}).items():
                    total[kind] = total.get(kind, 0) + count
        return total


def _read(data: Any) -> Counts:
    return {str(api): {int(kind): int(count) for kind, count in responses.items()} for api, responses in data.items()}
