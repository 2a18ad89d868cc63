"""One replica on a node, as the operator follows it: its lifecycle, and the paths in its spec.

start --> PENDING --> PLACED --> RUNNING <--> UNRESERVED --> LEAVING
            | ^         |           |             |             |
            v |         |           +-------------+-------------+--> ended, or node lost: removed
           LOST <-------+

state       fields                        leaves it when
PENDING     node is None                  the placer has reserved resources: PLACED
LOST        retry_at is set               the backoff is over: PENDING (first retry at once)
PLACED      node is set, nothing started  the agent reports the replica: RUNNING
                                          the reservation or the node is away for UNREACHABLE_S: LOST
RUNNING     status is the agent's         the agent reports it without its reservation: UNRESERVED
UNRESERVED  unreserved_since is set       the same node has reserved resources again: RUNNING
                                          that fails for UNRESERVED_S: LEAVING
LEAVING     is_leaving                    the reconciler has started another replica and stops this one;
                                          a job worker is stopped at once, and drains
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import PurePosixPath
from typing import Any, TypeVar

from cortex.cluster.node_client import SILENCE_S, NodeClient
from cortex.cluster.placement import (
    NodeAddress,
    Occupant,
    Placement,
    Placer,
    Resources,
    seems_free,
    unschedulable_reason,
)
from cortex.engine.devices import Inventory
from cortex.home import Home
from cortex.models.spec import HOME_PATH
from cortex.processes.backoff import Backoff
from cortex.worker.spec import ReplicaSpec, ReplicaStatus

#: A running replica that lost its reservation may go on for this long while the reservation is requested again.
UNRESERVED_S = 30.0
#: A pending request is reported as unschedulable after this time if it seems to fit, and
STARTING_S = 60.0
#: after this time if it does not: other replicas may be ending at the moment.
UNSCHEDULABLE_AFTER_S = 3.0
#: A placed replica is moved if its node has not answered the operator for this long.
UNREACHABLE_S = 30.0
#: Backoff between requests after the second loss.
_BACKOFF = Backoff(1.0, 30.0)
#: A cluster may grow while a replica waits, so the number of devices limits nothing.
_UNLIMITED_DEVICES = 4096


@dataclass
class RemoteReplica:
    """One replica of the cluster; the module docstring has its states."""

    spec: ReplicaSpec  #: with the paths of the operator's home
    status: ReplicaStatus
    node: NodeClient | None = None  #: None until it is placed
    preferred_host: str = ""  #: of the last request for a place
    stop_drain_s: float | None = None  #: set once a stop was requested
    unreserved_since: float | None = None  #: when it lost its reservation while it runs
    is_leaving: bool = False  #: it has been without a reservation for too long

    retry_at: float | None = None  #: when to request another place; None unless the last one was lost
    problem: str = ""  #: reason of the last loss, from the second loss on
    _losses: int = 0

    def lost(self, reason: str, now: float) -> None:
        """Record the loss of a place before the replica started there. The first retry is immediate."""
        self.retry_at = now + _BACKOFF.delay_s(self._losses) if self._losses else now
        self._losses += 1
        self.problem = reason if self._losses > 1 else ""
        self.status = replace(self.status, lack=self.problem)

    def is_due(self, now: float) -> bool:
        """Return True, once, when the backoff has passed and another place can be requested."""
        if self.retry_at is None or now < self.retry_at:
            return False
        self.retry_at = None
        return True

    def placed(self) -> None:
        """Record that the replica has a place."""
        self.retry_at, self.problem = None, ""
        self.status = replace(self.status, lack="")

    def update(self, status: ReplicaStatus) -> None:
        """Take a newer status."""
        is_unreserved = self.unreserved_since is not None
        self.status = replace(status, is_leaving=self.is_leaving, is_unreserved=is_unreserved)

    @property
    def wanted(self) -> Resources:
        """Resources that it requests of its node."""
        return Resources(self.spec.cpu, self.spec.mem_bytes, self.spec.gpu, self.spec.node_groups)

    @property
    def host(self) -> str:
        """Node on which it takes resources, or is expected to; "" if neither is known."""
        return self.node.address.host if self.node is not None else self.preferred_host

    def as_occupant(self, other: RemoteReplica) -> Occupant:
        """Return this replica as `other`, which needs a place, sees it. Replicas that will end are not of its API."""
        spec, counts = other.spec, self.stop_drain_s is None and not self.is_leaving
        is_same_api = counts and (spec.api, spec.is_job_worker) == (self.spec.api, self.spec.is_job_worker)
        return Occupant(self.host, self.wanted, is_same_api, is_same_api and spec.revision == self.spec.revision)


def waiting_reason(replica: RemoteReplica, placement: Placement, placer: Placer) -> str:
    """Return why a replica is still pending; empty during a normal start."""
    cluster = placer.resources()
    if cluster is None:
        return placer.reason
    patience_s = STARTING_S if seems_free(replica.wanted, cluster) else UNSCHEDULABLE_AFTER_S
    return unschedulable_reason(replica.wanted, cluster) if time.monotonic() - placement.since > patience_s else ""


def newest_addresses(placements: Iterable[Placement]) -> list[NodeAddress]:
    """Return each node with a placement, by its newest address: an agent may change its port."""
    placed = [placement for placement in placements if placement.state == "placed"]
    return list({p.node.host: p.node for p in sorted(placed, key=lambda p: p.since) if p.node is not None}.values())


def unreachable_reason(replica: RemoteReplica, placement: Placement | None) -> tuple[str, float]:
    """Return why a placed replica can't start on its node (empty at first), and for how many seconds."""
    assert replica.node is not None
    is_placed = placement is not None and placement.state == "placed"
    since_s = time.monotonic() - placement.since if placement is not None and is_placed else math.inf
    node = replica.node
    message = f"the operator's machine can't reach node {node.address.host}: {node.problem}"
    return message if since_s > SILENCE_S else "", since_s


async def reserve_again(replica: RemoteReplica, placer: Placer, clock: Callable[[], float]) -> bool:
    """Request a lost reservation again on the replica's own node. Return False once `UNRESERVED_S` have passed."""
    assert replica.node is not None
    assert replica.unreserved_since is not None
    name, host, cluster = replica.spec.id, replica.node.address.host, placer.resources()
    if cluster is None:
        replica.unreserved_since = clock()  # nobody else can reserve its resources meanwhile
        return True
    placement = placer.placements().get(name)
    if placement is None or placement.state == "lost":
        node_id = next((node_id for node_id, node in cluster.nodes.items() if node.host == host), "")
        if node_id:
            await placer.place(name, replica.wanted, node_id)
    return clock() - replica.unreserved_since <= UNRESERVED_S


@cache
def unlimited_inventory() -> Inventory:
    """Return an inventory that no request exceeds."""
    names = tuple(f"gpu-{number}" for number in range(_UNLIMITED_DEVICES))
    return Inventory(names, tuple(range(_UNLIMITED_DEVICES)), cores=math.inf, memory_bytes=2**62)


# The paths in a spec, between the operator's home and a node's.
#
# A field of `ReplicaSpec` (or of a dataclass inside it) that holds a path is declared with `field(metadata=HOME_PATH)`;
# only these are translated. `tests/cluster/test_path_mapping.py` fails for a text field that is not classified.

T = TypeVar("T")

_FOLDERS = (
    "projects_dir",
    "environments_dir",
    "models_dir",
    "logs_dir",
    "replicas_dir",
    "sockets_dir",
    "metrics_dir",
    "recordings_dir",
)


def home_folders(source: Home, target: Home) -> dict[str, str]:
    """Return the folders of `source` mapped to those of `target`, for `map_paths`."""
    return {str(getattr(source, name)): str(getattr(target, name)) for name in _FOLDERS}


def map_paths(spec: T, folders: Mapping[str, str]) -> T:
    """Return a copy of a dataclass in which each path below a key of `folders` is below its value; others stay."""
    changed: dict[str, Any] = {}
    for each in fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, each.name)
        changed[each.name] = _map_value(value, folders, is_path=HOME_PATH.items() <= each.metadata.items())
    return replace(spec, **changed)  # type: ignore[type-var]


def _map_value(value: Any, folders: Mapping[str, str], is_path: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_map_value(each, folders, is_path) for each in value)
    if is_dataclass(value):
        return map_paths(value, folders)
    return _map_path(value, folders) if is_path and value else value


def _map_path(path: str, folders: Mapping[str, str]) -> str:
    for source, target in folders.items():
        if path == source or path.startswith(f"{source}/"):
            return str(PurePosixPath(target) / path[len(source) :].lstrip("/"))
    return path
