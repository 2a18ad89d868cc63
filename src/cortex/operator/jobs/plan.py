"""Decide which workers jobs get. Pure: jobs, workers and free capacity in, actions out.

The rules:

1. Capacity is allocated in rounds: each job gets its first worker, the oldest job first, before any job gets a second.
2. A job that has no worker for lack of capacity takes one from the job that has most; that worker finishes its batch
   first. If only the last workers of younger jobs stand in its way, it waits for them, and no further job that is
   younger gets what it lacks: neither free capacity nor a worker whose job is over.
3. If no worker runs at all, the first job in line gets one even if replicas of APIs hold all cores: those may be idle
   forever. Memory and devices must still be free.
4. A worker whose job is over continues with another job of the same revision. If it has a model loaded, it waits warm
   for such a job. All other workers are stopped, and so is a task's: each task runs in a clean process.
5. A job fails with the reason if none of its workers can start.

A worker:

    StartWorker                    job over           AssignWorker(job)
    ----------> assigned to a job ----------> idle, warm ----------> assigned to a job
                        |                         |
                        |                         | WARM_S, or new code deployed
                        +-------> StopWorker <----+
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cortex.config.schema import Compute
from cortex.jobs.spec import JobRecord
from cortex.lifecycle import DeathCause, JobStatus, ProcessState
from cortex.operator.revisions.capacity import MachineCapacity
from cortex.worker.spec import ProcessStatus, ReplicaSpec, ReplicaStatus

#: Consecutive failed starts after which a worker is given up: one that never started, or one that did, which then has
#: several minutes.
MAX_FAILED_STARTS = 3
MAX_FAILED_RESTARTS = 10
#: Consecutive deaths outside of any batch after which a worker is given up.
MAX_IDLE_DEATHS = 10
#: Time that a worker waits warm for its next job.
WARM_S = 60.0
#: Drain timeout for the current batch of a worker that is stopped for another job.
YIELD_DRAIN_S = 3600.0


@dataclass(frozen=True)
class JobWorkerState:
    """A running job worker."""

    spec: ReplicaSpec
    status: ReplicaStatus
    job_id: str | None  #: None: its job is over
    idle_since: float | None = None  #: UNIX time since which it has no job
    is_leaving: bool = False
    is_current: bool = True  #: it runs the deployed revision of its API
    is_idle: bool = False  #: it waits for a batch of its job

    @property
    def process(self) -> ProcessStatus:
        """The worker's only process."""
        return self.status.processes[0]

    def has_given_up(self, is_completing: bool) -> bool:
        """Return whether the worker repeatedly fails to start or dies outside of any batch.

        A job that is completing has nothing to lose, so its workers get no more starts than new ones.
        """
        process = self.process
        last = process.deaths[-MAX_IDLE_DEATHS:]
        dies_idle = len(last) == MAX_IDLE_DEATHS and not any(death.inside or death.after for death in last)
        is_new = is_completing or not process.restarts
        return dies_idle or process.failed_starts >= (MAX_FAILED_STARTS if is_new else MAX_FAILED_RESTARTS)


@dataclass(frozen=True)
class PlannedJob:
    """An unfinished job and the compute of its workers."""

    record: JobRecord
    compute: Compute
    is_prepared: bool  #: its environment is ready
    waits_for: str = ""  #: why it is not prepared
    failed_preparations: int = 0  #: consecutive

    @property
    def wanted(self) -> int:
        """Return the number of workers that the job could use."""
        status, counts = self.record.status, self.record.counts
        if status is JobStatus.COMPLETING:
            return 0 if self.record.origin.is_task else 1
        if status in (JobStatus.PENDING, JobStatus.RUNNING):
            return min(self.record.options.workers, max(counts.open, 1))
        return 0


@dataclass(frozen=True)
class StartWorker:
    """Start a worker for a job."""

    job_id: str


@dataclass(frozen=True)
class AssignWorker:
    """Assign a running worker to a job; None: it waits warm."""

    worker_id: str
    job_id: str | None


@dataclass(frozen=True)
class StopWorker:
    """Stop a worker after its current batch, or after `drain_s`."""

    worker_id: str
    drain_s: float = 0.0


@dataclass(frozen=True)
class EndJob:
    """End a job early."""

    job_id: str
    status: JobStatus
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class SetMessage:
    """Store what a job waits for; empty: nothing."""

    job_id: str
    message: str


JobAction = StartWorker | AssignWorker | StopWorker | EndJob | SetMessage


def plan_jobs(
    jobs: Sequence[PlannedJob], workers: Iterable[JobWorkerState], capacity: MachineCapacity, now: float
) -> list[JobAction]:
    """Return the next actions. `jobs` are the unfinished jobs, the oldest first; `capacity` is what is free now."""
    everyone = list(workers)
    staying = [worker for worker in everyone if not worker.is_leaving]
    future = capacity.release(*(worker.spec for worker in everyone if worker.is_leaving))
    return _JobPlan(now, capacity, future, staying, is_first=not everyone).decide(jobs)


@dataclass
class _JobPlan:
    """Plan under construction."""

    now: float
    capacity: MachineCapacity  #: free now
    future: MachineCapacity  #: free for further jobs once all workers that are being stopped have ended
    workers: list[JobWorkerState]
    is_first: bool  #: no worker runs or is about to start
    waits: bool = False  #: capacity is reserved for a job that waits for it
    actions: list[JobAction] = field(default_factory=list)
    busy: list[tuple[int, list[JobWorkerState]]] = field(default_factory=list)  #: rank and workers of jobs with some
    ranks: dict[str, int] = field(default_factory=dict)  #: of the jobs by age, 0 for the oldest
    free: list[JobWorkerState] = field(default_factory=list)  #: workers whose job is over
    first_served: int = 0  #: rank of the oldest job with a worker
    sizes: dict[str, int] = field(default_factory=dict)  #: workers of each job, with those that this plan adds

    def decide(self, jobs: Sequence[PlannedJob]) -> list[JobAction]:
        staying = [job for job in jobs if not self._ends(job)]
        assigned: dict[str, list[JobWorkerState]] = {job.record.id: [] for job in staying}
        for worker in self.workers:
            assigned.get(worker.job_id or "", self.free).append(worker)
        for members in assigned.values():
            members.sort(key=lambda worker: worker.is_idle)  # a job lends the last one first
        self.sizes = {job_id: len(members) for job_id, members in assigned.items()}
        self.ranks = {job_id: rank for rank, job_id in enumerate(assigned)}
        self.busy = [(self.ranks[job_id], members) for job_id, members in assigned.items() if members]
        self.first_served = min((rank for rank, _ in self.busy), default=len(staying))
        round_number, pending = 1, staying
        # A job that gets no worker in one round would get none in the next.
        while pending := [
            job for job in pending if round_number - 1 <= self.sizes[job.record.id] and round_number <= job.wanted
        ]:
            for job in pending:
                if self.sizes[job.record.id] < round_number and self._add_worker(job):
                    self.sizes[job.record.id] += 1
                    self.first_served = min(self.first_served, self.ranks[job.record.id])
            round_number += 1
        for job in staying:
            self._set_message(job)
        for worker in self.free:
            self._keep_warm_or_stop(worker)
        return self.actions

    @property
    def _available(self) -> MachineCapacity:
        return self.capacity.with_shared_cores if self.is_first else self.capacity

    def _ends(self, job: PlannedJob) -> bool:
        """End a job that has timed out, or whose workers can't start. Return whether it ends."""
        record = job.record
        if record.deadline_at is not None and self.now >= record.deadline_at:
            self._end(record, JobStatus.TIMED_OUT, f"timed out after {record.options.timeout_s} s")
            return True
        members = [worker for worker in self.workers if worker.job_id == record.id]
        if job.failed_preparations >= MAX_FAILED_STARTS and not members:
            self._end(record, JobStatus.WORKER_ERROR, job.waits_for)
            return True
        is_completing = record.status is JobStatus.COMPLETING
        if not members or not all(worker.has_given_up(is_completing) for worker in members):
            return False
        process = members[0].process
        is_memory = process.death is not None and process.death.cause is DeathCause.OUT_OF_MEMORY
        failure = process.failure
        message = failure.message if failure else process.death.message if process.death else "unknown"
        status = JobStatus.WORKER_OOM if is_memory else JobStatus.WORKER_ERROR
        what = "on_job_complete can't run, because no worker can start" if is_completing else "no worker can run"
        self._end(record, status, f"{what}: {message}", failure.traceback if failure else "")
        return True

    def _end(self, record: JobRecord, status: JobStatus, message: str, traceback: str = "") -> None:
        self.actions.append(EndJob(record.id, status, message, traceback))

    def _add_worker(self, job: PlannedJob) -> bool:
        """Give a job one more worker. Return whether it got one."""
        record = job.record
        fitting = next((worker for worker in self.free if _can_run(worker, record)), None)
        if fitting is not None:
            self.free.remove(fitting)
            self.actions.append(AssignWorker(fitting.spec.id, record.id))
            return True
        if not job.is_prepared:
            return False
        if self._available.fits(job.compute) and (self.is_first or self.future.fits(job.compute)):
            self.is_first = False
            self.capacity, self.future = self.capacity.reserve(job.compute), self.future.reserve(job.compute)
            self.actions.append(StartWorker(record.id))
            return True
        if not self.sizes[record.id]:
            self._wait(job)
        return False

    def _wait(self, job: PlannedJob) -> None:
        """Reserve capacity for a job without any worker if no older job must end first, and stop workers for it."""
        spare = [worker for _, members in self.busy for worker in members[1:]]
        is_spared = self._without([*self.free, *spare]).fits(job.compute)
        if not is_spared and not self._waits_for_younger(job):
            return
        for worker in list(self.free):
            self._stop_for(job, worker, self.free, 0.0)
        if is_spared:
            largest = sorted((members for _, members in self.busy), key=len, reverse=True)
            lending = [each for each in largest if each[1:] and self.future.gains(job.compute, each[-1].spec)]
            for each in lending[:1]:
                self._stop_for(job, each[-1], each, YIELD_DRAIN_S)
        self.future = self.future.reserve(job.compute)
        self.waits = True

    def _waits_for_younger(self, job: PlannedJob) -> bool:
        """Return whether a job could start once the workers of all younger jobs had ended."""
        rank = self.ranks[job.record.id]
        others = [worker for each, members in self.busy for worker in (members[1:] if each < rank else members)]
        future = self._without([*self.free, *others])
        if not self.waits and rank <= self.first_served:
            future = future.with_shared_cores  # it will be the only worker
        return future.fits(job.compute)

    def _without(self, workers: Iterable[JobWorkerState]) -> MachineCapacity:
        return self.future.release(*(worker.spec for worker in workers))

    def _stop_for(self, job: PlannedJob, worker: JobWorkerState, members: list[JobWorkerState], drain_s: float) -> None:
        """Stop a worker if it holds what a job lacks; the job gets that once the worker has ended."""
        if not self.future.fits(job.compute) and self.future.gains(job.compute, worker.spec):
            self.future = self.future.release(worker.spec)
            members.remove(worker)
            self.actions.append(StopWorker(worker.spec.id, drain_s))

    def _set_message(self, job: PlannedJob) -> None:
        """Store why a job has no worker yet."""
        message = ""
        if not self.sizes[job.record.id] and job.wanted:
            message = job.waits_for
            if job.is_prepared and not message:
                message = self._available.shortage(job.compute) or "older jobs wait for the capacity that is free"
        if message != job.record.message and job.record.status is JobStatus.PENDING:
            self.actions.append(SetMessage(job.record.id, message))

    def _keep_warm_or_stop(self, worker: JobWorkerState) -> None:
        """Keep a worker without a job warm for a while if it has a model loaded; else stop it."""
        is_ready = worker.process.state is ProcessState.READY
        is_warm = worker.is_current and is_ready and worker.spec.models is not None
        if not is_warm or (worker.idle_since is not None and self.now - worker.idle_since > WARM_S):
            self.actions.append(StopWorker(worker.spec.id))
        elif worker.job_id is not None:
            self.actions.append(AssignWorker(worker.spec.id, None))


def _can_run(worker: JobWorkerState, job: JobRecord) -> bool:
    return worker.spec.revision == job.origin.revision and not job.origin.is_task
