"""Replays traffic against the autoscaler that operators run, with stated start-up and service times. Pure.

The decisions are `autoscaler.decide`'s; the replicas and the requests are simulated. What is left out: the preparation
of an environment, updates, failures, and the few requests that a gateway sends ahead to a busy process.
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
    History,
    Measure,
    Policy,
    Sample,
    decide,
)
from cortex.operator.autoscaling.queueing_theory import ExactQueue, FluidQueue, Latencies, Queue, Service, Step
from cortex.operator.autoscaling.traffic import Trace

#: Up to so many requests each is followed by itself.
EXACT_REQUESTS = 300_000
#: So many requests may be held while an API has no replica.
_HELD = 1024


@dataclass(frozen=True)
class Assumptions:
    """What a simulation can't know."""

    service: Service
    startup_s: float  #: from the decision to the first request that a replica may get
    replicas: int | None = None  #: in the beginning, within the bounds; None: as many as the first rate takes
    ceiling: int | None = None  #: how many replicas there is room for; None: as many as `max_replicas`
    seed: int = 1


@dataclass(frozen=True)
class Point:
    """One interval between two decisions."""

    time_s: float  #: its end
    rate: float  #: requests per second that came
    requested: int
    ready: int
    in_flight: float  #: the average
    waiting: float  #: the most
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True)
class Outcome:
    """What a simulation shows."""

    is_exact: bool  #: each request was followed, rather than amounts
    points: tuple[Point, ...]
    decisions: tuple[Decision, ...]  #: those that changed the number
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
        """Return the replicas that ran on average, starting ones included."""
        return self.replica_seconds / self.duration_s


def simulate(api: Api, trace: Trace, assumptions: Assumptions) -> Outcome:
    """Replay a trace. The same arguments give the same outcome. It ends with the trace, whatever waits then."""
    exact = trace.requests <= EXACT_REQUESTS
    # Workloads wait for as long as it takes.
    service, timeout_s = assumptions.service, math.inf if api.kind is ApiKind.ASYNC else api.networking.timeout_s
    queue: Queue = (
        ExactQueue(service, timeout_s, random.Random(assumptions.seed)) if exact else FluidQueue(service, timeout_s)
    )
    return _Run(api, trace, assumptions, queue, exact).run()


def slots(api: Api) -> int:
    """Return how many requests a replica works on at once: of a batch, all take as long as it does."""
    batching = api.handler.server_side_batching
    return max(api.concurrency, api.handler.processes_per_replica * batching.max_batch_size if batching else 0)


@dataclass
class _Fleet:
    """Replicas by when they are ready, the first first."""

    startup_s: float
    ready: int
    coming: deque[float] = field(default_factory=deque)

    @property
    def total(self) -> int:
        return self.ready + len(self.coming)

    def ready_between(self, start_s: float, end_s: float) -> list[float]:
        """Return the times at which some become ready."""
        return sorted({at for at in self.coming if start_s < at < end_s})

    def settle(self, now_s: float) -> None:
        """Let those become ready that have started up."""
        while self.coming and self.coming[0] <= now_s + 1e-9:
            self.coming.popleft()
            self.ready += 1

    def resize(self, wanted: int, now_s: float) -> None:
        """Start what is missing; end what is too much, those that are not ready first."""
        while self.total < wanted:
            self.coming.append(now_s + self.startup_s)
        while self.total > wanted and self.coming:
            self.coming.pop()
        self.ready = min(self.ready, wanted)


class _Run:
    """One simulation while it runs."""

    def __init__(self, api: Api, trace: Trace, assumptions: Assumptions, queue: Queue, is_exact: bool) -> None:
        self._api = api
        self._trace = trace
        self._assumptions = assumptions
        self._queue = queue
        self._is_exact = is_exact
        self._policy = Policy.of(api)
        # The stabilisation periods that follow a deploy are over.
        self._history = History(-self._policy.memory_s)
        first = assumptions.replicas
        if first is None:  # Little's law: so many are in flight while nobody waits
            first = math.ceil(trace.rate(0.0) * assumptions.service.mean_s / self._policy.target)
        first = min(max(first, self._policy.min_replicas), self._policy.max_replicas)
        self._fleet = _Fleet(assumptions.startup_s, first)
        self._samples: deque[Sample] = deque()
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

    def _ticks(self) -> Iterator[Point]:
        """Live from decision to decision."""
        for index in range(math.ceil(self._trace.duration_s / TICK_S)):
            start_s, end_s = index * TICK_S, min((index + 1) * TICK_S, self._trace.duration_s)
            steps = [self._second(start_s + second) for second in range(math.ceil((end_s - start_s) / SAMPLE_S))]
            yield self._point(steps, end_s, end_s - start_s)
            if self._fleet.total:
                self._decide(end_s)

    def _second(self, start_s: float) -> Step:
        """Live until the next sample."""
        fleet, end_s = self._fleet, min(start_s + SAMPLE_S, self._trace.duration_s)
        step, now_s = Step(), start_s
        for until_s in [*fleet.ready_between(start_s, end_s), end_s]:
            fleet.settle(now_s)
            step.add(self._advance(now_s, until_s))
            now_s = until_s
        self._replica_seconds += fleet.total * (end_s - start_s)
        load = step.busy if self._policy.measure is Measure.CORES else step.busy + step.waiting
        self._samples.append(Sample(end_s, load))
        while self._samples[0].at < end_s - self._policy.window_s - 2 * SAMPLE_S:
            self._samples.popleft()
        if fleet.total == 0 and load:
            self._decide(end_s)  # the first request is seen at once
        return step

    def _advance(self, start_s: float, end_s: float) -> Step:
        ready = self._fleet.ready
        servers = ready * slots(self._api)
        most = ready * self._api.autoscaling.max_replica_concurrency
        room = math.inf if self._policy.measure is Measure.WORKLOADS else max(most, servers or _HELD)
        return self._queue.advance(start_s, end_s, self._trace.mean_rate(start_s, end_s), servers, room)

    def _decide(self, now_s: float) -> None:
        most = self._assumptions.ceiling
        ceiling = None if most is None else Ceiling(most, f"there is room for {most}")
        decision = decide(self._policy, self._history, self._samples, now_s, self._fleet.total, ceiling)
        self._history = self._history.after(decision, self._policy)
        if decision.requested != decision.current:
            self._changes.append(decision)
            self._fleet.resize(decision.requested, now_s)
            self._most = max(self._most, decision.requested)

    def _point(self, steps: Sequence[Step], end_s: float, seconds: float) -> Point:
        latencies = Latencies()
        for step in steps:
            latencies.merge(step.latencies)
        self._all.merge(latencies)
        self._refused += sum(step.refused for step in steps)
        self._timed_out += sum(step.timed_out for step in steps)
        return Point(
            time_s=end_s,
            rate=self._trace.mean_rate(end_s - seconds, end_s),
            requested=self._fleet.total,
            ready=self._fleet.ready,
            in_flight=sum(step.busy + step.waiting for step in steps) / len(steps),
            waiting=max(step.waiting for step in steps),
            p50_s=latencies.quantile(0.5),
            p95_s=latencies.quantile(0.95),
        )
