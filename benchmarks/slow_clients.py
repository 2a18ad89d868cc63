"""Measure the effect of slow clients on other requests: `python -m benchmarks.slow_clients`.

It measures the p99 of normal requests at a constant rate: without slow clients, next to 200 clients that upload 1 MB at
1 kB/s, and next to 200 clients that read a 1 MB response at 1 kB/s. All call one API with one replica. Goal: at most
1.5 times the p99 without slow clients.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from typing import Any

from benchmarks.tools import machine, processes, report, results, systems
from benchmarks.tools.endpoint import Endpoint
from benchmarks.tools.open_loop import OpenLoad, open_loop
from benchmarks.tools.slow_connections import SlowClients
from benchmarks.tools.workloads import MIXED, MIXED_DOWNLOAD, MIXED_UPLOAD

GOAL = 1.5
#: After this time the burst of 200 connecting clients is over.
_SETTLE_S = 2.0
WITHOUT, UPLOADING, READING = "without", "uploading", "reading"


def main() -> None:
    """Measure, and write the report."""
    arguments = _arguments()
    system = systems.named(arguments.system)[0]
    systems.prepare((system,))
    processes.adopt_orphans()
    facts = machine.facts()
    loads: dict[str, list[OpenLoad]] = {WITHOUT: [], UPLOADING: [], READING: []}
    became: dict[str, dict[str, int]] = {UPLOADING: {}, READING: {}}
    with system.serve(MIXED) as endpoint:
        open_loop(endpoint, MIXED, arguments.rate, 1)
        for _ in range(arguments.repeats):
            for condition in (WITHOUT, UPLOADING, WITHOUT, READING):
                load, ends = _one(endpoint, condition, arguments)
                loads[condition].append(load)
                for end, count in ends.items():
                    became[condition][end] = became[condition].get(end, 0) + count
                print(f"{condition:9}  p99 {load.p99_us / 1e3:.3f} ms  errors {load.errors}  {ends or ''}", flush=True)
    base = statistics.median(load.p99_us for load in loads[WITHOUT])
    goals = [_goal(condition, loads[condition], base) for condition in (UPLOADING, READING)]
    errors = sum(load.errors for group in loads.values() for load in group)
    goals.append(report.Goal("normal requests that failed", "0", str(errors), errors == 0))
    text = f"# Slow clients: {system.name}, {arguments.clients} of them, {arguments.rate:.0f} normal requests/s\n\n"
    text += f"p99 without: {base / 1e3:.3f} ms\n\n{report.goals_table(goals)}\n\n"
    text += f"slow clients, by what became of them: {became}\n"
    data: dict[str, Any] = {"facts": facts, "arguments": vars(arguments), "slow_clients": became}
    data["loads"] = {name: [dataclasses.asdict(load) for load in group] for name, group in loads.items()}
    results.write("slow-clients", text, data)


def _one(endpoint: Endpoint, condition: str, arguments: argparse.Namespace) -> tuple[OpenLoad, dict[str, int]]:
    """Measure under one condition; also return the outcomes of the slow clients."""
    slow: SlowClients | None = None
    if condition != WITHOUT:
        workload = MIXED_UPLOAD if condition == UPLOADING else MIXED_DOWNLOAD
        slow = SlowClients(endpoint, workload, arguments.clients, uploads=condition == UPLOADING)
    with slow or contextlib.nullcontext():
        time.sleep(_SETTLE_S)
        load = open_loop(endpoint, MIXED, arguments.rate, arguments.seconds)
    return load, {"still at it": slow.kept, **slow.let_go} if slow else {}


def _goal(condition: str, loads: list[OpenLoad], base: float) -> report.Goal:
    ratio = statistics.median(load.p99_us for load in loads) / base
    return report.Goal(f"p99 with slow clients {condition}", f"≤ {GOAL} ×", f"{ratio:.2f} ×", ratio <= GOAL)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_clients", description=__doc__)
    parser.add_argument("--system", default="cortex", choices=("cortex", "fastapi"))
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1000.0, help="normal requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement in seconds")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
