"""An engine and a gateway whose replicas and routes change only at a test's command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from cortex.engine.devices import Inventory
from cortex.errors import ComputeUnavailableError, EngineError, GatewayError
from cortex.gateway.routes import RoutingTable
from cortex.gateway.statistics import BackendStats
from cortex.lifecycle import ProcessState
from cortex.worker.spec import Death, ProcessStatus, ReplicaSpec, ReplicaStatus, RequestLimits, StartFailure
from harness.wait import PATIENCE_S


async def until(condition: Callable[[], object]) -> None:
    """Run other tasks until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


class ScriptedEngine:
    """Implements `cortex.engine.base.Engine` in memory: a started replica stays `starting` until the test changes it.

    `stop` is only recorded; the test calls `end`.
    """

    def __init__(self, inventory: Inventory = Inventory(cores=8.0, memory_bytes=2**34)) -> None:  # noqa: B008 - frozen
        self.on_change: Callable[[], None] = lambda: None
        self.on_end: Callable[[Path], None] = lambda folder: None
        self.inventory = inventory
        self.running: dict[str, tuple[ReplicaSpec, ReplicaStatus]] = {}
        self.stopped: dict[str, float] = {}  #: drain timeouts, by id
        self.configured: dict[str, RequestLimits] = {}
        self.start_error: EngineError | ComputeUnavailableError | None = None
        self._started = 0

    async def startup(self, on_change: Callable[[], None], on_end: Callable[[Path], None]) -> None:
        self.on_change, self.on_end = on_change, on_end

    async def shutdown(self) -> None:
        pass

    async def find_devices(self) -> Inventory:
        return self.inventory

    def devices(self) -> Inventory:
        return self.inventory

    async def start(self, spec: ReplicaSpec) -> None:
        if self.start_error is not None:
            raise self.start_error
        self._started += 1
        processes = tuple(
            ProcessStatus(index, socket, ProcessState.STARTING, pid=100 * self._started + index)
            for index, socket in enumerate(spec.sockets)
        )
        status = ReplicaStatus(spec.id, spec.api, spec.revision, self._started, float(self._started), processes)
        self.running[spec.id] = spec, status
        self.on_change()

    async def stop(self, replica_id: str, drain_s: float) -> None:
        if replica_id in self.running:
            self.stopped.setdefault(replica_id, drain_s)
            self._set(replica_id, state=ProcessState.STOPPING)

    async def configure(self, replica_id: str, limits: RequestLimits) -> None:
        if replica_id in self.running:
            self.configured[replica_id] = limits
            spec, status = self.running[replica_id]
            self.running[replica_id] = (
                replace(spec, timeout_s=limits.timeout_s, max_body_bytes=limits.max_body_bytes),
                status,
            )

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        return dict(self.running)

    # Called by tests.

    def ids(self, revision: str | None = None) -> list[str]:
        """Return the ids of running replicas in the order of their start."""
        return [name for name, (spec, _) in self.running.items() if revision in (None, spec.revision)]

    def spec(self, replica_id: str) -> ReplicaSpec:
        return self.running[replica_id][0]

    def make_ready(self, replica_id: str) -> None:
        self._set(replica_id, state=ProcessState.READY, failed_starts=0, failure=None)

    def fail_to_start(self, replica_id: str, error: str) -> None:
        failed_starts = self.running[replica_id][1].processes[0].failed_starts + 1
        self._set(replica_id, state=ProcessState.BACKING_OFF, failed_starts=failed_starts, failure=StartFailure(error))

    def kill_process(self, replica_id: str, death: Death, new_pid: int) -> None:
        """Replace the only process of a job worker."""
        (process,) = self.running[replica_id][1].processes
        self._set(replica_id, pid=new_pid, restarts=process.restarts + 1, death=death, deaths=(*process.deaths, death))

    def end(self, replica_id: str) -> None:
        """Remove a replica: it has been stopped, or its supervisor died."""
        spec, _ = self.running.pop(replica_id)
        self.on_end(Path(spec.metrics_dir))
        self.on_change()

    def _set(self, replica_id: str, **changes: object) -> None:
        spec, status = self.running[replica_id]
        processes = tuple(replace(process, **changes) for process in status.processes)  # type: ignore[arg-type]
        self.running[replica_id] = spec, replace(status, processes=processes)
        self.on_change()


class ScriptedGateway:
    """Implements `cortex.gateway.base.Gateway`: records routing tables; servers are idle unless listed in `busy`."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.refused_connections = 0
        self.tables: list[RoutingTable] = []
        self.busy: set[str] = set()
        self.is_reachable = True
        self.counts: dict[str, BackendStats] = {}

    async def startup(self, table: RoutingTable) -> None:
        await self.apply(table)

    async def apply(self, table: RoutingTable) -> None:
        self._check_reachable()
        self.tables.append(table)

    def use_certificate(self, pem: str) -> None:
        pass

    async def drained(self, names: Collection[str]) -> set[str]:
        self._check_reachable()
        return set(names) - self.busy - self.servers()

    async def stats(self) -> Mapping[str, BackendStats]:
        self._check_reachable()
        return self.counts

    async def ensure_running(self) -> None:
        self._check_reachable()

    async def drain(self, timeout_s: float) -> None:
        self._check_reachable()

    async def stop(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass

    def servers(self) -> set[str]:
        """Return the names of all servers in the table in force."""
        return (
            {server.name for backend in self.tables[-1].backends for server in backend.servers}
            if self.tables
            else set()
        )

    def _check_reachable(self) -> None:
        if not self.is_reachable:
            raise GatewayError("HAProxy does not answer")
