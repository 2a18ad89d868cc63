"""Placement of replicas on nodes: resource requests, reservations, and why a request is unschedulable.

Plain data, pure functions and the `Placer` interface. Independent of Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from cortex.errors import format_size

#: Prefix of the names of placements that reserve nothing and only have an agent run on a node.
AGENT_PREFIX = "cortex-agent-"
#: Rounding tolerance: fractions of cores don't add up exactly.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Resources:
    """Resources that one replica or worker requests on one node."""

    cpu: float = 0.0  #: cores
    memory_bytes: int = 0
    gpu: int = 0
    node_groups: tuple[str, ...] = ()  #: allowed node groups; empty: all nodes


@dataclass(frozen=True)
class NodeAddress:
    """A node, and the port of its agent."""

    node_id: str
    host: str
    port: int


@dataclass(frozen=True)
class Placement:
    """State of one resource request.

    "lost" means that the reservation ended without a call of `Placer.remove`; `reason` has the cause. A lost placement
    stays lost until it is removed or placed again.
    """

    name: str
    state: Literal["pending", "placed", "lost"]
    node: NodeAddress | None  #: current or last node; None until it is placed
    since: float  #: start of this state, by `time.monotonic()`
    reason: str = ""
    gpus: tuple[str, ...] = ()  #: reserved devices of the node


@dataclass(frozen=True)
class NodeResources:
    """Total resources of one node, whether reserved or free."""

    host: str
    cpu: float
    memory_bytes: int
    gpu: int
    node_groups: frozenset[str] = frozenset()
    zone: str = ""  #: failure domain


@dataclass(frozen=True)
class Occupant:
    """A replica on a node, or requested there, as the next replica of some API sees it."""

    host: str
    resources: Resources
    is_same_api: bool = False
    is_same_revision: bool = False  #: of the same API


@dataclass(frozen=True)
class Amounts:
    """Resources summed over all nodes."""

    cpu: float = 0.0
    memory_bytes: int = 0
    gpu: int = 0


@dataclass(frozen=True)
class ClusterResources:
    """Resources of the cluster: total and free over all nodes, and the total of each node."""

    total: Amounts = Amounts()
    free: Amounts = Amounts()
    nodes: Mapping[str, NodeResources] = field(default_factory=dict)  #: live nodes by id


class Placer(Protocol):
    """Reserve resources of the cluster. Reservations outlive the operator; the next operator finds them.

    All methods run on the operator's event loop. Only `startup` waits for the cluster.
    """

    async def startup(self, on_change: Callable[[], None]) -> None:
        """Find existing reservations. Returns after some seconds even if the cluster does not answer.

        The placer calls `on_change` after each change of `placements`, `resources` or `is_available`.
        """

    async def shutdown(self) -> None:
        """Stop without releasing any reservation."""

    async def place(self, name: str, resources: Resources, node_id: str = "", preferred: str = "") -> None:
        """Request resources on the node `node_id` only, or on any node: `preferred` if it has them free.

        Does nothing if the name is pending or placed. Requests a lost name again.
        """

    async def remove(self, name: str) -> None:
        """Release a reservation or cancel a request. Unknown names are ignored."""

    def placements(self) -> dict[str, Placement]:
        """Return all requests and reservations by name; the last known state while the cluster is away."""

    def resources(self) -> ClusterResources | None:
        """Return the resources of the cluster; None while it does not answer."""

    @property
    def is_available(self) -> bool:
        """True while the cluster answers."""

    @property
    def reason(self) -> str:
        """Reason why the cluster does not answer; empty while it does."""


def fits(wanted: Resources, node: NodeResources) -> bool:
    """Return whether a request fits on a node that has nothing else reserved."""
    return (
        wanted.cpu <= node.cpu + _TOLERANCE
        and wanted.memory_bytes <= node.memory_bytes
        and wanted.gpu <= node.gpu
        and (not wanted.node_groups or not node.node_groups.isdisjoint(wanted.node_groups))
    )


def seems_free(wanted: Resources, cluster: ClusterResources) -> bool:
    """Return whether some node is large enough and the cluster has as much free in total."""
    free = cluster.free
    has_cores = wanted.cpu <= free.cpu + _TOLERANCE
    is_free = has_cores and wanted.memory_bytes <= free.memory_bytes and wanted.gpu <= free.gpu
    return is_free and any(fits(wanted, node) for node in cluster.nodes.values())


def unschedulable_reason(wanted: Resources, cluster: ClusterResources) -> str:
    """Return a message that compares a pending request with the free resources or with the largest node."""
    nodes = list(cluster.nodes.values())
    if not nodes:
        return f"a replica needs {_format(wanted, wanted)}; the cluster has no nodes"
    if wanted.node_groups:
        nodes = [node for node in nodes if not node.node_groups.isdisjoint(wanted.node_groups)]
        if not nodes:
            return f"a replica needs a node of {_format_groups(wanted)}; the cluster has none"
    among = f" of {_format_groups(wanted)}" if wanted.node_groups else ""
    if any(fits(wanted, node) for node in nodes):
        free = Resources(cluster.free.cpu, cluster.free.memory_bytes, cluster.free.gpu)
        return (
            f"a replica needs {_format(wanted, wanted)} on one node{among}: no node has that free at the moment; "
            f"the whole cluster has {_format(wanted, free)} free"
        )
    largest = _format(wanted, _largest(wanted, nodes))
    return f"a replica needs {_format(wanted, wanted)}; the largest node{among} has {largest}"


def choose_group(wanted: Resources, cluster: ClusterResources | None) -> str | None:
    """Return the first allowed node group with a node on which the request fits, else the first allowed group."""
    if not wanted.node_groups:
        return None
    nodes = list(cluster.nodes.values()) if cluster is not None else []
    for group in wanted.node_groups:
        if any(group in node.node_groups and fits(wanted, node) for node in nodes):
            return group
    return wanted.node_groups[0]


def choose_node(
    wanted: Resources, cluster: ClusterResources, occupants: Collection[Occupant], avoided: Collection[str] = ()
) -> str:
    """Return the id of the best node for one more replica; "" if none seems to have room.

    Hosts in `avoided` come last. Then the replicas of a revision are spread, first over zones, then over nodes, and so
    are those of its API. Among equal nodes, replicas with GPUs are packed, others get the one with the most free cores.
    """
    group = choose_group(wanted, cluster)
    zones = {node.host: node.zone or node.host for node in cluster.nodes.values()}
    on_node = Counter(each.host for each in occupants if each.is_same_revision)
    in_zone = Counter(zones.get(each.host) for each in occupants if each.is_same_revision)
    of_api = Counter(each.host for each in occupants if each.is_same_api)
    found = []
    for node_id, node in cluster.nodes.items():
        free = _free(node, occupants)
        if fits(wanted, free) and (group is None or group in node.node_groups):
            room = (free.gpu,) if wanted.gpu else (node.gpu, -free.cpu)
            same = (in_zone[zones[node.host]], on_node[node.host], of_api[node.host])
            found.append(((node.host in avoided, *same, *room, node_id), node_id))
    return min(found)[1] if found else ""


def _free(node: NodeResources, occupants: Collection[Occupant]) -> NodeResources:
    held = [each.resources for each in occupants if each.host == node.host]
    return replace(
        node,
        cpu=node.cpu - sum(each.cpu for each in held),
        memory_bytes=node.memory_bytes - sum(each.memory_bytes for each in held),
        gpu=node.gpu - sum(each.gpu for each in held),
    )


def _largest(wanted: Resources, nodes: list[NodeResources]) -> Resources:
    """Return the resources of the node that comes closest, judged by its scarcest resource."""

    def met(node: NodeResources) -> tuple[float, float]:
        shares = [
            node.cpu / wanted.cpu if wanted.cpu else 1.0,
            node.memory_bytes / wanted.memory_bytes if wanted.memory_bytes else 1.0,
            node.gpu / wanted.gpu if wanted.gpu else 1.0,
        ]
        return min(min(shares), 1.0), sum(min(share, 1.0) for share in shares)

    best = max(nodes, key=met)
    return Resources(best.cpu, best.memory_bytes, best.gpu)


def _format(wanted: Resources, amounts: Resources) -> str:
    """Format those of `amounts` that `wanted` requests."""
    parts = []
    if wanted.cpu or not (wanted.memory_bytes or wanted.gpu):
        parts.append(f"{amounts.cpu:.3g} {'core' if amounts.cpu == 1 else 'cores'}")
    if wanted.memory_bytes:
        parts.append(f"{format_size(amounts.memory_bytes)} of memory")
    if wanted.gpu:
        parts.append(f"{amounts.gpu} {'GPU' if amounts.gpu == 1 else 'GPUs'}")
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _format_groups(wanted: Resources) -> str:
    kind = "group" if len(wanted.node_groups) == 1 else "groups"
    return f"node {kind} {' or '.join(wanted.node_groups)}"
