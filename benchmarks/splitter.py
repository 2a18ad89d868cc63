"""A splitter of 30 and 70 % with a shadow of 20 %, which is then made to die: `python -m benchmarks.splitter`."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.cortex_cli import Cortex
from benchmarks.endpoint import Endpoint, wait_until_right
from benchmarks.systems import START_LIMIT_S
from benchmarks.workloads import NOOP

_SHARES = {"left": 0.3, "right": 0.7, "shadow": 0.2}
#: One run in 16,000 would be outside by chance.
_SIGMAS = 4.0
_CONNECTIONS = 8


def main() -> None:
    """Send, count, judge; exit 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.splitter", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        cortex = Cortex.in_folder(Path(folder))
        with cortex.up():
            cortex.deploy("split")
            wait_until_right(Endpoint(cortex.gateway_port, "/split"), NOOP, START_LIMIT_S)
            mistakes = _judge(cortex, count, {"x": 1}, "a healthy shadow")
            mistakes += _judge(cortex, count, {"x": 1, "die": True}, "a shadow that each copy kills")
    print("\n".join(mistakes) or "no mistakes")
    sys.exit(1 if mistakes else 0)


def _judge(cortex: Cortex, count: int, payload: dict[str, Any], name: str) -> list[str]:
    before = _answers(cortex)
    body = json.dumps(payload).encode()
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        sent = [pool.submit(_send, cortex.gateway_port, body, count // _CONNECTIONS) for _ in range(_CONNECTIONS)]
    statuses = [status for each in sent for status, _ in each.result()]
    times = sorted(seconds for each in sent for _, seconds in each.result())
    time.sleep(2)  # copies are sent beside the requests, and counts are read once a second
    after = _answers(cortex)
    got = {api: after[api] - before[api] for api in _SHARES}
    p99_ms = times[int(len(times) * 0.99)] * 1e3
    print(f"{name}: {len(statuses)} requests, {got}, p50 {statistics.median(times) * 1e3:.2f} ms, p99 {p99_ms:.2f} ms")
    wrong = [f"{name}: {statuses.count(status)} × {status}" for status in set(statuses) - {200}]
    for api, share in _SHARES.items():
        expected, sigma = share * len(statuses), math.sqrt(share * (1 - share) * len(statuses))
        is_copy_dropped = api == "shadow" and "die" in payload and got[api] <= expected + _SIGMAS * sigma
        if abs(got[api] - expected) > _SIGMAS * sigma and not is_copy_dropped:
            wrong.append(f"{name}: {api} got {got[api]}, expected {expected:.0f} ± {_SIGMAS * sigma:.0f}")
    return wrong


def _answers(cortex: Cortex) -> dict[str, int]:
    """Return how many answers of any class each API has given."""
    return {
        api: sum(json.loads(cortex.run("get", api, "-o", "json"))["metrics"]["requests"].values()) for api in _SHARES
    }


def _send(port: int, body: bytes, count: int) -> list[tuple[int, float]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    found = []
    for _ in range(count):
        started = time.perf_counter()
        connection.request("POST", "/split", body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        found.append((response.status, time.perf_counter() - started))
    return found


if __name__ == "__main__":
    main()
