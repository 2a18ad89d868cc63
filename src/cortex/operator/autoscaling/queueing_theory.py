"""Two models of a first-come-first-served queue in front of a changing number of servers. Pure.

`ExactQueue` simulates each request. `FluidQueue` simulates amounts, for any number of requests. A server runs one
request at a time: a thread of a process.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from statistics import NormalDist
from typing import Protocol

#: Growth factor of latency buckets: the error of a quantile is at most half of it.
_GROWTH = 1.02
_SMALLEST_S = 1e-5
#: Shares into which the distribution of service times is cut: finer at the long tail.
_SHARES = (0.05,) * 18 + (0.01,) * 9 + (0.002,) * 5


@dataclass
class Latencies:
    """Histogram of latencies."""

    counts: dict[int, float] = field(default_factory=dict)
    total: float = 0.0

    def add(self, latency_s: float, weight: float = 1.0) -> None:
        """Add a latency."""
        bucket = math.floor(math.log(max(latency_s, _SMALLEST_S) / _SMALLEST_S) / _LOG_GROWTH)
        self.counts[bucket] = self.counts.get(bucket, 0.0) + weight
        self.total += weight

    def merge(self, other: Latencies) -> None:
        """Add all latencies of another histogram."""
        for bucket, weight in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0.0) + weight
        self.total += other.total

    def quantile(self, share: float) -> float | None:
        """Return the latency that this share of requests does not exceed; None if empty."""
        left = share * self.total
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 1e-9:
                return _SMALLEST_S * math.exp((bucket + 0.5) * _LOG_GROWTH)
        return None


_LOG_GROWTH = math.log(_GROWTH)


@dataclass(frozen=True)
class ServiceTime:
    """Lognormal distribution of the time of one call: never negative, with a long tail."""

    mean_s: float
    cv: float = 0.0  #: standard deviation / mean

    def parts(self) -> Sequence[tuple[float, float]]:
        """Return (time, share) pairs that approximate the distribution; the shares add up to 1."""
        if not self.cv:
            return ((self.mean_s, 1.0),)
        sigma = math.sqrt(math.log(1 + self.cv**2))
        times, below = [], 0.0
        for share in _SHARES:
            middle = NormalDist().inv_cdf(below + share / 2)
            times.append((self.mean_s * math.exp(sigma * middle - sigma**2 / 2), share))
            below += share
        return times

    def draw(self, chance: random.Random) -> float:
        """Return a random time of one call."""
        if not self.cv:
            return self.mean_s
        sigma = math.sqrt(math.log(1 + self.cv**2))
        return self.mean_s * math.exp(sigma * chance.gauss(0, 1) - sigma**2 / 2)


@dataclass
class QueueStep:
    """Result of one step of time."""

    latencies: Latencies = field(default_factory=Latencies)  #: of requests that started
    busy: float = 0.0  #: servers at the end
    waiting: float = 0.0  #: requests at the end
    refused: float = 0.0  #: because the queue was full
    timed_out: float = 0.0  #: in the queue

    def add(self, later: QueueStep) -> None:
        """Append the step that follows directly."""
        self.latencies.merge(later.latencies)
        self.busy, self.waiting = later.busy, later.waiting
        self.refused += later.refused
        self.timed_out += later.timed_out


class ServerQueue(Protocol):
    """Queue in front of a changing number of servers."""

    def advance(self, start_s: float, end_s: float, rate: float, servers: int, limit: float) -> QueueStep:
        """Advance the time: `rate` requests per second arrive, and at most `limit` may be queued or running at once."""


class ExactQueue:
    """Simulates each request: Poisson arrivals and random service times."""

    def __init__(self, service: ServiceTime, timeout_s: float, chance: random.Random) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._chance = chance
        self._free: list[float] = []  # heap of the times at which each server becomes free
        self._leaving: list[float] = []  # busy servers that have been removed
        self._waiting: deque[float] = deque()

    def advance(self, start_s: float, end_s: float, rate: float, servers: int, limit: float) -> QueueStep:
        """Advance the time; see `ServerQueue`."""
        step = QueueStep()
        self._resize(servers, start_s)
        self._serve(start_s, step)
        arrival = start_s
        while rate > 0 and (arrival := arrival + self._chance.expovariate(rate)) < end_s:
            self._serve(arrival, step)
            # While a request waits, all servers are busy.
            if self._waiting and len(self._waiting) + len(self._free) >= limit:
                step.refused += 1
            else:
                self._waiting.append(arrival)
        self._serve(end_s, step)
        step.busy, step.waiting = self._busy(end_s), len(self._waiting)
        return step

    def _resize(self, servers: int, now_s: float) -> None:
        self._leaving = [free for free in self._leaving if free > now_s]
        while len(self._free) < servers:
            heappush(self._free, now_s)
        while len(self._free) > servers:  # idle servers first; busy ones finish their request
            if (free := heappop(self._free)) > now_s:
                self._leaving.append(free)

    def _serve(self, until_s: float, step: QueueStep) -> None:
        """Start all requests that can start by `until_s`."""
        free, waiting = self._free, self._waiting
        while waiting and free and free[0] <= until_s:
            arrival = waiting.popleft()
            begin = max(arrival, free[0])
            if begin - arrival > self._timeout_s:
                step.timed_out += 1
                continue
            takes = self._service.draw(self._chance)
            heapreplace(free, begin + takes)
            step.latencies.add(begin + takes - arrival)
        while waiting and until_s - waiting[0] > self._timeout_s:
            waiting.popleft()
            step.timed_out += 1

    def _busy(self, now_s: float) -> int:
        return sum(free > now_s for free in self._free) + sum(free > now_s for free in self._leaving)


class FluidQueue:
    """Simulates amounts: arrivals are spread evenly, and the queue holds amounts. Accurate for many servers."""

    def __init__(self, service: ServiceTime, timeout_s: float) -> None:
        self._mean_s = service.mean_s
        self._parts = service.parts()
        self._timeout_s = timeout_s
        self._waiting: deque[list[float]] = deque()  # [arrival time, amount]
        self._amount = 0.0

    def advance(self, start_s: float, end_s: float, rate: float, servers: int, limit: float) -> QueueStep:
        """Advance the time; see `ServerQueue`."""
        step, seconds = QueueStep(), end_s - start_s
        coming, could = rate * seconds, servers * seconds / self._mean_s
        busy = min(float(servers), (coming + self._amount) * self._mean_s / seconds)
        # Requests that arrive while others finish take their places.
        accepted = min(coming, max(0.0, limit - busy - self._amount) + min(could, coming + self._amount))
        step.refused = coming - accepted
        if accepted:
            self._waiting.append([(start_s + end_s) / 2, accepted])
            self._amount += accepted
        self._serve(start_s, seconds, could, step)
        while self._waiting and end_s - self._waiting[0][0] > self._timeout_s:
            step.timed_out += self._waiting[0][1]
            self._amount -= self._waiting.popleft()[1]
        if not self._waiting:
            self._amount = 0.0
        step.busy, step.waiting = busy, self._amount
        return step

    def _serve(self, start_s: float, seconds: float, could: float, step: QueueStep) -> None:
        served = 0.0
        while self._waiting and served < could - 1e-9:
            came, amount = self._waiting[0]
            part = min(amount, could - served)
            # Requests in a step that can serve all of them do not wait for its end.
            begin = start_s + seconds * (served + part / 2) / could
            waited = max(0.0, begin - came)
            for takes, share in self._parts:
                step.latencies.add(waited + takes, part * share)
            served += part
            self._amount -= part
            if part < amount:
                self._waiting[0][1] = amount - part
            else:
                self._waiting.popleft()
