"""Autoscaler loop: sample the load of each API, call `policy.decide`, and store the desired number of replicas.

The reconciler starts and stops the replicas. Only the desired number outlives the operator: after a restart, each API
keeps it and begins new stabilisation periods.

    every SAMPLE_S   sample     gateway (requests), queues (workloads), /proc (CPU time)
    every TICK_S     decide     average over the window -> recommendation -> stabilisation -> capacity
    every 0.1 s      wake up    APIs at zero replicas: the first waiting request starts one at once
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cortex.engine.base import Engine
from cortex.errors import GatewayError
from cortex.gateway.base import Gateway
from cortex.lifecycle import ApiKind
from cortex.operator.autoscaling.policy import (
    SAMPLE_S,
    TICK_S,
    Ceiling,
    Decision,
    LoadSample,
    Measure,
    ScalingHistory,
    ScalingPolicy,
    decide,
)
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.replicas.plan import wanted_replicas
from cortex.operator.revisions.capacity import MachineCapacity
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaStatus

#: Number of recent decisions kept for each API.
KEPT_DECISIONS = 100
#: Samples are kept for the window plus this time, to detect whether they cover the whole window.
_SPARE_S = 5.0


@dataclass(frozen=True)
class LoadSources:
    """Functions that return the current load."""

    requests: Callable[[], Awaitable[Mapping[str, int]]]  #: by API, in gateway and replicas; raises GatewayError
    workloads: Callable[[str], int | None]  #: unfinished ones of an AsyncAPI; None: unknown
    cores: Callable[[Iterable[ReplicaStatus]], Awaitable[Mapping[str, float]]]  #: by API, used since the last call


@dataclass(frozen=True)
class AutoscalerIntervals:
    """Intervals of the loop; tests use shorter ones."""

    tick_s: float = TICK_S
    sample_s: float = SAMPLE_S
    cold_s: float = 0.1  #: between two samples of APIs at zero replicas


@dataclass
class _ScaledApi:
    """Autoscaling state of one API."""

    api_id: str
    policy: ScalingPolicy
    history: ScalingHistory
    samples: deque[LoadSample] = field(default_factory=deque)
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=KEPT_DECISIONS))

    def sample(self, at: float, load: float) -> None:
        """Add a sample, and drop those that are older than the window."""
        self.samples.append(LoadSample(at, load))
        while self.samples[0].at < at - self.policy.window_s - _SPARE_S:
            self.samples.popleft()


def _next(due: float, period_s: float, now: float) -> float:
    """Return the next due time: in step with the last one, unless it was missed."""
    return due + period_s if due + period_s > now else now + period_s


async def requests_of(gateway: Gateway) -> Mapping[str, int]:
    """Return the number of requests of each API, in replicas and queued. Raises: GatewayError.

    Requests whose body is still being received don't count, unless the API has no replica and they may wait for it.
    """
    return {
        name: stats.in_flight + stats.queued if stats.servers else stats.requests
        for name, stats in (await gateway.stats()).items()
    }


def steady_clock(speed: float = 1.0) -> Callable[[], float]:
    """Return a monotonic clock that starts at UNIX time and runs `speed` times as fast as real time."""
    began, first = time.time(), time.monotonic()
    return lambda: began + (time.monotonic() - first) * speed


class Autoscaler:
    """Calls `on_change` after each change of a desired number. Time runs `speed` times as fast as real time."""

    def __init__(
        self,
        store: ApiStore,
        engine: Engine,
        sources: LoadSources,
        on_change: Callable[[], None],
        logger: Logger,
        speed: float = 1.0,
        intervals: AutoscalerIntervals = AutoscalerIntervals(),  # noqa: B008 - it is frozen
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._sources = sources
        self._on_change = on_change
        self._logger = logger
        self._intervals = intervals
        self._speed = speed
        self._clock = clock or steady_clock(speed)
        self._apis: dict[str, _ScaledApi] = {}
        self._next_sample = 0.0
        self._next_tick = self._clock() + intervals.tick_s
        self._error_log = LoopErrorLog(logger, "autoscaling failed")
        self._gateway_failed = False  #: at the last sample

    def decisions(self, name: str) -> Sequence[Decision]:
        """Return the recent decisions about an API, the oldest first."""
        scaled = self._apis.get(name)
        return tuple(scaled.decisions) if scaled else ()

    def shortage(self, record: ApiRecord) -> str:
        """Return why the last decision could not add the wanted replicas; empty if it could."""
        scaled = self._apis.get(record.name)
        is_of_record = scaled is not None and scaled.api_id == record.api_id
        return scaled.decisions[-1].shortage if scaled and is_of_record and scaled.decisions else ""

    def room(self, record: ApiRecord) -> Ceiling | None:
        """Return how many replicas of an API fit now; None: at least `max_replicas`."""
        return self._ceiling(record, self._capacity())

    async def run(self) -> None:
        """Sample and decide until cancelled."""
        while True:
            pause_s = self._intervals.sample_s / self._speed
            try:
                await self.step()
                pause_s = self._pause()
            except Exception as error:  # a failed step must not end the autoscaler
                self._error_log.failed(error)
            await asyncio.sleep(pause_s)

    async def step(self) -> None:
        """Take the samples and make the decisions that are due."""
        records = self._scalable()
        now = self._clock()
        cold = [record for record in records if wanted_replicas(record) == 0]
        is_sampling = now >= self._next_sample
        if records and (is_sampling or cold):
            await self._sample(records if is_sampling else cold, is_sampling)
        if is_sampling:
            self._next_sample = _next(self._next_sample, self._intervals.sample_s, now)
        for record in cold:
            self._wake_up(record)
        if now >= self._next_tick:
            self._next_tick = _next(self._next_tick, self._intervals.tick_s, now)
            self._tick()

    def _pause(self) -> float:
        cold = any(wanted_replicas(record) == 0 for record in self._scalable())
        until = max(0.0, min(self._next_sample, self._next_tick) - self._clock()) / self._speed
        return min(until, self._intervals.cold_s) if cold else until

    def _scalable(self) -> list[ApiRecord]:
        """Return the APIs whose number of replicas may change; drop the state of all others."""
        records = [
            record
            for record in self._store.records()
            if record.spec.kind.has_replicas
            and record.spec.autoscaling.min_replicas < record.spec.autoscaling.max_replicas
        ]
        for name in self._apis.keys() - {record.name for record in records}:
            del self._apis[name]
        return records

    def _state_of(self, record: ApiRecord) -> _ScaledApi:
        """Return the state of an API. A deploy resets it, but keeps the samples if they measure the same."""
        known = self._apis.get(record.name)
        if known is None or known.api_id != record.api_id:
            scaled = _ScaledApi(record.api_id, ScalingPolicy.of(record.spec), ScalingHistory(self._clock()))
            if known is not None:
                scaled.decisions = known.decisions
                if known.policy.measure is scaled.policy.measure:
                    scaled.samples = known.samples
            self._apis[record.name] = known = scaled
        return known

    async def _sample(self, records: Sequence[ApiRecord], is_sampling: bool) -> None:
        """Take a sample of each API whose load is known."""
        requests = await self._requests()
        by_cpu = [record.name for record in records if self._state_of(record).policy.measure is Measure.CORES]
        cores: Mapping[str, float] = {}
        if by_cpu and is_sampling:
            running = [status for _, status in self._engine.replicas().values() if status.api in by_cpu]
            cores = await self._sources.cores(running)
        now = self._clock()
        for record in records:
            scaled = self._state_of(record)
            is_cold = wanted_replicas(record) == 0
            if scaled.policy.measure is Measure.CORES and not is_cold:
                load = cores.get(record.name)
            elif record.spec.kind is ApiKind.ASYNC:
                load = self._sources.workloads(record.name)
            else:
                load = self._active_requests(record.name, requests)
            if load is not None and (is_sampling or load):
                scaled.sample(now, load)

    def _active_requests(self, name: str, requests: Mapping[str, int]) -> int | None:
        """Return the requests of an API without those of slow clients, which occupy no replica."""
        if name not in requests:
            return None
        statuses = [status for _, status in self._engine.replicas().values() if status.api == name]
        lent = sum(process.lent for status in statuses for process in status.processes)
        return max(0, requests[name] - lent)

    async def _requests(self) -> Mapping[str, int]:
        try:
            requests = await self._sources.requests()
        except GatewayError as error:
            if not self._gateway_failed:
                self._logger.warning("gateway load can't be read", error=error)
            self._gateway_failed = True
            return {}
        self._gateway_failed = False
        return requests

    def _wake_up(self, record: ApiRecord) -> None:
        """Start the first replica of an API as soon as a request or workload waits."""
        scaled = self._state_of(record)
        decision = decide(scaled.policy, scaled.history, tuple(scaled.samples), self._clock(), 0)
        if decision.requested:
            self._store_decision(record, scaled, decision)
            scaled.samples.clear()  # they counted waiting requests, even if CPU is measured from now on

    def _tick(self) -> None:
        capacity = self._capacity()
        for record in self._scalable():
            scaled, current = self._state_of(record), wanted_replicas(record)
            if current == 0:
                continue  # see `_wake_up`
            ceiling = self._ceiling(record, capacity)
            decision = decide(scaled.policy, scaled.history, tuple(scaled.samples), self._clock(), current, ceiling)
            for _ in range(decision.requested - current):
                capacity = capacity.reserve(record.spec.compute)
            self._store_decision(record, scaled, decision)

    def _capacity(self) -> MachineCapacity:
        """Return the free capacity. Cores of job workers count as free: replicas have precedence."""
        inventory, running = self._engine.devices(), [spec for spec, _ in self._engine.replicas().values()]
        serving = sum(spec.cpu for spec in running if ApiKind(spec.kind).has_replicas)
        return replace(MachineCapacity.of(inventory, running), cores=inventory.cores - serving)

    def _ceiling(self, record: ApiRecord, capacity: MachineCapacity) -> Ceiling | None:
        """Return how many replicas fit; None: at least `max_replicas`."""
        if not capacity.total_cores:
            return None  # not detected yet
        compute, most = record.spec.compute, record.spec.autoscaling.max_replicas
        count = sum(spec.api == record.name for spec, _ in self._engine.replicas().values())
        while count < most:
            if shortage := capacity.shortage(compute):
                return Ceiling(count, shortage.replace("a worker", "a replica").partition("; ")[0])
            capacity, count = capacity.reserve(compute), count + 1
        return None

    def _store_decision(self, record: ApiRecord, scaled: _ScaledApi, decision: Decision) -> None:
        if decision.requested != decision.current:  # first: a decision that can't be stored does not count
            self._store.set_replicas(record.name, decision.requested)
            self._error_log.succeeded()
        scaled.decisions.append(decision)
        scaled.history = scaled.history.after(decision, scaled.policy)
        if decision.requested == decision.current:
            return
        self._logger.info(
            "replicas changed",
            api=record.name,
            before=decision.current,
            now=decision.requested,
            reason=decision.reason,
        )
        self._on_change()
