"""Autoscaling of real replicas under real requests, with accelerated time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cortex.home import Home
from harness.installations.running import Load, RunningOperator, running_operator
from harness.wait import wait_until

pytestmark = pytest.mark.processes

HANDLER = """
import time
class Handler:
    def __init__(self, config):
        pass
    def handle_post(self, payload):
        time.sleep(0.05)
        return {"answer": "one"}
"""
SCALED = """
- name: iris
  kind: RealtimeAPI
  handler: {{type: python, path: handler.py}}
  compute: {{cpu: 20m}}
  autoscaling:
    min_replicas: {low}
    max_replicas: 3
    init_replicas: 1
    window: 10s
    upscale_stabilization_period: 0s
    downscale_stabilization_period: 20s
"""


@pytest.fixture
def operator(home: Home) -> Iterator[RunningOperator]:
    with running_operator(home, "--autoscaler-speed", "20") as running:
        yield running


def ready(operator: RunningOperator) -> int:
    return sum(item["state"] == "ready" for item in operator.replicas())


def test_scales_up_and_down_without_a_failed_request(
    operator: RunningOperator,
) -> None:
    reasons: dict[tuple[int, int], str] = {}  # collected while it waits: the operator keeps only the latest decisions

    def collect(is_done: bool) -> bool:
        for made in operator.call("GET", "/v1/apis/iris/scaling")[1]["decisions"]:
            reasons.setdefault((made["current"], made["requested"]), made["reason"])
        return is_done

    operator.deploy(SCALED.format(low=1), HANDLER)
    operator.wait()
    with Load(operator, threads=1) as rest:
        with Load(operator, threads=7) as step:
            wait_until(lambda: collect(ready(operator) == 3), 30, "three replicas")
        wait_until(lambda: collect(len(operator.replicas()) == 1), 30, "one replica")
    assert (rest.failures, step.failures) == ([], [])
    assert reasons.keys() >= {(1, 2), (2, 3), (3, 2), (2, 1)}
    assert reasons[2, 3].startswith("in flight averaged over 10 s: ")


def test_scales_to_zero_and_serves_a_burst_without_a_failed_request(operator: RunningOperator) -> None:
    operator.deploy(SCALED.format(low=0), HANDLER)
    operator.wait()
    assert operator.predict({})[0] == 200
    wait_until(lambda: not operator.replicas(), 30, "no replica")
    assert operator.api()["status"]["status_code"] == "live"
    with ThreadPoolExecutor(40) as clients:
        statuses = list(clients.map(lambda _: operator.predict({})[0], range(40)))
    assert statuses == [200] * 40
    decisions = operator.call("GET", "/v1/apis/iris/scaling")[1]["decisions"]
    woken = next(made for made in decisions if made["current"] == 0)
    assert woken["requested"] == 1
    assert woken["reason"].endswith("waiting at zero replicas: starting one at once")
