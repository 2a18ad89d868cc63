"""Pages of APIs: the list of all, and of one its load, replicas, scaling, models and predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from markupsafe import Markup

from cortex.config.schema import APPLICATION_TYPES, COMMAND, Traffic
from cortex.engine.usage import ResourceUsage
from cortex.jobs.async_queue import QueueState
from cortex.lifecycle import ApiKind, ApiStatus
from cortex.operator.autoscaling.policy import Decision
from cortex.operator.dashboard.charts import Chart, ChartLine, line_chart, sparkline
from cortex.operator.dashboard.rendering import Pages
from cortex.operator.dashboard.samples import DAY, HOUR, ApiSample
from cortex.operator.http.api_routes import describe_api, describe_apis
from cortex.operator.http.services import Services
from cortex.payloads.curl import FILE, curl
from cortex.payloads.json_object import Json
from cortex.processes.memory import MemoryUse
from cortex.state.queries.apis import ApiRecord
from cortex.worker.spec import ReplicaStatus

#: Order of the statuses in the list: what needs attention comes first.
_ORDER = [ApiStatus.ERROR, ApiStatus.OOM, ApiStatus.STALLED, ApiStatus.UPDATING, ApiStatus.LIVE]
_TONES = {ApiStatus.LIVE: "good", ApiStatus.UPDATING: "busy", ApiStatus.STALLED: "warn"}
#: Samples over which the list counts errors.
_ERRORS_S = 300.0
_DECISIONS = 20
#: Samples of the small charts in the list.
_SPARK_SAMPLES = 180


@dataclass(frozen=True)
class ChartRange:
    """A range of time that charts show."""

    title: str
    axis: tuple[str, ...]  #: labels of its start, its middle and its end
    count: int  #: number of samples
    is_day: bool = False

    @property
    def seconds(self) -> float:
        """Length of the range."""
        return self.count * (DAY if self.is_day else HOUR)[0]


#: Ranges by their names in addresses; the first is the default.
RANGES = {
    "15m": ChartRange("15 min", ("15 min ago", "7.5 min", "now"), 180),
    "1h": ChartRange("1 hour", ("60 min ago", "30 min", "now"), HOUR[1]),
    "1d": ChartRange("1 day", ("24 h ago", "12 h", "now"), DAY[1], is_day=True),
}


@dataclass(frozen=True)
class ApiRow:
    """An API in the list."""

    api: Json  #: as in `GET /v1/apis`
    load: ApiSample  #: of the last minute
    errors: float  #: part of the requests of the last minutes that failed with 5xx; NaN without requests
    spark: Markup
    oldest_at: float | None = None  #: when the oldest waiting workload of an AsyncAPI was accepted, UNIX seconds

    @property
    def name(self) -> str:
        """Name of the API."""
        return str(self.api["spec"]["name"])

    @property
    def status(self) -> ApiStatus:
        """Status of the API."""
        return ApiStatus(self.api["status"]["status_code"])

    @property
    def tone(self) -> str:
        """Class of the status in the stylesheet."""
        return tone(self.status)

    @property
    def reason(self) -> str:
        """Reason why the API is not live, or has fewer replicas than it should; empty without one."""
        failure = self.api["status"]["failure"]
        return str((failure or {}).get("message") or self.api["scaling_shortage"] or "")

    @property
    def command(self) -> str:
        """Command that calls the API, for one without a documentation page."""
        return call_command(self.api)


def tone(status: ApiStatus) -> str:
    """Return the class of a status in the stylesheet."""
    return _TONES.get(status, "bad")


def call_command(api: Json) -> str:
    """Return a command that calls an API, whose code decides which paths and bodies it takes."""
    handler = api["spec"].get("handler") or {}
    if handler.get("protobuf_path"):
        return f"cortex predict {api['spec']['name']} FILE.json --method METHOD"
    key = " -H 'x-api-key: KEY'" if api["needs_key"] else ""
    if handler.get("type") in (*APPLICATION_TYPES, COMMAND) or api["spec"]["kind"] == ApiKind.SPLITTER:
        return curl("GET", f"{api['endpoint']}/", key=key)
    return curl("POST", api["endpoint"], FILE, key=key)


def api_pages(services: Services, pages: Pages) -> APIRouter:
    """Return the pages."""
    router = APIRouter()

    @router.get("/")
    async def show_apis(request: Request) -> Response:
        """Show every API that the session's token permits."""
        described = await describe_apis(services, only=request.state.principal.api)
        queues = await services.jobs.async_apis.queue_states()
        rows = [_row(services, api, queues.get(api["spec"]["name"])) for api in described]
        rows.sort(key=lambda row: (_ORDER.index(row.status), row.name))
        return pages.page(request, "apis.html", rows=rows, total=_total(rows))

    @router.get("/apis/{api}")
    async def show_api(request: Request, api: str, range: str = "") -> Response:
        """Show one API."""
        record = services.api(api)
        described = await describe_api(services, record)
        statuses = [status for _, status in services.infrastructure.engine.replicas().values() if status.api == api]
        usage = await services.monitoring.metrics.recent_usage()
        range = range if range in RANGES else next(iter(RANGES))
        return pages.page(
            request,
            "api.html",
            row=_row(services, described),
            api=described,
            charts=_charts(services, api, RANGES[range]),
            range=range,
            ranges=RANGES,
            replicas=_replicas(statuses, usage),
            targets=[(each, await api_row(services, each.name)) for each in _targets(services, record)],
            decisions=[decision.to_json() for decision in notable(services.replicas.autoscaler.decisions(api))],
            tab="overview",
        )

    return router


async def api_row(services: Services, name: str) -> ApiRow:
    """Return the row of an API, which each of its pages shows above its content. Raises: NotFoundError."""
    services.api(name)
    return _row(services, (await describe_apis(services, only=name))[0])


def _row(services: Services, api: Json, queue: QueueState | None = None) -> ApiRow:
    name = api["spec"]["name"]
    samples = services.monitoring.load.samples(name)[-_SPARK_SAMPLES:]
    recent = services.monitoring.load.recent(name, _ERRORS_S)
    errors = recent.server_errors_per_s / recent.requests_per_s if recent.requests_per_s > 0 else math.nan
    values = [sample.requests_per_s if sample else math.nan for _, sample in samples]
    oldest_at = queue.oldest_at if queue else None
    return ApiRow(api, services.monitoring.load.recent(name), errors, sparkline(values), oldest_at)


def _total(rows: list[ApiRow]) -> Json:
    """Return the figures above the list."""
    return {
        "live": sum(row.status is ApiStatus.LIVE for row in rows),
        "updating": sum(row.status is ApiStatus.UPDATING for row in rows),
        "failing": sum(row.status not in (ApiStatus.LIVE, ApiStatus.UPDATING) for row in rows),
        "requests_per_s": _sum(row.load.requests_per_s for row in rows),
        "server_errors_per_s": _sum(row.load.server_errors_per_s for row in rows),
        "in_flight": _sum(row.load.in_flight for row in rows),
        "queued": _sum(row.load.queued for row in rows),
    }


def _sum(values: Any) -> float:
    return math.fsum(value for value in values if not math.isnan(value))


def _targets(services: Services, record: ApiRecord) -> list[Traffic]:
    """Return the APIs of a TrafficSplitter that are deployed."""
    return [each for each in record.spec.apis or [] if services.apis.get(each.name) is not None]


def notable(decisions: Sequence[Decision]) -> list[Decision]:
    """Return the newest decision, and the latest ones that changed the number of replicas or found no room for more."""
    kept = [each for each in decisions[:-1] if each.requested != each.current or each.shortage]
    return [*decisions[-1:], *reversed(kept[-_DECISIONS:])]


def _charts(services: Services, api: str, shown: ChartRange) -> list[Json]:
    found = services.monitoring.load.samples(api, shown.is_day)[-shown.count :]
    samples = [sample or ApiSample() for _, sample in found]

    def line(name: str, css: str, field: str, is_filled: bool = False) -> ChartLine:
        return ChartLine(name, css, [getattr(sample, field) for sample in samples], is_filled)

    def chart(title: str, unit: str, lines: list[ChartLine], least_top: float) -> Json:
        made: Chart = line_chart(title, lines, least_top)
        newest = [next((v for v in reversed(each.values) if not math.isnan(v)), math.nan) for each in lines]
        return {"title": title, "unit": unit, "chart": made, "lines": list(zip(lines, newest, strict=True))}

    return [
        chart(
            "Requests",
            "/s",
            [
                line("all", "line-accent", "requests_per_s", True),
                line("4xx", "line-warn", "client_errors_per_s"),
                line("5xx", "line-bad", "server_errors_per_s"),
            ],
            1.0,
        ),
        chart("Latency", "s", [line("p50", "line-accent", "p50_s"), line("p99", "line-violet", "p99_s")], 0.001),
        chart(
            "In flight",
            "",
            [line("in flight", "line-accent", "in_flight", True), line("queued", "line-warn", "queued")],
            1.0,
        ),
        chart(
            "Replicas", "", [line("wanted", "line-mute", "requested"), line("ready", "line-good", "ready", True)], 1.0
        ),
    ]


def _replicas(statuses: list[ReplicaStatus], usage: Mapping[str, ResourceUsage]) -> list[Json]:
    """Return the replicas with their processes, for the table."""
    rows = []
    for status in sorted(statuses, key=lambda status: status.id):
        processes = status.describe_processes()
        deaths = [process["last_death"] for process in processes if process["last_death"]]
        rows.append(
            {
                "id": status.id,
                "node": status.node,
                "revision": status.revision,
                "processes": processes,
                "restarts": sum(process["restarts"] for process in processes),
                "memory_bytes": _memory_bytes(usage[status.id].memory) if status.id in usage else None,
                "last_death": deaths[-1] if deaths else None,
                "states": sorted({process["state"] for process in processes}),
            }
        )
    return rows


def _memory_bytes(memory: MemoryUse) -> int:
    """Return the memory with shared pages counted once; agents of older versions send only the resident memory."""
    return memory.proportional_bytes or memory.resident_bytes
