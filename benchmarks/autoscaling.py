"""Compare `cortex simulate` with a real API, and test a cold start: `python -m benchmarks.autoscaling`.

Trace: a real API, whose calls wait for 100 ms on average, receives 2, then 30, then 2 random requests per second, and
the autoscaler reacts. The recorded requests per second are then simulated with the measured service and startup times.
Average replicas and p95 latency may differ by 15 %.

Cold: an API without replicas receives 1,000 requests at once. None may be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tools import machine, processes, report, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.open_calls import Call, send_all
from cortex.operator.autoscaling.policy import TICK_S
from cortex.operator.autoscaling.queueing_theory import ServiceTime
from cortex.operator.autoscaling.simulation import Assumptions, simulate
from cortex.operator.autoscaling.traffic import Trace
from cortex.operator.deploy.diagnose import diagnose

#: Requests per second, each from its second on; the last entry is the end.
STEPS = ((0.0, 2.0), (60.0, 30.0), (180.0, 2.0), (300.0, 0.0))
TOLERANCE = 0.15
BURST = 1000
_BODY = b'{"x": 1}'
_PROBES = 150
_SEEDS = 20
_LIMIT_S = 60.0

Figures = dict[str, float]


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=("trace", "cold"), default=["trace", "cold"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    processes.adopt_orphans()
    goals: list[report.Goal] = []
    data: dict[str, Any] = {"facts": machine.facts()}
    for part, measure in (("trace", _trace), ("cold", _cold)):
        if part in arguments.parts:
            found, data[part] = measure(arguments.rounds)
            goals += found
    results.write("autoscaling", f"# Autoscaling\n\n{report.goals_table(goals)}\n", data)
    if not all(goal.met for goal in goals):
        raise SystemExit(1)


def _trace(rounds: int) -> tuple[list[report.Goal], Any]:
    found = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="cortex-bench-", ignore_cleanup_errors=True) as folder:
            cortex = Cortex.in_folder(Path(folder))
            with cortex.up():
                found.append(_one_trace(cortex, random.Random(number)))
        print(f"trace {number + 1} of {rounds}: {found[-1]}", flush=True)
    goals = []
    for name, unit in (("average_replicas", ""), ("p95_s", " s")):
        real, simulated = (statistics.median(each[kind][name] for each in found) for kind in ("real", "simulated"))
        off = simulated / real - 1
        text = f"{name}: real {real:.3f}{unit}, simulated {simulated:.3f}{unit} ({off:+.1%})"
        goals.append(
            report.Goal(f"simulated {name} within {TOLERANCE:.0%} of reality", "", text, abs(off) <= TOLERANCE)
        )
    failed = sum(each["real"]["failed"] for each in found)
    goals.append(report.Goal("requests that failed while replicas came and went", "0", f"{failed:.0f}", not failed))
    return goals, found


def _one_trace(cortex: Cortex, chance: random.Random) -> dict[str, Any]:
    cortex.deploy("scaled")
    service = _service_time(cortex)
    startup_s = _startup_time(cortex)
    due = _arrivals(chance)
    real = _real(cortex, due)
    file = cortex.project / "scaled.yaml"
    (api,) = diagnose(file, file.name).apis
    trace = _recorded(due)
    outcomes = [simulate(api, trace, Assumptions(service, startup_s, replicas=1, seed=seed)) for seed in range(_SEEDS)]
    simulated = {
        "average_replicas": statistics.median(outcome.average_replicas for outcome in outcomes),
        "p95_s": statistics.median(outcome.p95_s or 0.0 for outcome in outcomes),
        "most_replicas": statistics.median(outcome.most_replicas for outcome in outcomes),
    }
    return {
        "service": {"mean_s": service.mean_s, "cv": service.cv},
        "startup_s": startup_s,
        "real": real,
        "simulated": simulated,
    }


def _service_time(cortex: Cortex) -> ServiceTime:
    """Send one request after the other."""
    latencies = [
        asyncio.run(send_all(cortex.gateway_port, "/scaled", _BODY, [0.0]))[0].latency_s for _ in range(_PROBES)
    ]
    mean_s = statistics.mean(latencies)
    return ServiceTime(mean_s, statistics.stdev(latencies) / mean_s)


def _startup_time(cortex: Cortex) -> float:
    """Measure the start of a second replica, then redeploy with one."""
    file = cortex.project / "scaled.yaml"
    more = file.with_name("more.yaml")
    more.write_text(file.read_text().replace("autoscaling:", "autoscaling:\n    min_replicas: 2"))
    start = time.monotonic()
    cortex.run("patch", str(more))
    _wait(lambda: _counts(cortex)["updated"]["ready"] == 2)
    took_s = time.monotonic() - start
    cortex.run("delete", "scaled", "--force")
    _wait(lambda: not cortex.status()["replicas"])
    cortex.deploy("scaled")
    return took_s


def _arrivals(chance: random.Random) -> list[float]:
    due = []
    for (start_s, rate), (end_s, _) in pairwise(STEPS):
        at = start_s
        while (at := at + chance.expovariate(rate)) < end_s:
            due.append(at)
    return due


def _recorded(due: Sequence[float]) -> Trace:
    """Return the number of requests due in each second."""
    seconds = int(STEPS[-1][0])
    counts = Counter(map(int, due))
    return Trace(tuple(map(float, range(seconds))), tuple(float(counts[at]) for at in range(seconds)), float(seconds))


def _real(cortex: Cortex, due: Sequence[float]) -> Figures:
    """Send the traffic from the moment of a decision on, as the simulation does."""
    watched = _Watched(cortex)
    _wait(lambda: bool(_decisions(cortex)))
    time.sleep(max(0.0, _decisions(cortex)[-1]["at"] + TICK_S - time.time()) % TICK_S)
    with watched:
        calls: list[Call] = asyncio.run(send_all(cortex.gateway_port, "/scaled", _BODY, due))
    latencies = sorted(call.latency_s for call in calls if call.status == 200)
    return {
        "average_replicas": statistics.mean(watched.requested),
        "most_replicas": max(watched.requested),
        "p95_s": latencies[int(0.95 * len(latencies))],
        "requests": len(calls),
        "failed": sum(call.status != 200 for call in calls),
        **{f"status_{status}": count for status, count in Counter(call.status for call in calls).items()},
    }


class _Watched:
    """Polls the wanted number of replicas a few times per second during the trace."""

    def __init__(self, cortex: Cortex) -> None:
        self._cortex = cortex
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.requested: list[int] = []

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        end = time.monotonic() + STEPS[-1][0]
        while not self._stop.wait(0.5) and time.monotonic() < end:
            self.requested.append(_counts(self._cortex)["requested"])


def _cold(rounds: int) -> tuple[list[report.Goal], Any]:
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="cortex-bench-", ignore_cleanup_errors=True) as folder:
        cortex = Cortex.in_folder(Path(folder))
        with cortex.up():
            cortex.deploy("cold")
            for number in range(rounds):
                _wait(lambda: _counts(cortex, "cold")["requested"] == 0 and not cortex.status()["replicas"])
                found.append(_burst(cortex))
                print(f"cold {number + 1} of {rounds}: {found[-1]}", flush=True)
    lost = sum(each["lost"] for each in found)
    first, last = (statistics.median(each[name] for each in found) for name in ("first_s", "last_s"))
    text = f"{lost:.0f}; first answer after {first:.2f} s, last after {last:.2f} s"
    return [report.Goal(f"lost of {BURST} requests to an API without replicas", "0", text, not lost)], found


def _burst(cortex: Cortex) -> Figures:
    calls = asyncio.run(send_all(cortex.gateway_port, "/cold", _BODY, [0.0] * BURST))
    answered = [call.latency_s for call in calls if call.status == 200]
    return {
        "lost": BURST - len(answered),
        "first_s": min(answered, default=float("nan")),
        "last_s": max(answered, default=float("nan")),
    }


def _counts(cortex: Cortex, api: str = "scaled") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cortex.run("get", api, "-o", "json"))["status"]["replica_counts"]
    return found


def _decisions(cortex: Cortex) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cortex.run("get", "scaled", "--why", "-o", "json"))["decisions"]
    return found


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the API did not come to the state that was waited for")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
