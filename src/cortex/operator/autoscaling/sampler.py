"""Samples the load of each API, asks `autoscaler.py`, and stores how many replicas are wanted from now on.

The reconciler does the rest. Nothing here outlives the operator but that number: after a restart each API keeps it, and
begins new stabilisation periods.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cortex.engine.devices import Inventory
from cortex.errors import GatewayError
from cortex.gateway.base import AnyGateway
from cortex.lifecycle import ApiKind
from cortex.operator.autoscaling.policy import (
    SAMPLE_S,
    TICK_S,
    Ceiling,
    Decision,
    History,
    Measure,
    Policy,
    Sample,
    decide,
)
from cortex.operator.error_log import LoopErrorLog
from cortex.operator.jobs.capacity import JobRoom
from cortex.operator.replicas.plan import wanted_replicas
from cortex.replica.spec import ReplicaSpec, ReplicaStatus
from cortex.state.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger

#: Decisions that are kept of each API.
KEPT_DECISIONS = 100
#: Beyond a window, samples are kept for so long: it must be seen that a window is covered.
_SPARE_S = 5.0


class Engine(Protocol):
    """What is asked of the engine."""

    def devices(self) -> Inventory:
        """Return what the machine has."""

    def replicas(self) -> Mapping[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return what runs."""


@dataclass(frozen=True)
class Sources:
    """Where loads come from."""

    requests: Callable[[], Awaitable[Mapping[str, int]]]  #: in gateway and replicas, by API; raises GatewayError
    workloads: Callable[[str], int | None]  #: of an AsyncAPI, open ones; None: not known
    cores: Callable[[Iterable[ReplicaStatus]], Awaitable[Mapping[str, float]]]  #: used since the last call, by API


@dataclass(frozen=True)
class Timing:
    """How often is looked and decided; tests are faster."""

    tick_s: float = TICK_S
    sample_s: float = SAMPLE_S
    cold_s: float = 0.1  #: between two looks while an API without replicas may be asked


@dataclass
class _Scaled:
    """What is known of one API."""

    api_id: str
    policy: Policy
    history: History
    samples: deque[Sample] = field(default_factory=deque)
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=KEPT_DECISIONS))

    def sample(self, at: float, load: float) -> None:
        """Keep a sample, and drop those that no window reaches any more."""
        self.samples.append(Sample(at, load))
        while self.samples[0].at < at - self.policy.window_s - _SPARE_S:
            self.samples.popleft()


def _next(due: float, period_s: float, now: float) -> float:
    """Return when something is due again: in step with the last time, unless that was missed."""
    return due + period_s if due + period_s > now else now + period_s


async def requests_of(gateway: AnyGateway) -> Mapping[str, int]:
    """Return how many requests each API has in replicas and waiting for one. Raises: GatewayError.

    Those whose body still comes in are no load yet, except where they may be held for the first replica.
    """
    return {
        name: stats.in_flight + stats.queued if stats.servers else stats.requests
        for name, stats in (await gateway.stats()).items()
    }


def steady_clock(speed: float = 1.0) -> Callable[[], float]:
    """Return a clock that begins with UNIX time and never jumps; `speed` times faster than others."""
    began, first = time.time(), time.monotonic()
    return lambda: began + (time.monotonic() - first) * speed


class Scaling:
    """The autoscaler's loop. `on_change` is called after each change of a number; time passes `speed` times faster."""

    def __init__(
        self,
        store: ApiStore,
        engine: Engine,
        sources: Sources,
        on_change: Callable[[], None],
        logger: Logger,
        speed: float = 1.0,
        timing: Timing = Timing(),  # noqa: B008 - it is frozen
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._sources = sources
        self._on_change = on_change
        self._logger = logger
        self._timing = timing
        self._speed = speed
        self._clock = clock or steady_clock(speed)
        self._apis: dict[str, _Scaled] = {}
        self._next_sample = 0.0
        self._next_tick = self._clock() + timing.tick_s
        self._error_log = LoopErrorLog(logger, "autoscaling failed")
        self._is_deaf = False  # the gateway did not answer the last time

    def decisions(self, name: str) -> Sequence[Decision]:
        """Return the last decisions about an API, the oldest first."""
        scaled = self._apis.get(name)
        return tuple(scaled.decisions) if scaled else ()

    async def run(self) -> None:
        """Look and decide until cancelled."""
        while True:
            pause_s = self._timing.sample_s / self._speed
            try:
                await self.step()
                pause_s = self._pause()
            except Exception as error:  # one bad look must not end the autoscaler
                self._error_log.failed(error)
            await asyncio.sleep(pause_s)

    async def step(self) -> None:
        """Take the samples that are due, and make the decisions that are."""
        records = self._scalable()
        now = self._clock()
        cold = [record for record in records if wanted_replicas(record) == 0]
        is_sampling = now >= self._next_sample
        if records and (is_sampling or cold):
            await self._look(records if is_sampling else cold, is_sampling)
        if is_sampling:
            self._next_sample = _next(self._next_sample, self._timing.sample_s, now)
        for record in cold:
            self._wake(record)
        if now >= self._next_tick:
            self._next_tick = _next(self._next_tick, self._timing.tick_s, now)
            self._tick()

    def _pause(self) -> float:
        cold = any(wanted_replicas(record) == 0 for record in self._scalable())
        until = max(0.0, min(self._next_sample, self._next_tick) - self._clock()) / self._speed
        return min(until, self._timing.cold_s) if cold else until

    def _scalable(self) -> list[ApiRecord]:
        """Return the APIs whose number may change, and forget those that are gone."""
        records = [
            record
            for record in self._store.records()
            if record.spec.kind.has_replicas
            and record.spec.autoscaling.min_replicas < record.spec.autoscaling.max_replicas
        ]
        for name in self._apis.keys() - {record.name for record in records}:
            del self._apis[name]
        return records

    def _of(self, record: ApiRecord) -> _Scaled:
        """Return what is known of an API; after a deploy it is judged anew, by the load that is known."""
        known = self._apis.get(record.name)
        if known is None or known.api_id != record.api_id:
            scaled = _Scaled(record.api_id, Policy.of(record.spec), History(self._clock()))
            if known is not None:
                scaled.decisions = known.decisions
                if known.policy.measure is scaled.policy.measure:
                    scaled.samples = known.samples
            self._apis[record.name] = known = scaled
        return known

    async def _look(self, records: Sequence[ApiRecord], is_sampling: bool) -> None:
        """Take a sample of each API; what can't be known now is left out."""
        requests = await self._requests()
        by_cpu = [record.name for record in records if self._of(record).policy.measure is Measure.CORES]
        cores: Mapping[str, float] = {}
        if by_cpu and is_sampling:
            running = [status for _, status in self._engine.replicas().values() if status.api in by_cpu]
            cores = await self._sources.cores(running)
        now = self._clock()
        for record in records:
            scaled = self._of(record)
            is_cold = wanted_replicas(record) == 0
            if scaled.policy.measure is Measure.CORES and not is_cold:
                load = cores.get(record.name)
            elif record.spec.kind is ApiKind.ASYNC:
                load = self._sources.workloads(record.name)
            else:
                load = self._running(record.name, requests)
            if load is not None and (is_sampling or load):
                scaled.sample(now, load)

    def _running(self, name: str, requests: Mapping[str, int]) -> int | None:
        """Return the requests of an API, less those of slow clients, who occupy no replica."""
        if name not in requests:
            return None
        statuses = [status for _, status in self._engine.replicas().values() if status.api == name]
        lent = sum(process.lent for status in statuses for process in status.processes)
        return max(0, requests[name] - lent)

    async def _requests(self) -> Mapping[str, int]:
        try:
            requests = await self._sources.requests()
        except GatewayError as error:
            if not self._is_deaf:
                self._logger.warning("gateway does not tell its load", error=error)
            self._is_deaf = True
            return {}
        self._is_deaf = False
        return requests

    def _wake(self, record: ApiRecord) -> None:
        """Give an API without replicas its first as soon as something waits for it."""
        scaled = self._of(record)
        decision = decide(scaled.policy, scaled.history, tuple(scaled.samples), self._clock(), 0)
        if decision.requested:
            self._keep(record, scaled, decision)
            scaled.samples.clear()  # they counted what waited, whatever is measured from now on

    def _tick(self) -> None:
        room = self._room()
        for record in self._scalable():
            scaled, current = self._of(record), wanted_replicas(record)
            if current == 0:
                continue  # the first request wakes it
            ceiling = self._ceiling(record, room)
            decision = decide(scaled.policy, scaled.history, tuple(scaled.samples), self._clock(), current, ceiling)
            for _ in range(decision.requested - current):
                room = room.take(record.spec.compute)
            self._keep(record, scaled, decision)

    def _room(self) -> JobRoom:
        """Return what there is besides all that runs. Cores that jobs use count as free: who serves comes first."""
        inventory, running = self._engine.devices(), [spec for spec, _ in self._engine.replicas().values()]
        serving = sum(spec.cpu for spec in running if ApiKind(spec.kind).has_replicas)
        return replace(JobRoom.of(inventory, running), cores=inventory.cores - serving)

    def _ceiling(self, record: ApiRecord, room: JobRoom) -> Ceiling | None:
        """Return how many replicas there can be; None: as many as the API may have."""
        if not room.all_cores:
            return None  # nobody has looked yet
        compute, policy = record.spec.compute, self._of(record).policy
        there = sum(spec.api == record.name for spec, _ in self._engine.replicas().values())
        while there < policy.max_replicas:
            if lack := room.lack(compute):
                return Ceiling(there, lack.replace("a worker", "a replica").partition("; ")[0])
            room, there = room.take(compute), there + 1
        return None

    def _keep(self, record: ApiRecord, scaled: _Scaled, decision: Decision) -> None:
        if decision.requested != decision.current:  # first: what can't be stored has not been decided
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
