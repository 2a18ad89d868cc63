"""Decides which workers jobs get: jobs, workers and room in, actions out. Pure; does nothing itself.

The rules:
1. Room goes round in turns: each job gets its first worker, the oldest job first, before any gets a second.
2. A job without any worker, for want of room, takes one from the job that has most, which finishes its batch first;
   warm workers that no job uses make room before that.
3. Where no worker runs at all, the first job in turn gets one although replicas of APIs hold all cores: those may be
   idle for ever. Memory and devices must be there.
4. A worker whose job is over goes on to another job of the same revision, or waits warm for one if that saves the load
   of a model; any other is stopped, as is that of a task: no task finds what another left behind.
5. A job whose workers can't start, not one of them, fails with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cortex.config.schema import Compute
from cortex.jobs.spec import JobRecord
from cortex.lifecycle import DeathCause, JobStatus, ProcessState
from cortex.operator.jobs.capacity import JobRoom
from cortex.replica.spec import ProcessStatus, ReplicaSpec, ReplicaStatus

#: Failed starts in a row after which a worker that never started is given up; one that did has several minutes.
MAX_FAILED_STARTS = 3
MAX_FAILED_RESTARTS = 10
#: Deaths in a row outside of any batch after which a worker is given up.
MAX_IDLE_DEATHS = 10
#: How long a worker waits warm for the next job.
WARM_S = 60.0
#: What a worker that makes room may still need for the batch inside it.
YIELD_DRAIN_S = 3600.0


@dataclass(frozen=True)
class Worker:
    """A worker that runs."""

    spec: ReplicaSpec
    status: ReplicaStatus
    job_id: str | None  #: None: its job is over
    idle_since: float | None = None  #: UNIX time since which it has no job
    is_leaving: bool = False
    is_current: bool = True  #: its code is what new jobs of its API run

    @property
    def process(self) -> ProcessStatus:
        """Return its only process."""
        return self.status.processes[0]

    @property
    def has_given_up(self) -> bool:
        """Tell whether it fails to start, or dies before it does anything, again and again."""
        process = self.process
        last = process.deaths[-MAX_IDLE_DEATHS:]
        dies_idle = len(last) == MAX_IDLE_DEATHS and not any(death.inside or death.after for death in last)
        return dies_idle or process.failed_starts >= (MAX_FAILED_RESTARTS if process.restarts else MAX_FAILED_STARTS)


@dataclass(frozen=True)
class PlannedJob:
    """A job that is not over, with what its workers take."""

    record: JobRecord
    compute: Compute
    is_prepared: bool  #: its environment is there
    waits_for: str = ""  #: why it is not prepared
    failed_preparations: int = 0  #: in a row

    @property
    def wanted(self) -> int:
        """Return how many workers it could use."""
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
class Assign:
    """Give a warm worker to a job; None: it waits for one."""

    worker_id: str
    job_id: str | None


@dataclass(frozen=True)
class StopWorker:
    """Stop a worker; the batch inside it may take `drain_s`."""

    worker_id: str
    drain_s: float = 0.0


@dataclass(frozen=True)
class EndJob:
    """Give a job up."""

    job_id: str
    status: JobStatus
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Note:
    """Say what a job waits for; empty: for nothing any more."""

    job_id: str
    message: str


Action = StartWorker | Assign | StopWorker | EndJob | Note


def plan_jobs(jobs: Sequence[PlannedJob], workers: Iterable[Worker], room: JobRoom, now: float) -> list[Action]:
    """Return the next actions. `jobs` are those not over, the oldest first; `room` is what all that runs leaves."""
    everyone = list(workers)
    staying = [worker for worker in everyone if not worker.is_leaving]
    coming = room
    for worker in everyone:
        if worker.is_leaving:
            coming = coming.give_back(worker.spec)
    return _Plan(now, room, coming, staying, is_first=not everyone).decide(jobs)


@dataclass
class _Plan:
    """The plan while it is being made."""

    now: float
    room: JobRoom
    coming: JobRoom  #: once those that are being stopped are gone
    workers: list[Worker]
    is_first: bool  #: no worker runs, nor is about to
    actions: list[Action] = field(default_factory=list)

    def decide(self, jobs: Sequence[PlannedJob]) -> list[Action]:
        staying = [job for job in jobs if not self._ends(job)]
        crews: dict[str, list[Worker]] = {job.record.id: [] for job in staying}
        free: list[Worker] = []
        for worker in self.workers:
            crews.get(worker.job_id or "", free).append(worker)
        sizes = {job_id: len(crew) for job_id, crew in crews.items()}
        turn, hungry = 1, staying
        # One that gets nothing in a turn would not in the next; others may.
        while hungry := [job for job in hungry if turn - 1 <= sizes[job.record.id] and turn <= job.wanted]:
            for job in hungry:
                if sizes[job.record.id] < turn:
                    sizes[job.record.id] += self._add_worker(job, turn, free, crews)
            turn += 1
        for job in staying:
            self._note(job, sizes[job.record.id])
        for worker in free:
            self._let_go(worker)
        return self.actions

    @property
    def _open_room(self) -> JobRoom:
        return self.room.shared if self.is_first else self.room

    def _ends(self, job: PlannedJob) -> bool:
        """End a job that is late, or whose workers can't start."""
        record = job.record
        if record.deadline_at is not None and self.now >= record.deadline_at:
            self._end(record, JobStatus.TIMED_OUT, f"timed out after {record.options.timeout_s} s")
            return True
        crew = [worker for worker in self.workers if worker.job_id == record.id]
        if job.failed_preparations >= MAX_FAILED_STARTS and not crew:
            self._end(record, JobStatus.WORKER_ERROR, job.waits_for)
            return True
        if not crew or not all(worker.has_given_up for worker in crew):
            return False
        process = crew[0].process
        is_memory = process.death is not None and process.death.cause is DeathCause.OUT_OF_MEMORY
        failure = process.failure
        message = failure.message if failure else process.death.message if process.death else "unknown"
        status = JobStatus.WORKER_OOM if is_memory else JobStatus.WORKER_ERROR
        self._end(record, status, f"no worker can run: {message}", failure.traceback if failure else "")
        return True

    def _end(self, record: JobRecord, status: JobStatus, message: str, traceback: str = "") -> None:
        self.actions.append(EndJob(record.id, status, message, traceback))

    def _add_worker(self, job: PlannedJob, turn: int, free: list[Worker], crews: Mapping[str, list[Worker]]) -> int:
        """Give a job one worker more; return how many it got."""
        record = job.record
        fitting = next((worker for worker in free if _can_take(worker, record)), None)
        if fitting is not None:
            free.remove(fitting)
            self.actions.append(Assign(fitting.spec.id, record.id))
            return 1
        if not job.is_prepared:
            return 0
        if self._open_room.fits(job.compute):
            self.is_first = False
            self.room, self.coming = self.room.take(job.compute), self.coming.take(job.compute)
            self.actions.append(StartWorker(record.id))
            return 1
        if turn == 1:
            self._make_room(job, free, crews)
        return 0

    def _make_room(self, job: PlannedJob, free: list[Worker], crews: Mapping[str, list[Worker]]) -> None:
        """Have others leave for a job that has no worker; it gets theirs once they are gone."""
        largest = max(crews.values(), key=len, default=[])
        may_leave = [*((worker, 0.0) for worker in free), *((worker, YIELD_DRAIN_S) for worker in largest[1:][-1:])]
        for worker, drain_s in may_leave:
            if self.coming.fits(job.compute):
                break
            room = self.coming.give_back(worker.spec)
            if room.lack(job.compute) == self.coming.lack(job.compute):
                continue  # not what it lacks
            self.coming = room
            (free if worker in free else largest).remove(worker)
            self.actions.append(StopWorker(worker.spec.id, drain_s))
        if self.coming.fits(job.compute):
            self.coming = self.coming.take(job.compute)  # kept for it

    def _note(self, job: PlannedJob, workers: int) -> None:
        """Say why a job has no worker yet."""
        message = ""
        if not workers and job.wanted:
            message = job.waits_for or ("" if not job.is_prepared else self._open_room.lack(job.compute))
        if message != job.record.message and job.record.status is JobStatus.PENDING:
            self.actions.append(Note(job.record.id, message))

    def _let_go(self, worker: Worker) -> None:
        """Keep a worker without a job warm for a while, where that saves something."""
        is_ready = worker.process.state is ProcessState.READY
        is_warm = worker.is_current and is_ready and worker.spec.models is not None
        if not is_warm or (worker.idle_since is not None and self.now - worker.idle_since > WARM_S):
            self.actions.append(StopWorker(worker.spec.id))
        elif worker.job_id is not None:
            self.actions.append(Assign(worker.spec.id, None))


def _can_take(worker: Worker, job: JobRecord) -> bool:
    return worker.spec.revision == job.origin.revision and not job.origin.is_task
