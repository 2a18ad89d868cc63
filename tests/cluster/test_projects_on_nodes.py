"""Projects on their way to nodes: cut off, damaged, missing, asked of an operator that is gone."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.test_cluster_engine import Cluster, cluster, ready, run, stop, until
from cortex.cluster.archives import ProjectArchives
from cortex.cluster.transport import Json, connect
from cortex.errors import InputError
from cortex.home import Home
from cortex.replica.spec import ReplicaSpec
from harness.cluster.local_nodes import CREDENTIALS, LocalNode, local_nodes


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as [made]:
        yield made


async def send(node: LocalNode, data: bytes, **request: object) -> Json | None:
    """Send a project, or some of one, as an operator does."""
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


def test_project_that_was_cut_off_or_damaged_is_sent_again(home: Home, node: LocalNode) -> None:
    async def test() -> None:
        async with cluster(home, [node]) as made:
            spec = made.spec()
            await send(node, b"PK", project=project(spec), size=1000)
            answer = await send(node, b"PK\5\6" + bytes(18), project=project(spec))
            assert answer is not None and "does not match its announced digest" in answer["error"]
            await ready(made, spec)
            await stop(made, spec.id)

    run(test())


def test_operator_that_comes_while_a_project_is_waited_for_sends_it(home: Home, node: LocalNode) -> None:
    async def test() -> None:
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

    run(test())


def test_project_that_is_missing_is_told_of_and_taken_once_it_is_there(home: Home, node: LocalNode) -> None:
    async def test() -> None:
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

    run(test())


def test_project_for_which_the_node_has_no_room_is_told_of(home: Home, node: LocalNode) -> None:
    shutil.rmtree(node.home.projects_dir)
    node.home.projects_dir.write_text("no folder, as good as a full disk")

    async def test() -> None:
        async with cluster(home, [node]) as made:
            spec = made.spec()
            await made.engine.start(spec)
            await until(lambda: failure(made, spec))
            assert "the node can't unpack the project" in failure(made, spec)
            node.home.projects_dir.unlink()
            await until(lambda: (status := made.status(spec.id)) and status.is_ready, 60)
            await stop(made, spec.id)

    run(test())


@pytest.mark.parametrize("name", ["../../etc", "", "a/b", "0" * 63])
def test_what_is_no_hash_leads_nowhere(home: Home, name: str) -> None:
    with pytest.raises(InputError, match="not the hash of a project"):
        asyncio.run(ProjectArchives(home).get(name))


def test_nodes_take_no_project_outside_of_its_folder(node: LocalNode) -> None:
    answer = asyncio.run(send(node, b"PK", project="../run/x"))
    assert answer is not None and "not the hash of a project" in answer["error"]
