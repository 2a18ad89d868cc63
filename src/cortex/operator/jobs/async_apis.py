"""AsyncAPIs: their replicas are started and replaced like those of realtime APIs, and work like workers of one job.

The reconciler asks here what such a replica needs beside; callers' workloads come in here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

from cortex.engine.base import Engine
from cortex.errors import NotFoundError
from cortex.home import Home
from cortex.jobs.spec import Assignment
from cortex.jobs.workload import Workload, WorkloadView
from cortex.jobs.workloads import Workloads
from cortex.lifecycle import ApiKind
from cortex.operator.jobs.assignments import LEASE_S
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.operator.jobs.workers import Crews
from cortex.replica.spec import ReplicaSpec
from cortex.state.apis import ApiRecord, ApiStore

#: How long a replica whose API is gone may still need for the workload inside it.
_GONE_DRAIN_S = 10.0


class AsyncApis:
    """The queues of all AsyncAPIs, and the replicas at them."""

    def __init__(
        self,
        home: Home,
        apis: ApiStore,
        workloads: Workloads,
        engine: Engine,
        crews: Crews,
        dispatcher: Dispatcher,
        worker_token: Callable[[str], str],
    ) -> None:
        self._home = home
        self._apis = apis
        self._workloads = workloads
        self._engine = engine
        self._crews = crews
        self._dispatcher = dispatcher
        self._worker_token = worker_token
        workloads.on_added = dispatcher.offer

    # Replicas.

    async def startup(self) -> None:
        """Take up the replicas that run; before any of them is answered."""
        for spec, _ in self._engine.replicas().values():
            if spec.kind == ApiKind.ASYNC:
                await self._enlist(spec)

    async def start(self, spec: ReplicaSpec) -> None:
        """Start a replica that works through its API's queue. Raises: as `Engine.start` does."""
        spec = replace(spec, jobs_socket=str(self._home.jobs_socket), jobs_token=self._worker_token(spec.id))
        with self._crews.awaiting(spec.id):
            await self._enlist(spec)  # first: whatever runs is known
            try:
                await self._engine.start(spec)
            except BaseException:
                await self._crews.forget(spec.id)
                raise

    async def retire(self, spec: ReplicaSpec) -> None:
        """Have a replica finish the workload inside it, and end."""
        await self._crews.stop(spec.id, spec.timeout_s if self.is_async(spec.api) else _GONE_DRAIN_S)

    async def _enlist(self, spec: ReplicaSpec) -> None:
        queue = await self._workloads.open(spec.api)
        await self._crews.assign(spec.id, queue.job_id)
        self._dispatcher.assign(spec.id, _assignment(spec, queue.job_id))

    # Callers.

    def is_async(self, api: str) -> bool:
        """Tell whether an API is there and of this kind."""
        record = self._apis.get(api)
        return record is not None and record.spec.kind is ApiKind.ASYNC

    def max_body_bytes(self, api: str) -> int:
        """Return how large a workload may be. Raises: NotFoundError."""
        return self._require(api).spec.networking.max_body_size

    async def add(self, api: str, workload: Workload) -> None:
        """Store a workload; once this returns, nothing loses it. Raises: NotFoundError."""
        self._require(api)
        await self._workloads.add(api, workload)

    async def get(self, api: str, name: uuid.UUID, wait_s: float) -> WorkloadView | None:
        """Return a workload; if it is not over, wait so long for that. Raises: NotFoundError for an unknown API."""
        self._require(api)
        return await self._workloads.get(api, name, wait_s)

    def open_workloads(self, api: str) -> int | None:
        """Count the workloads of an API that are not over; None if it has no queue."""
        return self._workloads.count(api)

    def _require(self, api: str) -> ApiRecord:
        record = self._apis.get(api)
        if record is None or record.spec.kind is not ApiKind.ASYNC:
            raise NotFoundError(f"{api} is not deployed")
        return record


def _assignment(spec: ReplicaSpec, job_id: str) -> Assignment:
    """Return what a replica is told of its queue: it stays with it for as long as it lives."""
    section = {"type": spec.type, "path": spec.path, "python_path": spec.python_path, "config": spec.config}
    api_spec = {"name": spec.api, "kind": spec.kind, spec.interface: section}
    return Assignment(job_id, spec.config, {}, api_spec, spec.log_path, LEASE_S, batch_timeout_s=spec.timeout_s)
