"""Measure what `networking.record` costs: requests per second of a function that does nothing, with and without it.

Run `python -m benchmarks.recording`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.tools import machine, processes, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, wait_until_right
from benchmarks.tools.load import closed_loop, require_wrk
from benchmarks.tools.systems import START_LIMIT_S
from benchmarks.tools.workloads import NOOP

_APIS = ("unrecorded", "share-10", "share-100")


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement in seconds")
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    per_s = _measure(arguments.rounds, arguments.seconds, arguments.concurrency)
    facts = machine.facts()
    lines = [
        f"# Recording\n\n{json.dumps(facts)}\n",
        f"Requests per second with {arguments.concurrency} clients.\n",
        "| API | median | of unrecorded, by round | median of ratios |",
        "|---|---:|---|---:|",
    ]
    for api, rates in per_s.items():
        ratios = [rate / base for rate, base in zip(rates, per_s["unrecorded"], strict=True)]
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        lines.append(f"| {api} | {statistics.median(rates):,.0f} | {shown} | {statistics.median(ratios):.3f} |")
    results.write("recording", "\n".join([*lines, ""]), {"facts": facts, "per_s": per_s})


def _measure(rounds: int, seconds: float, concurrency: int) -> dict[str, list[float]]:
    require_wrk()
    processes.adopt_orphans()
    per_s: dict[str, list[float]] = {api: [] for api in _APIS}
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        cortex = Cortex.in_folder(Path(folder) / "cortex")
        with cortex.up():
            cortex.deploy("recorded")
            for number in range(rounds):
                for api in _APIS if number % 2 == 0 else _APIS[::-1]:
                    endpoint = Endpoint(cortex.gateway_port, f"/{api}")
                    wait_until_right(endpoint, NOOP, START_LIMIT_S)
                    closed_loop(endpoint, NOOP, concurrency, 1)
                    per_s[api].append(closed_loop(endpoint, NOOP, concurrency, seconds).per_s)
                    print(f"{api}: {per_s[api][-1]:,.0f}/s", flush=True)
    return per_s


if __name__ == "__main__":
    main()
