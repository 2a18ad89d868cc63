"""The engine of a cluster with real node agents: hosting, following, adoption and loss of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cortex.cluster.credentials import ClusterCredentials, derive_key
from cortex.cluster.engine import ClusterEngine
from cortex.cluster.known_nodes import KnownNodes
from cortex.config.schema import Api
from cortex.engine.environment import Prepared
from cortex.home import Home
from cortex.operator.revisions.replica_specs import replica_spec
from cortex.projects.project import ProjectFiles, content_hash
from cortex.state.database import open_state
from cortex.state.queries.key_values import KeyValueStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.monitoring.metrics import read_folder
from cortex.worker.spec import ReplicaSpec, ReplicaStatus
from harness.cluster.fleets import eventually
from harness.cluster.local_nodes import SECRET, LocalNode, StaticPlacer, local_nodes
from harness.wait import PATIENCE_S

pytestmark = pytest.mark.processes

SOURCE = """
import os

class Handler:
    def __init__(self, config):
        self.word = config["word"]

    def handle_post(self, payload):
        print("asked", payload)
        return {"word": self.word, "pid": os.getpid()}
"""
API = {
    "name": "words",
    "kind": "RealtimeAPI",
    "handler": {"interface": "handler", "type": "python", "path": "handler.py", "config": {"word": "hello"}},
    "compute": {"cpu": 1},
}


@dataclass
class Cluster:
    """The operator's end of several nodes."""

    home: Home
    nodes: list[LocalNode]
    placer: StaticPlacer
    engine: ClusterEngine
    ended: list[str]

    def spec(self, **handler: Any) -> ReplicaSpec:
        """Return the spec of a new replica; its project is in the operator's home."""
        api = Api.model_validate({**API, "handler": {**API["handler"], **handler}})  # type: ignore[dict-item]
        project = self.home.projects_dir / "new"
        project.mkdir(parents=True, exist_ok=True)
        (project / "handler.py").write_text(SOURCE)
        found = content_hash(ProjectFiles(project, ("handler.py",)))
        if not (self.home.projects_dir / found).exists():
            project.rename(self.home.projects_dir / found)
        return replica_spec(self.home, Revision("revision-1", api, found), Prepared("", {}))

    def status(self, name: str) -> ReplicaStatus | None:
        found = self.engine.replicas().get(name)
        return found[1] if found else None

    def host(self, name: str) -> str:
        status = self.status(name)
        assert status is not None
        return status.processes[0].socket.rpartition(":")[0]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[LocalNode]]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 2) as made:
        yield made


@contextlib.asynccontextmanager
async def cluster(home: Home, nodes: list[LocalNode], cores: float = 4.0) -> AsyncIterator[Cluster]:
    ended: list[str] = []
    placer = StaticPlacer([node.address for node in nodes], cores)
    access = ClusterCredentials(SECRET, "127.0.0.1", 0)
    database = open_state(home.database_file)
    engine = ClusterEngine(home, placer, access, KnownNodes(KeyValueStore(database)), Logger("test"))
    await engine.startup(lambda: None, lambda folder: ended.append(folder.name))
    try:
        yield Cluster(home, nodes, placer, engine, ended)
    finally:
        await engine.shutdown()
        database.dispose()


async def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):
            await asyncio.sleep(0.02)
    return found


async def stop(made: Cluster, *names: str) -> None:
    for name in names:
        await made.engine.stop(name, 5)
    await until(lambda: not set(names) & set(made.engine.replicas()))


async def ready(made: Cluster, spec: ReplicaSpec) -> ReplicaStatus:
    await made.engine.start(spec)
    await until(lambda: (status := made.status(spec.id)) and status.is_ready)
    status = made.status(spec.id)
    assert status is not None
    return status


def ask(socket: str, secret: str = "") -> tuple[int, Any]:
    host, _, port = socket.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    headers = {"content-type": "application/json", "x-cortex-gateway": secret or derive_key(SECRET, "gateway")}
    connection.request("POST", "/", json.dumps(1), headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(test)


async def test_replica_is_prepared_and_served_on_its_node(home: Home, nodes: list[LocalNode]) -> None:
    async with cluster(home, nodes) as made:
        spec = made.spec()
        status = await ready(made, spec)
        answered, answer = await asyncio.to_thread(ask, status.processes[0].socket)
        assert (answered, answer["word"]) == (200, "hello")
        refused, _ = await asyncio.to_thread(ask, status.processes[0].socket, "another secret")
        assert refused == 401
        await stop(made, spec.id)
        await until(lambda: spec.id in made.ended)
        folder = home.metrics_dir / spec.id
        assert sum(n for key, n in read_folder(folder).items() if "cortex_replica_requests_total" in key) == 1
        assert made.placer.placements() == {}


async def test_replicas_are_adopted_by_the_next_operator(home: Home, nodes: list[LocalNode]) -> None:
    async with cluster(home, nodes) as made:
        spec = made.spec()
        before = await ready(made, spec)
        found = made.placer.found
    async with cluster(home, nodes) as made:
        made.placer.found = found
        assert made.status(spec.id) == before
        assert made.engine.replicas()[spec.id][0].run_dir == spec.run_dir
        await stop(made, spec.id)


async def test_replicas_outlive_the_agent_of_their_node(home: Home, nodes: list[LocalNode]) -> None:
    async with cluster(home, nodes) as made:
        spec = made.spec()
        before = await ready(made, spec)
        node = next(node for node in nodes if node.host == made.host(spec.id))
        await asyncio.to_thread(node.kill)
        answered, _ = await asyncio.to_thread(ask, before.processes[0].socket)
        assert answered == 200
        await asyncio.to_thread(node.start)
        await until(lambda: made.engine.nodes[node.host].is_up and spec.id in made.engine.nodes[node.host].replicas)
        assert made.status(spec.id) == before
        await stop(made, spec.id)


async def test_a_replica_reports_why_its_preparation_failed(home: Home, nodes: list[LocalNode]) -> None:
    async with cluster(home, nodes) as made:
        spec = made.spec(model="missing.pkl")
        await made.engine.start(spec)
        await until(lambda: (status := made.status(spec.id)) and status.processes[0].failure)
        status = made.status(spec.id)
        assert status is not None
        failure = status.processes[0].failure
        assert failure is not None
        assert failure.message in [f"node {node.host}: model missing.pkl: no such file or folder" for node in nodes]
        await stop(made, spec.id)


async def test_a_replica_too_large_for_every_node_stays_pending_with_a_reason(
    home: Home, nodes: list[LocalNode]
) -> None:
    async with cluster(home, nodes, cores=0.5) as made:
        spec = made.spec()
        await made.engine.start(spec)
        await until(lambda: (status := made.status(spec.id)) and status.lack)
        status = made.status(spec.id)
        assert status is not None
        assert status.lack == "a replica needs 1 core; the largest node has 0.5 cores"
        await stop(made, spec.id)


async def test_nodes_report_cpu_usage(home: Home, nodes: list[LocalNode]) -> None:
    async with cluster(home, nodes) as made:
        spec = made.spec()
        status = await ready(made, spec)
        socket = status.processes[0].socket

        async def used() -> Any:
            await asyncio.to_thread(ask, socket)
            return (await made.engine.cores([status])).get("words")

        await eventually(used, 60)
        await stop(made, spec.id)


async def test_replicas_of_a_silent_node_are_removed_until_it_is_back(home: Home, nodes: list[LocalNode]) -> None:
    async with cluster(home, nodes) as made:
        specs = [made.spec(), made.spec()]
        for spec in specs:
            await ready(made, spec)
        assert {made.host(spec.id) for spec in specs} == {node.host for node in nodes}
        silent = next(node for node in nodes if node.host == made.host(specs[0].id))
        assert silent.process is not None
        os.kill(silent.process.pid, signal.SIGSTOP)
        try:
            await until(lambda: specs[0].id not in made.engine.replicas())
            assert specs[1].id in made.engine.replicas()
        finally:
            os.kill(silent.process.pid, signal.SIGCONT)
        # It was never gone: once the node speaks again, its replica counts again.
        await until(lambda: specs[0].id in made.engine.replicas())
        await stop(made, *(spec.id for spec in specs))


def test_ended_nodes_leave_no_metrics_behind(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex.cluster.node_client._END_S", PATIENCE_S)

    async def test(node: LocalNode) -> None:
        async with cluster(home, [node]) as made:
            spec = made.spec()
            await ready(made, spec)
            await made.engine.stop(spec.id, 0)
            # The node reports an end twice: first that the replica serves no more, then that its metrics are final.
            await until(lambda: made.ended == [spec.id])
            assert not made.engine.replicas()
            await made.engine.end_nodes()
            assert node.process is not None
            await asyncio.to_thread(node.process.wait, PATIENCE_S)
            assert not node.home.metrics_dir.exists()

    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as [alone]:
        run(test(alone))
