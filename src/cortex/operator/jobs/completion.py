"""Ends jobs whose batches are all resolved: results written, `on_job_complete` called, the webhook told.

What was done is marked in the store, so that an operator that takes over goes on where this one was.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping

from cortex.errors import CortexError, DatabaseUnavailableError, StorageError
from cortex.jobs.http.view import JobView, status_json
from cortex.jobs.http.webhook import WebhookError, retry_delays, tell
from cortex.jobs.output import write_results
from cortex.jobs.records import DUE, TOLD, WEBHOOK
from cortex.jobs.spec import JobRecord
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.operator.jobs.hooks import HookLost
from cortex.operator.jobs.log import JobLog
from cortex.operator.jobs.tasks import task_end
from cortex.telemetry import Logger

#: How often a process may die inside `on_job_complete`, and how often the results may fail to be written.
MAX_ATTEMPTS = 3
_RETRY_S = 5.0
_HOOK_DEATHS = "hook_deaths"


class Completion:
    """The ends of all jobs, each in a task of its own."""

    def __init__(
        self, store: JobStore, dispatcher: Dispatcher, log: JobLog, environ: Mapping[str, str], logger: Logger
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._log = log
        self._environ = environ
        self._logger = logger
        self._completing: dict[str, asyncio.Task[None]] = {}
        self._announcing: set[asyncio.Task[None]] = set()

    async def startup(self) -> None:
        """Tell the webhooks that an earlier operator still had to."""
        for job_id in await self._store.jobs_marked(WEBHOOK, DUE):
            if (job := await self._store.get(job_id)) and job.status.is_over:
                self._in_background(self._tell_webhook(job))

    async def shutdown(self) -> None:
        """Stop; another operator goes on."""
        tasks = [*self._completing.values(), *self._announcing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, job: JobRecord, on_end: Callable[[], None]) -> None:
        """Complete a job in the background, unless that is going on."""
        if job.id not in self._completing:
            self._completing[job.id] = asyncio.create_task(self._run(job, on_end), name=f"complete {job.id}")

    def cancel(self, job_id: str) -> None:
        """Forget a job that is over."""
        if task := self._completing.pop(job_id, None):
            task.cancel()

    def announce(self, job: JobRecord) -> None:
        """Say in the log, and to the webhook, that a job is over."""
        self._log.ended(job)
        if job.options.webhook:
            self._in_background(self._tell_webhook(job))

    async def _run(self, job: JobRecord, on_end: Callable[[], None]) -> None:
        try:
            await self._end(job)
        except DatabaseUnavailableError as error:
            self._logger.error("completing a job waits", job=job.id, error=error)
            self._completing.pop(job.id, None)  # the next pass takes it up again
            return
        on_end()

    async def _end(self, job: JobRecord) -> None:
        try:
            status, message, traceback = await self._complete(job)
        except DatabaseUnavailableError:
            raise
        except Exception as error:  # the job must end, whatever is wrong
            known = isinstance(error, CortexError)
            self._logger.error("completing a job failed", None if known else error, job=job.id, error=error)
            status, message, traceback = JobStatus.UNEXPECTED_ERROR, str(error) or type(error).__name__, ""
        await self._store.change(job.id, status, message, traceback)

    async def _complete(self, job: JobRecord) -> tuple[JobStatus, str, str]:
        if job.origin.is_task:
            return task_end(job, await self._store.dead_letters(job.id))
        await self._write_results(job)
        deaths = int((await self._store.marks(job.id)).get(_HOOK_DEATHS, "0"))
        while isinstance(outcome := await self._dispatcher.run_hook(job.id), HookLost):
            deaths += 1
            await self._store.set_mark(job.id, _HOOK_DEATHS, str(deaths))
            if deaths >= MAX_ATTEMPTS:
                cause = f", the last time: {outcome.cause}" if outcome.cause else ""
                return JobStatus.WORKER_ERROR, f"the worker's process died {deaths} times in on_job_complete{cause}", ""
        if outcome.error:
            return JobStatus.WORKER_ERROR, f"on_job_complete raised {outcome.error}", outcome.traceback
        counts = job.counts
        if not counts.failed:
            return JobStatus.SUCCEEDED, "", ""
        message = f"{counts.failed} of {counts.batches} batches are dead letters"
        return JobStatus.COMPLETED_WITH_FAILURES, message, ""

    async def _write_results(self, job: JobRecord) -> None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await write_results(self._store, job, self._environ)
                return
            except StorageError as error:
                if attempt == MAX_ATTEMPTS:
                    raise StorageError(f"the results could not be written: {error}; they are kept here") from error
                self._log.of(job)(f"the results could not be written, trying again: {error}")
                await asyncio.sleep(_RETRY_S * attempt)

    async def _tell_webhook(self, job: JobRecord) -> None:
        # Not orjson, which refuses what a configuration may hold: integers of more than 64 bits, say.
        body = json.dumps({"job_status": status_json(JobView(job, ""))}).encode()
        for delay in (*retry_delays(), None):
            try:
                await tell(job.options.webhook or "", body, job.id)
                break
            except WebhookError as error:
                if delay is None:
                    self._log.of(job)(f"webhook: {error}; given up")
                    break
                self._log.of(job)(f"webhook: {error}; trying again in {delay:g} s")
                await asyncio.sleep(delay)
        await self._store.set_mark(job.id, WEBHOOK, TOLD)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)
