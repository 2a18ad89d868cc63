"""Servers that all run at once and are loaded in turn, for ratios that a slow minute of the machine does not change."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from benchmarks.tools.endpoint import Endpoint, NotServingError, wait_until_right
from benchmarks.tools.load import closed_loop
from benchmarks.tools.processes import cpu_between, cpu_s
from benchmarks.tools.systems import START_LIMIT_S
from benchmarks.tools.workloads import Workload


@dataclass(frozen=True, eq=False)
class Case:
    """One server and one request. Cases of the same `group` are compared with the first of them."""

    group: str
    system: str
    endpoint: Endpoint
    workload: Workload
    processes: Callable[[], list[psutil.Process]]  #: those on the path of requests, whose CPU time counts


@dataclass(frozen=True)
class Measured:
    """Medians over the rounds of one case; those of `…_ratio` and `extra_…` are of the differences within a round."""

    group: str
    system: str
    concurrency: int
    per_s: float
    p50_us: float
    cpu_us: float  #: per request
    rate_ratio: float  #: requests/s of this case ÷ those of the first
    extra_cpu_us: float  #: CPU of this case − that of the first


def compare(cases: Sequence[Case], concurrencies: Sequence[int], rounds: int, seconds: float) -> list[Measured]:
    """Load the cases in turn. Raises: NotServingError if a response is wrong."""
    for case in cases:
        wait_until_right(case.endpoint, case.workload, START_LIMIT_S)
        closed_loop(case.endpoint, case.workload, 16, 1)
    measured = []
    for concurrency in concurrencies:
        samples: dict[Case, list[tuple[float, float, float]]] = {case: [] for case in cases}
        for number in range(rounds):
            for case in cases if number % 2 else reversed(cases):
                samples[case].append(_sample(case, concurrency, seconds))
        for case in cases:
            first = samples[next(each for each in cases if each.group == case.group)]
            pairs = list(zip(samples[case], first, strict=True))
            per_s, p50_us, cpu_us = (statistics.median(each) for each in zip(*samples[case], strict=True))
            ratio = statistics.median(own[0] / other[0] for own, other in pairs)
            extra_us = statistics.median(own[2] - other[2] for own, other in pairs)
            row = Measured(case.group, case.system, concurrency, per_s, p50_us, cpu_us, ratio, extra_us)
            measured.append(row)
            print(row, flush=True)
    return measured


def table(measured: Sequence[Measured]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        "| request | system | concurrency | requests/s | ÷ first | median | CPU per request |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.group} | {row.system} | {row.concurrency} | {row.per_s:,.0f} | {row.rate_ratio:.2f} "
        f"| {row.p50_us:,.0f} µs | {row.cpu_us:,.1f} µs ({row.extra_cpu_us:+.1f}) |"
        for row in measured
    ]
    return "\n".join(lines) + "\n"


def _sample(case: Case, concurrency: int, seconds: float) -> tuple[float, float, float]:
    """Return requests per second, median latency and CPU per request in microseconds."""
    members = case.processes()
    before = cpu_s(members)
    load = closed_loop(case.endpoint, case.workload, concurrency, seconds)
    used_s = cpu_between(before, cpu_s(members))
    if load.errors:
        raise NotServingError(f"{load.errors} of {load.requests} requests to {case.system} failed")
    return load.per_s, load.p50_us, used_s / load.requests * 1e6
