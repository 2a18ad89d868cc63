"""The jobs' control loop: load unfinished jobs, plan (pure), apply, and repeat after each change.

One pass:

    note_deaths, expire                    leases of dead or silent processes are released (`workers.py`)
    store.active()                         unfinished jobs
      -> jobs that ended                   forgotten; their end is logged and sent to the webhook (`completion.py`)
      -> jobs of deleted APIs              stopped
      -> plan_jobs() -> actions            StartWorker, AssignWorker, StopWorker, EndJob, SetMessage (`plan.py`)
      -> enqueuing                         files are cut into batches, in the background
      -> completing                        results, then the hook (`completion.py`), in the background

Statuses and transitions of a job are in `cortex/lifecycle.py`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from cortex.config.schema import Api
from cortex.errors import (
    ComputeUnavailableError,
    CortexError,
    DatabaseUnavailableError,
    DatabaseUnreachableError,
    EngineError,
)
from cortex.home import Home
from cortex.jobs.intake.files import enqueue_files
from cortex.jobs.records import set_message
from cortex.jobs.spec import FROM_ENDPOINT, Assignment, FilePathLister, JobRecord, Upload, source_from_json
from cortex.jobs.store import JobStore
from cortex.lifecycle import ApiKind, JobStatus
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.jobs.completion import JobCompletion, JobLog
from cortex.operator.jobs.plan import (
    AssignWorker,
    EndJob,
    JobAction,
    JobWorkerState,
    PlannedJob,
    SetMessage,
    StartWorker,
    StopWorker,
    plan_jobs,
)
from cortex.operator.jobs.workers import JobWorkers, job_assignment
from cortex.operator.revisions.preparation_states import Preparation, Stage
from cortex.operator.revisions.preparations import Preparations
from cortex.operator.revisions.replica_specs import worker_compute, worker_spec
from cortex.state.queries.apis import ApiStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger

#: Maximum time between two passes while there is a job or worker: deadlines, retries and idle workers are checked.
TICK_S = 1.0
#: Interval of the cleanup, which deletes the payloads of finished jobs, and the oldest finished jobs.
_CLEAN_S = 60.0
#: Interval of the check for leases that their workers no longer renew.
_EXPIRE_S = 5.0
#: An upload whose submission is gone is deleted after this time: a younger one may just have been stored.
_ABANDONED_S = 60.0


class JobReconciler:
    """Brings every job from its submission to its end."""

    def __init__(
        self,
        home: Home,
        apis: ApiStore,
        store: JobStore,
        workers: JobWorkers,
        preparations: Preparations,
        environ: Mapping[str, str],
        logger: Logger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home = home
        self._apis = apis
        self._store = store
        self._preparations = preparations
        self._environ = environ
        self._logger = logger
        self._clock = clock
        self.log = JobLog(home)
        self.workers = workers
        self.dispatcher = workers.dispatcher
        self._completion = JobCompletion(store, self.log, environ, logger)
        self._jobs: dict[str, JobRecord] = {}
        self._revisions: dict[str, Revision] = {}
        self._submitting: list[Revision] = []
        self._uploads: set[str] = set()
        self._enqueuing: dict[str, asyncio.Task[None]] = {}
        self._awake = self.dispatcher.awake
        self._next_clean = 0.0
        self._next_expiry = 0.0
        self._cleaning: asyncio.Task[None] | None = None
        self._deleted: set[str] = set()  #: deleted jobs whose workers may still write logs
        self._error_log = LoopErrorLog(logger, "reconciling jobs failed")

    def wake(self) -> None:
        """Request a pass. Call it after each change of jobs or workers."""
        self._awake.set()

    def revisions(self) -> list[Revision]:
        """Return the revisions that unfinished jobs need."""
        revisions = list(self._submitting)
        for job in self._jobs.values():
            with suppress(ValueError):  # the next pass ends a job that can't be read
                revisions.append(self._revision(job))
        return revisions

    @contextmanager
    def submitting(self, revision: Revision) -> Iterator[None]:
        """Keep the revision of a job that is being stored. `add` the job before the end."""
        self._submitting.append(revision)
        try:
            yield
        finally:
            self._submitting.remove(revision)

    @contextmanager
    def uploading(self, job: JobRecord) -> Iterator[None]:
        """Add a job whose items are being uploaded. Its submission deletes it if the upload breaks off."""
        self._uploads.add(job.id)
        self.add(job)
        try:
            yield
        finally:
            self._uploads.discard(job.id)

    def add(self, job: JobRecord) -> None:
        """Add a stored job."""
        self._jobs[job.id] = job
        self.wake()

    def workers_of(self, job_id: str) -> list[JobWorkerState]:
        """Return the running workers of a job."""
        return [worker for worker in self.workers.all() if worker.job_id == job_id]

    async def startup(self) -> None:
        """Adopt the jobs and workers of a previous operator. Call it before any worker's request is answered."""
        await self._store.startup(self.dispatcher.offer)
        for job in await self._store.active():
            if job.status is JobStatus.ENQUEUING and isinstance(source_from_json(job.source), Upload):
                await self._store.delete_job(job.id)  # its submission was never acknowledged
            else:
                self._jobs[job.id] = job
        for worker, job_id in (await self.workers.startup()).items():
            record = self._jobs.get(job_id)
            self.dispatcher.assign(worker, self._assignment(record, worker))
        for worker_entry in self.workers.all():
            if worker_entry.job_id is None:
                self.dispatcher.assign(worker_entry.spec.id, None)
        await self._completion.startup()

    async def run(self) -> None:
        """Run passes until cancelled."""
        try:
            while True:
                await self._run_pass()
                is_idle = not (self._jobs or self.workers.all() or self._store.workloads.apis)
                try:
                    async with asyncio.timeout(_CLEAN_S if is_idle else TICK_S):
                        await self._awake.wait()
                except TimeoutError:
                    pass
        finally:
            tasks = [*self._enqueuing.values(), *([self._cleaning] if self._cleaning else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._completion.shutdown()

    async def end(self, job_id: str, status: JobStatus, message: str, traceback: str = "") -> bool:
        """End a job; return False if it is already over."""
        if not await self._store.change(job_id, status, message, traceback):
            return False
        self._wake_with(job_id)
        return True

    def _wake_with(self, job_id: str) -> None:
        """Request a pass, and make the workers of a job query the store again."""
        self.dispatcher.wake(job_id)
        self.wake()

    async def _run_pass(self) -> None:
        self._awake.clear()
        try:
            await self._reconcile()
            self._error_log.succeeded()
        except Exception as error:  # a failed pass must not end the control loop
            self._error_log.failed(error)

    async def _reconcile(self) -> None:
        await self.workers.note_deaths()
        await self._expire()
        jobs = await self._store.active()
        await self._release_ended(jobs)
        self._jobs |= {job.id: job for job in jobs}
        await self._stop_jobs_of_deleted_apis()
        planned = [found for job in jobs if (found := await self._planned(job))]
        workers = [self._with_currency(worker) for worker in self.workers.all()]
        for action in plan_jobs(planned, workers, self.workers.capacity(), self._clock()):
            try:
                await self._apply(action)
            except DatabaseUnavailableError:
                raise
            except Exception as error:  # an error of one job must not block the others
                self._logger.error("reconciling a job failed", exc_info=error, action=type(action).__name__)
        for job in jobs:
            if job.status is JobStatus.ENQUEUING:
                await self._enqueue(job)
            elif job.status is JobStatus.COMPLETING:
                self._completion.begin(job, partial(self._wake_with, job.id))
        await self._delete_late_logs()
        self._clean()

    def _with_currency(self, worker: JobWorkerState) -> JobWorkerState:
        """Set `is_current` of a worker without a job: whether its revision is still deployed."""
        if worker.job_id in self._jobs:
            return worker
        record = self._apis.get(worker.spec.api)
        return replace(worker, is_current=record is not None and record.revision == worker.spec.revision)

    async def _planned(self, job: JobRecord) -> PlannedJob | None:
        """Return a job for the plan; end the job if this version can't read it."""
        try:
            revision = self._revision(job)
        except ValueError as error:
            await self.end(job.id, JobStatus.UNEXPECTED_ERROR, f"its API can't be read by this version: {error}")
            return None
        compute = worker_compute(revision.spec)
        preparation = self._preparations.states().get((job.origin.api, job.origin.revision), Preparation())
        if preparation.stage is Stage.NEEDED and self._clock() >= preparation.hold_until:
            self._preparations.begin(revision)
        waits_for = f"its environment can't be built: {preparation.failure.message}" if preparation.failure else ""
        return PlannedJob(job, compute, preparation.stage is Stage.DONE, waits_for, preparation.failures)

    async def _apply(self, action: JobAction) -> None:
        match action:
            case StartWorker(job_id):
                await self._start_worker(self._jobs[job_id])
            case AssignWorker(worker_id, job_id):
                record = self._jobs.get(job_id or "")
                await self.workers.assign(worker_id, job_id, self._assignment(record, worker_id))
            case StopWorker(worker_id, drain_s):
                await self.workers.stop(worker_id, drain_s)
            case EndJob(job_id, status, message, traceback):
                await self.end(job_id, status, message, traceback)
            case SetMessage(job_id, message):
                await self._store.write(set_message, job_id, message)

    def _revision(self, job: JobRecord) -> Revision:
        """Return the revision that a job runs. Cached: parsing the spec in each pass would be expensive."""
        if job.id not in self._revisions:
            spec = Api.read_stored(job.origin.spec)
            self._revisions[job.id] = Revision(job.origin.revision, spec, job.origin.project_hash)
        return self._revisions[job.id]

    def _assignment(self, job: JobRecord | None, worker: str) -> Assignment | None:
        """Return a worker's assignment to a job; None without a job, or if the job can't be read and will be ended."""
        try:
            return job_assignment(job, worker, self._home) if job is not None else None
        except ValueError as error:
            self._logger.error("a job can't be read", worker=worker, error=error)
            return None

    async def _start_worker(self, job: JobRecord) -> None:
        revision = self._revision(job)
        prepared = self._preparations.prepared(revision)
        if prepared is None:
            return
        spec = worker_spec(self._home, revision, prepared, job.id)
        try:
            await self.workers.start(spec, job_assignment(job, spec.id, self._home))
            self._logger.info("worker started", api=spec.api, job=job.id, worker=spec.id)
        except ComputeUnavailableError:
            pass  # a process that is being stopped holds it; its end triggers the next pass
        except EngineError as error:
            self._preparations.start_failed(revision, error)
            self._logger.error("worker could not be started", api=spec.api, job=job.id, error=error)

    async def _enqueue(self, job: JobRecord) -> None:
        """Complete the batches of a job. Uploaded items get theirs from the submission."""
        source = source_from_json(job.source)
        if isinstance(source, FilePathLister) and job.id not in self._enqueuing:
            self._enqueue_files(job, source)
        is_old = self._clock() - job.created_at > _ABANDONED_S
        if isinstance(source, Upload) and job.id not in self._uploads and is_old:
            await self._store.delete_job(job.id)  # its submission broke off without deleting it

    def _enqueue_files(self, job: JobRecord, source: FilePathLister) -> None:
        """Cut a job's files into batches in the background; after a crash of the operator, start over."""
        networking = self._revision(job).spec.networking
        max_bytes, folders = networking.max_batch_size, networking.local_paths or ()
        log, admit = self.log.of(job), None
        if FROM_ENDPOINT in job.source:
            admit = partial(self._store.limit.admit, job.origin.api, max_bytes=networking.max_stored_size)

        async def run() -> None:
            try:
                await enqueue_files(self._store, job, source, self._environ, max_bytes, log, folders, admit)
            except DatabaseUnreachableError as error:
                self._logger.warning("enqueuing waits for the database", job=job.id, error=error)
                self._enqueuing.pop(job.id, None)  # the next pass starts over
                return
            except Exception as error:
                self._logger.error("enqueuing failed", exc_info=error, job=job.id)
                known = isinstance(error, CortexError)
                try:
                    message = str(error) if known else f"{type(error).__name__}: {error}"
                    await self.end(job.id, JobStatus.ENQUEUE_FAILED, message)
                except DatabaseUnavailableError:
                    self._enqueuing.pop(job.id, None)  # the next pass starts over
                    return
            self.wake()

        self._enqueuing[job.id] = asyncio.create_task(run(), name=f"enqueue {job.id}")

    async def _release_ended(self, jobs: Sequence[JobRecord]) -> None:
        """Release what finished jobs held, and notify of their end."""
        for job_id in set(self._jobs) - {job.id for job in jobs}:
            record = await self._store.get(job_id)
            if record is not None and not record.status.is_over:
                continue  # it was added after `jobs` was read
            del self._jobs[job_id]
            self._revisions.pop(job_id, None)
            if task := self._enqueuing.pop(job_id, None):
                task.cancel()
            self._completion.cancel(job_id)
            if record is not None:
                self._completion.notify_end(record)

    async def log_ends(self) -> None:
        """Log the ends of jobs that workers have reported since `run` ended; the next operator sends webhooks."""
        for job_id in set(self._jobs) - {job.id for job in await self._store.active()}:
            record = await self._store.get(job_id)
            if record is not None and record.status.is_over:
                self.log.ended(record)

    async def _stop_jobs_of_deleted_apis(self) -> None:
        """Stop the jobs and delete the queues of deleted APIs."""
        for job in list(self._jobs.values()):
            if self._apis.get(job.origin.api) is None:
                await self.end(job.id, JobStatus.STOPPED, "its API was deleted")
        for api in self._store.workloads.apis:
            record = self._apis.get(api)
            if record is None or record.spec.kind is not ApiKind.ASYNC:
                await self._store.workloads.close(api)

    async def _expire(self) -> None:
        if (self._jobs or self._store.workloads.apis) and time.monotonic() >= self._next_expiry:
            self._next_expiry = time.monotonic() + _EXPIRE_S
            if await self._store.expire():
                self.dispatcher.wake()

    def _clean(self) -> None:
        is_running = self._cleaning is not None and not self._cleaning.done()
        if is_running or time.monotonic() < self._next_clean:
            return
        self._next_clean = time.monotonic() + _CLEAN_S
        self._cleaning = asyncio.create_task(self._clean_store(), name="clean jobs")

    async def _clean_store(self) -> None:
        try:
            await self.delete_logs(await self._store.clean())
        except Exception as error:
            self._logger.error("old jobs can't be cleaned up", exc_info=error)

    async def delete_logs(self, job_ids: Collection[str]) -> None:
        """Delete the logs of deleted jobs, and once more after their workers, which still write, have ended."""
        self._deleted.update(job_ids)
        await self._delete_folders(job_ids)

    async def _delete_late_logs(self) -> None:
        finished = self._deleted - {worker.job_id for worker in self.workers.all()}
        self._deleted -= finished
        await self._delete_folders(finished)

    async def _delete_folders(self, job_ids: Collection[str]) -> None:
        wanted = set(job_ids)
        folders = [f for f in self._home.logs_dir.glob("*/*") if f.name in wanted and f.is_dir()] if wanted else []
        for folder in folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
