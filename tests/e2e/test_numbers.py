"""Numbers of `/metrics` after kills, updates and restarts, compared with the callers' counts; and logs by request."""

from __future__ import annotations

import json
import re
from pathlib import Path

from harness.installations.installation import Installation, write_project
from harness.installations.number_chaos import NumberChaos, Plan, read_metrics
from harness.wait import wait_until

PRINTING = """
    import asyncio
    from cortex_internal.lib.log import logger

    class Handler:
        def __init__(self, config):
            print("made")

        def handle_put(self, payload):
            print("called")
            logger.warning("careful", extra={"x": payload["x"]})
            raise ValueError("bad x")

        async def handle_patch(self, payload):
            await asyncio.sleep(0)
            print("awaited")
            return payload
"""
CONFIG = """
    - name: printing
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {access_log: true}
"""


def test_numbers_are_right_through_kills_updates_and_a_restart(cortex: Installation, tmp_path: Path) -> None:
    outcome = NumberChaos(cortex, tmp_path, Plan(process_kills=5, replica_kills=3, operator_kills=1)).run()
    assert outcome.mistakes == [], outcome
    assert outcome.sent > 100


def test_logs_are_joined_by_request_and_replicas_are_measured(cortex: Installation, tmp_path: Path) -> None:
    cortex.cortex("deploy", write_project(tmp_path / "project", PRINTING, CONFIG))
    failed, awaited = (cortex.post("/printing", {"x": 3}, method=method) for method in ("PUT", "PATCH"))
    assert (failed.status, awaited.status) == (500, 200)
    request_id, other_id = failed.json["request_id"], awaited.headers["x-cortex-request-id"]

    def lines(*options: str) -> list[dict[str, object]]:
        printed = cortex.cortex("logs", "printing", "-o", "json", *options).stdout
        return [json.loads(line) for line in printed.splitlines()]

    def until_its_end() -> list[dict[str, object]] | None:
        found = lines("--request", request_id)
        return found if found and found[-1]["message"] == "ValueError: bad x" else None

    found = wait_until(until_its_end) or []
    assert [line["message"] for line in found[:3]] == ["called", "careful x=3", f"request {request_id} failed:"]
    assert len(found) > 3
    assert {line["request_id"] for line in found} == {request_id}
    assert found[1]["level"] == "warning"
    text = read_metrics(cortex)
    assert re.search(
        r'^cortex_replica_cpu_seconds_total\{api="printing",replica="printing-[^"]+"\} 0*[.1-9]', text, re.M
    )
    assert re.search(r'^cortex_replica_memory_bytes\{api="printing",replica="printing-[^"]+"\} \d', text, re.M)
    wait_until(lambda: lines("--request", other_id))
    everything = lines()
    assert [line["request_id"] for line in everything if line["message"] == "awaited"] == [other_id]
    assert [line.get("request_id") for line in everything if line["message"] == "made"] == [None]
    access = wait_until(lambda: lines("--access", "--request", request_id)) or []
    assert [(line["method"], line["path"], line["status"]) for line in access] == [("PUT", "/printing", 500)]

    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    traced = cortex.post("/printing", {}, method="PATCH", traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    request_id = traced.headers["x-cortex-request-id"]
    (line,) = wait_until(lambda: lines("--request", request_id)) or []
    assert (line["message"], line["trace_id"]) == ("awaited", trace)
    (line,) = wait_until(lambda: lines("--access", "--request", request_id)) or []
    assert line["trace_id"] == trace
