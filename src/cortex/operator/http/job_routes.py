"""Routes of jobs, at the gateway and at the operator: submit, list, describe, stop, retry, results, logs.

The gateway names the API and the job in headers that no client can set.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from cortex.engine.logs import LogSource
from cortex.errors import CortexError, InputError, MethodNotAllowedError, NotFoundError, SubmissionError
from cortex.jobs.http.view import JobView, job_json, jobs_json, submitted_json
from cortex.jobs.intake.items import split_lines
from cortex.jobs.intake.request_body import RequestMemory, body_pieces, check_utf8, read_body, text_in_utf8
from cortex.jobs.intake.submission import (
    DRY_RUN,
    SubmissionLimits,
    check_query,
    check_workers,
    parse_body,
    parse_upload,
)
from cortex.jobs.spec import JobRecord, Submission
from cortex.operator.access.audit import record_change
from cortex.operator.http.gateway_routes import API_HEADER, JOB_HEADER, GatewayRoutes
from cortex.operator.http.log_format import DEFAULT_TAIL, MAX_TAIL, LogForm
from cortex.operator.http.log_streams import stream_logs
from cortex.operator.jobs.service import JobService
from cortex.telemetry import Logger
from cortex.worker.monitoring.request_log import valid_traceparent

#: Content types of an upload: one JSON value per line, however many.
_UPLOAD_TYPES = frozenset(
    {"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"}
)
#: A larger body is parsed in a thread.
_LARGE_BYTES = 64 * 1024
#: Lines in one chunk of a dry run. The response begins with the first chunk, so earlier errors have a status of 400.
_LINES_PER_PIECE = 200
_TRUE, _FALSE = frozenset({"true", "1", "t", "yes"}), frozenset({"false", "0", "f", "no", ""})
_IF_TOO_LARGE = (
    "raise networking.max_body_size of the API, or send the items as lines of JSON: `cortex submit API --items FILE`,"
    " or the content type application/x-ndjson"
)
_LINES_TYPE = "application/x-ndjson"
#: Status of a response that nobody reads: the client has disconnected.
_CLIENT_CLOSED_REQUEST = 499


def job_routes(jobs: JobService, log_sources: Callable[[], Sequence[LogSource]]) -> APIRouter:
    """Return the routes of the operator's own HTTP API."""
    router = APIRouter(prefix="/v1/apis/{api}/jobs")
    memory = RequestMemory()

    @router.post("")
    async def submit_job(api: str, request: Request) -> Response:
        """Submit a job; with `dryRun=true` only validate it. The body is a submission, or one item per line."""
        try:
            if flag(request, DRY_RUN):
                record_change(request, "dry run", api)
                return await dry_run(request, jobs, api, memory, is_trusted=True)
            job = await submit(request, jobs, api, memory, is_trusted=True)
            record_change(request, job.id, api)
            return answer(await asyncio.to_thread(submitted_json, job))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @router.get("")
    async def list_jobs(api: str, limit: Annotated[int, Query(ge=1, le=1000)] = 10) -> Response:
        """Return the latest jobs of an API, newest first."""
        return answer(await asyncio.to_thread(jobs_json, await jobs.list(api, limit)))

    @router.get("/{job}")
    async def get_job(api: str, job: str) -> Response:
        """Return one job."""
        return answer(await asyncio.to_thread(job_json, await jobs.get(api, job)))

    @router.delete("/{job}")
    async def stop_job(api: str, job: str) -> dict[str, str]:
        """Stop a job."""
        await jobs.stop(api, job)
        return {"message": f"stopped job {job}"}

    @router.post("/{job}/retry")
    async def retry_job(api: str, job: str, request: Request, workers: int | None = None) -> Response:
        """Submit the dead letters of a finished job as a new job."""
        check_query(request.query_params, ("workers",))
        if workers is not None:
            check_workers(workers)
        retried = await jobs.retry_failed(api, job, workers)
        record_change(request, f"{job} as {retried.id}", api)
        return answer(await asyncio.to_thread(submitted_json, retried))

    _add_streams(router, jobs, log_sources)
    return router


def _add_streams(router: APIRouter, jobs: JobService, log_sources: Callable[[], Sequence[LogSource]]) -> None:
    """Add the routes that stream lines."""

    @router.get("/{job}/results")
    async def get_results(api: str, job: str) -> StreamingResponse:
        """Stream the results of a job's batches, one line of JSON each."""
        return StreamingResponse(await begun(jobs.results(api, job)), media_type=_LINES_TYPE)

    @router.get("/{job}/dead-letters")
    async def get_dead_letters(api: str, job: str) -> StreamingResponse:
        """Stream the dead letters of a job (batches that failed for good), one line of JSON each."""
        return StreamingResponse(await begun(jobs.dead_letters(api, job)), media_type=_LINES_TYPE)

    @router.get("/{job}/logs")
    async def get_logs(
        api: str,
        job: str,
        follow: bool = False,
        replica: str | None = None,
        tail: Annotated[int, Query(ge=0, le=MAX_TAIL)] = DEFAULT_TAIL,
        json: bool = False,
    ) -> StreamingResponse:
        """Stream the log lines of a job's workers, in order of time; with `follow`, until the job ends."""
        await jobs.get(api, job)

        async def is_over() -> bool:
            try:
                return (await jobs.get(api, job)).record.status.is_over
            except NotFoundError:  # deleted with its API
                return True

        return stream_logs(log_sources(), f"{api}/{job}", replica, follow, tail, is_over, LogForm(json))


class SubmittedJobs(Protocol):
    """The jobs of the routes at the gateway: those of the operator, or those in memory (`dev.job_server`)."""

    def limits(self, api: str) -> SubmissionLimits:
        """Return the limits of a submission to an API. Raises: NotFoundError."""

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
        """Store a job; `items` is the body of an upload. Raises: CortexError."""

    def dry_run(self, api: str, submission: Submission, *, is_trusted: bool = False) -> AsyncIterator[str]:
        """Validate a submission; yield the lines of the response. Raises: CortexError."""

    async def get(self, api: str, job_id: str) -> JobView:
        """Return one job. Raises: NotFoundError."""

    async def stop(self, api: str, job_id: str) -> None:
        """Stop a job. Raises: NotFoundError, ConflictError if it is over."""


class JobRoutes(GatewayRoutes):
    """ASGI application for BatchAPIs and TaskAPIs."""

    def __init__(self, jobs: SubmittedJobs, logger: Logger) -> None:
        super().__init__(logger)
        self._jobs = jobs
        self._memory = RequestMemory()

    async def _answer(self, request: Request) -> Response:
        api = request.headers[API_HEADER]
        job_id = request.headers.get(JOB_HEADER)
        match request.method:
            case "POST" if job_id is None:
                is_trusted = self._is_trusted(request)
                if flag(request, DRY_RUN):
                    return await dry_run(request, self._jobs, api, self._memory, is_trusted=is_trusted)
                record = await submit(request, self._jobs, api, self._memory, is_trusted=is_trusted)
                return answer(await asyncio.to_thread(submitted_json, record))
            case "GET" | "HEAD":
                job = await self._jobs.get(api, job_id or _named_job(request))
                return answer(await asyncio.to_thread(self._describe, job))
            case "DELETE":
                job_id = job_id or _named_job(request)
                await self._jobs.stop(api, job_id)
                return answer({"message": f"stopped job {job_id}"})
        raise MethodNotAllowedError.of(request.method, "GET, DELETE" if job_id else "POST, GET, DELETE")

    def _is_trusted(self, request: Request) -> bool:
        """Return whether a submission may name any place."""
        return False

    def _describe(self, job: JobView) -> dict[str, Any]:
        return job_json(job, is_owner=False)

    def _error_response(self, request: Request, error: CortexError) -> Response:
        body = {
            "kind": error.code,
            "message": str(error),
            "error": str(error),
            "request_id": request.headers.get("x-cortex-request-id", ""),
        }
        return answer(body, error.http_status)


async def submit(
    request: Request, jobs: SubmittedJobs, api: str, memory: RequestMemory, *, is_trusted: bool = False
) -> JobRecord:
    """Submit the job of a request's body. Raises: CortexError, ClientDisconnect; then nothing is stored."""
    with memory.share() as share:
        submission, items = await _read_submission(request, jobs.limits(api), share.acquire)
        traceparent = valid_traceparent(request.headers.get("traceparent", ""))
        return await jobs.submit(api, submission, items, is_trusted=is_trusted, traceparent=traceparent)


async def dry_run(
    request: Request, jobs: SubmittedJobs, api: str, memory: RequestMemory, *, is_trusted: bool = False
) -> Response:
    """Return the files that a submission would read, or its errors, as lines of text."""
    try:
        limits = jobs.limits(api)
        with memory.share() as share:
            submission, pieces = await _read_submission(request, limits, share.acquire)
            if pieces is not None:
                batch_size = getattr(submission.source, "batch_size", 1)
                async for _ in split_lines(pieces, batch_size, limits.max_batch_bytes):
                    pass
            lines = await begun(_chunks(jobs.dry_run(api, submission, is_trusted=is_trusted)))
    except CortexError as error:
        return Response(f"{error}\n", error.http_status, media_type="text/plain; charset=utf-8")
    return StreamingResponse(lines, media_type="text/plain; charset=utf-8")


async def begun(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Return `items` after the first one arrived, so that an early error is raised here and not in the stream."""
    try:
        first = [await anext(items)]
    except StopAsyncIteration:
        first = []
    return _after(first, items)


def answer(data: Any, status: int = 200) -> Response:
    """Return data as JSON, by the standard library: orjson rejects some configurations, those with large integers."""
    return Response(json.dumps(data), status, media_type="application/json")


def flag(request: Request, name: str) -> bool:
    """Return a boolean query parameter. Raises: InputError."""
    value = request.query_params.get(name, "").lower()
    if value not in _TRUE | _FALSE:
        raise InputError(f"{name}: must be true or false (got {value[:50]}); write {name}=true")
    return value in _TRUE


async def _read_submission(
    request: Request, limits: SubmissionLimits, acquire: Callable[[int], None]
) -> tuple[Submission, AsyncIterator[bytes] | None]:
    """Return the submission of a request and, for an upload, the stream of its body.

    Raises: SubmissionError, TooLargeError, BusyError; and, as its pieces do, ClientDisconnect when the caller is gone.
    """
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind in _UPLOAD_TYPES:
        if limits.is_task:
            raise SubmissionError('a task has no items; send something like {"config": {"key": "value"}} as JSON')
        check_utf8(content_type)
        return parse_upload(dict(request.query_params), limits), body_pieces(request)
    check_query(request.query_params)
    body = await read_body(request, limits.max_body_bytes, acquire, _IF_TOO_LARGE)
    body = text_in_utf8(body, content_type)
    if len(body) > _LARGE_BYTES:
        return await asyncio.to_thread(parse_body, body, limits), None
    return parse_body(body, limits), None


def _named_job(request: Request) -> str:
    job_id = request.query_params.get("jobID", "")
    if not job_id:
        raise InputError("query param required: jobID; write <endpoint>?jobID=<job id>")
    return job_id


async def _chunks(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Join lines into chunks. An error after the first chunk is the last line, since the status is already sent."""
    pieces: list[str] = []
    is_sent = False
    try:
        async for line in lines:
            pieces.append(f"{line}\n")
            if len(pieces) >= _LINES_PER_PIECE:
                yield "".join(pieces)
                is_sent = True
                pieces.clear()
    except CortexError as error:
        if not is_sent:
            raise
        pieces.append(f"{error}\n")
    yield "".join(pieces)


async def _after(first: list[Any], items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    for item in first:
        yield item
    async for item in items:
        yield item
