"""Measure the cost of watching 10,000 objects in S3: `python -m benchmarks.model_listing`.

The model agent watches a folder with 100 models of 10 versions of 10 files. First at the default interval of 10
seconds: CPU time and requests per poll. Then 1,000 polls without a pause: growth of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.tools import machine, report, results
from benchmarks.tools.listing_server import ListingServer
from cortex.home import Home
from cortex.models import protocol
from cortex.models.spec import ModelSource

MODELS, VERSIONS, FILES = 100, 10, 10
_LIMIT_S = 60.0
#: Caches of the first polls fill once.
_WARM_UP_POLLS = 20
_GROWTH_GOAL_PERCENT = 5.0
_CPU_GOAL_MS = 500.0


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_listing", description=__doc__)
    parser.add_argument("--polls", type=int, default=1000, help="number of polls without a pause")
    parser.add_argument("--slow-polls", type=int, default=6, help="number of polls at the default interval")
    arguments = parser.parse_args()
    facts = machine.facts()
    keys = [
        f"models/model-{model:03}/{version}/part-{file}.bin"
        for model in range(MODELS)
        for version in range(1, VERSIONS + 1)
        for file in range(FILES)
    ]
    slow = _measure(keys, 10.0, arguments.slow_polls, warm_up=2)
    print(f"every 10 s: {slow}", flush=True)
    quick = _measure(keys, 0.05, arguments.polls, warm_up=_WARM_UP_POLLS)
    print(f"quick: { {name: value for name, value in quick.items() if name != 'rss_mb'} }", flush=True)
    growth = 100 * (quick["rss_mb"][-1] / quick["rss_mb"][0] - 1)
    goals = [
        report.Goal(
            "CPU per poll", f"≤ {_CPU_GOAL_MS:g} ms", f"{slow['cpu_ms']:.0f} ms", slow["cpu_ms"] <= _CPU_GOAL_MS
        ),
        report.Goal(
            "requests per poll",
            "10 pages, and nothing else",
            f"{slow['requests']:.1f}",
            slow["requests"] <= len(keys) / 1000 + 1,
        ),
        report.Goal(
            f"memory after {quick['polls']} polls",
            f"+{_GROWTH_GOAL_PERCENT:g} % at most",
            f"{growth:+.1f} % ({quick['rss_mb'][0]:.1f} → {quick['rss_mb'][-1]:.1f} MB)",
            growth <= _GROWTH_GOAL_PERCENT,
        ),
    ]
    share = slow["cpu_ms"] / 10_000 * 100
    text = (
        f"# Watching {len(keys):,} objects\n\n{report.goals_table(goals)}\n\n"
        f"Every 10 s that is {share:.1f} % of one core; {quick['cpu_ms']:.0f} ms of CPU per poll when polled quickly.\n"
    )
    results.write("model-listing", text, {"facts": facts, "slow": slow, "quick": quick})


def _measure(keys: list[str], interval_s: float, polls: int, warm_up: int) -> dict[str, Any]:
    server = ListingServer(keys)
    server.start()
    try:
        with _agent(server.url) as (agent, home), _watching(home, interval_s):
            _wait_for_polls(server, warm_up)
            start, cpu, asked = server.requests["first page"], _cpu_s(agent), server.requests.total()
            rss = [agent.memory_info().rss / 1e6]
            step = max(1, polls // 50)
            for target in range(start + step, start + polls + 1, step):
                _wait_for_polls(server, target)
                rss.append(agent.memory_info().rss / 1e6)
            done = server.requests["first page"] - start
            return {
                "polls": done,
                "cpu_ms": (_cpu_s(agent) - cpu) / done * 1e3,
                "requests": (server.requests.total() - asked) / done,
                "by_kind": dict(server.requests),
                # Medians: the very moment of a listing holds its answer.
                "rss_mb": [statistics.median(rss[:5]), *rss[5:-5], statistics.median(rss[-5:])],
            }
    finally:
        server.stop()


@contextlib.contextmanager
def _agent(endpoint: str) -> Iterator[tuple[psutil.Process, Home]]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder:
        home = Home(Path(folder))
        home.create()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environ |= {"AWS_ENDPOINT_URL_S3": endpoint, "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}
        command = [sys.executable, "-P", "-m", "cortex.models.agent.agent", folder]
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL)
        try:
            yield psutil.Process(process.pid), home
        finally:
            process.terminate()
            process.wait(10)


@contextlib.contextmanager
def _watching(home: Home, interval_s: float) -> Iterator[None]:
    """Act as the supervisor of an API that watches all models; caching is on, so that nothing is downloaded."""
    source = ModelSource("python", dir="s3://bucket/models", poll_interval_s=interval_s, cache_size=1)
    path = str(home.model_agent_socket)
    deadline = time.monotonic() + _LIMIT_S
    with socket.socket(socket.AF_UNIX) as client:
        while client.connect_ex(path):
            if time.monotonic() > deadline:
                raise SystemExit(f"the model agent does not listen at {path}")
            time.sleep(0.05)
        client.sendall(protocol.write(protocol.Watch("benchmark", source)))
        yield


def _wait_for_polls(server: ListingServer, count: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while server.requests["first page"] < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"no {count} polls within {_LIMIT_S:g} s; requests so far: {dict(server.requests)}")
        time.sleep(0.02)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
