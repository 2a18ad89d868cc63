"""Pages of jobs: the list of all, and of one its progress, errors, logs and submission, with a button that stops it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from cortex.errors import InputError
from cortex.jobs.http.view import JobView, masked_api_spec, masked_spec, status_json
from cortex.jobs.records import JobFilter
from cortex.jobs.spec import DeadLetter
from cortex.lifecycle import JobStatus
from cortex.masking import mask_secrets
from cortex.operator.access.audit import record_change
from cortex.operator.dashboard.pages.logs import MAX_LINES, styled_lines
from cortex.operator.dashboard.rendering import Pages, done, shown_json
from cortex.operator.dashboard.security import PREFIX, form_of
from cortex.operator.http.log_format import LogForm
from cortex.operator.http.log_streams import read_logs
from cortex.operator.http.services import Services
from cortex.payloads.json_object import Json

#: Jobs on one page of the list.
PAGE_JOBS = 50
#: Dead letters on one page, and the characters of each that are shown.
PAGE_LETTERS = 20
_MAX_ERROR, _MAX_TRACEBACK, _MAX_PAYLOAD = 1_000, 8_000, 4_000
#: Groups of errors that the page of a job shows.
_MAX_ERRORS = 20
_LARGEST_NUMBER = 2**31 - 1
_UNFINISHED = frozenset(status for status in JobStatus if not status.is_over)
#: Groups of statuses by which the list can be filtered.
STATUSES: Mapping[str, frozenset[JobStatus]] = {
    "unfinished": _UNFINISHED,
    "succeeded": frozenset({JobStatus.SUCCEEDED}),
    "failed": frozenset(JobStatus) - _UNFINISHED - {JobStatus.SUCCEEDED, JobStatus.STOPPED},
    "stopped": frozenset({JobStatus.STOPPED}),
}
_TONES = {
    JobStatus.SUCCEEDED: "good",
    JobStatus.STOPPED: "",
    JobStatus.PENDING: "",
    JobStatus.COMPLETED_WITH_FAILURES: "warn",
} | dict.fromkeys((JobStatus.ENQUEUING, JobStatus.RUNNING, JobStatus.COMPLETING), "busy")


@dataclass(frozen=True)
class JobRow:
    """A job, as the list and its own pages show it."""

    view: JobView
    status: Json  #: `job_status` of the HTTP API
    now: float  #: UNIX seconds
    is_deployed: bool  #: its API is

    @property
    def path(self) -> str:
        """Path of its page."""
        return job_path(self.view.record.origin.api, self.view.record.id)

    @property
    def tone(self) -> str:
        """Class of its status in the stylesheet."""
        return _TONES.get(self.view.record.status, "bad")

    @property
    def is_over(self) -> bool:
        """True if it has ended."""
        return self.view.record.status.is_over

    @property
    def can_retry(self) -> bool:
        """True if a new job can run its dead letters, or the call of a task, again."""
        record = self.view.record
        is_failed_task = record.origin.is_task and record.status is not JobStatus.SUCCEEDED
        return self.is_deployed and self.is_over and (record.counts.failed > 0 or is_failed_task)

    @property
    def finished(self) -> int:
        """Number of batches that have succeeded or failed for good."""
        return self.view.record.counts.succeeded + self.view.record.counts.failed

    @property
    def share(self) -> float:
        """Finished part of the batches, from 0 to 1."""
        return self.finished / max(1, self.view.record.counts.batches)

    @property
    def elapsed_s(self) -> float:
        """Time from its submission to its end, or until now."""
        return (self.view.record.ended_at or self.now) - self.view.record.created_at

    @property
    def items_per_s(self) -> float | None:
        """Finished items per second since its first worker began; None before the first batch."""
        counts = self.view.record.counts
        return self._per_second(counts.succeeded_items + counts.failed_items)

    @property
    def remaining_s(self) -> float | None:
        """Expected time to its last batch, if the rest is as fast as what is finished; None if unknown."""
        if self.is_over or not (rate := self._per_second(self.finished)):
            return None
        return self.view.record.counts.open / rate

    def _per_second(self, count: int) -> float | None:
        record = self.view.record
        if record.started_at is None or not count:
            return None
        return count / max((record.ended_at or self.now) - record.started_at, 0.001)


@dataclass(frozen=True)
class ShownLetter:
    """A dead letter, cut to what fits on a page, with its secrets masked."""

    letter: DeadLetter
    error: str
    traceback: str  #: its end, where the exception is
    payload: str  #: "" if it is too large
    is_cut: bool  #: the payload is longer
    retries: Sequence[JobRow]  #: jobs that contain it, the newest first


def job_path(api: str, job: str) -> str:
    """Return the path of a job's page."""
    return f"{PREFIX}/jobs/{api}/{job}"


def job_pages(services: Services, pages: Pages) -> APIRouter:
    """Return the pages."""
    router = APIRouter()

    @router.get("/jobs")
    async def show_jobs(
        request: Request,
        api: str = "",
        status: str = "",
        before: Annotated[int | None, Query(ge=1, le=_LARGEST_NUMBER)] = None,
    ) -> Response:
        """Show the jobs that the session's token permits, newest first."""
        only = request.state.principal.api
        chosen = JobFilter(only or api.strip() or None, STATUSES.get(status, frozenset()), before)
        found = await services.jobs.service.list(chosen, PAGE_JOBS + 1)
        deployed = [each for each in services.apis.records() if only in (None, each.name)]
        names = {each.name for each in deployed if each.spec.kind.runs_jobs} | set(filter(None, [chosen.api]))
        return pages.page(
            request,
            "jobs/list.html",
            rows=await _rows(services, found[:PAGE_JOBS]),
            following=found[PAGE_JOBS - 1].record.number if len(found) > PAGE_JOBS else None,
            apis=sorted(names),
            api=chosen.api or "",
            statuses=STATUSES,
            status=status,
            before=before,
        )

    @router.get("/jobs/{api}/{job}")
    async def show_job(request: Request, api: str, job: str) -> Response:
        """Show the progress of a job, and its errors."""
        row = await job_row(services, api, job)
        errors = await services.jobs.service.errors(api, job) if row.view.record.counts.failed else []
        return pages.page(
            request,
            "jobs/job.html",
            row=row,
            tab="",
            errors=errors[:_MAX_ERRORS],
            kinds=len(errors),
            retries=await _retries(services, api, job),
        )

    @router.get("/jobs/{api}/{job}/dead-letters")
    async def show_dead_letters(
        request: Request, api: str, job: str, after: Annotated[int, Query(ge=-1, le=_LARGEST_NUMBER)] = -1
    ) -> Response:
        """Show the batches of a job that failed for good."""
        row = await job_row(services, api, job)
        found = await services.jobs.service.read_dead_letters(api, job, after, PAGE_LETTERS)
        has_more = bool(found and await services.jobs.service.read_dead_letters(api, job, found[-1].seq, 1))
        retries = await _retries(services, api, job)
        return pages.page(
            request,
            "jobs/dead_letters.html",
            row=row,
            tab="dead-letters",
            letters=await asyncio.to_thread(lambda: [_shown(letter, retries) for letter in found]),
            after=after,
            following=found[-1].seq if has_more else None,
        )

    @router.get("/jobs/{api}/{job}/logs")
    async def show_logs(
        request: Request, api: str, job: str, lines: Annotated[int, Query(ge=1, le=MAX_LINES)] = 200
    ) -> Response:
        """Show the newest lines of a job's workers."""
        row = await job_row(services, api, job)
        found = await read_logs(services.log_sources(), f"{api}/{job}", None, lines, LogForm())
        return pages.page(request, "jobs/logs.html", row=row, tab="logs", lines=styled_lines(found), count=lines)

    @router.get("/jobs/{api}/{job}/submission")
    async def show_submission(request: Request, api: str, job: str) -> Response:
        """Show what was submitted, without the items, and the configuration of the API at that time."""
        row = await job_row(services, api, job)
        submission, _ = await asyncio.to_thread(masked_spec, row.view.record)
        return pages.page(
            request,
            "jobs/submission.html",
            row=row,
            tab="submission",
            submission={key: value for key, value in submission.items() if value not in (None, "")},
            api_spec=masked_api_spec(row.view.record),
        )

    @router.post("/jobs/{api}/{job}/stop")
    async def stop(request: Request, api: str, job: str) -> Response:
        """Stop the job, and abandon its running batches."""
        await services.jobs.service.stop(api, job)
        return done(request, job_path(api, job), f"stopped job {job}")

    @router.post("/jobs/{api}/{job}/retry")
    async def retry(request: Request, api: str, job: str) -> Response:
        """Submit the dead letters of the job, or the one that the form names, as a new job."""
        seq = form_of(request).get("seq")
        if seq is not None and not (seq.isascii() and seq.isdigit() and len(seq) < 10):
            raise InputError(f"{seq[:20]!r} is not the number of a dead letter")
        retried = await services.jobs.service.retry_failed(api, job, seq=None if seq is None else int(seq))
        what = job if seq is None else f"batch {seq} of {job}"
        record_change(request, f"{what} as {retried.id}", api)
        return done(request, job_path(api, retried.id), f"submitted as a retry of {what}")

    return router


def _shown(letter: DeadLetter, retries: Sequence[JobRow]) -> ShownLetter:
    payload = shown_json(letter.payload)
    return ShownLetter(
        letter,
        error=mask_secrets(letter.error)[:_MAX_ERROR],
        traceback=mask_secrets(letter.traceback)[-_MAX_TRACEBACK:],
        payload=payload[:_MAX_PAYLOAD],
        is_cut=len(payload) > _MAX_PAYLOAD,
        retries=[row for row in retries if row.view.record.source.get("seq") in (None, letter.seq)],
    )


async def _retries(services: Services, api: str, job: str) -> list[JobRow]:
    return await _rows(services, await services.jobs.service.retries(api, job))


async def job_row(services: Services, api: str, job: str) -> JobRow:
    """Return what every page of a job shows. Raises: NotFoundError."""
    (row,) = await _rows(services, [await services.jobs.service.get(api, job)])
    return row


async def _rows(services: Services, views: Sequence[JobView]) -> list[JobRow]:
    """Return what a page shows of jobs; in a thread, because masking a large configuration takes tenths of a second."""
    return await asyncio.to_thread(lambda: [_row(services, view) for view in views])


def _row(services: Services, view: JobView) -> JobRow:
    is_deployed = services.apis.get(view.record.origin.api) is not None
    return JobRow(view, status_json(view), time.time(), is_deployed)
