"""Reports about calls of user code: event loops, batches, exceptions, forks, shared memory."""

from __future__ import annotations

import http.client
import json
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.installations.installation import Installation
from harness.installations.reports import Report, ReportedApi, deployed_report
from harness.wait import PATIENCE_S, wait_until

#: A name of shared memory that no other run uses.
SEGMENT = f"cortex-report-{secrets.token_hex(6)}"


def post_one_after_the_other(api: ReportedApi, payloads: list[Any]) -> list[tuple[int, Any]]:
    """Send all payloads over one connection; return the statuses and bodies."""
    connection = http.client.HTTPConnection(api.cortex.host, api.cortex.gateway_port, timeout=PATIENCE_S)
    answers = []
    for payload in payloads:
        connection.request("POST", "/t", json.dumps(payload), {"content-type": "application/json"})
        response = connection.getresponse()
        answers.append((response.status, json.loads(response.read())))
    connection.close()
    return answers


def start_event_loops(api: ReportedApi) -> object:
    """Return how many calls of each kind differ, after calls that are so quick that they run on the event loop."""
    quick, calls = [{"how": ""}] * 300, [{"how": how} for how in ("run", "own", "current", "none")]
    answers = post_one_after_the_other(api, [*calls, *quick, *calls, *quick, *calls])
    return Counter(json.dumps(answer) for answer in answers)


def batch_keys(api: ReportedApi) -> object:
    """Return the answers to requests at once, and to one afterwards."""
    together = [answer.json for answer in api.post_together([{"text": "x" * (n + 1)} for n in range(8)])]
    return [together, api.post({"text": "after"}).json]


def chain(api: ReportedApi) -> object:
    answer = api.post(0)
    log = api.cortex.cortex("logs", "t", "--tail", "40").stdout
    return [
        answer.status,
        "RecursionError" in answer.json["error"],
        "died" in answer.json["error"],
        "RecursionError: maximum recursion depth exceeded" in log,
    ]


def shared_memory(api: ReportedApi) -> object:
    statuses = [api.post(how).status for how in ("slow", "quick", "slow", "quick")]
    api.cortex.clear()
    wait_until(lambda: not Path("/dev/shm", SEGMENT).exists(), PATIENCE_S)
    return statuses


def forks(api: ReportedApi) -> object:
    """Return the answers over one connection, after quick calls."""
    answers = post_one_after_the_other(api, ["quick"] * 300 + ["raise", "exit", "quick", "raise", "quick"] * 3)
    return Counter(json.dumps(answer) for answer in answers)


REPORTS = [
    Report(
        "a plain method may start an event loop, however quick its calls are",
        "bentoml#5547",
        """
        import asyncio

        class Handler:
            def __init__(self, config):
                self.loop = asyncio.new_event_loop()
                asyncio.set_event_loop(self.loop)

            async def one(self):
                await asyncio.sleep(0)
                return 1

            def handle_post(self, payload):
                if payload["how"] == "run":
                    return asyncio.Runner(loop_factory=asyncio.new_event_loop).run(self.one())
                if payload["how"] == "own":
                    return self.loop.run_until_complete(self.one())
                if payload["how"] == "current":
                    return asyncio.get_event_loop().run_until_complete(self.one())
                try:
                    return str(asyncio.get_running_loop())
                except RuntimeError:
                    return 1
        """,
        start_event_loops,
        {"[200, 1]": 612},
    ),
    Report(
        "a batch key may be a number of numpy",
        "ray#66140",
        """
        import numpy

        class Handler:
            def __init__(self, config):
                pass

            def batch_key(self, payload):
                return numpy.searchsorted(numpy.array([4, 16, 64]), len(payload["text"]))

            def handle_post(self, payload):
                return [len(item["text"]) for item in payload]
        """,
        batch_keys,
        [list(range(1, 9)), 5],
        config="""
        - name: t
          kind: RealtimeAPI
          handler:
            type: python
            path: handler.py
            server_side_batching: {max_batch_size: 16, batch_interval: 20ms}
          networking: {timeout: 8s}
        """,
    ),
    Report(
        "a long chain of exceptions fails its call only",
        "litserve#759",
        """
        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                try:
                    return {}["x"]
                except KeyError:
                    return self.handle_post(payload)
        """,
        chain,
        [500, True, False, True],
    ),
    Report(
        "shared memory of a call that is killed is removed",
        "celery#1709",
        f"""
        import time
        from multiprocessing.shared_memory import SharedMemory

        class Handler:
            def __init__(self, config):
                self.memory = SharedMemory(name="{SEGMENT}", create=True, size=1 << 20)

            def handle_post(self, payload):
                if payload == "slow":
                    time.sleep(60)
                return payload
        """,
        shared_memory,
        [504, 200, 504, 200],
        config="""
        - name: t
          kind: RealtimeAPI
          handler: {type: python, path: handler.py}
          networking: {timeout: 1s}
        """,
    ),
    Report(
        "a child of a fork that leaves its call answers no request",
        "C8",
        """
        import os, sys

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                if payload != "quick" and os.fork() == 0:
                    if payload == "raise":
                        raise ValueError
                    sys.exit(0)
                return [payload]
        """,
        forks,
        {'[200, ["quick"]]': 306, '[200, ["raise"]]': 6, '[200, ["exit"]]': 3},
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    with deployed_report(report, cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
