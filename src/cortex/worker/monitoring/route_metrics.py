"""Counts and durations of requests by route: of a class with routes, of an application, or the rpcs of gRPC.

A route is a template such as `/items/{id}`. Requests without a known one count as the route `other`. So do those of
further routes once there are `MAX_ROUTES`: no client can make the number of series grow without limit.
"""

from __future__ import annotations

from cortex.worker.monitoring.metrics import INITIAL_STATUSES, Histogram, MetricFile, SeriesKind, series_key

MAX_ROUTES = 100
OTHER = "other"
#: Upper bounds of the buckets of durations, in seconds.
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET"})


class RouteRecorder:
    """The series of one process. Event-loop thread only."""

    def __init__(self, file: MetricFile | None) -> None:
        self._file = file
        self._routes: set[tuple[str, str]] = set()
        self._counters: dict[tuple[str, str, int], int | None] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def add(self, method: str, route: str) -> None:
        """Add the series of a route, so that they exist before its first request."""
        if self._file is None or (method, route) in self._routes:
            return
        self._routes.add((method, route))
        labels = {"method": method, "route": route}
        self._histograms[method, route] = Histogram(self._file, "cortex_route_duration_seconds", BOUNDS_S, labels)
        for status in INITIAL_STATUSES:
            self._file.index_of(_counter_key(method, route, status))

    def record(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        if self._file is None:
            return
        series = method if method in _METHODS else OTHER, route
        if series not in self._routes:
            if len(self._routes) >= MAX_ROUTES:
                series = OTHER, OTHER
            self.add(*series)
        counter = self._counters.get((*series, status), -1)
        if counter == -1:
            counter = self._counters[*series, status] = self._file.index_of(_counter_key(*series, status))
        if counter is not None:
            self._file.cells[counter] += 1
        self._histograms[series].observe(seconds)


def _counter_key(method: str, route: str, status: int) -> str:
    labels = {"method": method, "route": route, "code": str(status)}
    return series_key(SeriesKind.COUNTER, "cortex_route_requests_total", labels)
