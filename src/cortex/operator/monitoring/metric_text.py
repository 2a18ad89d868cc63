"""Numbers as the text that Prometheus reads. Pure; knows nothing of where they come from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from cortex.replica.series import Series, SeriesKind, encodable, parse_key

#: What our own numbers are, in the order in which they are shown. Numbers of users have no words of ours.
HELP: Mapping[str, str] = {
    "cortex_build_info": "Version of the operator; always 1.",
    "cortex_requests_total": "Answers that callers got from the gateway, by class of the status; other: none was sent.",
    "cortex_requests_in_flight": "Requests inside the replicas.",
    "cortex_queue_length": "Requests that wait in the gateway for a replica.",
    "cortex_replicas": "Replicas by what they do.",
    "cortex_replicas_wanted": "Replicas that are wanted.",
    "cortex_replica_requests_total": "Answers of replicas by status, those on behalf of a process that died included.",
    "cortex_request_queue_seconds": "From a request's arrival at the gateway to the start of its call.",
    "cortex_request_handler_seconds": "Time in the user's code.",
    "cortex_request_duration_seconds": "From a request's arrival at the gateway to its answer.",
    "cortex_batch_wait_seconds": "Time that a request waited for others to share its call.",
    "cortex_batch_size": "Requests in one call.",
    "cortex_process_deaths_total": "Processes of user code that ended without being told to, by cause.",
    "cortex_model_reloads_total": "Times that a process took over because it had newer models.",
    "cortex_jobs": "Jobs that are kept, by status.",
    "cortex_async_queue_length": "Workloads of an AsyncAPI that are not over.",
    "cortex_predictions_total": "Tracked predictions, by class if they have one.",
    "cortex_untracked_predictions_total": "Answers whose prediction was not of the tracker's type.",
    "cortex_prediction_value_sum": "Sum of tracked numbers.",
    "cortex_prediction_value_min": "The smallest tracked number.",
    "cortex_prediction_value_max": "The largest tracked number.",
}
#: Numbers whose name begins so are not shown.
HIDDEN = "_"

_TYPES = {
    SeriesKind.COUNTER: "counter",
    SeriesKind.BUCKET: "histogram",
    SeriesKind.SUM: "histogram",
}
Labels = tuple[tuple[str, str], ...]


class Point(NamedTuple):
    """One line."""

    type: str  #: "counter", "gauge", "histogram", or "unknown": of the whole family
    family: str
    name: str  #: of the line: the family's with a suffix, if it is a histogram's
    labels: Labels
    value: float


def gauge(name: str, value: float, **labels: str) -> Point:
    """Return a line of a gauge."""
    return Point("gauge", name, name, tuple(labels.items()), value)


def counter(name: str, value: float, **labels: str) -> Point:
    """Return a line of a counter."""
    return Point("counter", name, name, tuple(labels.items()), value)


def points_of(api: str, numbers: Mapping[str, float]) -> Iterator[Point]:
    """Yield the lines of what the processes of an API have counted, by the keys of `replica.series`."""
    buckets: dict[tuple[str, Labels], dict[float, float]] = {}
    sums: dict[tuple[str, Labels], float] = {}
    for key, value in numbers.items():
        series = parse_key(key)
        if series is None or series.name.startswith(HIDDEN):
            continue
        labels = (("api", api), *((label, encodable(text)) for label, text in series.labels))
        match series.kind:
            case SeriesKind.BUCKET:
                bound, labels = _take_bound(labels)
                buckets.setdefault((series.name, labels), {})[bound] = value
            case SeriesKind.SUM:
                sums[series.name, labels] = value
            case SeriesKind.SET_AT:
                pass
            case SeriesKind.MIN | SeriesKind.MAX:
                name = f"{series.name}_{series.kind.value}"
                yield Point("gauge", name, name, labels, value)
            case SeriesKind.COUNTER | SeriesKind.GAUGE:
                yield _single(series, labels, value)
    for (name, labels), found in buckets.items():
        yield from _histogram(name, labels, found, sums.get((name, labels), 0.0))


def _single(series: Series, labels: Labels, value: float) -> Point:
    return Point(_TYPES.get(series.kind, "gauge"), series.name, series.name, labels, value)


def _take_bound(labels: Labels) -> tuple[float, Labels]:
    limit = next((value for label, value in labels if label == "le"), "+Inf")
    return float(limit), tuple(pair for pair in labels if pair[0] != "le")


def _histogram(name: str, labels: Labels, buckets: Mapping[float, float], total: float) -> Iterator[Point]:
    count = 0.0
    for bound in sorted({*buckets, math.inf}):
        count += buckets.get(bound, 0.0)
        limit = "+Inf" if bound == math.inf else f"{bound:g}"
        yield Point("histogram", name, f"{name}_bucket", (*labels, ("le", limit)), count)
    yield Point("histogram", name, f"{name}_sum", labels, total)
    yield Point("histogram", name, f"{name}_count", labels, count)


def to_text(points: Iterable[Point]) -> bytes:
    """Return the lines, by family; of two for the same series, that of a histogram, else the first."""
    families: dict[str, list[Point]] = {name: [] for name in HELP}
    for point in _unique(_settled(list(points))):
        families.setdefault(point.family, []).append(point)
    families = {name: found for name, found in families.items() if found}
    registry = CollectorRegistry()
    registry.register(_Families([_metric(name, found, families.keys()) for name, found in families.items()]))
    return generate_latest(registry)


def _settled(points: list[Point]) -> list[Point]:
    """Give each family one type: where APIs mean different things by one name, each line is a family of no type."""
    while True:
        types: dict[str, set[str]] = {}
        for point in points:
            types.setdefault(point.family, set()).add(point.type)
        mixed = {family for family, found in types.items() if len(found) > 1}
        if not mixed:
            return points
        points = [p._replace(type="unknown", family=p.name) if p.family in mixed else p for p in points]


def _unique(points: list[Point]) -> Iterable[Point]:
    """Leave out what would be the second line for a series: a page with such is refused as a whole."""
    found: dict[tuple[str, Labels], Point] = {}
    for point in sorted(points, key=lambda point: point.type != "histogram"):  # whole, or they are no histograms
        found.setdefault((point.name, tuple(sorted(point.labels))), point)
    return found.values()


class _Families(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _metric(name: str, points: list[Point], families: Collection[str]) -> Metric:
    kind = points[0].type
    shown = name.removesuffix("_total") if kind == "counter" else name
    # The library declares counters as `<name>_total`, and readers know them as `<name>`: one of a user's that is called
    # otherwise, or whose name without the ending is another's, keeps its name instead of its type.
    if kind == "counter" and (shown == name or shown in families):
        kind, shown = "unknown", name
    metric = Metric(shown, HELP.get(name, name), kind)
    for point in points:
        metric.add_sample(point.name, dict(point.labels), point.value)
    return metric
