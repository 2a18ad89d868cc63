"""Job workers: assignments, deaths, and what happens to the batches inside a process that died.

The engine reports which workers run and which of their processes died; the store knows their leases. `note_deaths`
releases the leases of dead processes, so that other workers can retry the batches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cortex.config.api_spec import api_spec
from cortex.config.schema import Api
from cortex.engine.base import Engine
from cortex.home import Home
from cortex.jobs.batch_queue import LEASE_S
from cortex.jobs.http.view import spec_json
from cortex.jobs.lease_expiry import holders
from cortex.jobs.records import put_assignment, read_assignments
from cortex.jobs.spec import HOOK_SEQ, TRACEPARENT, Assignment, JobRecord, batch_id
from cortex.jobs.store import JobStore
from cortex.lifecycle import ApiKind, ProcessState
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.operator.jobs.plan import JobWorkerState
from cortex.operator.revisions.capacity import MachineCapacity
from cortex.telemetry import Logger
from cortex.worker.spec import Death, ReplicaSpec, ReplicaStatus

#: Error of a task whose worker vanished: how much of it was done is unknown.
VANISHED = "its worker vanished, with the machine or through `cortex down`; what it had done by then is unknown"
_LEAVING = (ProcessState.STOPPING, ProcessState.STOPPED)
_HOOK = "hook"


class JobWorkers:
    """The workers of all jobs, and the replicas of AsyncAPIs. `log(api, job_id, line)` writes to a job's log."""

    def __init__(
        self,
        engine: Engine,
        store: JobStore,
        dispatcher: Dispatcher,
        token: Callable[[str], str],
        log: Callable[[str, str, str], None],
        logger: Logger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the registry; `token` returns the token with which a worker authenticates."""
        self.dispatcher = dispatcher
        self._engine = engine
        self._store = store
        self._token = token
        self._log = log
        self._logger = logger
        self._clock = clock
        self._jobs: dict[str, str | None] = {}  #: job of each worker
        self._idle_since: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._starting: set[str] = set()  #: they are not lost, although they do not run
        self._handled: dict[str, set[tuple[int, float]]] = {}  #: deaths that were processed, by worker

    async def startup(self) -> dict[str, str]:
        """Adopt running workers; return the job of each.

        Leases of workers that went down with the machine are released without counting a failed attempt. A task is the
        exception: its work must not be repeated unless its retry policy allows it.
        """
        running, assigned = self._running(), await self._store.read(read_assignments)
        for worker, _ in await self._store.read(holders):
            if worker not in running:
                record = await self._store.get(assigned.get(worker, ""))
                await self._store.release(worker, None, VANISHED if record and record.origin.is_task else None)
        for worker in set(assigned) - set(running):
            await self._store.write(put_assignment, worker, None)
        for worker in running:
            self._jobs[worker] = assigned.get(worker)
            self._idle_since[worker] = self._clock()
        return {worker: job for worker in running if (job := self._jobs[worker])}

    def all(self) -> list[JobWorkerState]:
        """Return every running job worker; replicas of AsyncAPIs belong to the reconciler."""
        return [
            JobWorkerState(
                spec,
                status,
                self._jobs.get(name),
                self._idle_since.get(name),
                self._is_leaving(name, status),
                is_idle=self.dispatcher.is_polling(name),
            )
            for name, (spec, status) in self._running().items()
            if spec.is_job_worker
        ]

    def capacity(self) -> MachineCapacity:
        """Return what of the machine is free."""
        return MachineCapacity.of(self._engine.devices(), [spec for spec, _ in self._engine.replicas().values()])

    async def assign(self, worker: str, job_id: str | None, assignment: Assignment | None) -> None:
        """Store the job of a worker, and answer its request for one."""
        self._jobs[worker] = job_id
        self._idle_since[worker] = self._clock()
        await self._store.write(put_assignment, worker, job_id)
        self.dispatcher.assign(worker, assignment)

    async def start(self, spec: ReplicaSpec, assignment: Assignment) -> None:
        """Start a worker for a job. Raises: like `Engine.start`."""
        self._starting.add(spec.id)
        try:
            await self.assign(spec.id, assignment.job_id, assignment)  # before the start: every running one is known
            await self._engine.start(replace(spec, jobs_token=self._token(spec.id)))
        except BaseException:
            await self._forget(spec.id)
            raise
        finally:
            self._starting.discard(spec.id)

    async def stop(self, worker: str, drain_s: float) -> None:
        """Stop a worker after its current batch, or after `drain_s`."""
        self._leaving.add(worker)
        self.dispatcher.stop(worker)
        await self._engine.stop(worker, drain_s)

    async def note_deaths(self) -> None:
        """Release the batches of every process that died since the last call."""
        running = self._running()
        for name, (spec, status) in running.items():
            if self._is_leaving(name, status):
                self._leaving.add(name)  # perhaps the engine stops it, because its node lost the reservation
            handled = self._handled.setdefault(name, set())
            for death in status.processes[0].deaths:
                if (death.pid, death.at) not in handled:
                    await self._note_death(spec, death)
                    handled.add((death.pid, death.at))
        for name in [name for name in self._jobs if name not in running and name not in self._starting]:
            await self._note_loss(name)

    async def _forget(self, worker: str) -> None:
        """Remove a worker that could not be started."""
        self._jobs.pop(worker, None)
        self.dispatcher.forget(worker)
        await self._store.write(put_assignment, worker, None)

    def _running(self) -> Mapping[str, tuple[ReplicaSpec, ReplicaStatus]]:
        replicas = self._engine.replicas().items()
        return {name: (spec, status) for name, (spec, status) in replicas if spec.jobs_socket is not None}

    def _is_leaving(self, name: str, status: ReplicaStatus) -> bool:
        return name in self._leaving or any(process.state in _LEAVING for process in status.processes)

    async def _note_death(self, spec: ReplicaSpec, death: Death) -> None:
        # Something that a finished batch left behind, such as a thread, may have killed the process. A batch that was
        # reported has no lease any more, so it is never blamed.
        job_id, _, text = (death.inside or death.after).partition(":")
        seq = HOOK_SEQ if text == _HOOK else int(text) if text.isdigit() else None  # None: it died before any batch
        cause = death.message if seq is not None and spec.id not in self._leaving else None
        freed = await self._store.release(spec.id, death.pid, cause, None if seq is None else (job_id, seq))
        self.dispatcher.wake()
        if not freed:
            return  # a previous operator has logged it, or no batch had begun
        place = "in" if death.inside else "after"
        inside = "" if seq is None else f" {place} {_what(spec, job_id, seq)}"
        if spec.is_job_worker and (job := job_id or self._jobs.get(spec.id)):
            self._log(spec.api, job, f"worker {spec.id}: process {death.pid} died{inside}: {death.message}")
        self._logger.warning("worker's process died", api=spec.api, worker=spec.id, inside=inside, cause=death.message)

    async def _note_loss(self, worker: str) -> None:
        was_stopped = worker in self._leaving
        lost = await self._store.release(worker, None, None if was_stopped else "it vanished with its supervisor")
        job_id = self._jobs.pop(worker, None)
        self._leaving.discard(worker)
        self._handled.pop(worker, None)
        self._idle_since.pop(worker, None)
        self.dispatcher.forget(worker)
        self.dispatcher.wake()
        await self._store.write(put_assignment, worker, None)
        if not was_stopped:
            self._logger.warning("worker vanished", worker=worker, job=job_id, leases=lost)


def _what(spec: ReplicaSpec, job_id: str, seq: int) -> str:
    if seq == HOOK_SEQ:
        return "on_job_complete"
    if spec.kind == ApiKind.BATCH:
        return f"batch {batch_id(job_id, seq)}"
    return "its task" if spec.kind == ApiKind.TASK else "a workload"


def job_assignment(record: JobRecord, worker: str, home: Home) -> Assignment:
    """Return the assignment of a worker to a job: the constructor arguments of the user's class."""
    api = Api.read_stored(record.origin.spec)
    config = merged(api.handler.config, record.options.config or {})
    return Assignment(
        job_id=record.id,
        config=config,
        job_spec=spec_json(record),
        api_spec=api_spec(api, config),
        log_path=str(home.logs_dir / record.origin.api / record.id / f"{worker}.log"),
        lease_s=LEASE_S,
        batch_timeout_s=record.options.batch_timeout_s,
        traceparent=record.source.get(TRACEPARENT, ""),
    )


def merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge maps recursively; all other values of `overrides` replace those of `base`."""
    result = copy.deepcopy(base)
    for key, value in overrides.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = merged(below, value)
        else:
            result[key] = copy.deepcopy(value)
    return result
