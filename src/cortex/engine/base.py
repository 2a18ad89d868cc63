"""The interface of engines: one runs replicas on this machine, one on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cortex.engine.devices import Inventory
from cortex.worker.spec import ReplicaSpec, ReplicaStatus, RequestLimits


class Engine(Protocol):
    """Starts, watches and stops replicas. Replicas outlive it and are adopted by the next engine.

    All methods run on the operator's event loop. The engine keeps the newest status of each replica.
    """

    async def startup(self, on_change: Callable[[], None], on_end: Callable[[Path], None]) -> None:
        """Adopt every running replica and clean up after those that died while no operator ran.

        The engine calls `on_change` after each change of a status. It calls `on_end`, with the folder of its metrics,
        once nothing of a replica runs any more, before it removes the replica's files: possibly more than once, and for
        replicas of an earlier engine too.
        """

    async def shutdown(self) -> None:
        """Stop watching the replicas; they keep running."""

    async def find_devices(self) -> Inventory:
        """Detect the devices for replicas again."""

    def devices(self) -> Inventory:
        """Return the devices found last, including those assigned to replicas."""

    async def start(self, spec: ReplicaSpec) -> None:
        """Start a replica with devices of its own; return before it is ready. Its devices are free once it is gone.

        Raises: ComputeUnavailableError if too few are free; EngineError if its supervisor can't be started.
        """

    async def stop(self, replica_id: str, drain_s: float) -> None:
        """Drain and stop a replica; it is killed if it takes longer than `drain_s`.

        Unknown ids are ignored. Returns at once; `replicas()` no longer contains the replica when it has ended.
        """

    async def configure(self, replica_id: str, limits: RequestLimits) -> None:
        """Change the limits of a running replica; they apply from its next request on. Unknown ids are ignored."""

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return every running replica by id, with its newest status, including those being stopped."""
