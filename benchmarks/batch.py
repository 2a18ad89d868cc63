"""Compare batch jobs with other systems: `python -m benchmarks.batch`.

A million integers in batches of 100 go to two workers, which return the sum of each batch. The time runs from before
the submission until every batch is recorded. Cortex, Ray Data, Celery with Redis, and a process pool as the upper limit
take turns. Each is started from scratch, and runs a small job before the measured one.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
from dataclasses import dataclass

from benchmarks.tools import batch_systems, machine, processes, report, results
from benchmarks.tools.batch_systems import BatchSystem, Driver, DriverError
from benchmarks.tools.cortex_cli import NotServingError

ITEMS, BATCH_SIZE = 1_000_000, 100
FIRST_ITEMS = 10_000
GOAL_PER_S, GOAL_CPU_MS = 300_000, 0.3


@dataclass(frozen=True)
class BatchSample:
    """Figures of one system in one round."""

    system: str
    first_s: float  #: of the small job, the first after the start
    seconds: float
    per_s: float  #: items
    cpu_ms: float  #: per batch, of all processes: the system's and the one that submits
    peak_mb: float


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch", description=__doc__)
    parser.add_argument("--systems", default="", help="comma-separated list of systems (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    arguments = parser.parse_args()
    chosen = batch_systems.named(arguments.systems)
    if any(system.name == "celery" for system in chosen) and shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not on PATH: `apt-get install redis-server`, or leave celery out: --systems")
    batch_systems.prepare(chosen)
    processes.adopt_orphans()
    facts = machine.facts()
    facts["rounds"] = f"{arguments.rounds}; one system runs at a time"
    facts["job"] = f"{arguments.items:,} items in batches of {arguments.batch_size}, {batch_systems.WORKERS} workers"
    samples: list[BatchSample] = []
    failed: dict[str, str] = {}
    for number in range(arguments.rounds):
        for system in chosen:
            try:
                samples.append(_measure(system, arguments.items, arguments.batch_size))
                print(f"round {number + 1}: {samples[-1]}", flush=True)
            except (DriverError, NotServingError) as error:
                failed[system.name] = " ".join(str(error).split())
                print(f"round {number + 1}: {system.name} failed: {error}", flush=True)
    data = {
        "facts": facts,
        "medians": [dataclasses.asdict(sample) for sample in medians(samples)],
        "samples": [dataclasses.asdict(sample) for sample in samples],
        "failed": failed,
    }
    results.write("batch", markdown(samples, facts, failed), data)


def medians(samples: list[BatchSample]) -> list[BatchSample]:
    """Return one sample per system: the median of each figure over the rounds."""
    groups: dict[str, list[BatchSample]] = {}
    for sample in samples:
        groups.setdefault(sample.system, []).append(sample)
    names = ("first_s", "seconds", "per_s", "cpu_ms", "peak_mb")
    return [
        BatchSample(system, *(statistics.median(getattr(sample, name) for sample in group) for name in names))
        for system, group in groups.items()
    ]


def goals(samples: list[BatchSample]) -> list[report.Goal]:
    """Compare the medians with the project's goals."""
    ours = next((sample for sample in medians(samples) if sample.system == report.CORTEX), None)
    rate = f"{ours.per_s:,.0f}" if ours else "–"
    cpu = f"{ours.cpu_ms:.3f} ms" if ours else "–"
    return [
        report.Goal("items/s, end to end", f"≥ {GOAL_PER_S:,}", rate, ours and ours.per_s >= GOAL_PER_S),
        report.Goal("CPU per batch", f"< {GOAL_CPU_MS:g} ms", cpu, ours and ours.cpu_ms < GOAL_CPU_MS),
    ]


def markdown(samples: list[BatchSample], facts: dict[str, str], failed: dict[str, str]) -> str:
    """Return the whole report."""
    found = medians(samples)
    ours = next((sample for sample in found if sample.system == report.CORTEX), None)
    records = {system.name: system.records for system in batch_systems.SYSTEMS}
    head = ("system", "items/s", "cortex ÷ it", "CPU ms/batch", "peak MB", "first small job s", "results are in")
    rows = [
        (
            sample.system,
            f"{sample.per_s:,.0f}",
            f"{ours.per_s / sample.per_s:.2f}" if ours and sample is not ours else "",
            f"{sample.cpu_ms:.3f}",
            f"{sample.peak_mb:.0f}",
            f"{sample.first_s:.2f}",
            records[sample.system],
        )
        for sample in found
    ]
    parts = ["# Batch jobs", report.table(("fact", "value"), facts.items())]
    parts += ["## Goals", report.goals_table(goals(samples)), "## Medians", report.table(head, rows)]
    if failed:
        parts += ["## Could not be measured", report.table(("system", "why"), failed.items())]
    return "\n\n".join(parts) + "\n"


def _measure(system: BatchSystem, items: int, batch_size: int) -> BatchSample:
    with system.driven() as driver:
        first_s = driver.tell(f"run {min(FIRST_ITEMS, items)} {batch_size}")["seconds"]
        before = processes.cpu_with_ended_s()
        with processes.PeakMemory() as memory:
            seconds = driver.tell(f"run {items} {batch_size}")["seconds"]
        cpu_s = processes.cpu_with_ended_s() - before
        _check(driver, items, batch_size)
    batches = -(-items // batch_size)
    return BatchSample(system.name, first_s, seconds, items / seconds, cpu_s / batches * 1e3, memory.mb)


def _check(driver: Driver, items: int, batch_size: int) -> None:
    """Check that all results are there. Ray may have more batches: it ends each block with a shorter one."""
    found = driver.tell("totals")
    if found["total"] != sum(range(items)) or found["batches"] < -(-items // batch_size):
        raise DriverError(f"the results are not right: {found}")


if __name__ == "__main__":
    main()
