"""Complete jobs whose batches are all resolved: write results, queue `on_job_complete`, send webhooks.

Each finished step is stored, so that the next operator continues where this one stopped:

    completing ---> results written, hook queued ---> hook reported: job is over ---> webhook acknowledged
                    (batch jobs only)                 (by `batch_queue`)              (with retries)

Also writes the operator's own lines in the log of a job.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from cortex.engine.log_writer import LogWriter
from cortex.errors import CortexError, DatabaseUnavailableError, StorageError, WebhookError
from cortex.home import Home
from cortex.jobs.batch_queue import add_hook, has_hook
from cortex.jobs.http.view import JobView, WorkerCounts, status_json
from cortex.jobs.http.webhook import retry_delays, send_webhook
from cortex.jobs.lease_expiry import DEATH_ERROR
from cortex.jobs.output import write_results
from cortex.jobs.queries import read_dead_letters
from cortex.jobs.records import DUE, SENT, WEBHOOK, ids_marked, put_mark
from cortex.jobs.spec import FROM_ENDPOINT, DeadLetter, JobRecord
from cortex.jobs.store import JobStore
from cortex.lifecycle import DeathCause, JobStatus
from cortex.telemetry import Logger

#: Maximum number of attempts to write the results.
MAX_ATTEMPTS = 3
_RETRY_S = 5.0
_OUT_OF_MEMORY = DEATH_ERROR.format(cause=DeathCause.OUT_OF_MEMORY.value)
_LOG_FILE = "job.log"


class JobCompletion:
    """Completes jobs, each in its own asyncio task."""

    def __init__(self, store: JobStore, log: JobLog, environ: Mapping[str, str], logger: Logger) -> None:
        self._store = store
        self._log = log
        self._environ = environ
        self._logger = logger
        self._completing: dict[str, asyncio.Task[None]] = {}
        self._notifying: set[asyncio.Task[None]] = set()

    async def startup(self) -> None:
        """Send the webhooks that a previous operator has left."""
        for job_id in await self._store.read(ids_marked, WEBHOOK, DUE):
            if (job := await self._store.get(job_id)) and job.status.is_over:
                self._in_background(self._send_webhook(job))

    async def shutdown(self) -> None:
        """Cancel all work; the next operator continues it."""
        tasks = [*self._completing.values(), *self._notifying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, job: JobRecord, on_end: Callable[[], None]) -> None:
        """Complete a job in the background, up to its hook, unless that has begun; then call `on_end`."""
        if job.id not in self._completing:
            self._completing[job.id] = asyncio.create_task(self._run(job, on_end), name=f"complete {job.id}")

    def cancel(self, job_id: str) -> None:
        """Cancel the completion of a job that is over."""
        if task := self._completing.pop(job_id, None):
            task.cancel()

    def notify_end(self, job: JobRecord) -> None:
        """Log the end of a job and send its webhook."""
        self._log.ended(job)
        if job.options.webhook:
            self._in_background(self._send_webhook(job))

    async def _run(self, job: JobRecord, on_end: Callable[[], None]) -> None:
        try:
            await self._complete(job)
        except DatabaseUnavailableError as error:
            self._logger.error("completing a job waits for the database", job=job.id, error=error)
            self._completing.pop(job.id, None)  # the next pass begins it again
            return
        on_end()

    async def _complete(self, job: JobRecord) -> None:
        try:
            if job.origin.is_task:
                await self._store.change(job.id, *task_end(job, await self._store.read(read_dead_letters, job.id)))
            elif not await self._store.read(has_hook, job.number):
                await self._write_results(job)
                await self._store.write(add_hook, job.id)
        except DatabaseUnavailableError:
            raise
        except Exception as error:  # the job must end after any error
            known = isinstance(error, CortexError)
            self._logger.error("completing a job failed", None if known else error, job=job.id, error=error)
            await self._store.change(job.id, JobStatus.UNEXPECTED_ERROR, str(error) or type(error).__name__)

    async def _write_results(self, job: JobRecord) -> None:
        if job.options.output is None:
            return
        folders = _networking(job).get("local_paths") or ()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await write_results(self._store, job, self._environ, folders)
                return
            except StorageError as error:
                if attempt == MAX_ATTEMPTS:
                    raise StorageError(f"the results could not be written: {error}; they are kept by cortex") from error
                self._log.of(job)(f"the results could not be written, trying again: {error}")
                await asyncio.sleep(_RETRY_S * attempt)

    async def _send_webhook(self, job: JobRecord) -> None:
        # Not orjson, which rejects values that a configuration may hold, such as integers of more than 64 bits.
        status = await asyncio.to_thread(status_json, JobView(job, "", WorkerCounts.at_end(job)))
        body = json.dumps({"job_status": status}).encode()
        hosts = (_networking(job).get("webhook_hosts") or ()) if FROM_ENDPOINT in job.source else None
        for delay in (*retry_delays(), None):
            try:
                await send_webhook(job.options.webhook or "", body, job.id, hosts=hosts)
                break
            except WebhookError as error:
                if delay is None:
                    self._log.of(job)(f"webhook: {error}; given up")
                    break
                self._log.of(job)(f"webhook: {error}; trying again in {delay:g} s")
                await asyncio.sleep(delay)
        await self._store.write(put_mark, job.id, WEBHOOK, SENT)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)


def _networking(job: JobRecord) -> dict[str, Any]:
    """Return this section of a job's API as stored; another version may have written other parts of it."""
    found: dict[str, Any] = json.loads(job.origin.spec).get("networking", {})
    return found


def task_end(job: JobRecord, letters: Sequence[DeadLetter]) -> tuple[JobStatus, str, str]:
    """Return the status, message and traceback of a task that has run, from its dead letters."""
    if not letters:
        return JobStatus.SUCCEEDED, "", ""
    letter = letters[0]
    status = JobStatus.WORKER_OOM if letter.error.startswith(_OUT_OF_MEMORY) else JobStatus.WORKER_ERROR
    attempts = f" (attempt {letter.attempts} of {job.options.max_attempts})" if job.options.max_attempts > 1 else ""
    return status, letter.error + attempts, letter.traceback


class JobLog:
    """Writes the operator's own lines to the logs of jobs, beside those of the workers."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def folder(self, api: str, job_id: str) -> Path:
        """Return the log folder of a job: one file per worker and one of the operator."""
        return self._home.logs_dir / api / job_id

    def line(self, api: str, job_id: str, text: str) -> None:
        """Write a line to the log of a job."""
        writer = LogWriter(self.folder(api, job_id) / _LOG_FILE)
        writer.line(0, "s", text)
        writer.close()

    def of(self, job: JobRecord) -> Callable[[str], None]:
        """Return a function that writes lines to the log of one job."""
        return lambda text: self.line(job.origin.api, job.id, text)

    def ended(self, job: JobRecord) -> None:
        """Write the end of a job."""
        counts = job.counts
        text = job.status.message
        if not job.origin.is_task:
            text += f": {counts.succeeded} of {counts.batches} batches succeeded, {counts.failed} failed"
        if job.message and job.status not in (JobStatus.SUCCEEDED, JobStatus.STOPPED):
            text += f"; {job.message}"
        self.line(job.origin.api, job.id, text + (f"\n{job.traceback}" if job.traceback else ""))
