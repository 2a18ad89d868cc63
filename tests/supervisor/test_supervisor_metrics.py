"""Metrics of a real replica across deaths of its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.worker.monitoring.metrics import SUPERVISOR, SeriesKind, read_folder, series_key
from harness.replicas.replicas import new_request_id, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

HANDLER = """
    import os

    class Handler:
        def __init__(self, config, metrics_client):
            self.metrics = metrics_client

        def handle_post(self, payload):
            self.metrics.increment("hits", tags={"do": payload["do"]})
            if payload["do"] == "exit":
                os._exit(3)
            if payload["do"] == "hang":
                while True:
                    pass
            return {}
"""


def counter(name: str, **labels: str) -> str:
    return series_key(SeriesKind.COUNTER, name, labels)


def test_every_response_and_worker_death_is_counted(tmp_path: Path) -> None:
    with running_replica(HANDLER, metrics_dir=str(tmp_path / "m"), timeout_s=20.0) as replica:
        replica.wait_ready()
        statuses = [replica.request({"do": do}).status for do in ["exit", "add"] * 5]
        late = new_request_id(ago_s=19.5)
        statuses += [replica.request({"do": "hang"}, request_id=late).status, replica.request({"do": "add"}).status]
        assert statuses == [500, 200] * 5 + [504, 200]
        folder = tmp_path / "m"
        assert (
            read_folder(folder).items()
            >= {
                counter("hits", do="add"): 6,
                counter("hits", do="exit"): 5,
                counter("hits", do="hang"): 1,
                counter("cortex_replica_requests_total", code="200"): 6,
                counter("cortex_replica_requests_total", code="500"): 5,
                counter("cortex_replica_requests_total", code="504"): 1,
                counter("cortex_process_deaths_total", cause="exited"): 5,
                counter("cortex_process_deaths_total", cause="timed out"): 1,
            }.items()
        )
        files = {entry.name for entry in folder.iterdir()}
        assert {SUPERVISOR, "ended.json", f"0-{replica.pid}"} <= files
        assert len(files) < 8, "what processes left that died was made one"


def test_a_stopped_process_does_not_count_as_a_death(tmp_path: Path) -> None:
    with running_replica(HANDLER, metrics_dir=str(tmp_path / "m")) as replica:
        replica.wait_ready()
        assert replica.request({"do": "add"}).status == 200
        replica.command(command="stop", drain_s=5)
        wait_until(lambda: replica.process.poll() is not None)
        numbers = read_folder(tmp_path / "m")
        assert numbers[counter("hits", do="add")] == 1
        assert not [key for key in numbers if "deaths" in key]


def test_requests_are_served_without_a_metrics_folder(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("in the way")
    with running_replica(HANDLER, metrics_dir=str(tmp_path / "m")) as replica:
        replica.wait_ready()
        assert replica.request({"do": "add"}).status == 200
        wait_until(lambda: "cannot record metrics of this process" in replica.log())
        assert replica.request({"do": "exit"}).status == 500
        assert replica.request({"do": "add"}).status == 200
