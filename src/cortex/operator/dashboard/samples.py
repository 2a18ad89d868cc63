"""Samples of each API's load for the charts of the dashboard: an hour at 5 seconds, a day at a minute.

Each API has two rings of fixed size, 95 kB together. The data is in memory only: it begins with the operator.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cortex.errors import GatewayError
from cortex.gateway.base import Gateway
from cortex.gateway.statistics import BackendStats
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.replicas.status import ApiState
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger
from cortex.worker.monitoring.metrics import ABORTED, SeriesKind, parse_key, series_key

SAMPLE_S = 5.0
#: Interval and number of the samples in each ring.
HOUR = (SAMPLE_S, 720)
DAY = (60.0, 1440)
#: Maximum of APIs that have samples, so that memory is bounded; further APIs have none.
MAX_APIS = 200

_DURATION = "cortex_request_duration_seconds"
_ABORTED_KEY = series_key(SeriesKind.COUNTER, ABORTED)
_NOTHING = -(2**62)
Buckets = Mapping[float, float]  #: number of requests by upper bound in seconds


class ApiSample(NamedTuple):
    """Load of one API in one interval; NaN: unknown."""

    requests_per_s: float = math.nan  #: responses of all classes
    client_errors_per_s: float = math.nan  #: 4xx, and clients that disconnected
    server_errors_per_s: float = math.nan  #: 5xx, and responses that broke off
    in_flight: float = math.nan
    queued: float = math.nan  #: requests in the gateway; for AsyncAPIs unfinished workloads
    p50_s: float = math.nan
    p99_s: float = math.nan
    ready: float = math.nan  #: replicas
    requested: float = math.nan


_FIELDS = len(ApiSample._fields)


class SampleRing:
    """The newest samples, one per interval. An interval without a sample is a gap."""

    def __init__(self, interval_s: float, count: int) -> None:
        self.interval_s = interval_s
        self._count = count
        self._slots = array("q", [_NOTHING]) * count
        self._values = array("f", [math.nan]) * (count * _FIELDS)

    def add(self, at: float, sample: ApiSample) -> None:
        """Add the sample of the interval that contains `at`, which replaces an earlier one of that interval."""
        slot = int(at // self.interval_s)
        place = slot % self._count
        self._slots[place] = slot
        self._values[place * _FIELDS : (place + 1) * _FIELDS] = array("f", sample)

    def read(self, now: float) -> list[tuple[float, ApiSample | None]]:
        """Return the start of each interval up to `now`, oldest first, with its sample; None: a gap."""
        last = int(now // self.interval_s)
        return [(slot * self.interval_s, self._at(slot)) for slot in range(last - self._count + 1, last + 1)]

    def _at(self, slot: int) -> ApiSample | None:
        place = slot % self._count
        if self._slots[place] != slot:
            return None
        return ApiSample(*self._values[place * _FIELDS : (place + 1) * _FIELDS])


def average(samples: Sequence[ApiSample]) -> ApiSample:
    """Return the average of samples by field, and the maximum of their `p99_s`. Unknown values do not count."""
    columns = [[value for value in column if not math.isnan(value)] for column in zip(*samples, strict=True)]
    means = ApiSample(*(math.fsum(column) / len(column) if column else math.nan for column in columns))
    return means._replace(p99_s=max((each.p99_s for each in samples if not math.isnan(each.p99_s)), default=math.nan))


def quantile(q: float, buckets: Buckets) -> float:
    """Return the `q` quantile, interpolated inside its bucket as Prometheus does; NaN without requests.

    In the last bucket, which has no upper bound, it is the bound before it.
    """
    bounds = sorted(buckets)
    left = q * sum(buckets.values())
    if left <= 0:
        return math.nan
    lower = 0.0
    for bound in bounds:
        if buckets[bound] >= left:
            return lower if math.isinf(bound) else lower + (bound - lower) * left / buckets[bound]
        left -= buckets[bound]
        lower = lower if math.isinf(bound) else bound
    return lower


def duration_buckets(numbers: Mapping[str, float]) -> dict[float, float]:
    """Return the histogram of request durations in an API's series, by the keys of `worker.monitoring.metrics`."""
    buckets: dict[float, float] = {}
    for key, value in numbers.items():
        series = parse_key(key) if _DURATION in key else None
        if series is not None and series.name == _DURATION and series.kind is SeriesKind.BUCKET:
            bound = float(dict(series.labels).get("le", "inf"))
            buckets[bound] = buckets.get(bound, 0.0) + value
    return buckets


class _Counters(NamedTuple):
    """Counters of one API at one moment."""

    at: float
    responses: Mapping[int, int]
    durations: Buckets
    aborted: float


class _SampledApi:
    """The samples of one API, and the counters of the last one."""

    def __init__(self) -> None:
        self.hour = SampleRing(*HOUR)
        self.day = SampleRing(*DAY)
        self._last: _Counters | None = None
        self._minute: list[ApiSample] = []
        self._minute_slot = 0

    def is_unchanged(self, responses: Mapping[int, int]) -> bool:
        """Return True if the API has responded to no request since the last sample."""
        return self._last is not None and self._last.responses == responses

    @property
    def counted(self) -> tuple[Buckets, float]:
        """The histogram of durations, and the incomplete responses, of the last sample."""
        return (self._last.durations, self._last.aborted) if self._last else ({}, 0.0)

    def add(self, counters: _Counters, sample: ApiSample) -> None:
        if self._last is not None:
            sample = _with_rates(sample, self._last, counters)
        self._last = counters
        self.hour.add(counters.at, sample)
        slot = int(counters.at // DAY[0])
        if slot != self._minute_slot:
            self._minute, self._minute_slot = [], slot
        self._minute.append(sample)
        self.day.add(counters.at, average(self._minute))


def _with_rates(sample: ApiSample, before: _Counters, after: _Counters) -> ApiSample:
    seconds = max(after.at - before.at, 0.001)
    new = {kind: max(0, count - before.responses.get(kind, 0)) for kind, count in after.responses.items()}
    buckets = {bound: max(0.0, n - before.durations.get(bound, 0.0)) for bound, n in after.durations.items()}
    return sample._replace(
        requests_per_s=sum(new.values()) / seconds,
        client_errors_per_s=(new.get(4, 0) + new.get(0, 0)) / seconds,
        server_errors_per_s=(new.get(5, 0) + max(0.0, after.aborted - before.aborted)) / seconds,
        p50_s=quantile(0.5, buckets),
        p99_s=quantile(0.99, buckets),
    )


class LoadRecorder:
    """Samples every API while the operator runs. `open_workloads` counts the unfinished workloads of an AsyncAPI."""

    def __init__(
        self,
        store: ApiStore,
        gateway: Gateway,
        totals: MetricTotals,
        open_workloads: Callable[[str], int | None],
        state_of: Callable[[ApiRecord], ApiState],
        logger: Logger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._totals = totals
        self._open_workloads = open_workloads
        self._state_of = state_of
        self._clock = clock
        self._apis: dict[str, _SampledApi] = {}
        self._error_log = LoopErrorLog(logger, "sampling for the dashboard failed")

    def samples(self, api: str, is_day: bool = False) -> list[tuple[float, ApiSample | None]]:
        """Return the samples of an API's last hour or day, oldest first; empty if it has none."""
        sampled = self._apis.get(api)
        if sampled is None:
            return []
        return (sampled.day if is_day else sampled.hour).read(self._clock())

    def recent(self, api: str, seconds: float = 60.0) -> ApiSample:
        """Return the average of an API's last samples; without any, all values are NaN."""
        count = int(seconds // SAMPLE_S) + 1  # the current interval may have no sample yet
        return average([sample for _, sample in self.samples(api)[-count:] if sample is not None])

    async def run(self) -> None:
        """Sample at each multiple of the interval until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S - self._clock() % SAMPLE_S)
            try:
                await self.sample()
                self._error_log.succeeded()
            except Exception as error:  # a failed sample is a gap
                self._error_log.failed(error)

    async def sample(self) -> None:
        """Take one sample of each API."""
        records = self._store.records()[:MAX_APIS]
        for name in self._apis.keys() - {record.name for record in records}:
            del self._apis[name]
        try:
            stats: Mapping[str, BackendStats] = await self._gateway.stats()
        except GatewayError:  # the reconciler logs that; what is known without the gateway is sampled
            stats = {}
        busy = [name for name, each in stats.items() if self._is_busy(name, each)]
        counted = await asyncio.to_thread(lambda: dict(self._read_totals(busy))) if busy else {}
        now = self._clock()
        for record in records:
            self._add(record, now, stats.get(record.name), counted.get(record.name))

    def _is_busy(self, name: str, stats: BackendStats) -> bool:
        """Return True if the histogram of an API must be read: it has responded to requests since the last sample."""
        sampled = self._apis.get(name)
        return sampled is None or not sampled.is_unchanged(stats.responses)

    def _read_totals(self, names: Sequence[str]) -> Iterator[tuple[str, tuple[Buckets, float]]]:
        for name in names:
            totals = self._totals.of(name)
            yield name, (duration_buckets(totals), totals.get(_ABORTED_KEY, 0.0))

    def _add(
        self, record: ApiRecord, now: float, stats: BackendStats | None, counted: tuple[Buckets, float] | None
    ) -> None:
        sampled = self._apis.get(record.name)
        if sampled is None:
            sampled = self._apis[record.name] = _SampledApi()
        state = self._state_of(record)
        sample = ApiSample(ready=state.ready, requested=state.requested)
        workloads = self._open_workloads(record.name)
        if stats is not None:
            sample = sample._replace(in_flight=stats.in_flight, queued=stats.queued)
        if workloads is not None:
            sample = sample._replace(queued=workloads)
        responses = dict(stats.responses) if stats is not None else {}
        if stats is None:  # rates would count all responses as new once the gateway answers
            sampled.hour.add(now, sample)
            return
        sampled.add(_Counters(now, responses, *(counted or sampled.counted)), sample)
