"""Gathers every number of the installation for `/metrics`. Decides and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict

from cortex import __version__
from cortex.errors import GatewayError
from cortex.gateway.base import AnyGateway
from cortex.gateway.stats import BackendStats
from cortex.jobs.store import JobStore
from cortex.operator.monitoring.metric_text import Point, counter, gauge, points_of, to_text
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.replicas.status import ApiState
from cortex.state.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger

#: Classes of statuses; 0 is a request that got none, because its caller went away.
_CLASSES = {kind: f"{kind}xx" if kind else "other" for kind in (1, 2, 3, 4, 5, 0)}

Counts = Mapping[str, int]


class Metrics:
    """Everything that is counted, as the text that Prometheus reads."""

    def __init__(
        self,
        store: ApiStore,
        totals: MetricTotals,
        gateway: AnyGateway,
        jobs: JobStore,
        state_of: Callable[[ApiRecord], ApiState],
        logger: Logger,
    ) -> None:
        #: Returns the workloads that are not over, by AsyncAPI.
        self.open_workloads: Callable[[], Awaitable[Counts]] = _none
        self._store = store
        self._totals = totals
        self._gateway = gateway
        self._jobs = jobs
        self._state_of = state_of
        self._logger = logger

    async def text(self) -> bytes:
        """Return all numbers of all APIs that are deployed."""
        records = self._store.records()
        points = [gauge("cortex_build_info", 1, version=__version__)]
        stats = await self._stats()
        jobs = await self._jobs.counts_by_status() if any(record.spec.kind.runs_jobs for record in records) else {}
        workloads = await self.open_workloads()
        for record in records:
            name = record.name
            if name in stats:
                points += _of_gateway(name, stats[name])
            if record.spec.kind.has_replicas:
                points += _of_replicas(name, self._state_of(record))
            if record.spec.kind.runs_jobs:
                points += [gauge("cortex_jobs", n, api=name, status=code) for code, n in jobs.get(name, {}).items()]
            if name in workloads:
                points.append(gauge("cortex_async_queue_length", workloads[name], api=name))
        return await asyncio.to_thread(self._with_counted, [record.name for record in records], points)

    def _with_counted(self, apis: list[str], points: list[Point]) -> bytes:
        for api in apis:
            points += points_of(api, self._totals.of(api))
        return to_text(points)

    async def _stats(self) -> Mapping[str, BackendStats]:
        try:
            return await self._gateway.stats()
        except GatewayError as error:
            self._logger.warning("gateway does not tell its counts", error=error)
            return {}


async def _none() -> Counts:
    return {}


def _of_gateway(api: str, stats: BackendStats) -> Iterator[Point]:
    for kind, words in _CLASSES.items():
        yield counter("cortex_requests_total", stats.responses.get(kind, 0), api=api, code=words)
    yield gauge("cortex_requests_in_flight", stats.in_flight, api=api)
    yield gauge("cortex_queue_length", stats.queued, api=api)


def _of_replicas(api: str, state: ApiState) -> Iterator[Point]:
    stale = asdict(state.stale)
    for name, number in asdict(state.updated).items():
        yield gauge("cortex_replicas", number + stale[name], api=api, state=name)
    yield gauge("cortex_replicas_wanted", state.requested, api=api)
