"""Measurements in rounds: every system once, one at a time, then all again."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from benchmarks.tools import processes
from benchmarks.tools.endpoint import Endpoint, NotServingError
from benchmarks.tools.load import Load, closed_loop
from benchmarks.tools.open_loop import open_loop
from benchmarks.tools.paths import USER_CODE
from benchmarks.tools.streaming import streaming
from benchmarks.tools.systems import System
from benchmarks.tools.workloads import LARGE, SMALL, STREAM, Workload

BARE = "bare function"
#: Shares of a system's peak at which the latencies of an open load are measured.
SHARES_OF_PEAK = (0.5, 0.7)
#: Rates that are tried to find a peak. From the fourth on, each halves the uncertainty: it ends at 2 to 4 %.
_PROBES = 7


@dataclass(frozen=True)
class Plan:
    """Extent of the measurements."""

    rounds: int = 5
    seconds: float = 4.0
    warm_s: float = 1.0
    concurrencies: tuple[int, ...] = (1, 16, 64)
    large_concurrency: int = 16
    probe_s: float = 2.0
    open_s: float = 5.0
    open_rounds: int = 3


@dataclass(frozen=True)
class Sample:
    """One measurement; figures that don't apply to its kind of load are None."""

    system: str
    workload: str
    load: str  #: "closed", "open", "matched" (open, relative to the peak of another system), "peak" or "stream"
    concurrency: int = 0
    share: float | None = None  #: open loop: rate relative to the peak
    per_s: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    cpu_us: float | None = None  #: per request, whole process tree, without the load generator
    pss_mb: float | None = None
    errors: int = 0
    rate: float | None = None  #: open loop: requests per second that were due
    late_p99_us: float | None = None  #: open loop: the generator's own lateness
    busy: float | None = None  #: open loop: share of the time in which the generator ran, or waited for a processor
    generator_cpu_us: float | None = None  #: open loop: per request
    chunks_per_s: float | None = None
    first_byte_us: float | None = None


@dataclass(frozen=True)
class Failed:
    """A system that could not be measured."""

    system: str
    workload: str
    message: str


Outcome = list[Sample | Failed]
_L = TypeVar("_L", bound=Load)


def closed_rounds(systems: tuple[System, ...], workloads: tuple[Workload, ...], plan: Plan) -> Outcome:
    """Measure requests per second, latencies, CPU and memory under `wrk`."""
    concurrencies = plan.concurrencies if workloads == SMALL else (plan.large_concurrency,)

    def one_visit(system: System, workload: Workload, endpoint: Endpoint) -> Iterator[Sample]:
        for concurrency in concurrencies:
            yield closed(system, workload, endpoint, concurrency, plan.seconds)

    outcome: Outcome = []
    for number in range(plan.rounds):
        _say(f"round {number + 1} of {plan.rounds}: {', '.join(workload.name for workload in workloads)}")
        for workload in workloads:
            if workload in SMALL:
                outcome.append(_bare(workload, plan.seconds / 2))
            for system in systems:
                outcome += visit(system, workload, plan, one_visit)
    return outcome


def open_rounds(
    systems: tuple[System, ...],
    workload_of: Callable[[System], Workload],
    plan: Plan,
    shares: tuple[float, ...] = SHARES_OF_PEAK,
) -> Outcome:
    """Measure latencies at shares of each system's own peak, and of cortex also at those of the fastest peer's.

    A peak and its shares are measured in the same visit, because the machine may be slower a minute later.
    """
    outcome: Outcome = []
    for number in range(plan.open_rounds):
        _say(f"open-loop round {number + 1} of {plan.open_rounds}")
        measurements = partial(_open_visit, plan=plan, shares=shares, peaks_of_peers=[])
        for system in sorted(systems, key=lambda system: system.role == "cortex"):
            if system.role != "limit":
                outcome += visit(system, workload_of(system), plan, measurements)
    return outcome


def _open_visit(
    system: System,
    workload: Workload,
    endpoint: Endpoint,
    plan: Plan,
    shares: tuple[float, ...],
    peaks_of_peers: list[float],
) -> Iterator[Sample]:
    start = closed_loop(endpoint, workload, max(plan.concurrencies), plan.probe_s).per_s
    peak = sustained_peak(partial(_measured_open, system, workload, endpoint, seconds=plan.probe_s), start)
    yield replace(peak, load="peak", share=1.0)
    loads = {"open": peak.rate or 0.0}
    if system.role == "peer":
        peaks_of_peers.append(loads["open"])
    elif peaks_of_peers:
        loads["matched"] = max(peaks_of_peers)
    for load, of_rate in loads.items():
        for share in shares:
            sample = _measured_open(system, workload, endpoint, share * of_rate, plan.open_s)
            yield replace(sample, load=load, share=share)


def sustained_peak(measure_at: Callable[[float], Sample], start: float) -> Sample:
    """Find the highest rate that an open load sustains; return the measurement at it.

    `start` is the first rate. One that is not sustained is tried again, in case something else used the machine.
    Raises: ValueError if no rate is sustained.
    """
    best: Sample | None = None
    rate, low, high = start, 0.0, 0.0
    for _ in range(_PROBES):
        sample = measure_at(rate)
        if sample.p99_us is None:
            sample = measure_at(rate)
        if sample.p99_us is None:
            high = rate
        else:
            best, low = sample, rate
        rate = (low + high) / 2 if high else rate * 1.5
    if best is None:
        raise ValueError(f"no rate between {high:.0f}/s and {start:.0f}/s was sustained")
    return best


def large_rounds(systems: tuple[System, ...], plan: Plan) -> Outcome:
    """Measure 1 MB in, 1 MB out, and a streamed response."""
    peers = tuple(system for system in systems if system.role != "limit")
    outcome = closed_rounds(peers, LARGE, plan)

    def one_visit(system: System, workload: Workload, endpoint: Endpoint) -> Iterator[Sample]:
        alone = streaming(endpoint, workload, plan.seconds / 2)
        sample = closed(system, workload, endpoint, plan.large_concurrency, plan.seconds)
        yield replace(sample, load="stream", first_byte_us=alone.first_byte_us, chunks_per_s=alone.chunks_per_s)

    for number in range(plan.rounds):
        _say(f"round {number + 1} of {plan.rounds}: {STREAM.name}")
        for system in peers:
            outcome += visit(system, STREAM, plan, one_visit)
    return outcome


def visit(
    system: System,
    workload: Workload,
    plan: Plan,
    measurements: Callable[[System, Workload, Endpoint], Iterator[Sample]],
) -> Outcome:
    """Start a system, warm it up, measure and end it. A failure is recorded, and the other systems go on."""
    if workload.name not in system.workloads:
        return []
    done: Outcome = []
    try:
        with system.serve(workload) as endpoint:
            closed_loop(endpoint, workload, plan.large_concurrency, plan.warm_s)
            for sample in measurements(system, workload, endpoint):
                done.append(sample)
                _say(_line(sample))
            if mistake := endpoint.mistake(workload):
                raise NotServingError(f"wrong answer after the load: {mistake}")
    except (NotServingError, OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as error:
        _say(f"{system.name} {workload.name}: {error}")
        done.append(Failed(system.name, workload.name, str(error)))
    return done


def closed(system: System, workload: Workload, endpoint: Endpoint, concurrency: int, seconds: float) -> Sample:
    """Measure one system under one closed load."""
    load, cpu_us, pss_mb = _watched(lambda: closed_loop(endpoint, workload, concurrency, seconds))
    return Sample(
        system=system.name,
        workload=workload.name,
        load="closed",
        concurrency=concurrency,
        per_s=load.per_s,
        p50_us=load.p50_us,
        p99_us=load.p99_us,
        cpu_us=cpu_us,
        pss_mb=pss_mb,
        errors=load.errors,
    )


def _measured_open(system: System, workload: Workload, endpoint: Endpoint, rate: float, seconds: float) -> Sample:
    load, cpu_us, pss_mb = _watched(lambda: open_loop(endpoint, workload, rate, seconds))
    return Sample(
        system=system.name,
        workload=workload.name,
        load="open",
        per_s=load.per_s,
        p50_us=load.p50_us if load.is_sustained else None,
        p99_us=load.p99_us if load.is_sustained else None,
        cpu_us=cpu_us,
        pss_mb=pss_mb,
        errors=load.errors,
        rate=rate,
        late_p99_us=load.late_p99_us,
        busy=load.busy,
        generator_cpu_us=load.generator_cpu_us,
    )


def _watched(run: Callable[[], _L]) -> tuple[_L, float, float]:
    """Run a load; return it with CPU microseconds per request and PSS in MB of the system's processes.

    The generator is not among them: it starts after the first reading and has ended before the second.
    """
    before = processes.cpu_s(processes.descendants())
    load = run()
    members = processes.descendants()
    used_s = processes.cpu_between(before, processes.cpu_s(members))
    return load, used_s / max(1, load.requests) * 1e6, processes.pss_mb(members)


def _bare(workload: Workload, seconds: float) -> Sample:
    command = [sys.executable, str(USER_CODE / "bare.py"), workload.name, str(seconds), workload.body.decode()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds + 60)
    found = json.loads(done.stdout)
    return Sample(
        system=BARE,
        workload=workload.name,
        load="closed",
        concurrency=1,
        per_s=found["requests"] / found["seconds"],
        p50_us=found["p50_us"],
        p99_us=found["p99_us"],
        cpu_us=found["cpu_us"],
    )


def _line(sample: Sample) -> str:
    extent = f"{sample.share:.0%}" if sample.share else sample.concurrency
    where = f"{sample.system:18} {sample.workload:8} {sample.load:7} {extent:>4}"
    latencies = f"p50 {(sample.p50_us or 0) / 1e3:8.2f} ms  p99 {(sample.p99_us or 0) / 1e3:8.2f} ms"
    if sample.rate and sample.p99_us is None:
        latencies = f"overloaded: {sample.rate or 0:.0f}/s were due, generator busy {sample.busy or 0:.0%}"
    costs = f"CPU {sample.cpu_us or 0:7.1f} µs  {sample.pss_mb or 0:6.0f} MB  errors {sample.errors}"
    return f"{where}  {sample.per_s or 0:9.0f}/s  {latencies}  {costs}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
