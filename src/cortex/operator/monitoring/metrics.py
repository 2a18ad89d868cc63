"""The `/metrics` page: gathers all metrics of the installation and formats them for Prometheus."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from cortex import __version__
from cortex.config.schema import Api
from cortex.engine.usage import RecentUsage, ResourceUsage
from cortex.errors import GatewayError
from cortex.gateway.base import Gateway
from cortex.gateway.statistics import BackendStats
from cortex.jobs.records import count_by_status
from cortex.jobs.schedule_state import read_schedules
from cortex.jobs.store import JobStore
from cortex.lifecycle import ApiKind, DeathCause, JobStatus
from cortex.operator.canary.trials import Trials
from cortex.operator.certificates import ServedCertificate
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.replicas.status import ApiState
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger
from cortex.worker.monitoring.exchange_writer import RECORDED_KEY, UNRECORDED_KEYS
from cortex.worker.monitoring.metrics import (
    ABORTED,
    DEATHS,
    DURATION_BOUNDS_S,
    HANDLER,
    INITIAL_STATUSES,
    RELOADS,
    REQUESTS,
    SeriesKind,
    escape_surrogates,
    parse_key,
    series_key,
)

#: Help texts of cortex's own metrics, in the order of the page. Users' metrics have none.
HELP: Mapping[str, str] = {
    "cortex_build_info": "Version of the operator; always 1.",
    "cortex_refused_connections_total": "Connections and HTTP/2 requests above the gateway's limit for one address.",
    "cortex_certificate_expiry_timestamp_seconds": "UNIX time at which the certificate expires that is served.",
    "cortex_requests_total": "Responses of the gateway by class of the status code; other: the client disconnected.",
    "cortex_requests_in_flight": "Requests inside the replicas.",
    "cortex_queue_length": "Requests waiting in the gateway for a replica.",
    "cortex_request_timeout_seconds": "networking.timeout, after which callers receive 504.",
    "cortex_replicas": "Replicas by state.",
    "cortex_replicas_wanted": "Desired replicas.",
    "cortex_replica_cpu_seconds_total": "CPU time of a replica's processes.",
    "cortex_replica_memory_bytes": "Resident memory of a replica's processes.",
    "cortex_replica_proportional_memory_bytes": "Memory of a replica's processes, with their shares of shared pages.",
    "cortex_replica_private_memory_bytes": "Memory that only one process has, of a replica's processes.",
    "cortex_replica_gpu_memory_bytes": "Used memory of a replica's GPU.",
    "cortex_replica_gpu_utilization": "Part of the time in which a replica's GPU ran a kernel, 0 to 1.",
    "cortex_replica_requests_total": "Responses of replicas by status code, including those for a process that died.",
    "cortex_aborted_responses_total": "Responses that replicas began and did not complete.",
    "cortex_request_queue_seconds": "Time from a request's arrival at the gateway to the start of its call.",
    "cortex_request_handler_seconds": "Time in the user's code.",
    "cortex_request_duration_seconds": "Time from a request's arrival at the gateway to its response.",
    "cortex_route_requests_total": "Responses of an application by route template.",
    "cortex_grpc_calls_total": "Calls of a gRPC service by rpc and status.",
    "cortex_route_duration_seconds": "Time from a request's arrival at the gateway to the end of its response.",
    "cortex_batch_wait_seconds": "Time that a request waited for others to join its batch.",
    "cortex_batch_size": "Requests per call.",
    "cortex_process_deaths_total": "Unexpected deaths of processes with user code, by cause.",
    "cortex_model_reloads_total": "Replacements of a process by one with newer models.",
    "cortex_jobs": "Stored jobs by status.",
    "cortex_schedule_failed": "1 if the last run that was due could not be submitted, else 0.",
    "cortex_canary_age_ratio": "Time since a revision that is tried was deployed, as part of give_up_after; else 0.",
    "cortex_async_queue_length": "Workloads of an AsyncAPI that are not finished.",
    "cortex_predictions_total": "Tracked predictions, by class for classification.",
    "cortex_untracked_predictions_total": "Responses without a prediction of the tracker's type.",
    "cortex_recorded_requests_total": "Requests in the recording of networking.record.",
    "cortex_unrecorded_requests_total": "Requests of the share of networking.record that are not recorded, by reason.",
    "cortex_prediction_value_sum": "Sum of tracked numbers.",
    "cortex_prediction_value_min": "Smallest tracked number.",
    "cortex_prediction_value_max": "Largest tracked number.",
}
#: Prefix of series that are not shown.
HIDDEN = "_"

#: Labels by class of status code; 0: no response, because the client disconnected.
_STATUS_CLASSES = {kind: f"{kind}xx" if kind else "other" for kind in (1, 2, 3, 4, 5, 0)}
#: Bounds of histograms whose other buckets are not shown.
_SHOWN: Mapping[str, Collection[float]] = {HANDLER: (*DURATION_BOUNDS_S, math.inf)}
_TYPES = {
    SeriesKind.COUNTER: "counter",
    SeriesKind.BUCKET: "histogram",
    SeriesKind.SUM: "histogram",
}
Labels = tuple[tuple[str, str], ...]


class MetricPoint(NamedTuple):
    """One line of the page."""

    type: str  #: of its family: "counter", "gauge", "histogram" or "unknown"
    family: str
    name: str  #: the family's, with a suffix in a histogram
    labels: Labels
    value: float


class Metrics:
    """All metrics of the installation.

    `open_workloads` counts unfinished workloads by AsyncAPI; `usage` measures the replicas by id.
    """

    def __init__(
        self,
        store: ApiStore,
        totals: MetricTotals,
        gateway: Gateway,
        jobs: JobStore,
        open_workloads: Callable[[], Awaitable[Mapping[str, int]]],
        state_of: Callable[[ApiRecord], ApiState],
        trials: Trials,
        certificate: ServedCertificate,
        usage: Callable[[], Awaitable[Mapping[str, ResourceUsage]]],
        logger: Logger,
    ) -> None:
        self._store = store
        self._totals = totals
        self._gateway = gateway
        self._jobs = jobs
        self._open_workloads = open_workloads
        self._state_of = state_of
        self._trials = trials
        self._certificate = certificate
        self._usage = usage
        self._recent_usage = RecentUsage(usage)
        self._logger = logger

    async def usage(self) -> Mapping[str, ResourceUsage]:
        """Measure the replicas, by id."""
        return await self._usage()

    async def recent_usage(self) -> Mapping[str, ResourceUsage]:
        """Return the latest measurement, for pages that refresh themselves."""
        return await self._recent_usage.get()

    async def aborted(self, apis: Iterable[str]) -> Mapping[str, int]:
        """Return how many responses of each API were begun and not completed."""
        key = series_key(SeriesKind.COUNTER, ABORTED)
        return await asyncio.to_thread(lambda: {api: int(self._totals.of(api).get(key, 0)) for api in apis})

    async def recording(self, record: ApiRecord) -> dict[str, Any] | None:
        """Return where the requests of an API are recorded, and how many of them were; None without `record`."""
        settings = record.spec.networking.record
        if settings is None:
            return None
        numbers = await asyncio.to_thread(self._totals.of, record.name)
        return {
            "to": settings.to,
            "recorded": int(numbers.get(RECORDED_KEY, 0)),
            "unrecorded": {reason: int(numbers.get(key, 0)) for reason, key in UNRECORDED_KEYS.items()},
        }

    async def text(self) -> bytes:
        """Return the page for all APIs that are deployed."""
        records = self._store.records()
        refused = counter("cortex_refused_connections_total", self._gateway.refused_connections)
        points = [gauge("cortex_build_info", 1, version=__version__), refused]
        if (ends_at := self._certificate.ends_at) is not None:
            points.append(gauge("cortex_certificate_expiry_timestamp_seconds", ends_at.timestamp()))
        stats = await self._gateway_stats()
        jobs = await self._jobs.read(count_by_status) if any(record.spec.kind.runs_jobs for record in records) else {}
        schedules = await self._jobs.read(read_schedules) if any(record.spec.schedule for record in records) else {}
        workloads = await self._open_workloads()
        for record in records:
            name = record.name
            if name in stats:
                points += _gateway_points(name, stats[name])
            if record.spec.kind.has_replicas:
                points += _replica_points(name, self._state_of(record))
            if record.spec.kind.runs_jobs:
                counts = {status.code: 0 for status in JobStatus} | jobs.get(name, {})
                points += [gauge("cortex_jobs", n, api=name, status=code) for code, n in counts.items()]
            if record.spec.schedule is not None:
                has_failed = name in schedules and bool(schedules[name].error)
                points.append(gauge("cortex_schedule_failed", int(has_failed), api=name))
            if record.spec.kind is ApiKind.REALTIME:
                points.append(gauge("cortex_request_timeout_seconds", record.spec.networking.timeout_s, api=name))
            if (canary := record.spec.update_strategy.canary) is not None and record.spec.kind is ApiKind.REALTIME:
                known = self._trials.of(record)
                age_s = time.time() - record.updated_at.timestamp() if known and known[0].is_open else 0.0
                points.append(gauge("cortex_canary_age_ratio", age_s / canary.give_up_after_s, api=name))
            if name in workloads:
                points.append(gauge("cortex_async_queue_length", workloads[name], api=name))
        names = {record.name for record in records}
        for replica, usage in (await self._usage()).items():
            if usage.api in names:
                points += _usage_points(replica, usage)
        return await asyncio.to_thread(self._with_totals, records, points)

    def _with_totals(self, records: Sequence[ApiRecord], points: list[MetricPoint]) -> bytes:
        for record in records:
            points += series_points(record.name, {**initial_series(record.spec), **self._totals.of(record.name)})
        return to_text(points)

    async def _gateway_stats(self) -> Mapping[str, BackendStats]:
        try:
            return await self._gateway.stats()
        except GatewayError as error:
            self._logger.warning("gateway statistics are unavailable", error=error)
            return {}


# Points.


def gauge(name: str, value: float, **labels: str) -> MetricPoint:
    """Return a line of a gauge."""
    return MetricPoint("gauge", name, name, tuple(labels.items()), value)


def counter(name: str, value: float, **labels: str) -> MetricPoint:
    """Return a line of a counter."""
    return MetricPoint("counter", name, name, tuple(labels.items()), value)


def _gateway_points(api: str, stats: BackendStats) -> Iterator[MetricPoint]:
    for kind, label in _STATUS_CLASSES.items():
        yield counter("cortex_requests_total", stats.responses.get(kind, 0), api=api, code=label)
    yield gauge("cortex_requests_in_flight", stats.in_flight, api=api)
    yield gauge("cortex_queue_length", stats.queued, api=api)


def _replica_points(api: str, state: ApiState) -> Iterator[MetricPoint]:
    stale = asdict(state.stale)
    for name, number in asdict(state.updated).items():
        yield gauge("cortex_replicas", number + stale[name], api=api, state=name)
    yield gauge("cortex_replicas_wanted", state.requested, api=api)


def _usage_points(replica: str, usage: ResourceUsage) -> Iterator[MetricPoint]:
    labels = {"api": usage.api, "replica": replica}
    yield counter("cortex_replica_cpu_seconds_total", usage.cpu_s, **labels)
    yield gauge("cortex_replica_memory_bytes", usage.memory.resident_bytes, **labels)
    yield gauge("cortex_replica_proportional_memory_bytes", usage.memory.proportional_bytes, **labels)
    yield gauge("cortex_replica_private_memory_bytes", usage.memory.private_bytes, **labels)
    for gpu in usage.gpus:
        yield gauge("cortex_replica_gpu_memory_bytes", gpu.memory_bytes, **labels, gpu=gpu.id)
        yield gauge("cortex_replica_gpu_utilization", gpu.utilization, **labels, gpu=gpu.id)


def initial_series(spec: Api) -> dict[str, float]:
    """Return the series of an API from its deploy on, before anything was counted.

    Prometheus' `increase()` does not see a series begin, so it would miss the first event.
    """
    found = []
    if spec.kind is not ApiKind.SPLITTER:
        found += [series_key(SeriesKind.COUNTER, DEATHS, {"cause": cause.value}) for cause in DeathCause]
    if spec.kind is ApiKind.REALTIME:
        found += [series_key(SeriesKind.COUNTER, REQUESTS, {"code": str(status)}) for status in INITIAL_STATUSES]
        found += [series_key(SeriesKind.COUNTER, name) for name in (ABORTED, RELOADS)]
    if spec.networking.record is not None:
        found += [RECORDED_KEY, *UNRECORDED_KEYS.values()]
    return dict.fromkeys(found, 0.0)


def series_points(api: str, numbers: Mapping[str, float]) -> Iterator[MetricPoint]:
    """Yield the lines of an API's series; `numbers` has the keys of `worker.monitoring.metrics`."""
    buckets: dict[tuple[str, Labels], dict[float, float]] = {}
    sums: dict[tuple[str, Labels], float] = {}
    for key, value in numbers.items():
        series = parse_key(key)
        if series is None or series.name.startswith(HIDDEN):
            continue
        labels = (("api", api), *((label, escape_surrogates(text)) for label, text in series.labels))
        match series.kind:
            case SeriesKind.BUCKET:
                bound, labels = _split_bound(labels)
                buckets.setdefault((series.name, labels), {})[bound] = value
            case SeriesKind.SUM:
                sums[series.name, labels] = value
            case SeriesKind.SET_AT:
                pass
            case SeriesKind.MIN | SeriesKind.MAX:
                name = f"{series.name}_{series.kind.value}"
                yield MetricPoint("gauge", name, name, labels, value)
            case SeriesKind.COUNTER | SeriesKind.GAUGE:
                yield MetricPoint(_TYPES.get(series.kind, "gauge"), series.name, series.name, labels, value)
    for (name, labels), found in buckets.items():
        yield from _histogram(name, labels, found, sums.get((name, labels), 0.0))


def _split_bound(labels: Labels) -> tuple[float, Labels]:
    limit = next((value for label, value in labels if label == "le"), "+Inf")
    return float(limit), tuple(pair for pair in labels if pair[0] != "le")


def _histogram(name: str, labels: Labels, buckets: Mapping[float, float], total: float) -> Iterator[MetricPoint]:
    count = 0.0
    for bound in sorted({*buckets, math.inf}):
        count += buckets.get(bound, 0.0)
        if bound not in _SHOWN.get(name, (bound,)):
            continue
        limit = "+Inf" if bound == math.inf else f"{bound:g}"
        yield MetricPoint("histogram", name, f"{name}_bucket", (*labels, ("le", limit)), count)
    yield MetricPoint("histogram", name, f"{name}_sum", labels, total)
    yield MetricPoint("histogram", name, f"{name}_count", labels, count)


# Text.


def to_text(points: Iterable[MetricPoint]) -> bytes:
    """Return the page, grouped by family. Of duplicate series, a histogram's line is kept, else the first."""
    families: dict[str, list[MetricPoint]] = {name: [] for name in HELP}
    for point in _unique(_with_consistent_types(list(points))):
        families.setdefault(point.family, []).append(point)
    families = {name: found for name, found in families.items() if found}
    registry = CollectorRegistry()
    registry.register(_Families([_metric(name, found, families.keys()) for name, found in families.items()]))
    return generate_latest(registry)


def _with_consistent_types(points: list[MetricPoint]) -> list[MetricPoint]:
    """Give each family one type. If APIs use one name for different types, each line becomes an untyped family."""
    while True:
        types: dict[str, set[str]] = {}
        for point in points:
            types.setdefault(point.family, set()).add(point.type)
        mixed = {family for family, found in types.items() if len(found) > 1}
        if not mixed:
            return points
        points = [p._replace(type="unknown", family=p.name) if p.family in mixed else p for p in points]


def _unique(points: list[MetricPoint]) -> Iterable[MetricPoint]:
    """Drop duplicate lines of a series: Prometheus rejects the whole page otherwise."""
    found: dict[tuple[str, Labels], MetricPoint] = {}
    for point in sorted(points, key=lambda point: point.type != "histogram"):  # a histogram must stay complete
        found.setdefault((point.name, tuple(sorted(point.labels))), point)
    return found.values()


class _Families(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _metric(name: str, points: list[MetricPoint], families: Collection[str]) -> Metric:
    kind = points[0].type
    shown = name.removesuffix("_total") if kind == "counter" else name
    # The library appends `_total` to the name of a counter. A user's counter without that suffix, or whose name without
    # it is another family's, keeps its name and loses its type.
    if kind == "counter" and (shown == name or shown in families):
        kind, shown = "unknown", name
    metric = Metric(shown, HELP.get(name, name), kind)
    for point in points:
        metric.add_sample(point.name, dict(point.labels), point.value)
    return metric
