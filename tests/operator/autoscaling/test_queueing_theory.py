"""Both queue models compared with queueing theory and with each other."""

from __future__ import annotations

import math
import random

import pytest

from cortex.operator.autoscaling.queueing_theory import (
    ExactQueue,
    FluidQueue,
    Latencies,
    QueueStep,
    ServerQueue,
    ServiceTime,
)

ROOM = 1e9


def run(queue: ServerQueue, rate: float, servers: int, seconds: int, room: float = ROOM) -> Latencies:
    latencies = Latencies()
    for second in range(seconds):
        latencies.merge(queue.advance(second, second + 1, rate, servers, room).latencies)
    return latencies


def exact(service: ServiceTime, timeout_s: float = 60.0, seed: int = 1) -> ExactQueue:
    return ExactQueue(service, timeout_s, random.Random(seed))


@pytest.mark.heavy
def test_matches_the_theoretical_waiting_time_of_md1() -> None:
    # M/D/1 at a load of 0.8: the mean waiting time is 2 service times.
    latencies = run(exact(ServiceTime(0.01)), 80.0, 1, 2000)
    assert mean(latencies) == pytest.approx(0.03, rel=0.1)


def test_service_times_have_the_given_mean_and_deviation() -> None:
    service, chance = ServiceTime(0.2, 0.7), random.Random(1)
    drawn = [service.draw(chance) for _ in range(20_000)]
    average = sum(drawn) / len(drawn)
    spread = math.sqrt(sum((value - average) ** 2 for value in drawn) / len(drawn))
    assert (average, spread / average) == (pytest.approx(0.2, rel=0.03), pytest.approx(0.7, rel=0.05))
    assert sum(share for _, share in service.parts()) == pytest.approx(1)
    assert sum(time * share for time, share in service.parts()) == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize("cv", [0.0, 0.5])
@pytest.mark.heavy
def test_the_fluid_queue_approximates_the_exact_queue_for_many_servers(cv: float) -> None:
    service = ServiceTime(0.1, cv)
    found = []
    for queue in (exact(service), FluidQueue(service, 60.0)):
        latencies = run(queue, 800.0, 100, 20)
        for second in range(20, 40):  # overload, then underload
            latencies.merge(queue.advance(second, second + 1, 1500.0, 100, ROOM).latencies)
        for second in range(40, 60):
            latencies.merge(queue.advance(second, second + 1, 400.0, 130, ROOM).latencies)
        found.append([latencies.total, *(latencies.quantile(share) for share in (0.5, 0.95, 0.99))])
    assert found[1] == pytest.approx(found[0], rel=0.08)


@pytest.mark.parametrize("queue", [exact(ServiceTime(0.1)), FluidQueue(ServiceTime(0.1), 60.0)], ids=["exact", "fluid"])
def test_rejects_requests_beyond_the_limit_and_loses_none(queue: ServerQueue) -> None:
    steps = [queue.advance(second, second + 1, 100.0, 2, 50.0) for second in range(10)]
    began = sum(step.latencies.total for step in steps)
    refused = sum(step.refused for step in steps)
    assert began == pytest.approx(200, rel=0.05)
    assert steps[-1].waiting == pytest.approx(48, abs=2)
    assert began + refused + steps[-1].waiting == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(
    "queue", [exact(ServiceTime(0.1), 2.0), FluidQueue(ServiceTime(0.1), 2.0)], ids=["exact", "fluid"]
)
def test_requests_time_out_in_the_queue(queue: ServerQueue) -> None:
    steps = [queue.advance(second, second + 1, 20.0, 0, ROOM) for second in range(4)]
    assert sum(step.timed_out for step in steps) > 0
    assert steps[-1].waiting == pytest.approx(40, abs=25)
    assert queue.advance(4, 5, 0.0, 1000, ROOM).waiting == 0


def test_a_removed_server_finishes_its_call() -> None:
    queue = exact(ServiceTime(5.0))
    busy: list[QueueStep] = [queue.advance(0, 1, 100.0, 4, ROOM), queue.advance(1, 2, 0.0, 1, ROOM)]
    assert [step.busy for step in busy] == [4, 4]


def mean(latencies: Latencies) -> float:
    quantiles = [latencies.quantile((index + 0.5) / 1000) or 0.0 for index in range(1000)]
    return sum(quantiles) / 1000
