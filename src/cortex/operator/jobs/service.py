"""Everything that users do with jobs, for the gateway's routes as for the operator's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cortex.config.schema import Api
from cortex.errors import ConflictError, InputError, NotFoundError
from cortex.jobs.http.view import SCHEDULED_FOR, JobView, WorkerCounts
from cortex.jobs.intake.files import check_output, list_paths
from cortex.jobs.intake.items import split_items, split_lines
from cortex.jobs.intake.sources import source_to_json
from cortex.jobs.intake.submission import SubmissionLimits
from cortex.jobs.output import dead_letter_lines, result_lines
from cortex.jobs.spec import (
    TASK_BATCH,
    FilePathLister,
    ItemList,
    JobOrigin,
    JobRecord,
    NewBatch,
    Options,
    Source,
    Submission,
    TaskCall,
    Upload,
)
from cortex.jobs.store import Also, JobStore
from cortex.lifecycle import ApiKind, JobStatus, ProcessState
from cortex.operator.jobs.plan import Worker
from cortex.operator.jobs.supervisor import JobSupervisor
from cortex.state.apis import ApiRecord, ApiStore

#: What is said of such an API before its first job.
NO_JOBS: dict[str, Any] = {"running_jobs": 0, "latest_job_id": None}


@dataclass(frozen=True)
class Due:
    """Why a job is submitted by itself."""

    at: float  #: when it was due, UNIX seconds
    also: Also  #: what is stored with it


class Jobs:
    """Submits, shows and stops jobs. `endpoint` returns the address of an API's endpoint."""

    def __init__(
        self,
        apis: ApiStore,
        store: JobStore,
        supervisor: JobSupervisor,
        environ: Mapping[str, str],
        endpoint: Callable[[Api], str],
    ) -> None:
        self._apis = apis
        self._store = store
        self._supervisor = supervisor
        self._environ = environ
        self._endpoint = endpoint

    def limits(self, api: str) -> SubmissionLimits:
        """Return the bounds of a submission to an API. Raises: NotFoundError."""
        record = self._require_api(api)
        networking = record.spec.networking
        return SubmissionLimits(networking.max_body_size, networking.max_batch_size, record.spec.kind is ApiKind.TASK)

    def local_paths(self, api: str) -> list[str]:
        """Return the folders that callers without a token may name. Raises: NotFoundError."""
        return self._require_api(api).spec.networking.local_paths or []

    async def submit(
        self,
        api: str,
        submission: Submission,
        items: AsyncIterator[bytes] | None = None,
        due: Due | None = None,
    ) -> JobRecord:
        """Store a job; once this returns, nothing but its user loses it. `items` are the body of an upload.

        Raises: NotFoundError, SubmissionError, StorageError where the output can't be written, and what `due` raises.
        """
        record = self._require_api(api)
        if submission.options.output is not None:
            await check_output(submission.options.output, self._environ)
        source, options = submission.source, submission.options
        with self._supervisor.submitting(record.target):
            if isinstance(source, Upload):
                if items is None:
                    raise InputError("an upload has a body")
                job = await self._upload(record, source, options, items)
            else:
                batches = _batches(source, record.spec.networking.max_batch_size)
                stored, also = source_to_json(source), _nothing
                if due is not None:
                    stored, also = {**stored, SCHEDULED_FOR: due.at}, due.also
                job = await self._store.create(_origin(record), options, stored, batches, also)
                await self._require_still(record, job)
            self._began(job)
        return job

    async def dry_run(self, api: str, submission: Submission) -> AsyncIterator[str]:
        """Check a submission as if it were made; yield the lines of the answer."""
        record = self._require_api(api)
        source, max_bytes = submission.source, record.spec.networking.max_batch_size
        if isinstance(source, ItemList):
            await asyncio.to_thread(lambda: sum(1 for _ in split_items(source.items, source.batch_size, max_bytes)))
        elif isinstance(source, FilePathLister):
            async for paths in list_paths(source, self._environ):
                for path in paths:
                    yield path
        if submission.options.output is not None:
            await check_output(submission.options.output, self._environ)
        yield "validations passed"

    async def get(self, api: str, job_id: str) -> JobView:
        """Return one job. Raises: NotFoundError."""
        return self._view(await self._require(api, job_id))

    async def list(self, api: str, limit: int = 10) -> list[JobView]:
        """Return the newest jobs of an API."""
        return [self._view(job) for job in await self._store.list(api, limit)]

    async def stop(self, api: str, job_id: str) -> None:
        """Stop a job; batches inside workers are given up. Raises: NotFoundError, ConflictError if it is over."""
        job = await self._require(api, job_id)
        if await self._supervisor.end(job_id, JobStatus.STOPPED, "stopped by its user"):
            return
        job = await self._require(api, job_id)
        if job.status is JobStatus.STOPPED:
            raise ConflictError(f"{job.origin.kind} job has already been stopped")
        raise ConflictError(f"cannot stop {job.origin.kind} job because it is not in progress")

    async def retry_failed(self, api: str, job_id: str, workers: int | None = None) -> JobRecord:
        """Submit what a job that is over left as a new job: see `JobStore.retry`, also for what it raises."""
        old = await self._require(api, job_id)
        record = self._require_api(api)
        options = old.options if workers is None else replace(old.options, workers=workers)
        with self._supervisor.submitting(record.target):
            job = await self._store.retry(job_id, _origin(record), options)
            self._began(job)
        return job

    async def results(self, api: str, job_id: str) -> AsyncIterator[bytes]:
        """Yield what the batches returned, a line of JSON each. Raises: NotFoundError."""
        await self._require(api, job_id)
        async for lines in result_lines(self._store, job_id):
            yield b"".join(lines)

    async def dead_letters(self, api: str, job_id: str) -> AsyncIterator[bytes]:
        """Yield the batches that were given up, a line of JSON each. Raises: NotFoundError."""
        await self._require(api, job_id)
        async for lines in dead_letter_lines(self._store, job_id):
            yield b"".join(lines)

    async def api_deleted(self, api: str, keep: bool) -> None:
        """Stop the jobs of an API that was deleted; forget them, unless its cache is kept; drop its queue."""
        await self._store.workloads.close(api)
        for job in await self._store.active():
            if job.origin.api == api:
                await self._supervisor.end(job.id, JobStatus.STOPPED, "its API was deleted")
        if not keep:
            await self._supervisor.delete_logs(await self._store.delete_api(api))

    def open_workloads(self, api: str) -> int | None:
        """Count the workloads of an AsyncAPI that are not over; None for an API without a queue."""
        return self._store.workloads.count(api)

    async def summaries(self) -> dict[str, dict[str, Any]]:
        """Return, by API, how many jobs are in progress, and which is the latest."""
        return {
            api: {"running_jobs": found.running, "latest_job_id": found.latest}
            for api, found in (await self._store.summaries()).items()
        }

    async def _upload(
        self, record: ApiRecord, source: Upload, options: Options, items: AsyncIterator[bytes]
    ) -> JobRecord:
        """Store a job whose items come in as lines; all of it or nothing."""
        job = await self._store.create(_origin(record), options, source_to_json(source), None)
        with self._supervisor.uploading(job):
            try:
                async for batches in split_lines(items, source.batch_size, record.spec.networking.max_batch_size):
                    await self._store.add_batches(job.id, batches)
                finished = await self._store.finish_enqueuing(job.id)
                if finished.status is JobStatus.ENQUEUE_FAILED:
                    raise InputError(finished.message)
            except BaseException:
                await asyncio.shield(self._store.delete_job(job.id))
                raise
        return finished

    def _began(self, job: JobRecord) -> None:
        workers = f"{job.options.workers} worker{'' if job.options.workers == 1 else 's'}"
        batches = f"{job.counts.batches} batch{'' if job.counts.batches == 1 else 'es'}"
        is_read = job.status is JobStatus.ENQUEUING
        what = f" for {workers}: {'its files are being read' if is_read else batches}"
        self._supervisor.log.of(job)(f"submitted{'' if job.origin.is_task else what}")
        self._supervisor.add(job)

    def _require_api(self, api: str) -> ApiRecord:
        record = self._apis.get(api)
        if record is None:
            raise NotFoundError(f"{api} is not deployed")
        if not record.spec.kind.runs_jobs:
            raise InputError(f"{api} is a {record.kind}, which runs no jobs; deploy it with `kind: {ApiKind.BATCH}`")
        return record

    async def _require(self, api: str, job_id: str) -> JobRecord:
        job = await self._store.get(job_id)
        if job is None or job.origin.api != api:
            record = self._require_api(api)
            raise NotFoundError(f"unable to find {record.kind} job {job_id} ({api} api)")
        return job

    async def _require_still(self, record: ApiRecord, job: JobRecord) -> None:
        """Delete a job that its API's end could not stop, as it was not to be seen yet. Raises: NotFoundError."""
        known = self._apis.get(record.name)
        if known is None or known.created_at != record.created_at:
            await self._store.delete_job(job.id)
            raise NotFoundError(f"{record.name} was deleted before the job was stored")

    def _view(self, job: JobRecord) -> JobView:
        try:
            endpoint = self._endpoint(Api.read_stored(job.origin.spec))
        except ValueError:  # another version of cortex wrote it
            endpoint = ""
        return JobView(job, endpoint, _count(job, self._supervisor.workers(job.id)))


def _batches(source: Source, max_bytes: int) -> Iterator[NewBatch] | None:
    """Cut a source into batches; None where they follow."""
    if isinstance(source, ItemList):
        return split_items(source.items, source.batch_size, max_bytes)
    return iter([TASK_BATCH]) if isinstance(source, TaskCall) else None


def _nothing(*_: Any) -> None:
    pass


def _count(job: JobRecord, workers: list[Worker]) -> WorkerCounts:
    if job.status.is_over:
        ended_well = job.status in (JobStatus.SUCCEEDED, JobStatus.COMPLETED_WITH_FAILURES)
        has_failed = job.origin.is_task and job.status in (JobStatus.WORKER_ERROR, JobStatus.WORKER_OOM)
        return WorkerCounts(succeeded=job.options.workers if ended_well else 0, failed=int(has_failed))
    states = [worker.process for worker in workers]
    failed = sum(process.failed_starts > 0 for process in states)
    running = sum(process.state is ProcessState.READY for process in states)
    return WorkerCounts(
        pending=max(0, job.options.workers - len(states)) if job.status is not JobStatus.ENQUEUING else 0,
        initializing=len(states) - failed - running,
        running=running,
        failed=failed,
    )


def _origin(record: ApiRecord) -> JobOrigin:
    return JobOrigin(
        api=record.name,
        api_id=record.api_id,
        spec_id=record.spec_id,
        revision=record.revision,
        project_hash=record.target.project_hash,
        spec=record.spec.model_dump_json(),
        kind=record.kind,
    )
