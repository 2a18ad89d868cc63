"""Transfer of projects to nodes: truncated, damaged, missing, and from a new operator."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.test_cluster_engine import Cluster, cluster, ready, stop, until
from cortex.cluster.archives import ProjectArchives
from cortex.cluster.transport import connect
from cortex.errors import InputError
from cortex.home import Home
from cortex.payloads.json_object import Json
from cortex.worker.spec import ReplicaSpec
from harness.cluster.local_nodes import CREDENTIALS, LocalNode, local_nodes

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as [made]:
        yield made


async def send(node: LocalNode, data: bytes, **request: object) -> Json | None:
    """Send a project, or a part of it, as an operator does."""
    wire = await connect(node.host, node.address.port, CREDENTIALS.identity)
    wire.send({"purpose": "project", "digest": "0" * 64, "size": len(data), **request})
    wire.writer.write(data)
    await wire.drain()
    if request.get("size", len(data)) != len(data):
        wire.close()
        return None
    answer = await wire.receive()
    wire.close()
    return answer


def project(spec: ReplicaSpec) -> str:
    return Path(spec.project_dir).name


def failure(made: Cluster, spec: ReplicaSpec) -> str:
    status = made.status(spec.id)
    found = status.processes[0].failure if status else None
    return found.message if found else ""


async def test_a_truncated_or_damaged_project_is_sent_again(home: Home, node: LocalNode) -> None:
    async with cluster(home, [node]) as made:
        spec = made.spec()
        await send(node, b"PK", project=project(spec), size=1000)
        answer = await send(node, b"PK\5\6" + bytes(18), project=project(spec))
        assert answer is not None and "does not match its announced digest" in answer["error"]
        await ready(made, spec)
        await stop(made, spec.id)


async def test_a_new_operator_sends_a_project_that_a_node_waits_for(home: Home, node: LocalNode) -> None:
    async with cluster(home, [node]) as made:
        spec = made.spec()
        hidden = home.path / "hidden"
        Path(spec.project_dir).rename(hidden)
        await made.engine.start(spec)
        await until(lambda: spec.id in made.engine.nodes[node.host].replicas)
        found = made.placer.found
    hidden.rename(spec.project_dir)
    async with cluster(home, [node]) as made:
        made.placer.found = found
        await until(lambda: (status := made.status(spec.id)) and status.is_ready, 60)
        await stop(made, spec.id)


async def test_a_missing_project_is_reported_and_used_once_it_exists(home: Home, node: LocalNode) -> None:
    async with cluster(home, [node]) as made:
        spec = made.spec()
        hidden = home.path / "hidden"
        Path(spec.project_dir).rename(hidden)
        await made.engine.start(spec)
        await until(lambda: failure(made, spec))
        reason = "the operator can't send the project: it is not on the operator's machine; deploy it again"
        assert failure(made, spec) == f"node {node.host}: {reason}"
        assert not (node.home.projects_dir / project(spec)).exists()
        hidden.rename(spec.project_dir)
        await until(lambda: (status := made.status(spec.id)) and status.is_ready, 60)
        await stop(made, spec.id)


async def test_a_project_that_can_not_be_unpacked_is_reported(home: Home, node: LocalNode) -> None:
    shutil.rmtree(node.home.projects_dir)
    node.home.projects_dir.write_text("no folder, as good as a full disk")
    async with cluster(home, [node]) as made:
        spec = made.spec()
        await made.engine.start(spec)
        await until(lambda: failure(made, spec))
        assert "the node can't unpack the project" in failure(made, spec)
        node.home.projects_dir.unlink()
        await until(lambda: (status := made.status(spec.id)) and status.is_ready, 60)
        await stop(made, spec.id)


@pytest.mark.parametrize("name", ["../../etc", "", "a/b", "0" * 63])
def test_an_invalid_project_hash_is_rejected(home: Home, name: str) -> None:
    with pytest.raises(InputError, match="not the hash of a project"):
        asyncio.run(ProjectArchives(home).get(name))


def test_nodes_reject_projects_outside_of_their_folder(node: LocalNode) -> None:
    answer = asyncio.run(send(node, b"PK", project="../run/x"))
    assert answer is not None and "not the hash of a project" in answer["error"]
