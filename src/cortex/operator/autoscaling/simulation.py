"""Replay traffic against the operator's autoscaling policy, with assumed start-up and service times. Pure.

`policy.decide` makes the decisions; the replicas and requests are simulated. Not simulated: the preparation of an
environment, updates, failures, and the few requests that a gateway sends ahead to a busy process.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cortex.config.schema import Api
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
from cortex.operator.autoscaling.queueing_theory import (
    ExactQueue,
    FluidQueue,
    Latencies,
    QueueStep,
    ServerQueue,
    ServiceTime,
)
from cortex.operator.autoscaling.traffic import Trace

#: Traces of up to this many requests are simulated exactly.
EXACT_REQUESTS = 300_000
#: Maximum number of requests held while an API has no replica.
_HELD = 1024


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a simulation."""

    service: ServiceTime
    startup_s: float  #: from the decision until a replica is ready
    replicas: int | None = None  #: at the start, within the bounds; None: derived from the first rate
    ceiling: int | None = None  #: capacity of the machine in replicas; None: `max_replicas`
    seed: int = 1


@dataclass(frozen=True)
class SimulatedInterval:
    """Interval between two decisions."""

    time_s: float  #: end of the interval
    rate: float  #: arrivals per second
    requested: int
    ready: int
    in_flight: float  #: average
    waiting: float  #: maximum
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True)
class Outcome:
    """Result of a simulation."""

    is_exact: bool  #: each request was simulated, rather than amounts
    points: tuple[SimulatedInterval, ...]
    decisions: tuple[Decision, ...]  #: decisions that changed the number
    requests: float
    refused: float
    timed_out: float
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    replica_seconds: float
    most_replicas: int
    duration_s: float

    @property
    def average_replicas(self) -> float:
        """Average number of replicas, including starting ones."""
        return self.replica_seconds / self.duration_s


def simulate(api: Api, trace: Trace, assumptions: Assumptions) -> Outcome:
    """Replay a trace, deterministically. The simulation ends with the trace, even if requests still wait."""
    exact = trace.requests <= EXACT_REQUESTS
    # Workloads have no timeout.
    service, timeout_s = assumptions.service, math.inf if api.kind is ApiKind.ASYNC else api.networking.timeout_s
    queue: ServerQueue = (
        ExactQueue(service, timeout_s, random.Random(assumptions.seed)) if exact else FluidQueue(service, timeout_s)
    )
    return _Simulation(api, trace, assumptions, queue, exact).run()


def slots(api: Api) -> int:
    """Return how many requests a replica processes at once, including all requests of a batch."""
    batching = api.handler.server_side_batching
    return max(api.concurrency, api.handler.processes_per_replica * batching.max_batch_size if batching else 0)


@dataclass
class _Fleet:
    """Ready and starting replicas."""

    startup_s: float
    ready: int
    starting: deque[float] = field(default_factory=deque)  #: times at which they become ready, sorted

    @property
    def total(self) -> int:
        return self.ready + len(self.starting)

    def ready_between(self, start_s: float, end_s: float) -> list[float]:
        """Return the times in the interval at which replicas become ready."""
        return sorted({at for at in self.starting if start_s < at < end_s})

    def settle(self, now_s: float) -> None:
        """Mark replicas as ready whose start-up time is over."""
        while self.starting and self.starting[0] <= now_s + 1e-9:
            self.starting.popleft()
            self.ready += 1

    def resize(self, wanted: int, now_s: float) -> None:
        """Start missing replicas; stop surplus ones, those that are not ready first."""
        while self.total < wanted:
            self.starting.append(now_s + self.startup_s)
        while self.total > wanted and self.starting:
            self.starting.pop()
        self.ready = min(self.ready, wanted)


class _Simulation:
    """State of one simulation."""

    def __init__(self, api: Api, trace: Trace, assumptions: Assumptions, queue: ServerQueue, is_exact: bool) -> None:
        self._api = api
        self._trace = trace
        self._assumptions = assumptions
        self._queue = queue
        self._is_exact = is_exact
        self._policy = ScalingPolicy.of(api)
        # The stabilisation periods after the deploy are over.
        self._history = ScalingHistory(-self._policy.memory_s)
        first = assumptions.replicas
        if first is None:  # Little's law: the requests in flight without queueing
            first = math.ceil(trace.rate(0.0) * assumptions.service.mean_s / self._policy.target)
        first = min(max(first, self._policy.min_replicas), self._policy.max_replicas)
        self._fleet = _Fleet(assumptions.startup_s, first)
        self._samples: deque[LoadSample] = deque()
        self._changes: list[Decision] = []
        self._all = Latencies()
        self._refused = self._timed_out = self._replica_seconds = 0.0
        self._most = first

    def run(self) -> Outcome:
        points = tuple(self._ticks())
        return Outcome(
            is_exact=self._is_exact,
            points=points,
            decisions=tuple(self._changes),
            requests=self._trace.requests,
            refused=self._refused,
            timed_out=self._timed_out,
            p50_s=self._all.quantile(0.5),
            p95_s=self._all.quantile(0.95),
            p99_s=self._all.quantile(0.99),
            replica_seconds=self._replica_seconds,
            most_replicas=self._most,
            duration_s=self._trace.duration_s,
        )

    def _ticks(self) -> Iterator[SimulatedInterval]:
        """Simulate from one decision to the next."""
        for index in range(math.ceil(self._trace.duration_s / TICK_S)):
            start_s, end_s = index * TICK_S, min((index + 1) * TICK_S, self._trace.duration_s)
            steps = [self._second(start_s + second) for second in range(math.ceil((end_s - start_s) / SAMPLE_S))]
            yield self._point(steps, end_s, end_s - start_s)
            if self._fleet.total:
                self._decide(end_s)

    def _second(self, start_s: float) -> QueueStep:
        """Simulate until the next sample."""
        fleet, end_s = self._fleet, min(start_s + SAMPLE_S, self._trace.duration_s)
        step, now_s = QueueStep(), start_s
        for until_s in [*fleet.ready_between(start_s, end_s), end_s]:
            fleet.settle(now_s)
            step.add(self._advance(now_s, until_s))
            now_s = until_s
        self._replica_seconds += fleet.total * (end_s - start_s)
        load = step.busy if self._policy.measure is Measure.CORES else step.busy + step.waiting
        self._samples.append(LoadSample(end_s, load))
        while self._samples[0].at < end_s - self._policy.window_s - 2 * SAMPLE_S:
            self._samples.popleft()
        if fleet.total == 0 and load:
            self._decide(end_s)  # zero replicas: the first request is detected at once
        return step

    def _advance(self, start_s: float, end_s: float) -> QueueStep:
        ready = self._fleet.ready
        servers = ready * slots(self._api)
        most = ready * self._api.autoscaling.max_replica_concurrency
        limit = math.inf if self._policy.measure is Measure.WORKLOADS else max(most, servers or _HELD)
        return self._queue.advance(start_s, end_s, self._trace.mean_rate(start_s, end_s), servers, limit)

    def _decide(self, now_s: float) -> None:
        most = self._assumptions.ceiling
        ceiling = None if most is None else Ceiling(most, f"there is capacity for {most}")
        decision = decide(self._policy, self._history, self._samples, now_s, self._fleet.total, ceiling)
        self._history = self._history.after(decision, self._policy)
        if decision.requested != decision.current:
            self._changes.append(decision)
            self._fleet.resize(decision.requested, now_s)
            self._most = max(self._most, decision.requested)

    def _point(self, steps: Sequence[QueueStep], end_s: float, seconds: float) -> SimulatedInterval:
        latencies = Latencies()
        for step in steps:
            latencies.merge(step.latencies)
        self._all.merge(latencies)
        self._refused += sum(step.refused for step in steps)
        self._timed_out += sum(step.timed_out for step in steps)
        return SimulatedInterval(
            time_s=end_s,
            rate=self._trace.mean_rate(end_s - seconds, end_s),
            requested=self._fleet.total,
            ready=self._fleet.ready,
            in_flight=sum(step.busy + step.waiting for step in steps) / len(steps),
            waiting=max(step.waiting for step in steps),
            p50_s=latencies.quantile(0.5),
            p95_s=latencies.quantile(0.95),
        )
