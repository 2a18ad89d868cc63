"""The process of a BatchAPI, TaskAPI or AsyncAPI in `cortex dev`: the operator's routes, with jobs in memory.

Jobs and workloads run on the main thread, one after the other; the event loop runs on another.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cortex.dev.local.api import LocalApi
from cortex.dev.local.jobs import AsyncApi, JobsApi, LocalJob
from cortex.errors import IdempotencyError, NotFoundError
from cortex.jobs.http.view import JobView
from cortex.jobs.intake.items import split_lines
from cortex.jobs.intake.submission import SubmissionLimits
from cortex.jobs.spec import JobOptions, JobRecord, Submission, Upload, Workload, WorkloadView
from cortex.lifecycle import WorkloadStatus
from cortex.operator.http.async_routes import AsyncRoutes
from cortex.operator.http.gateway_routes import API_HEADER, JOB_HEADER
from cortex.operator.http.job_routes import JobRoutes
from cortex.payloads.signature import ApiSignature
from cortex.telemetry import Logger
from cortex.terminal import print_line
from cortex.worker.applications.application_server import ApplicationServer
from cortex.worker.applications.lifespan import Lifespan
from cortex.worker.spec import ReplicaSpec

_SHOWN_CHARACTERS = 500

Work = SimpleQueue[LocalJob | Workload | None]


class _Jobs:
    """The jobs of one API, as its routes need them."""

    def __init__(self, api: JobsApi, queue: Work) -> None:
        self._api = api
        self._queue = queue
        self._jobs: dict[str, LocalJob] = {}

    def limits(self, api: str) -> SubmissionLimits:
        return self._api.limits

    async def submit(
        self,
        api: str,
        submission: Submission,
        items: AsyncIterator[bytes] | None = None,
        /,
        *,
        is_trusted: bool = False,
        traceparent: str = "",
    ) -> JobRecord:
        if not is_trusted:
            self._api.check_places(submission)
        source = submission.source
        if isinstance(source, Upload) and items is not None:
            parts = split_lines(items, source.batch_size, self._api.limits.max_batch_bytes)
            batches = [batch async for part in parts for batch in part]
        else:
            batches = await asyncio.to_thread(self._api.batches, source)
        job = self._api.create(submission, batches)
        if ignored := _ignored_options(submission.options):
            print_line(f"job {job.record.id}: cortex dev ignores {', '.join(ignored)}", sys.stderr)
        self._jobs[job.record.id] = job
        self._queue.put(job)
        return job.record

    def dry_run(self, api: str, submission: Submission, *, is_trusted: bool = False) -> AsyncIterator[str]:
        if not is_trusted:
            self._api.check_places(submission)
        return self._api.checked_lines(submission)

    async def get(self, api: str, job_id: str) -> JobView:
        return JobView(self.find(job_id).record, "")

    async def stop(self, api: str, job_id: str) -> None:
        self.find(job_id).stop()

    def find(self, job_id: str) -> LocalJob:
        if job_id not in self._jobs:
            raise NotFoundError(f"there is no job {job_id[:100]}")
        return self._jobs[job_id]


def _ignored_options(options: JobOptions) -> list[str]:
    """Return the options of a submission that have no effect here."""
    given = {
        "workers": options.workers > 1,
        "timeout": options.timeout_s,
        "batch_timeout": options.batch_timeout_s,
        "isolate_failures": options.isolate_failures,
        "output (GET the job for its results)": options.output,
        "webhook": options.webhook,
        "sqs_dead_letter_queue": options.dead_letter_queue,
    }
    return [name for name, value in given.items() if value]


class _LocalJobRoutes(JobRoutes):
    """The routes of jobs; a job has also its results and failures."""

    def __init__(self, jobs: _Jobs, logger: Logger) -> None:
        super().__init__(jobs, logger)
        self._local = jobs

    def _is_trusted(self, request: Request) -> bool:
        # The user sends curl, and browsers send the submissions of any page that the user visits.
        return "origin" not in request.headers

    def _describe(self, job: JobView) -> dict[str, Any]:
        found = self._local.find(job.record.id)
        failures = [{"batch": each.seq, "error": each.error} for each in found.failures]
        return {**super()._describe(job), "results": found.results, "failures": failures}


class _Workloads:
    """The workloads of one API, as its routes need them."""

    def __init__(self, api: AsyncApi, max_body_bytes: int, queue: Work) -> None:
        self._api = api
        self._max_body_bytes = max_body_bytes
        self._queue = queue

    def max_body_bytes(self, api: str) -> int:
        return self._max_body_bytes

    def is_of_older_file(self, api: str) -> bool:
        return self._api.is_of_older_file

    async def add(self, api: str, workload: Workload, key: str) -> uuid.UUID:
        if key:
            workload = workload.with_key(api, key)
            stored = self._api.find_key(workload.id)
            if stored is not None and stored != workload.id:
                raise IdempotencyError
            if stored is not None:
                return stored
        self._api.add(workload)
        self._queue.put(workload)
        return workload.id

    async def get(self, api: str, name: uuid.UUID, wait_s: float) -> WorkloadView | None:
        return await asyncio.to_thread(self._api.get, name, wait_s)


class JobServer(LocalApi):
    """Serves requests on the event loop, and runs jobs on the thread that calls `run`, or `run_jobs`."""

    def __init__(self, spec: ReplicaSpec, api: JobsApi | AsyncApi, loop: asyncio.AbstractEventLoop) -> None:
        self._api = api
        self._queue: Work = SimpleQueue()
        logger, limit = Logger("cortex.dev"), spec.max_body_bytes
        routes: ASGIApp
        if isinstance(api, JobsApi):
            routes = _LocalJobRoutes(_Jobs(api, self._queue), logger)
            limit = max(limit, api.networking.max_stored_size)  # of an upload
        else:
            routes = AsyncRoutes(_Workloads(api, limit, self._queue), api.check_body, logger)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            """Set the headers of the gateway."""
            name = scope["path"].removeprefix(scope["root_path"]).strip("/")
            headers = {API_HEADER: spec.api} | ({JOB_HEADER: name} if name else {})
            pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
            await routes({**scope, "headers": [*scope["headers"], *pairs]}, receive, send)

        super().__init__(replace(spec, max_body_bytes=limit + 1), loop)  # the routes refuse larger bodies themselves
        self._server = ApplicationServer(self._context, Lifespan(app))

    @property
    def signature(self) -> ApiSignature | None:
        """Return what its methods take and return; None if that is known once a job has an object."""
        return self._api.signature

    @property
    def class_name(self) -> str | None:
        """Return the name of the user's class."""
        return self._api.class_name

    def load(self) -> None:
        """Import the user's class. Raises: UserError, StorageError."""
        self._api.load()

    def run(self) -> None:
        """Run jobs until `stop`, with the event loop on another thread."""
        threading.Thread(target=self._context.loop.run_forever, name="event-loop", daemon=True).start()
        self.run_jobs()
        self._api.close()

    def run_jobs(self) -> None:
        """Run jobs until `stop`."""
        while (work := self._queue.get()) is not None:
            if isinstance(work, LocalJob) and isinstance(self._api, JobsApi):
                self._api.run(work)
                self._print(work)
            elif isinstance(work, Workload) and isinstance(self._api, AsyncApi):
                view = self._api.run(work)
                if view.status is not WorkloadStatus.FAILED:  # else its traceback is printed
                    shown = view.value.decode(errors="replace")[:_SHOWN_CHARACTERS]
                    print_line(f"workload {view.id} {view.status.value}: {shown}", sys.stderr)

    def stop(self) -> None:
        """Make `run_jobs` return after the job that runs. On any thread."""
        self._queue.put(None)

    def _print(self, job: LocalJob) -> None:
        record, counts = job.record, job.record.counts
        reason = f": {record.message}" if record.message else ""
        lines = [f"job {record.id} {record.status.message}{reason}"]
        if not record.origin.is_task:
            lines[0] += f" ({counts.succeeded} of {counts.batches} batches succeeded)"
        for number, result in enumerate(job.results[:10]):
            if result is not None:
                what = "result" if record.origin.is_task else f"result of batch {number}"
                lines.append(f"  {what}: {json.dumps(result)[:_SHOWN_CHARACTERS]}")
        print_line("\n".join(lines), sys.stderr)
