"""What a process counts of its answers, and what it tells of their time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cortex.replica.metric_file import MetricFile, read_metrics
from cortex.replica.recorder import BatchRecorder, Recorder
from cortex.replica.series import SeriesKind, merge, parse_key
from harness.replicas.replicas import new_request_id, running_replica
from harness.wait import wait_until

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


@dataclass
class Moments:
    arrived_ns: int = 0
    batched_ns: int = 0
    started_ns: int = 0
    returned_ns: int = 0


def parts(header: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", header)}


def counted(folder: Path, name: str) -> dict[str, float]:
    """Add up the series of a name in a replica's files: by code for counters, else how many were observed."""
    found: dict[str, float] = {}
    for key, value in merge(map(read_metrics, folder.glob("0-*"))).items():
        series = parse_key(key)
        assert series is not None
        if series.name == name and series.kind in (SeriesKind.COUNTER, SeriesKind.BUCKET):
            label = dict(series.labels).get("code", "observed")
            found[label] = found.get(label, 0) + value
    return found


def test_parts_sum_up_to_the_total() -> None:
    recorder = Recorder(None)
    for moments in (
        Moments(1_000_000, 0, 2_500_999, 9_000_000),
        Moments(1_000_000, 1_700_000, 5_000_000_000, 5_000_900_001),
        Moments(1_000_000, 0, 2_000_000, 0),
    ):
        told = parts(recorder.finish(moments, 200).decode())
        assert ("batch" in told) == bool(moments.batched_ns)
        total = told.pop("total")
        assert abs(sum(told.values()) - total) < 1e-6 * len(told)
        assert abs(told["queue"] - ((moments.batched_ns or moments.started_ns) - moments.arrived_ns) / 1e6) <= 0.001


def test_a_request_that_was_not_run_has_waited_only() -> None:
    told = parts(Recorder(None).finish(Moments(1), 504).decode())
    assert set(told) == {"queue", "total"}


def test_batches_are_counted_by_size(tmp_path: Path) -> None:
    recorder = BatchRecorder(MetricFile(tmp_path / "0-1"))
    recorder.began(3, [0, 1_000_000, 2_000_000])
    recorder.began(1, [5])
    assert counted(tmp_path, "cortex_batch_size") == {"observed": 2}
    assert counted(tmp_path, "cortex_batch_wait_seconds") == {"observed": 4}


def test_each_answer_is_counted_by_its_code_and_timed(tmp_path: Path) -> None:
    with running_replica(SOURCE, metrics_dir=str(tmp_path)) as replica:
        replica.wait_ready()
        for by in (1, 2, 0):
            answer = replica.request({"by": by}, request_id=new_request_id(ago_s=0.25))
            told = parts(answer.headers["server-timing"])
            assert 250 <= told["queue"] <= told["total"]
        assert parts(replica.request({}, method="PUT").headers["server-timing"]).keys() >= {"handler", "encode"}
        assert "server-timing" in replica.request(method="GET").headers
        assert replica.request({}, method="PATCH").status == 405
        assert replica.request(body=b"{", method="POST").status == 400
        expected = {"200": 4, "500": 1, "405": 1, "400": 1}
        wait_until(lambda: counted(tmp_path, "cortex_replica_requests_total") == expected)
        assert counted(tmp_path, "cortex_request_duration_seconds") == {"observed": 7}
        assert counted(tmp_path, "cortex_request_handler_seconds") == {"observed": 6}
        assert counted(tmp_path, "cortex_request_queue_seconds") == {"observed": 6}
