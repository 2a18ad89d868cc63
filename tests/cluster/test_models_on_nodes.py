"""Models on nodes."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cluster.test_cluster_engine import Cluster, ask, cluster, ready, run, stop
from cortex.config.schema import Api
from cortex.engine.environment import Prepared
from cortex.home import Home
from cortex.operator.revisions.replica_specs import replica_spec
from cortex.projects.project import ProjectFiles, content_hash
from cortex.state.revision import Revision
from cortex.worker.spec import ReplicaSpec
from harness.cluster.local_nodes import LocalNode, local_nodes
from harness.servers.buckets import BUCKET
from harness.servers.s3 import SwiftServer
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


def test_nodes_list_stores_for_themselves(home: Home, swift_server: SwiftServer) -> None:
    swift = swift_server.other_account()
    swift.create_bucket(BUCKET)

    async def test(nodes: list[LocalNode]) -> None:
        async with cluster(home, nodes) as made:
            specs = [spec(home), spec(home)]
            sockets = await sockets_of(made, specs)
            assert {made.host(each.id) for each in specs} == {node.host for node in nodes}
            await until_all_answer(sockets, 1)
            swift.put(BUCKET, "numbers/2/number", b"2")
            await until_all_answer(sockets, 2)
            await stop(made, *(each.id for each in specs))

    swift.put(BUCKET, "numbers/1/number", b"1")
    with (
        tempfile.TemporaryDirectory(prefix="cx-") as folder,
        local_nodes(Path(folder), 2, swift.environ) as nodes,
    ):
        run(test(nodes))
