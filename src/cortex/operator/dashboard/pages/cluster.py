"""Page of the machines: their resources, what replicas request and leave free, and the replicas on each.

On one machine it shows that machine. On a cluster, a node is listed if Ray lists it or the operator follows its agent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response

from cortex.cluster.placement import Amounts, ClusterResources, NodeResources
from cortex.engine.devices import Inventory
from cortex.operator.dashboard.rendering import Pages
from cortex.operator.http.services import Services
from cortex.worker.spec import ReplicaSpec, ReplicaStatus

#: With more nodes, the replicas of each are folded.
_MAX_UNFOLDED = 3


@dataclass(frozen=True)
class PlacedReplica:
    """A replica or job worker, and what it requests."""

    spec: ReplicaSpec
    status: ReplicaStatus
    used_bytes: int | None = None  #: memory, with shared pages counted once; None: not known

    @property
    def requested(self) -> Amounts:
        """Resources that it requests."""
        return Amounts(self.spec.cpu, self.spec.mem_bytes, self.spec.gpu)

    @property
    def states(self) -> list[str]:
        """The states of its processes."""
        return sorted({process.state.value for process in self.status.processes})


@dataclass(frozen=True)
class NodeConnection:
    """State of the operator's connection to a node agent."""

    is_up: bool
    silent_s: float  #: since the last message, which is at least a heartbeat
    problem: str = ""


@dataclass(frozen=True)
class NodeView:
    """A machine on the page."""

    name: str
    total: Amounts | None  #: None: not known
    replicas: list[PlacedReplica] = field(default_factory=list)
    connection: NodeConnection | None = None  #: None: this machine, or a node to which no replica was placed yet
    groups: tuple[str, ...] = ()
    gateway: str = ""  #: URL of its gateway; "": it has none, or only the operator's

    @property
    def requested(self) -> Amounts:
        """Resources that its replicas request together."""
        return _sum(replica.requested for replica in self.replicas)

    @property
    def used_bytes(self) -> int | None:
        """Memory that its replicas use, as far as it is known; None if it is unknown."""
        known = [replica.used_bytes for replica in self.replicas if replica.used_bytes is not None]
        return sum(known) if known else None

    @property
    def is_lost(self) -> bool:
        """Return True for a node that does not answer."""
        return self.connection is not None and not self.connection.is_up


@dataclass(frozen=True)
class ClusterView:
    """All machines."""

    nodes: list[NodeView]
    total: Amounts | None
    free: Amounts | None
    waiting: list[PlacedReplica] = field(default_factory=list)  #: replicas without a node
    problem: str = ""  #: why no replica can be placed
    is_cluster: bool = True
    why_no_gpus: str = ""


def cluster_pages(describe: Callable[[], Awaitable[ClusterView]], pages: Pages) -> APIRouter:
    """Return the page."""
    router = APIRouter()

    @router.get("/cluster")
    async def show_cluster(request: Request) -> Response:
        """Show all machines; nodes that do not answer come first."""
        view = await describe()
        return pages.page(request, "cluster.html", view=view, is_folded=len(view.nodes) > _MAX_UNFOLDED)

    return router


async def describe_machines(services: Services) -> ClusterView:
    """Return the machines of an operator."""
    usage = await services.monitoring.metrics.recent_usage()
    used = {name: each.memory.proportional_bytes or each.memory.resident_bytes for name, each in usage.items()}
    replicas = [
        PlacedReplica(spec, status, used.get(spec.id))
        for spec, status in services.infrastructure.engine.replicas().values()
    ]
    replicas.sort(key=lambda replica: replica.spec.id)
    cluster = services.infrastructure.cluster
    if cluster is None:
        return view_of_machine(services.infrastructure.engine.devices(), replicas)
    connections = {
        host: NodeConnection(node.is_up, node.silent_s, "" if node.is_up else node.problem)
        for host, node in cluster.engine.nodes.items()
    }
    gateways = {str(gateway["node"]): str(gateway["url"]) for gateway in cluster.fleet.describe()}
    return view_of_cluster(cluster.placer.resources(), connections, replicas, gateways, cluster.placer.reason)


# Pure.


def view_of_machine(inventory: Inventory, replicas: list[PlacedReplica]) -> ClusterView:
    """Return the only machine."""
    total = Amounts(inventory.cores, inventory.memory_bytes, len(inventory.gpus)) if inventory.cores else None
    node = NodeView("this machine", total, replicas)
    free = _difference(total, node.requested) if total else None
    return ClusterView([node], total, free, is_cluster=False, why_no_gpus=inventory.why_no_gpus)


def view_of_cluster(
    resources: ClusterResources | None,
    connections: Mapping[str, NodeConnection],
    replicas: Iterable[PlacedReplica],
    gateways: Mapping[str, str],
    problem: str,
) -> ClusterView:
    """Return the nodes of a cluster; `connections` and `gateways` are by host, `resources` None while Ray is away."""
    known: dict[str, NodeResources] = {node.host: node for node in resources.nodes.values()} if resources else {}
    placed: dict[str, list[PlacedReplica]] = defaultdict(list)
    for replica in replicas:
        placed[replica.status.node].append(replica)
    waiting = placed.pop("", [])
    nodes = []
    for host in {*known, *connections, *placed}:
        found = known.get(host)
        total = Amounts(found.cpu, found.memory_bytes, found.gpu) if found else None
        groups = tuple(sorted(found.node_groups)) if found else ()
        nodes.append(NodeView(host, total, placed[host], connections.get(host), groups, gateways.get(host, "")))
    nodes.sort(key=lambda node: (not node.is_lost, node.name))
    total, free = (resources.total, resources.free) if resources else (None, None)
    return ClusterView(nodes, total, free, waiting, problem)


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    listed = list(amounts)
    return Amounts(
        sum(each.cpu for each in listed), sum(each.memory_bytes for each in listed), sum(each.gpu for each in listed)
    )


def _difference(total: Amounts, held: Amounts) -> Amounts:
    """Return what is left; nothing where more is held, as by a job worker that shares the cores of replicas."""
    return Amounts(
        max(total.cpu - held.cpu, 0.0), max(total.memory_bytes - held.memory_bytes, 0), max(total.gpu - held.gpu, 0)
    )
