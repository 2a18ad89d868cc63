"""Models on nodes: the operator's machine lists sources for all nodes; each node lists while it is away."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.test_cluster_engine import Cluster, ask, cluster, ready, run, stop
from cortex.config.schema import Api
from cortex.engine.environment import Prepared
from cortex.home import Home
from cortex.operator.replicas.replica_specs import replica_spec
from cortex.projects.project import ProjectFiles, content_hash
from cortex.state.revision import Revision
from cortex.worker.spec import ReplicaSpec
from harness.cluster.local_nodes import LocalNode, local_nodes
from harness.models.model_agents import RunningAgent
from harness.servers.buckets import BUCKET
from harness.servers.s3 import SwiftServer
from harness.servers.slow_proxy import SlowProxy
from harness.wait import PATIENCE_S

pytestmark = [pytest.mark.processes, pytest.mark.long]

SOURCE = """
import pathlib

class Handler:
    def __init__(self, config, model_client):
        self.client = model_client

    def load_model(self, model_path):
        return pathlib.Path(model_path, "number").read_text()

    def handle_post(self, payload):
        return {"number": self.client.get_model()}
"""


@dataclass
class Stores:
    """One store with several addresses, which show who listed it."""

    swift: SwiftServer
    of_operator: SlowProxy
    of_nodes: SlowProxy

    def put(self, version: int) -> None:
        self.swift.put(BUCKET, f"numbers/{version}/number", str(version).encode())

    @staticmethod
    def listings(way: SlowProxy) -> int:
        """Count how often the model was listed, not counting its versions, which are when they are downloaded."""
        return way.listed.count("numbers/")


@pytest.fixture
def stores(swift_server: SwiftServer) -> Iterator[Stores]:
    swift = swift_server.other_account()
    swift.create_bucket(BUCKET)
    with SlowProxy(swift.url) as of_operator, SlowProxy(swift.url) as of_nodes:
        yield Stores(swift, of_operator, of_nodes)


@contextlib.contextmanager
def operator_agent(home: Home, stores: Stores) -> Iterator[RunningAgent]:
    agent = RunningAgent(home, {**stores.swift.environ, "AWS_ENDPOINT_URL_S3": stores.of_operator.url})
    try:
        yield agent.start()
    finally:
        agent.stop()


def spec(home: Home) -> ReplicaSpec:
    models = {"path": f"s3://{BUCKET}/numbers", "poll_interval_s": "1s"}
    handler = {"interface": "handler", "type": "python", "path": "handler.py", "models": models}
    api = Api.model_validate({"name": "numbers", "kind": "RealtimeAPI", "handler": handler, "compute": {"cpu": 1}})
    project = home.projects_dir / "new"
    project.mkdir(exist_ok=True)
    (project / "handler.py").write_text(SOURCE)
    found = content_hash(ProjectFiles(project, ("handler.py",)))
    if not (home.projects_dir / found).exists():
        project.rename(home.projects_dir / found)
    return replica_spec(home, Revision("revision-1", api, found), Prepared("", {}))


async def answers(sockets: list[str]) -> list[Any]:
    return [(await asyncio.to_thread(ask, socket))[1] for socket in sockets]


async def until_all_answer(sockets: list[str], version: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await answers(sockets) != [{"number": str(version)}] * len(sockets):
            await asyncio.sleep(0.1)


async def sockets_of(made: Cluster, specs: list[ReplicaSpec]) -> list[str]:
    return [(await ready(made, each)).processes[0].socket for each in specs]


def said_away(nodes: list[LocalNode]) -> bool:
    return any("listing here" in (node.home.logs_dir / "models.log").read_text() for node in nodes)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.05)


def test_the_operator_lists_for_all_nodes_and_each_for_itself_while_it_is_away(home: Home, stores: Stores) -> None:
    stores.put(1)
    environ = {**stores.swift.environ, "AWS_ENDPOINT_URL_S3": stores.of_nodes.url}

    async def test(nodes: list[LocalNode], agent: RunningAgent) -> None:
        async with cluster(home, nodes) as made:
            specs = [spec(home), spec(home)]
            sockets = await sockets_of(made, specs)
            assert {made.host(each.id) for each in specs} == {node.host for node in nodes}
            await until_all_answer(sockets, 1)
            stores.put(2)
            await until_all_answer(sockets, 2)
            assert stores.listings(stores.of_operator) >= 3
            # On a machine that has no time for it, even the operator's agent may seem to be away.
            assert stores.listings(stores.of_nodes) == 0 or said_away(nodes)
            assert agent.contents() == []  # nothing is downloaded where no replica runs
        await asyncio.to_thread(agent.kill)
        stores.put(3)
        await until_all_answer(sockets, 3)
        assert stores.listings(stores.of_nodes) > 0
        await asyncio.to_thread(agent.start)
        async with cluster(home, nodes) as made:
            before = stores.listings(stores.of_operator)
            await until(lambda: stores.listings(stores.of_operator) > before)
            stores.put(4)
            await until_all_answer(sockets, 4)
            await until(lambda: {each.id for each in specs} <= set(made.engine.replicas()))
            await stop(made, *(each.id for each in specs))

    with (
        tempfile.TemporaryDirectory(prefix="cx-") as folder,
        operator_agent(home, stores) as agent,
        local_nodes(Path(folder), 2, environ) as nodes,
    ):
        run(test(nodes, agent))
