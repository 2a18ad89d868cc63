"""Measure the cost of API keys at the gateway: `python -m benchmarks.api_keys`."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import psutil

from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, NotServingError, wait_until_right
from benchmarks.tools.load import closed_loop, require_wrk
from benchmarks.tools.systems import START_LIMIT_S
from benchmarks.tools.workloads import NOOP
from cortex.client.environments import connect_local
from cortex.home import Home

#: Number of further keys in the gateway's map.
_OTHER_KEYS = 1000
_CONNECTIONS = 16
#: By the name of the API.
_AUTHS = {"open": "none", "keyed": "api_key"}
_API = """
- name: {api}
  kind: RealtimeAPI
  handler: {{type: python, path: noop.py}}
  autoscaling: {{max_replicas: 1}}
  networking: {{auth: {auth}}}
"""


def main() -> None:
    """Load an API with keys and one without in turn; print requests per second and the gateway's CPU per request."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api_keys", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--keys", type=int, default=_OTHER_KEYS, help="number of further keys in the gateway's map")
    options = parser.parse_args()
    require_wrk()
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        cortex = Cortex.in_folder(Path(folder))
        with cortex.up():
            _measure(cortex, options.rounds, options.seconds, options.keys)


def _measure(cortex: Cortex, rounds: int, seconds: int, others: int) -> None:
    for api, auth in _AUTHS.items():
        (cortex.project / f"{api}.yaml").write_text(_API.format(api=api, auth=auth))
        cortex.deploy(api)
    wait_until_right(Endpoint(cortex.gateway_port, "/open"), NOOP, START_LIMIT_S)
    operator = connect_local(Home(cortex.home))
    for number in range(others):
        operator.call("POST", "/v1/keys", body=json.dumps({"name": str(number), "apis": ["keyed"]}).encode())
    key = operator.call("POST", "/v1/keys", body=b'{"name": "the caller", "apis": ["keyed"]}')["key"]
    found: dict[str, list[tuple[float, float]]] = {api: [] for api in _AUTHS}
    for number in range(rounds):
        for api in _AUTHS if number % 2 else reversed(_AUTHS):
            found[api].append(_load(cortex, api, seconds, key))
    for api, samples in found.items():
        rate, cost_us = (statistics.median(each) for each in zip(*samples, strict=True))
        print(f"auth: {_AUTHS[api]}: {rate:,.0f} requests/s, {cost_us:.1f} µs of the gateway's CPU each")
    rates, costs = (
        statistics.median(keyed[which] / plain[which] for plain, keyed in zip(*found.values(), strict=True))
        for which in (0, 1)
    )
    print(f"with {others + 1} keys: {rates:.3f} of the requests/s, {costs:.3f} of the gateway's CPU per request")


def _load(cortex: Cortex, api: str, seconds: int, key: str) -> tuple[float, float]:
    """Return requests per second, and microseconds of the gateway's CPU per request."""
    endpoint = Endpoint(cortex.gateway_port, f"/{api}")
    closed_loop(endpoint, NOOP, _CONNECTIONS, 1, key)  # warms up
    before_s = _gateway_cpu_s(cortex)
    load = closed_loop(endpoint, NOOP, _CONNECTIONS, seconds, key)
    if load.errors:
        raise NotServingError(f"{load.errors} of {load.requests} requests to {api} failed")
    return load.per_s, (_gateway_cpu_s(cortex) - before_s) / load.requests * 1e6


def _gateway_cpu_s(cortex: Cortex) -> float:
    master = psutil.Process(cortex.status()["gateway"]["pid"])
    times = [process.cpu_times() for process in (master, *master.children())]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
