"""Where replicas may run: what they want, what the cluster has, and who reserves it. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

#: What begins the name under which an agent is wanted on a node, rather than a replica.
AGENT_PREFIX = "cortex-agent-"


@dataclass(frozen=True)
class Resources:
    """What one replica or worker wants of one node."""

    cpu: float = 0.0  #: cores
    memory_bytes: int = 0
    gpu: int = 0
    node_groups: tuple[str, ...] = ()  #: it may run on nodes of any of these; empty: on all


@dataclass(frozen=True)
class NodeAddress:
    """A node, and the port of the node agent on it."""

    node_id: str
    host: str
    port: int


@dataclass(frozen=True)
class Placement:
    """What was found for one replica or worker.

    "lost": its resources are reserved no more, though nobody asked for that; `reason` says what happened. A placement
    that is lost stays so until it is removed.
    """

    name: str
    state: Literal["pending", "placed", "lost"]
    node: NodeAddress | None  #: where it is or was; None until it is placed
    since: float  #: since when it is in this state, by `time.monotonic()`
    reason: str = ""
    gpus: tuple[str, ...] = ()  #: the devices of the node that are its own


@dataclass(frozen=True)
class NodeResources:
    """All that one node has, taken or not."""

    host: str
    cpu: float
    memory_bytes: int
    gpu: int
    node_groups: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Amounts:
    """Sums over all nodes."""

    cpu: float = 0.0
    memory_bytes: int = 0
    gpu: int = 0


@dataclass(frozen=True)
class ClusterResources:
    """What the cluster has: of all nodes together what there is and what is free, and what each node has."""

    total: Amounts = Amounts()
    free: Amounts = Amounts()
    nodes: Mapping[str, NodeResources] = field(default_factory=dict)  #: by node id; those that live


class Placer(Protocol):
    """Reserves resources of the cluster. What is placed stays so when the operator ends, and is found by the next one.

    All methods run on the operator's event loop, and none waits for the cluster longer than `startup` says. `on_change`
    (set by its owner before `startup`) is called after each change of what they return.
    """

    on_change: Callable[[], None]

    async def startup(self) -> None:
        """Find what is placed already; returns after some seconds also where the cluster does not answer."""

    async def shutdown(self) -> None:
        """Let go of everything that is placed without giving it up."""

    async def place(self, name: str, resources: Resources, node_id: str = "") -> None:
        """Have resources reserved as soon as a node has them; on the node `node_id` only, where one is named.

        A name that is pending or placed is left as it is; one that was lost is placed again.
        """

    async def remove(self, name: str) -> None:
        """Give up what is reserved, or no longer wait for it. Unknown names are ignored."""

    def placements(self) -> dict[str, Placement]:
        """Return everything that is wanted or reserved, by name; what was known last while the cluster is away."""

    def resources(self) -> ClusterResources | None:
        """Return what the cluster has; None while it does not answer."""

    @property
    def is_available(self) -> bool:
        """Whether the cluster answers."""

    @property
    def reason(self) -> str:
        """Why it does not; empty while it does."""
