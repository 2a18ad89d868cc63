"""One replica of a cluster as the operator knows it, and what it wants of a node. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from cortex.cluster.node_client import NodeLink
from cortex.cluster.placement import Resources
from cortex.engine.devices import Inventory
from cortex.replica.spec import ReplicaSpec, ReplicaStatus

#: Who lost its place again is placed again after so long, then after twice as long.
_RETRY_S = 1.0
_MAX_RETRY_S = 30.0
#: A cluster may grow while a replica waits: how many devices there are is no limit on how many are asked for.
_ANY_NUMBER = 4096


@dataclass
class Remote:
    """One replica, wherever it is."""

    spec: ReplicaSpec  #: in terms of the operator's home
    status: ReplicaStatus
    link: NodeLink | None = None  #: None until it is placed
    stop_drain_s: float | None = None  #: set once a stop is wanted
    unreserved_since: float | None = None  #: since when it runs without its reservation
    is_leaving: bool = False  #: that has gone on for too long

    retry_at: float | None = None  #: when a place is asked for again; None unless it was lost before anything ran
    problem: str = ""  #: why that happened more than once
    _losses: int = 0

    def lost(self, reason: str, now: float) -> None:
        """Note that its place was lost before it was started there: another is asked for, at first at once."""
        self.retry_at = now + min(_RETRY_S * 2.0 ** (self._losses - 1), _MAX_RETRY_S) if self._losses else now
        self._losses += 1
        self.problem = reason if self._losses > 1 else ""
        self.status = replace(self.status, lack=self.problem)

    def is_due(self, now: float) -> bool:
        """Tell whether to ask for another place; says so once."""
        if self.retry_at is None or now < self.retry_at:
            return False
        self.retry_at = None
        return True

    def placed(self) -> None:
        """Note that there is a place."""
        self.retry_at, self.problem = None, ""
        self.status = replace(self.status, lack="")

    def learn(self, status: ReplicaStatus) -> None:
        """Take a newer status."""
        self.status = replace(status, is_leaving=self.is_leaving)

    @property
    def wanted(self) -> Resources:
        """What it takes of its node."""
        return Resources(self.spec.cpu, self.spec.mem_bytes, self.spec.gpu, self.spec.node_groups)


@cache
def any_devices() -> Inventory:
    """Return as many of everything as anybody could want."""
    names = tuple(f"gpu-{number}" for number in range(_ANY_NUMBER))
    return Inventory(names, tuple(range(_ANY_NUMBER)), cores=math.inf, memory_bytes=2**62)


def spec_of_folder(folder: Path) -> ReplicaSpec:
    """Return a spec that names where a replica's numbers lie, which is all that those need who add them up."""
    api = folder.name.rsplit("-", 2)[0]
    return ReplicaSpec(folder.name, api, "", "", "", "", "", "", (), "", "", metrics_dir=str(folder))
