"""Page of schedules: the next and the last run of each, and a button that runs one now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from cortex.errors import NotFoundError
from cortex.operator.access.audit import record_change
from cortex.operator.dashboard.pages.jobs import JobRow, job_path, job_row
from cortex.operator.dashboard.rendering import Pages, done
from cortex.operator.http.services import Services
from cortex.state.queries.apis import ApiRecord


@dataclass(frozen=True)
class ScheduleRow:
    """The schedule of an API."""

    api: str
    kind: str
    schedule: dict[str, Any]  #: as in `GET /v1/apis/{api}`
    last: JobRow | None  #: job of the last run; None before it, and if it is deleted


def schedule_pages(services: Services, pages: Pages) -> APIRouter:
    """Return the pages."""
    router = APIRouter(prefix="/schedules")

    @router.get("")
    async def show_schedules(request: Request) -> Response:
        """Show every schedule that the session's token permits, by its next run."""
        only = request.state.principal.api
        scheduled = [each for each in services.apis.records() if each.spec.schedule and only in (None, each.name)]
        rows = [await _row(services, record) for record in scheduled]
        rows.sort(key=lambda row: (row.schedule["next_run"] is None, row.api))
        return pages.page(request, "jobs/schedules.html", rows=rows)

    @router.post("/{api}/run")
    async def run(request: Request, api: str) -> Response:
        """Submit the job of a schedule now."""
        job = await services.jobs.schedules.run_now(services.api(api))
        record_change(request, job.id, api)
        return done(request, job_path(api, job.id), f"submitted the job of the schedule of {api}")

    return router


async def _row(services: Services, record: ApiRecord) -> ScheduleRow:
    schedule = await services.jobs.schedules.describe(record)
    assert schedule is not None
    try:
        last = await job_row(services, record.name, schedule["last_job_id"] or "")
    except NotFoundError:
        last = None
    return ScheduleRow(record.name, record.kind, schedule, last)
