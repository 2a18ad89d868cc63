"""Jobs and job workers as data, for tests of pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from cortex.config.schema import Compute
from cortex.jobs.spec import JobCounts, JobOptions, JobOrigin, JobRecord
from cortex.lifecycle import DeathCause, JobStatus, ProcessState
from cortex.models.spec import ModelSource
from cortex.operator.jobs.plan import AssignWorker, JobWorkerState, PlannedJob, StartWorker, StopWorker, plan_jobs
from cortex.operator.revisions.capacity import DeviceCapacity, MachineCapacity
from cortex.worker.spec import Death, ProcessStatus, ReplicaStatus, StartFailure
from harness.replicas.specs import replica_spec

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
    mem: int = 0,
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
    is_idle: bool = False,
) -> JobWorkerState:
    """Return a running job worker."""
    spec = replica_spec(
        id=name,
        api="sum",
        revision=revision,
        interface="predictor",
        cpu=cpu,
        mem_bytes=mem,
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
    return JobWorkerState(spec, status, job_id, idle_since, is_leaving, is_idle=is_idle)


def free_capacity(cores: float, *, of: float = 4.0, memory: int = 8 * 1024**3) -> MachineCapacity:
    """Return the free capacity of a machine without devices."""
    return MachineCapacity(cores, memory, DeviceCapacity(), of, 8 * 1024**3)


@dataclass
class SimulatedJobs:
    """Jobs and workers over time: in each step the plan is applied, and each worker completes one batch."""

    cores: float  #: of the machine
    replica_cores: float
    replica_memory: int = 0
    jobs: list[PlannedJob] = field(default_factory=list)  #: unfinished, the oldest first
    workers: dict[str, JobWorkerState] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)  #: jobs in the order of their first workers
    _number: int = 0

    def submit(self, *jobs: PlannedJob) -> None:
        """Add jobs, which are younger than all others."""
        self.jobs += jobs

    def run(self, steps: int, submit: Callable[[int], Iterable[PlannedJob]] = lambda step: ()) -> None:
        """Advance; before each step, the jobs of `submit` arrive."""
        for step in range(steps):
            self.submit(*submit(step))
            self._apply()
            self._complete_batches()

    def _capacity(self) -> MachineCapacity:
        cpu = sum(worker.spec.cpu for worker in self.workers.values())
        memory = 8 * 1024**3 - self.replica_memory - sum(worker.spec.mem_bytes for worker in self.workers.values())
        free = replace(free_capacity(self.cores - self.replica_cores - cpu, of=self.cores), memory_bytes=memory)
        return replace(free, replica_cores=self.replica_cores, replica_memory_bytes=self.replica_memory)

    def _apply(self) -> None:
        known = {planned.record.id: planned for planned in self.jobs}
        for action in plan_jobs(self.jobs, self.workers.values(), self._capacity(), NOW):
            match action:
                case StartWorker(job_id):
                    self._number += 1
                    compute, revision = known[job_id].compute, known[job_id].record.origin.revision
                    name = f"w{self._number}"
                    cpu, mem = compute.cpu or 0, compute.mem or 0
                    self.workers[name] = worker(name, job_id, cpu=cpu, mem=mem, revision=revision)
                case AssignWorker(name, job_id):
                    self.workers[name] = replace(self.workers[name], job_id=job_id)
                case StopWorker(name):
                    self.workers[name] = replace(self.workers[name], is_leaving=True)
        for each in self.workers.values():
            if each.job_id and each.job_id not in self.started:
                self.started.append(each.job_id)

    def _complete_batches(self) -> None:
        done = Counter(each.job_id for each in self.workers.values())
        self.workers = {name: each for name, each in self.workers.items() if not each.is_leaving}
        left = ((planned, planned.record.counts.batches - done[planned.record.id]) for planned in self.jobs)
        self.jobs = [_with_batches(planned, batches) for planned, batches in left if batches > 0]


def _with_batches(planned: PlannedJob, batches: int) -> PlannedJob:
    return replace(planned, record=replace(planned.record, counts=JobCounts(batches=batches, items=batches)))
