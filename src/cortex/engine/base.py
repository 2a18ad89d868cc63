"""The protocol of an engine: where replicas run. Nothing here knows about APIs, routes or the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cortex.engine.devices import Inventory
from cortex.replica.spec import Limits, ReplicaSpec, ReplicaStatus


class Engine(Protocol):
    """Starts, watches and stops replicas; replicas outlive it and are adopted by the next one.

    All methods run on the operator's event loop. The engine keeps the newest status of each replica and calls
    `on_change` (set by its owner before `startup`) after each change, so that nobody has to poll. It calls `on_end`
    (set likewise) once nothing of a replica runs any more, before what it wrote is removed: perhaps more than once,
    and for a replica of an earlier engine too.
    """

    on_change: Callable[[], None]
    on_end: Callable[[ReplicaSpec], None]

    async def startup(self) -> None:
        """Adopt every replica that already runs and clean up after those that died meanwhile."""

    async def shutdown(self) -> None:
        """Let go of all replicas without stopping one."""

    async def find_devices(self) -> Inventory:
        """Look again which devices there are for replicas."""

    def devices(self) -> Inventory:
        """Return the devices that were found last; those that replicas hold included."""

    async def start(self, spec: ReplicaSpec) -> None:
        """Start a replica with devices of its own; returns before it is ready. They are free again once it is gone.

        Raises: ComputeUnavailableError if too few are free; EngineError if its supervisor can't be started.
        """

    async def stop(self, replica_id: str, drain_s: float) -> None:
        """Ask a replica to finish the requests inside it and end; after `drain_s` it is killed.

        Unknown ids are ignored. Returns at once; the replica disappears from `replicas()` when it is gone.
        """

    async def configure(self, replica_id: str, limits: Limits) -> None:
        """Change the limits of a running replica, from its next request on. Unknown ids are ignored."""

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return every replica that runs, by id, with its newest status; those being stopped included."""
