"""Measure what `networking.record` costs a function that does nothing: requests per second, CPU time of its process.

On a machine that does other things too, the CPU time is the better measure: its ratio changes little with the load.
Run `python -m benchmarks.recording`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import psutil

from benchmarks.tools import machine, processes, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, wait_until_right
from benchmarks.tools.load import closed_loop, require_wrk
from benchmarks.tools.systems import START_LIMIT_S
from benchmarks.tools.workloads import NOOP

_APIS = ("unrecorded", "share-10", "share-100", "share-10-unlimited", "share-100-unlimited")


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement in seconds")
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    per_s, cpu_us = _measure(arguments.rounds, arguments.seconds, arguments.concurrency)
    facts = machine.facts()
    lines = [
        f"# Recording\n\n{json.dumps(facts)}\n",
        f"With {arguments.concurrency} clients; ratios to `unrecorded` are medians of the rounds.\n",
        "| API | requests/s | ratio | CPU time of the process per request, µs | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for api in _APIS:
        rate, time_us = statistics.median(per_s[api]), statistics.median(cpu_us[api])
        ratios = _ratio(per_s[api], per_s["unrecorded"]), _ratio(cpu_us[api], cpu_us["unrecorded"])
        lines.append(f"| {api} | {rate:,.0f} | {ratios[0]:.3f} | {time_us:.1f} | {ratios[1]:.3f} |")
    results.write("recording", "\n".join([*lines, ""]), {"facts": facts, "per_s": per_s, "cpu_us": cpu_us})


def _ratio(values: list[float], bases: list[float]) -> float:
    return statistics.median(value / base for value, base in zip(values, bases, strict=True))


def _measure(rounds: int, seconds: float, concurrency: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    require_wrk()
    processes.adopt_orphans()
    per_s: dict[str, list[float]] = {api: [] for api in _APIS}
    cpu_us: dict[str, list[float]] = {api: [] for api in _APIS}
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        cortex = Cortex.in_folder(Path(folder) / "cortex")
        with cortex.up():
            cortex.deploy("recorded")
            status = json.loads(cortex.run("status", "-o", "json"))
            workers = {each["api"]: psutil.Process(each["pid"]) for each in status["replicas"]}
            for number in range(rounds):
                for api in _APIS if number % 2 == 0 else _APIS[::-1]:
                    endpoint = Endpoint(cortex.gateway_port, f"/{api}")
                    wait_until_right(endpoint, NOOP, START_LIMIT_S)
                    closed_loop(endpoint, NOOP, concurrency, 1)
                    before_s = sum(workers[api].cpu_times()[:2])
                    load = closed_loop(endpoint, NOOP, concurrency, seconds)
                    used_s = sum(workers[api].cpu_times()[:2]) - before_s
                    per_s[api].append(load.per_s)
                    cpu_us[api].append(1e6 * used_s / (load.per_s * seconds))
                    print(f"{api}: {load.per_s:,.0f}/s, {cpu_us[api][-1]:.1f} µs", flush=True)
    return per_s, cpu_us


if __name__ == "__main__":
    main()
