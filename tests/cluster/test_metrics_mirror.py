"""Metrics of replicas on nodes are aggregated exactly once."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import test_cluster_engine
from cluster.test_cluster_engine import cluster, ready, stop, until
from cortex.cluster.credentials import derive_key
from cortex.cluster.metrics_mirror import MetricsMirror
from cortex.home import Home
from cortex.worker.monitoring.metrics import read_folder
from harness.cluster.local_nodes import SECRET, LocalNode, local_nodes

pytestmark = pytest.mark.processes


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as [made]:
        yield made


async def test_metrics_of_a_node_that_does_not_answer_yet_are_not_final(home: Home, node: LocalNode) -> None:
    async with cluster(home, [node]) as made:
        spec = made.spec()
        await ready(made, spec)
        await until(lambda: (home.metrics_dir / spec.id).is_dir())
        assert made.engine.unsettled() == {spec.id}
        found = made.placer.found
    await asyncio.to_thread(node.kill)
    async with cluster(home, [node]) as made:
        made.placer.found = found
        assert made.engine.replicas() == {}
        assert made.engine.unsettled() == {spec.id}
        await asyncio.to_thread(node.start)
        made.placer.nodes = [node.address]
        await until(lambda: spec.id in made.engine.replicas())
        await stop(made, spec.id)
        await until(lambda: spec.id in made.ended)


@pytest.mark.parametrize(("epochs", "is_kept"), [((1, 1), True), ((3, 4), True), ((3, 5), False)])
def test_copies_are_deleted_if_another_operator_led_since(
    tmp_path: Path, epochs: tuple[int, int], is_kept: bool
) -> None:
    first, second = epochs
    folder, led = tmp_path / "metrics", tmp_path / "led"
    folder.mkdir()
    MetricsMirror(folder).startup(led, first)
    (folder / "words-1-2").mkdir()
    MetricsMirror(folder).startup(led, second)
    assert MetricsMirror(folder).names() == ({"words-1-2"} if is_kept else set())


SLOW = """
import time

class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        open(payload, "w").close()
        time.sleep(600)
"""


async def test_what_workers_count_after_the_death_of_their_supervisor_is_aggregated(
    home: Home, node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_cluster_engine, "SOURCE", SLOW)
    inside = tmp_path / "inside"
    async with cluster(home, [node]) as made:
        spec = made.spec()
        status = await ready(made, spec)
        asking = asyncio.create_task(asyncio.to_thread(post, status.processes[0].socket, str(inside)))
        await until(inside.exists)
        os.kill(status.supervisor_pid, signal.SIGKILL)
        assert await asking == 500
        await until(lambda: spec.id in made.ended)
        numbers = read_folder(home.metrics_dir / spec.id)
        assert sum(n for key, n in numbers.items() if "cortex_replica_requests_total" in key) == 1
        assert made.ended == [spec.id]


def post(address: str, payload: str) -> int:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    headers = {"content-type": "application/json", "x-cortex-gateway": derive_key(SECRET, "gateway")}
    connection.request("POST", "/", json.dumps(payload), headers)
    return connection.getresponse().status
