"""Request and batch metrics of a process, and the Server-Timing header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cortex.worker.monitoring.metrics import (
    BatchRecorder,
    MetricFile,
    RequestRecorder,
    SeriesKind,
    merge_series,
    parse_key,
    read_metrics,
)
from harness.replicas.replicas import new_request_id, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return {"result": 1 / payload["by"]}

        async def handle_put(self, payload):
            return payload

        def handle_get(self):
            yield "a"
            yield "b"
"""


def parts(header: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", header)}


def counted(folder: Path, name: str) -> dict[str, float]:
    """Return the sums of the series of a name in a replica's files: by code, or `observed` for histograms."""
    found: dict[str, float] = {}
    for key, value in merge_series(map(read_metrics, folder.glob("0-*"))).items():
        series = parse_key(key)
        assert series is not None
        if series.name == name and series.kind in (SeriesKind.COUNTER, SeriesKind.BUCKET):
            label = dict(series.labels).get("code", "observed")
            found[label] = found.get(label, 0) + value
    return found


def test_parts_sum_up_to_the_total() -> None:
    recorder = RequestRecorder(None)
    for arrived_ns, batched_ns, started_ns, returned_ns in (
        (1_000_000, 0, 2_500_999, 9_000_000),
        (1_000_000, 1_700_000, 5_000_000_000, 5_000_900_001),
        (1_000_000, 0, 2_000_000, 0),
    ):
        timing = parts(recorder.finish(200, arrived_ns, batched_ns, started_ns, returned_ns).decode())
        assert ("batch" in timing) == bool(batched_ns)
        total = timing.pop("total")
        assert abs(sum(timing.values()) - total) < 1e-6 * len(timing)
        assert abs(timing["queue"] - ((batched_ns or started_ns) - arrived_ns) / 1e6) <= 0.001


def test_a_request_that_did_not_run_has_only_queue_time() -> None:
    timing = parts(RequestRecorder(None).finish(504, 1, 0, 0, 0).decode())
    assert set(timing) == {"queue", "total"}


def test_batches_are_counted_by_size(tmp_path: Path) -> None:
    recorder = BatchRecorder(MetricFile(tmp_path / "0-1"))
    recorder.record(3, [0, 1_000_000, 2_000_000])
    recorder.record(1, [5])
    assert counted(tmp_path, "cortex_batch_size") == {"observed": 2}
    assert counted(tmp_path, "cortex_batch_wait_seconds") == {"observed": 4}


def test_each_response_is_counted_by_status_and_timed(tmp_path: Path) -> None:
    with running_replica(SOURCE, metrics_dir=str(tmp_path)) as replica:
        replica.wait_ready()
        for by in (1, 2, 0):
            answer = replica.request({"by": by}, request_id=new_request_id(ago_s=0.25))
            timing = parts(answer.headers["server-timing"])
            assert 250 <= timing["queue"] <= timing["total"]
        assert parts(replica.request({}, method="PUT").headers["server-timing"]).keys() >= {"handler", "encode"}
        assert "server-timing" in replica.request(method="GET").headers
        assert replica.request({}, method="PATCH").status == 405
        assert replica.request(body=b"{", method="POST").status == 400
        expected = {"200": 4, "500": 1, "405": 1, "400": 1}
        wait_until(lambda: counted(tmp_path, "cortex_replica_requests_total") == expected)
        assert counted(tmp_path, "cortex_request_duration_seconds") == {"observed": 7}
        assert counted(tmp_path, "cortex_request_handler_seconds") == {"observed": 6}
        assert counted(tmp_path, "cortex_request_queue_seconds") == {"observed": 6}
