"""Jobs and job workers as data, for tests of pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cortex.config.schema import Compute
from cortex.jobs.spec import JobCounts, JobOptions, JobOrigin, JobRecord
from cortex.lifecycle import DeathCause, JobStatus, ProcessState
from cortex.models.spec import ModelSource
from cortex.operator.jobs.plan import JobWorkerState, PlannedJob
from cortex.operator.replicas.capacity import DeviceCapacity, MachineCapacity
from cortex.worker.spec import Death, ProcessStatus, ReplicaSpec, ReplicaStatus, StartFailure

NOW = 1_000_000.0


def job(
    name: str,
    workers: int = 1,
    *,
    status: JobStatus = JobStatus.PENDING,
    batches: int = 100,
    cpu: float = 1.0,
    mem: int | None = None,
    revision: str = "r1",
    deadline_at: float | None = None,
    is_prepared: bool = True,
    message: str = "",
    waits_for: str = "",
) -> PlannedJob:
    """Return an active job of the API `sum`."""
    origin = JobOrigin("sum", "api-id", "spec-id", revision, "project", "{}")
    options = JobOptions(workers, timeout_s=None if deadline_at is None else 60)
    record = JobRecord(name, 1, origin, options, {}, status, NOW, deadline_at=deadline_at, message=message)
    record = replace(record, counts=JobCounts(batches=batches, items=batches))
    return PlannedJob(record, Compute(cpu=cpu, mem=mem), is_prepared, waits_for)


def worker(
    name: str,
    job_id: str | None,
    *,
    state: ProcessState = ProcessState.READY,
    cpu: float = 1.0,
    revision: str = "r1",
    failed_starts: int = 0,
    failure: str = "",
    restarts: int = 0,
    death: DeathCause | None = None,
    deaths: Sequence[str] = (),
    after: str = "",
    models: bool = False,
    idle_since: float | None = None,
    is_leaving: bool = False,
) -> JobWorkerState:
    """Return a running job worker."""
    spec = ReplicaSpec(
        id=name,
        api="sum",
        revision=revision,
        interface="predictor",
        project_dir="/p",
        path="p.py",
        python="python",
        run_dir="/r",
        sockets=("/s",),
        control_socket="/c",
        log_path="/l",
        cpu=cpu,
        jobs_socket="/jobs",
        models=ModelSource(layout="onnx") if models else None,
    )
    fault = Death(DeathCause.SEGMENTATION_FAULT, "segmentation fault", NOW, after=after)
    past = tuple(replace(fault, inside=inside) for inside in deaths)
    process = ProcessStatus(
        0,
        "/s",
        state,
        restarts=restarts,
        failed_starts=failed_starts,
        failure=StartFailure(failure, "File p.py") if failure else None,
        death=Death(death, death.value, NOW) if death else past[-1] if past else None,
        deaths=past,
    )
    status = ReplicaStatus(name, "sum", revision, 1, NOW, (process,))
    return JobWorkerState(spec, status, job_id, idle_since, is_leaving)


def free_capacity(cores: float, *, of: float = 4.0, memory: int = 8 * 1024**3) -> MachineCapacity:
    """Return the free capacity of a machine without devices."""
    return MachineCapacity(cores, memory, DeviceCapacity(), of, 8 * 1024**3)
