"""The sample request that a worker must process before it is ready."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex.lifecycle import ProcessState
from harness.replicas.replicas import running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

HANDLER = """
    class Handler:
        def __init__(self, config):
            with open("sample.json", "w") as file:
                file.write({sample!r})
            self.seen = []

        {method}

        def handle_get(self):
            return self.seen
"""


def source(method: str, sample: Any = {"n": 1}) -> str:  # noqa: B006 - not changed
    body = method.strip().replace("\n", "\n    ")
    return HANDLER.format(sample=sample if isinstance(sample, str) else json.dumps(sample), method=body)


SYNC = """
        def handle_post(self, payload, query_params, headers):
            self.seen.append([payload, dict(query_params), headers["content-type"]])
            return payload
"""
ASYNC = """
        async def handle_post(self, payload):
            import asyncio
            await asyncio.sleep(0)
            self.seen.append(payload)
            return payload
"""
STREAM = """
        def handle_post(self, payload):
            self.seen.append(payload)
            yield "a"
            self.seen.append("all of it was taken")
"""
CALLBACK = """
        def handle_post(self, payload):
            self.seen.append(payload)
            return payload, lambda: self.seen.append("not called")
"""
ONE, ALL = {"n": 1}, "all of it was taken"


@pytest.mark.parametrize(
    ("method", "batch", "seen"),
    [
        pytest.param(SYNC, 0, [[ONE, {}, "application/json"]], id="sync"),
        pytest.param(ASYNC, 0, [ONE], id="async"),
        pytest.param(ASYNC, 8, [[ONE]], id="async, batched"),
        pytest.param(STREAM, 0, [ONE, ALL], id="generator"),
        pytest.param(STREAM.replace("def ", "async def "), 0, [ONE, ALL], id="async generator"),
        pytest.param(CALLBACK, 0, [ONE], id="callback"),
    ],
)
def test_the_sample_is_processed_before_the_worker_is_ready(
    method: str, batch: int, seen: list[Any], tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"max_batch_size": batch, "batch_interval_s": 0.01 if batch else 0.0}
    with running_replica(source(method), readiness="sample.json", metrics_dir=str(tmp_path), **fields) as replica:
        replica.wait_ready()
        assert replica.request(method="GET").json == seen


RAISES = """
        def handle_post(self, payload):
            return 1 / payload["n"]
"""
STUCK = """
        def handle_post(self, payload):
            import time
            time.sleep(60)
"""


@pytest.mark.parametrize(
    ("method", "sample", "message", "frame"),
    [
        pytest.param(RAISES, {"n": 0}, "ZeroDivisionError: division by zero", 'payload["n"]', id="it raises"),
        pytest.param(RAISES, "{", "malformed JSON: unexpected end of data: line 1 column 2", "", id="no JSON"),
        pytest.param(RAISES.replace("1 /", "{1} or"), {"n": 0}, "result: set is not JSON", "", id="can't be sent"),
        pytest.param(STUCK, {}, "no answer within 4 s", "time.sleep(60)", id="too slow"),
    ],
)
def test_a_failing_sample_is_a_failed_start(method: str, sample: Any, message: str, frame: str) -> None:
    with running_replica(source(method, sample), readiness="sample.json", timeout_s=4) as replica:
        failure = replica.wait_state(ProcessState.BACKING_OFF).processes[0].failure
        assert failure is not None
        assert failure.message.startswith(f"the readiness sample sample.json failed: {message}")
        assert frame in failure.traceback
        wait_until(lambda: message in replica.log())


def test_rejects_a_sample_for_an_api_without_a_post_method() -> None:
    with running_replica(source("", {}), readiness="sample.json") as replica:
        failure = replica.wait_state(ProcessState.BACKING_OFF).processes[0].failure
        assert failure is not None
        assert failure.message == "the readiness sample sample.json can't be sent: no method answers POST"
