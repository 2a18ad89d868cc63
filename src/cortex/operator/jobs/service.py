"""Job service: everything that users do with jobs, through the gateway, the operator's routes, or a schedule.

Callers of an endpoint have shown no token: anyone on the machine, and any web page open on it, can reach the gateway,
while the operator can read and write whatever its user can, has credentials for buckets, and reaches private networks.
Unless a submission is trusted, it may only name what the API's owner allows: `networking.local_paths`, `buckets` and
`webhook_hosts`. An API key changes nothing: its owner is still not the operator.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from cortex.config.schema import STORES, Api, Networking
from cortex.errors import ConflictError, InputError, NotFoundError, SubmissionError, with_article
from cortex.jobs.http.view import JobView, WorkerCounts
from cortex.jobs.http.webhook import forbidden_host
from cortex.jobs.intake.files import check_output, list_paths
from cortex.jobs.intake.items import split_items, split_lines
from cortex.jobs.intake.submission import SubmissionLimits
from cortex.jobs.output import dead_letter_lines, result_lines
from cortex.jobs.queries import ErrorGroup, group_errors, read_dead_letters
from cortex.jobs.records import MIN_JOB_BYTES, JobFilter, list_jobs, summarize
from cortex.jobs.spec import (
    FROM_ENDPOINT,
    SCHEDULED_FOR,
    TASK_BATCH,
    TRACEPARENT,
    DeadLetter,
    DelimitedFiles,
    FilePathLister,
    ItemList,
    JobOptions,
    JobOrigin,
    JobRecord,
    NewBatch,
    RetryOf,
    Source,
    Submission,
    TaskCall,
    Upload,
    source_to_json,
)
from cortex.jobs.store import ExtraWrites, JobStore
from cortex.lifecycle import ApiKind, JobStatus, ProcessState
from cortex.operator.jobs.plan import JobWorkerState
from cortex.operator.jobs.reconciler import JobReconciler
from cortex.state.queries.apis import ApiRecord, ApiStore

#: Jobs of an API among which retries of one are searched: about as many as are kept.
_RECENT_JOBS = 100
#: Summary of an API before its first job.
NO_JOBS: dict[str, Any] = {"running_jobs": 0, "latest_job_id": None}


@dataclass(frozen=True)
class ScheduledRun:
    """The run of a schedule that a job is submitted for."""

    at: float  #: due time, UNIX seconds
    extra_writes: ExtraWrites  #: writes in the same transaction


class JobService:
    """Submits, shows and stops jobs. `endpoint` returns the URL of an API's endpoint."""

    def __init__(
        self,
        apis: ApiStore,
        store: JobStore,
        reconciler: JobReconciler,
        environ: Mapping[str, str],
        endpoint: Callable[[Api], str],
    ) -> None:
        self._apis = apis
        self._store = store
        self._reconciler = reconciler
        self._environ = environ
        self._endpoint = endpoint

    def limits(self, api: str) -> SubmissionLimits:
        """Return the limits of a submission to an API. Raises: NotFoundError."""
        record = self._require_api(api)
        networking = record.spec.networking
        return SubmissionLimits(networking.max_body_size, networking.max_batch_size, record.spec.kind is ApiKind.TASK)

    async def submit(
        self,
        api: str,
        submission: Submission,
        items: AsyncIterator[bytes] | None = None,
        run: ScheduledRun | None = None,
        *,
        is_trusted: bool = False,
        traceparent: str = "",
    ) -> JobRecord:
        """Store a job durably. `items` is the body of an upload. Trusted callers may name any place.

        `traceparent` is the valid header of the submission, or empty.
        Raises: NotFoundError, SubmissionError, BusyError if untrusted callers have stored too much, StorageError if the
        output can't be written, and the errors of `run.extra_writes`.
        """
        record = self._require_api(api)
        if not is_trusted:
            check_places(submission, record.spec)
        source, options, admit = submission.source, submission.options, _nothing
        stored = source_to_json(source) | ({TRACEPARENT: traceparent} if traceparent else {})
        with ExitStack() as stack:
            if not is_trusted:
                stored |= {FROM_ENDPOINT: True}
                max_bytes = record.spec.networking.max_stored_size
                admit = stack.enter_context(self._store.limit.submission(api, max_bytes))
                admit(MIN_JOB_BYTES + len(json.dumps(options.config)))
            if options.output is not None:
                await check_output(options.output, self._environ, record.spec.networking.local_paths or ())
            stack.enter_context(self._reconciler.submitting(record.target))
            if isinstance(source, Upload):
                if items is None:
                    raise InputError("an upload needs a body")
                job = await self._upload(record, source, options, stored, items, admit)
            else:
                batches, extra_writes = _batches(source, record.spec.networking.max_batch_size), _nothing
                if batches is not None and not is_trusted:
                    found = await asyncio.to_thread(list, batches)
                    admit(_size(found))
                    batches = iter(found)
                if run is not None:
                    stored, extra_writes = {**stored, SCHEDULED_FOR: run.at}, run.extra_writes
                job = await self._store.create(_origin(record), options, stored, batches, extra_writes)
                await self._check_still_deployed(record, job)
            self._start_reconciling(job)
        return job

    async def dry_run(self, api: str, submission: Submission, *, is_trusted: bool = False) -> AsyncIterator[str]:
        """Validate a submission without storing a job; yield the lines of the response. Raises: like `submit`."""
        record = self._require_api(api)
        if not is_trusted:
            check_places(submission, record.spec)
        async for line in checked_lines(submission, record.spec.networking, self._environ):
            yield line

    async def get(self, api: str, job_id: str) -> JobView:
        """Return one job. Raises: NotFoundError."""
        return self._view(await self._require(api, job_id))

    async def list(self, chosen: str | JobFilter, limit: int = 10) -> list[JobView]:
        """Return the newest jobs of an API, or of those that a filter selects."""
        return [self._view(job) for job in await self._store.read(list_jobs, chosen, limit)]

    async def errors(self, api: str, job_id: str) -> Sequence[ErrorGroup]:
        """Return the errors of a job's dead letters, those of the most batches first. Raises: NotFoundError."""
        await self._require(api, job_id)
        return await self._store.read(group_errors, job_id)

    async def stop(self, api: str, job_id: str) -> None:
        """Stop a job and abandon its running batches. Raises: NotFoundError, ConflictError if it is over."""
        job = await self._require(api, job_id)
        if await self._reconciler.end(job_id, JobStatus.STOPPED, "stopped by its user"):
            return
        job = await self._require(api, job_id)
        if job.status is JobStatus.STOPPED:
            raise ConflictError(f"{job.origin.kind} job has already been stopped")
        raise ConflictError(f"cannot stop {job.origin.kind} job because it is not in progress")

    async def retry_failed(
        self, api: str, job_id: str, workers: int | None = None, seq: int | None = None
    ) -> JobRecord:
        """Submit the failed batches of a finished job, or one of them, as a new job.

        A job from the endpoint may still only name what the API allows now. Raises: SubmissionError, and like
        `JobStore.retry`.
        """
        old = await self._require(api, job_id)
        record = self._require_api(api)
        if FROM_ENDPOINT in old.source:
            check_places(Submission(RetryOf(job_id), old.options), record.spec)
        options = old.options if workers is None else replace(old.options, workers=workers)
        with self._reconciler.submitting(record.target):
            job = await self._store.retry(job_id, _origin(record), options, seq)
            self._start_reconciling(job)
        return job

    async def retries(self, api: str, job_id: str) -> Sequence[JobView]:
        """Return the jobs that retry a job, the newest first, among the newest jobs of its API."""
        found = await self._store.read(list_jobs, api, _RECENT_JOBS)
        return [self._view(job) for job in found if job.source.get("retry_of") == job_id]

    async def results(self, api: str, job_id: str) -> AsyncIterator[bytes]:
        """Yield the results of the batches, one line of JSON each. Raises: NotFoundError."""
        await self._require(api, job_id)
        async for lines in result_lines(self._store, job_id):
            yield b"".join(lines)

    async def read_dead_letters(self, api: str, job_id: str, after: int, limit: int) -> Sequence[DeadLetter]:
        """Return up to `limit` dead letters after batch `after`, fewer if they are large. Raises: NotFoundError."""
        await self._require(api, job_id)
        return await self._store.read(read_dead_letters, job_id, after, limit)

    async def dead_letters(self, api: str, job_id: str) -> AsyncIterator[bytes]:
        """Yield the dead letters, one line of JSON each. Raises: NotFoundError."""
        await self._require(api, job_id)
        async for lines in dead_letter_lines(self._store, job_id):
            yield b"".join(lines)

    async def api_deleted(self, api: str, keep: bool) -> None:
        """Stop the jobs of a deleted API and delete its queue; delete the jobs unless `keep` is set."""
        await self._store.workloads.close(api)
        for job in await self._store.active():
            if job.origin.api == api:
                await self._reconciler.end(job.id, JobStatus.STOPPED, "its API was deleted")
        if not keep:
            await self._reconciler.delete_logs(await self._store.delete_api(api))

    def open_workloads(self, api: str) -> int | None:
        """Count the unfinished workloads of an AsyncAPI; None for an API without a queue."""
        return self._store.workloads.count(api)

    async def summaries(self) -> dict[str, dict[str, Any]]:
        """Return the number of running jobs and the latest job of each API."""
        return {
            api: {"running_jobs": found.running, "latest_job_id": found.latest}
            for api, found in (await self._store.read(summarize)).items()
        }

    async def _upload(
        self,
        record: ApiRecord,
        source: Upload,
        options: JobOptions,
        stored: dict[str, Any],
        items: AsyncIterator[bytes],
        admit: Callable[[int], None],
    ) -> JobRecord:
        """Store a job whose items are uploaded as lines, atomically."""
        job = await self._store.create(_origin(record), options, stored, None)
        with self._reconciler.uploading(job):
            try:
                async for batches in split_lines(items, source.batch_size, record.spec.networking.max_batch_size):
                    admit(_size(batches))
                    await self._store.add_batches(job.id, batches)
                finished = await self._store.finish_enqueuing(job.id)
                if finished.status is JobStatus.ENQUEUE_FAILED:
                    raise InputError(finished.message)
            except BaseException:
                await asyncio.shield(self._store.delete_job(job.id))
                raise
        return finished

    def _start_reconciling(self, job: JobRecord) -> None:
        """Log the submission and hand the job to its reconciler."""
        workers = f"{job.options.workers} worker{'' if job.options.workers == 1 else 's'}"
        batches = f"{job.counts.batches} batch{'' if job.counts.batches == 1 else 'es'}"
        is_read = job.status is JobStatus.ENQUEUING
        what = f" for {workers}: {'its files are being read' if is_read else batches}"
        self._reconciler.log.of(job)(f"submitted{'' if job.origin.is_task else what}")
        self._reconciler.add(job)

    def _require_api(self, api: str) -> ApiRecord:
        record = self._apis.get(api)
        if record is None:
            raise NotFoundError(f"{api} is not deployed")
        if not record.spec.kind.runs_jobs:
            hint = f"deploy it with `kind: {ApiKind.BATCH}`"
            if record.spec.kind is ApiKind.ASYNC:
                hint = f"GET {self._endpoint(record.spec)}/ID returns a workload"
            raise InputError(f"{api} is {with_article(record.kind)}, which runs no jobs; {hint}")
        return record

    async def _require(self, api: str, job_id: str) -> JobRecord:
        job = await self._store.get(job_id)
        if job is None or job.origin.api != api:
            record = self._require_api(api)
            raise NotFoundError(f"unable to find {record.kind} job {job_id} ({api} api)")
        return job

    async def _check_still_deployed(self, record: ApiRecord, job: JobRecord) -> None:
        """Delete a job whose API was deleted while the job was being stored. Raises: NotFoundError."""
        known = self._apis.get(record.name)
        if known is None or known.created_at != record.created_at:
            await self._store.delete_job(job.id)
            raise NotFoundError(f"{record.name} was deleted before the job was stored")

    def _view(self, job: JobRecord) -> JobView:
        try:
            endpoint = self._endpoint(Api.read_stored(job.origin.spec))
        except ValueError:  # written by another version of cortex
            endpoint = ""
        return JobView(job, endpoint, _count(job, self._reconciler.workers_of(job.id)))


async def checked_lines(
    submission: Submission, networking: Networking, environ: Mapping[str, str]
) -> AsyncIterator[str]:
    """Yield the files that a submission would read, and that it is valid. Raises: SubmissionError, StorageError."""
    source, max_bytes = submission.source, networking.max_batch_size
    folders = networking.local_paths or ()
    if isinstance(source, ItemList):
        await asyncio.to_thread(lambda: sum(1 for _ in split_items(source.items, source.batch_size, max_bytes)))
    elif isinstance(source, FilePathLister):
        async for paths in list_paths(source, environ, folders):
            for path in paths:
                yield path
    if submission.options.output is not None:
        await check_output(submission.options.output, environ, folders)
    yield "validations passed"


def disallowed_places(submission: Submission, networking: Networking) -> Iterator[str]:
    """Yield an error for each place that a submission names and an API does not open to its endpoint."""
    named: list[tuple[str, str]] = []
    if isinstance(submission.source, FilePathLister):
        section = "delimited_files" if isinstance(submission.source, DelimitedFiles) else "file_path_lister"
        named += [(section, path) for path in submission.source.paths]
    if submission.options.output is not None:
        named.append(("output", submission.options.output))
    for field, path in named:
        is_remote = path.startswith(STORES)
        allowed = (networking.buckets if is_remote else networking.local_paths) or []
        what, it, key = ("bucket path", "it", "buckets") if is_remote else ("local path", "its folder", "local_paths")
        # Paths are prefixes: without the slash, /data would allow /database.
        is_below = any(path.startswith(f"{folder.rstrip('/')}/") for folder in allowed)
        if not is_below or {".", ".."}.intersection(path.split("/")):
            fix = f"use `cortex submit`, or add {it} to networking.{key} of the API"
            ending = f'; write "{path}/"' if path in allowed else f"; {fix}"
            yield f'{field}: the {what} "{path}" is not open to this endpoint{ending}'
    webhook = submission.options.webhook
    if webhook is not None and (host := forbidden_host(webhook, networking.webhook_hosts or [])) is not None:
        fix = "use `cortex submit`, or add it to networking.webhook_hosts of the API"
        yield f'webhook: the host "{host}" is not public, and not open to this endpoint; {fix}'


def check_places(submission: Submission, spec: Api) -> None:
    """Validate the places that a submission of an untrusted caller names. Raises: SubmissionError."""
    problems = list(disallowed_places(submission, spec.networking))
    if problems:
        raise SubmissionError("; ".join(problems))


def _batches(source: Source, max_bytes: int) -> Iterator[NewBatch] | None:
    """Cut a source into batches; None if they follow later."""
    if isinstance(source, ItemList):
        return split_items(source.items, source.batch_size, max_bytes)
    return iter([TASK_BATCH]) if isinstance(source, TaskCall) else None


def _size(batches: Sequence[NewBatch]) -> int:
    return sum(len(batch.payload) for batch in batches)


def _nothing(*_: Any) -> None:
    pass


def _count(job: JobRecord, workers: list[JobWorkerState]) -> WorkerCounts:
    if job.status.is_over:
        return WorkerCounts.at_end(job)
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
