"""Pages of the workloads of AsyncAPIs: the queues of all, the latest workloads of one, and one workload."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from cortex.errors import UnknownWorkloadError
from cortex.jobs.async_queue import QueueState
from cortex.jobs.spec import WorkloadView
from cortex.lifecycle import ApiKind, WorkloadStatus
from cortex.masking import mask_secrets
from cortex.operator.dashboard.rendering import Pages, shown_json
from cortex.operator.dashboard.security import PREFIX
from cortex.operator.http.services import Services

#: Workloads in the list of one API.
MAX_WORKLOADS = 100
#: Characters of a result or an error that are shown, and of an error in the list.
_MAX_VALUE, _MAX_LISTED = 20_000, 300
_EMPTY = QueueState(0, 0, None)
_TONES = {
    WorkloadStatus.IN_QUEUE: "",
    WorkloadStatus.IN_PROGRESS: "busy",
    WorkloadStatus.COMPLETED: "good",
    WorkloadStatus.FAILED: "bad",
}


@dataclass(frozen=True)
class WorkloadRow:
    """A workload, as the pages show it."""

    view: WorkloadView
    error: str  #: "" unless it has failed

    @property
    def tone(self) -> str:
        """Class of its status in the stylesheet."""
        return _TONES[self.view.status]

    @property
    def status(self) -> str:
        """Its status in words."""
        return self.view.status.value.replace("_", " ")

    @property
    def elapsed_s(self) -> float | None:
        """Time from its acceptance to its end; None while it is open."""
        return None if self.view.ended_at is None else self.view.ended_at - self.view.created_at


def workload_pages(services: Services, pages: Pages) -> APIRouter:
    """Return the pages."""
    router = APIRouter(prefix="/workloads")

    @router.get("")
    async def show_queues(request: Request) -> Response:
        """Show the queue of each AsyncAPI that the session's token permits."""
        only, states = request.state.principal.api, await services.jobs.async_apis.queue_states()
        names = [each.name for each in services.apis.records() if each.spec.kind is ApiKind.ASYNC]
        queues = {name: states.get(name, _EMPTY) for name in sorted(names) if only in (None, name)}
        return pages.page(request, "jobs/queues.html", queues=queues)

    @router.get("/{api}")
    async def show_workloads(request: Request, api: str, status: str = "", id: str = "") -> Response:
        """Show the latest workloads of an API; with an id, open that one."""
        chosen = WorkloadStatus(status) if status in set(WorkloadStatus) else None
        found = await services.jobs.async_apis.recent(api, chosen, MAX_WORKLOADS)
        if id.strip():
            return RedirectResponse(f"{PREFIX}/workloads/{api}/{_parse(id)}", 303)
        return pages.page(
            request,
            "jobs/workloads.html",
            api=api,
            queue=(await services.jobs.async_apis.queue_states()).get(api, _EMPTY),
            rows=[_row(view, _MAX_LISTED) for view in found],
            statuses=list(WorkloadStatus),
            status=chosen,
            limit=MAX_WORKLOADS,
        )

    @router.get("/{api}/{workload}")
    async def show_workload(request: Request, api: str, workload: str) -> Response:
        """Show one workload, with its result or its error."""
        view = await services.jobs.async_apis.get(api, _parse(workload), 0.0)
        if view is None:
            raise UnknownWorkloadError(workload[:100])
        result = shown_json(view.value) if view.status is WorkloadStatus.COMPLETED else ""
        return pages.page(
            request,
            "jobs/workload.html",
            api=api,
            row=_row(view),
            result=result[:_MAX_VALUE],
            is_cut=len(result) > _MAX_VALUE,
        )

    return router


def _parse(text: str) -> uuid.UUID:
    """Return the id of a workload. Raises: UnknownWorkloadError."""
    try:
        return uuid.UUID(text.strip())
    except ValueError:
        raise UnknownWorkloadError(text[:100]) from None


def _row(view: WorkloadView, limit: int = _MAX_VALUE) -> WorkloadRow:
    is_failed = view.status is WorkloadStatus.FAILED
    return WorkloadRow(view, mask_secrets(view.value.decode(errors="replace"))[:limit] if is_failed else "")
