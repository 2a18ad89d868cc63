"""Routes of jobs: those of the gateway, and lists, results, dead letters, retries and logs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from cortex.engine.logs import LogSource
from cortex.errors import NotFoundError
from cortex.jobs.http.endpoints import JobsPort, answer, begun, dry_run, flag, submit
from cortex.jobs.http.view import JobView, job_json, jobs_json, submitted_json
from cortex.jobs.intake.request_body import RequestMemory
from cortex.jobs.intake.submission import check_workers
from cortex.jobs.spec import JobRecord
from cortex.operator.http.log_format import DEFAULT_TAIL, MAX_TAIL, LogForm
from cortex.operator.http.log_streams import stream_logs

_LINES = "application/x-ndjson"
#: Status of a response that nobody reads: the client has disconnected.
_CLIENT_CLOSED_REQUEST = 499


class OperatorJobs(JobsPort, Protocol):
    """Job operations that these routes use."""

    async def list(self, api: str, limit: int) -> list[JobView]: ...

    async def retry_failed(self, api: str, job_id: str, workers: int | None) -> JobRecord: ...

    def results(self, api: str, job_id: str) -> AsyncIterator[bytes]: ...

    def dead_letters(self, api: str, job_id: str) -> AsyncIterator[bytes]: ...


def job_routes(jobs: OperatorJobs, log_sources: Callable[[], Sequence[LogSource]]) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/apis/{api}/jobs")
    memory = RequestMemory()

    @router.post("")
    async def submit_job(api: str, request: Request) -> Response:
        """Submit a job; with `dryRun=true` only validate it. The body is a submission, or one item per line."""
        try:
            if flag(request, "dryRun"):
                return await dry_run(request, jobs, api, memory, is_trusted=True)
            return answer(submitted_json(await submit(request, jobs, api, memory, is_trusted=True)))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @router.get("")
    async def list_jobs(api: str, limit: Annotated[int, Query(ge=1, le=1000)] = 10) -> Response:
        """Return the latest jobs of an API, newest first."""
        return answer(jobs_json(await jobs.list(api, limit)))

    @router.get("/{job}")
    async def get_job(api: str, job: str) -> Response:
        """Return one job."""
        return answer(job_json(await jobs.get(api, job)))

    @router.delete("/{job}")
    async def stop_job(api: str, job: str) -> dict[str, str]:
        """Stop a job."""
        await jobs.stop(api, job)
        return {"message": f"stopped job {job}"}

    @router.post("/{job}/retry")
    async def retry_job(api: str, job: str, workers: int | None = None) -> Response:
        """Submit the dead letters of a finished job as a new job."""
        if workers is not None:
            check_workers(workers)
        return answer(submitted_json(await jobs.retry_failed(api, job, workers)))

    _add_streams(router, jobs, log_sources)
    return router


def _add_streams(router: APIRouter, jobs: OperatorJobs, log_sources: Callable[[], Sequence[LogSource]]) -> None:
    """Add the routes that stream lines."""

    @router.get("/{job}/results")
    async def get_results(api: str, job: str) -> StreamingResponse:
        """Stream the results of a job's batches, one line of JSON each."""
        return StreamingResponse(await begun(jobs.results(api, job)), media_type=_LINES)

    @router.get("/{job}/dead-letters")
    async def get_dead_letters(api: str, job: str) -> StreamingResponse:
        """Stream the dead letters of a job (batches that failed for good), one line of JSON each."""
        return StreamingResponse(await begun(jobs.dead_letters(api, job)), media_type=_LINES)

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
