"""AsyncAPIs: the reconciler starts and replaces their replicas; the replicas process their queue like job workers.

This module holds what such a replica needs besides its spec, and accepts the workloads of callers.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from cortex.engine.base import Engine
from cortex.errors import NotFoundError
from cortex.home import Home
from cortex.jobs.async_queue import ENTRY_BYTES, AsyncQueues, QueueState
from cortex.jobs.batch_queue import LEASE_S
from cortex.jobs.spec import Assignment, Workload, WorkloadView
from cortex.lifecycle import ApiKind, WorkloadStatus
from cortex.operator.jobs.workers import JobWorkers
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.worker.spec import ReplicaSpec

#: Drain timeout of a replica whose API was deleted.
_DELETED_DRAIN_S = 10.0


class AsyncApis:
    """The queues of all AsyncAPIs, and the replicas that process them."""

    def __init__(
        self,
        home: Home,
        apis: ApiStore,
        workloads: AsyncQueues,
        engine: Engine,
        workers: JobWorkers,
    ) -> None:
        self._home = home
        self._apis = apis
        self._workloads = workloads
        self._engine = engine
        self._workers = workers

    # Replicas.

    async def startup(self) -> None:
        """Adopt running replicas. Call it before any of their requests is answered."""
        for spec, _ in self._engine.replicas().values():
            if spec.kind == ApiKind.ASYNC:
                assignment = await self._assignment(spec)
                await self._workers.assign(spec.id, assignment.job_id, assignment)

    async def start(self, spec: ReplicaSpec) -> None:
        """Start a replica that processes its API's queue. Raises: like `Engine.start`."""
        spec = replace(spec, jobs_socket=str(self._home.jobs_socket))
        await self._workers.start(spec, await self._assignment(spec))

    async def retire(self, spec: ReplicaSpec) -> None:
        """Stop a replica after its current workload."""
        await self._workers.stop(spec.id, spec.timeout_s if self.is_async(spec.api) else _DELETED_DRAIN_S)

    async def _assignment(self, spec: ReplicaSpec) -> Assignment:
        """Return the assignment of a replica to its API's queue, which never changes."""
        job_id = (await self._workloads.open(spec.api)).job_id
        return Assignment(
            job_id, spec.config, {}, spec.api_spec, spec.log_path, LEASE_S, batch_timeout_s=spec.timeout_s
        )

    # Callers.

    def is_async(self, api: str) -> bool:
        """Return whether an AsyncAPI of this name is deployed."""
        record = self._apis.get(api)
        return record is not None and record.spec.kind is ApiKind.ASYNC

    def max_body_bytes(self, api: str) -> int:
        """Return the maximum size of a workload. Raises: NotFoundError."""
        return self._require(api).spec.networking.max_body_size

    def is_of_older_file(self, api: str) -> bool:
        """Return whether an API is deployed from a file of an older generation."""
        record = self._apis.get(api)
        return record is not None and record.spec.handler.interface != "handler"

    async def add(self, api: str, workload: Workload, key: str = "") -> uuid.UUID:
        """Store a workload durably, once for an idempotency key, and return its id.

        Raises: NotFoundError, IdempotencyError, BusyError if its API has stored too much.
        """
        max_bytes = self._require(api).spec.networking.max_stored_size
        with self._workloads.limit.submission(api, max_bytes) as admit:
            admit(len(workload.body) + ENTRY_BYTES)
            return await self._workloads.add(api, workload, key)

    async def get(self, api: str, name: uuid.UUID, wait_s: float) -> WorkloadView | None:
        """Return a workload; wait up to `wait_s` for its completion. Raises: NotFoundError for an unknown API."""
        self._require(api)
        return await self._workloads.get(api, name, wait_s)

    async def queue_states(self) -> dict[str, QueueState]:
        """Return the state of the queue of every AsyncAPI that has received a workload, or has run."""
        return await self._workloads.states()

    async def recent(self, api: str, status: WorkloadStatus | None, limit: int) -> Sequence[WorkloadView]:
        """Return the latest workloads; see `AsyncQueues.recent`. Raises: NotFoundError for an unknown API."""
        self._require(api)
        return await self._workloads.recent(api, status, limit)

    def _require(self, api: str) -> ApiRecord:
        record = self._apis.get(api)
        if record is None or record.spec.kind is not ApiKind.ASYNC:
            raise NotFoundError(f"{api} is not deployed")
        return record
