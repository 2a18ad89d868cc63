"""Page of an API's logs: the newest lines of all replicas, of one replica, or of one request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from cortex.engine.logs import LogLine
from cortex.operator.dashboard.pages.apis import api_row
from cortex.operator.dashboard.rendering import Pages
from cortex.operator.http.log_format import LogForm, line_fields
from cortex.operator.http.log_streams import read_logs
from cortex.operator.http.services import Services

MAX_LINES = 2_000
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")
_ERROR_LEVELS = frozenset({"error", "critical"})


def log_pages(services: Services, pages: Pages) -> APIRouter:
    """Return the page."""
    router = APIRouter()

    @router.get("/apis/{api}/logs")
    async def show_logs(
        request: Request,
        api: str,
        id: str = "",
        replica: str = "",
        lines: Annotated[int, Query(ge=1, le=MAX_LINES)] = 200,
    ) -> Response:
        """Show log lines; `id` selects those of a request."""
        row = await api_row(services, api)
        id, replica = id.strip(), replica.strip()
        form = LogForm(request=id if _REQUEST_ID.fullmatch(id) else None)
        found = await read_logs(services.log_sources(), api, replica or None, lines, form)
        return pages.page(
            request,
            "api_logs.html",
            row=row,
            tab="logs",
            lines=styled_lines(found),
            id=id,
            replica=replica,
            count=lines,
            replicas=sorted(s.id for _, s in services.infrastructure.engine.replicas().values() if s.api == api),
        )

    return router


def styled_lines(lines: Iterable[LogLine]) -> list[dict[str, Any]]:
    """Return log lines as the fields of their JSON, with their class in the stylesheet as `css`."""
    found = [line_fields(line) for line in lines]
    return [each | {"css": _css(each)} for each in found]


def _css(line: dict[str, Any]) -> str:
    if line["stream"] == "supervisor":
        return "log-supervisor"
    if line.get("level") in _ERROR_LEVELS:
        return "log-error"
    return "log-warning" if line.get("level") == "warning" else f"log-{line['stream']}"
