"""Measure short calls next to long ones of the same API: `python -m benchmarks.uneven_calls`.

With 1, 2 and 4 processes, half of them (at least one) run calls of 2 s, one after the other with pauses, while short
calls arrive at random. A short call should never wait behind a long one while another process is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tools import machine, processes, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.open_calls import Call, send_all

LONG_S = 2.0
#: Short calls occupy a process for this part of the time.
_USED = 0.1
_PROCESSES = (1, 2, 4)
_HANDLER = """
import time


class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        time.sleep(payload["s"])
        return payload
"""
_API = """
- name: uneven
  kind: RealtimeAPI
  handler: {{type: python, path: uneven.py, processes_per_replica: {processes}}}
  autoscaling: {{max_replicas: 1}}
"""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Latencies of the short calls with one number of processes."""

    processes: int
    calls: int
    failed: int
    median_s: float
    p99_s: float
    max_s: float


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uneven_calls", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each measurement")
    parser.add_argument("--short", type=float, default=0.02, help="duration of a short call in seconds")
    options = parser.parse_args()
    processes.adopt_orphans()
    measured = []
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        cortex = Cortex.in_folder(Path(folder))
        (cortex.project / "uneven.py").write_text(_HANDLER)
        with cortex.up():
            for count in _PROCESSES:
                (cortex.project / "uneven.yaml").write_text(_API.format(processes=count))
                cortex.deploy("uneven")
                measured.append(asyncio.run(_measure(cortex.gateway_port, count, options)))
                print(measured[-1], flush=True)
    text = f"# Short calls ({options.short * 1e3:g} ms) next to long ones ({LONG_S:g} s)\n\n"
    text += "| processes | long calls at once | short calls | median | p99 | longest | failed |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for row in measured:
        times = " | ".join(f"{each * 1e3:.0f} ms" for each in (row.median_s, row.p99_s, row.max_s))
        text += f"| {row.processes} | {_long_calls(row.processes)} | {row.calls} | {times} | {row.failed} |\n"
    data: dict[str, Any] = {"facts": machine.facts(), "measured": [dataclasses.asdict(row) for row in measured]}
    results.write("uneven-calls", text, data)


def _long_calls(count: int) -> int:
    return max(1, count // 2)


async def _measure(port: int, count: int, options: argparse.Namespace) -> Measured:
    numbers = random.Random(count)
    due, now = [], 0.0
    while (now := now + numbers.expovariate(_USED / options.short * count)) < options.seconds:
        due.append(now)
    starts = [
        number * 0.3 + start * (LONG_S + 0.5)
        for number in range(_long_calls(count))
        for start in range(int(options.seconds / (LONG_S + 0.5)))
    ]
    short, _ = await asyncio.gather(_send(port, options.short, due), _send(port, LONG_S, sorted(starts)))
    latencies = sorted(call.latency_s for call in short if call.status == 200)
    p99_s = latencies[int(0.99 * len(latencies))]
    failed = len(short) - len(latencies)
    return Measured(count, len(short), failed, statistics.median(latencies), p99_s, latencies[-1])


async def _send(port: int, duration_s: float, due_s: list[float]) -> list[Call]:
    return await send_all(port, "/uneven", json.dumps({"s": duration_s}).encode(), due_s)


if __name__ == "__main__":
    main()
