"""Watches the workers of jobs: who is there, who died of what, and what becomes of the batches that were with them.

The engine tells what runs, the store which leases there are; a death is brought from the one to the other here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from cortex.engine.base import Engine
from cortex.jobs.store import JobStore
from cortex.lifecycle import ApiKind, ProcessState
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.operator.jobs.plan import Worker
from cortex.operator.jobs.tasks import VANISHED
from cortex.replica.spec import Death, ReplicaSpec, ReplicaStatus
from cortex.telemetry import Logger

_LEAVING = (ProcessState.STOPPING, ProcessState.STOPPED)
_HOOK = "hook"


class Crews:
    """The workers of all jobs. `tell(api, job_id, line)` writes to a job's log."""

    def __init__(
        self,
        engine: Engine,
        store: JobStore,
        dispatcher: Dispatcher,
        tell: Callable[[str, str, str], None],
        logger: Logger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._store = store
        self._dispatcher = dispatcher
        self._tell = tell
        self._logger = logger
        self._clock = clock
        self._jobs: dict[str, str | None] = {}
        self._idle_since: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._awaited: set[str] = set()
        self._handled: dict[str, set[tuple[int, float]]] = {}

    async def startup(self) -> dict[str, str]:
        """Learn who works for which job; leases of workers that went down with the machine return unblamed.

        Only a task has failed an attempt by it: what it has done must not be done again unless that was asked for.
        """
        running, assigned = self._running(), await self._store.assignments()
        for worker, _ in await self._store.workers_with_leases():
            if worker not in running:
                record = await self._store.get(assigned.get(worker, ""))
                await self._store.release(worker, None, VANISHED if record and record.origin.is_task else None)
        for worker in set(assigned) - set(running):
            await self._store.assign(worker, None)
        for worker in running:
            self._jobs[worker] = assigned.get(worker)
            self._idle_since[worker] = self._clock()
        return {worker: job for worker in running if (job := self._jobs[worker])}

    def all(self) -> list[Worker]:
        """Return every worker of jobs that runs; replicas of AsyncAPIs are the reconciler's."""
        return [
            Worker(spec, status, self._jobs.get(name), self._idle_since.get(name), self._is_leaving(name, status))
            for name, (spec, status) in self._running().items()
            if spec.is_job_worker
        ]

    async def assign(self, worker: str, job_id: str | None) -> None:
        """Remember for which job a worker works."""
        self._jobs[worker] = job_id
        self._idle_since[worker] = self._clock()
        await self._store.assign(worker, job_id)

    @contextmanager
    def awaiting(self, worker: str) -> Iterator[None]:
        """Don't take a worker for lost that is being started meanwhile."""
        self._awaited.add(worker)
        try:
            yield
        finally:
            self._awaited.discard(worker)

    async def stop(self, worker: str, drain_s: float) -> None:
        """Have a worker finish the batch inside it, if that takes no longer than `drain_s`, and end."""
        self._leaving.add(worker)
        self._dispatcher.stop(worker)
        await self._engine.stop(worker, drain_s)

    async def forget(self, worker: str) -> None:
        """Drop a worker that was never started."""
        self._jobs.pop(worker, None)
        self._dispatcher.forget(worker)
        await self._store.assign(worker, None)

    async def note_deaths(self) -> None:
        """Free the batches of every process that died since the last call."""
        running = self._running()
        for name, (spec, status) in running.items():
            handled = self._handled.setdefault(name, set())
            for death in status.processes[0].deaths:
                if (death.pid, death.at) not in handled:
                    await self._note_death(spec, death)
                    handled.add((death.pid, death.at))
        for name in [name for name in self._jobs if name not in running and name not in self._awaited]:
            await self._note_loss(name)

    def _running(self) -> Mapping[str, tuple[ReplicaSpec, ReplicaStatus]]:
        replicas = self._engine.replicas().items()
        return {name: (spec, status) for name, (spec, status) in replicas if spec.jobs_socket is not None}

    def _is_leaving(self, name: str, status: ReplicaStatus) -> bool:
        return name in self._leaving or any(process.state in _LEAVING for process in status.processes)

    async def _note_death(self, spec: ReplicaSpec, death: Death) -> None:
        # What a batch leaves behind, a thread or a closed descriptor, may be what kills. Nothing is blamed on one that
        # was reported: then it has no lease any more.
        job_id, _, seq = (death.inside or death.after).partition(":")
        is_batch = seq.isdigit()  # else it died at the job's end, or before any batch
        cause = death.message if is_batch and spec.id not in self._leaving else None
        freed = await self._store.release(spec.id, death.pid, cause, (job_id, int(seq)) if is_batch else None)
        self._dispatcher.lose(spec.id, death.pid, death.message)
        self._dispatcher.wake()
        is_in_hook = death.inside.endswith(f":{_HOOK}")
        if not freed and not is_in_hook:
            return  # an earlier operator has told of it, or it never began
        place = "in" if death.inside else "after"
        what = "its task" if spec.kind == ApiKind.TASK else f"batch {seq}"
        inside = f" {place} {what}" if is_batch else " in on_job_complete" if is_in_hook else ""
        if spec.is_job_worker and (job := job_id or self._jobs.get(spec.id)):
            self._tell(spec.api, job, f"worker {spec.id}: process {death.pid} died{inside}: {death.message}")
        self._logger.warning("worker's process died", api=spec.api, worker=spec.id, inside=inside, cause=death.message)

    async def _note_loss(self, worker: str) -> None:
        was_stopped = worker in self._leaving
        lost = await self._store.release(worker, None, None if was_stopped else "it vanished with its supervisor")
        job_id = self._jobs.pop(worker, None)
        self._leaving.discard(worker)
        self._handled.pop(worker, None)
        self._idle_since.pop(worker, None)
        self._dispatcher.lose(worker, None)
        self._dispatcher.forget(worker)
        self._dispatcher.wake()
        await self._store.assign(worker, None)
        if not was_stopped:
            self._logger.warning("worker vanished", worker=worker, job=job_id, leases=lost)
