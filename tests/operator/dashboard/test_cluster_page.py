"""Page of the machines: what it computes, and what it shows of one machine and of a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.cluster.placement import Amounts, ClusterResources, NodeResources
from cortex.engine.devices import Inventory
from cortex.lifecycle import TokenScope
from cortex.operator.access.tokens import Principal
from cortex.operator.dashboard.pages.cluster import (
    ClusterView,
    NodeConnection,
    PlacedReplica,
    cluster_pages,
    view_of_cluster,
    view_of_machine,
)
from harness.replicas.fleet import FAILED, READY, replica
from harness.servers.dashboard import ServedDashboard, assert_readable, served_dashboard

pytestmark = pytest.mark.processes

GIB = 2**30
HOSTILE = "<script>alert(1)</script>"
NO_RESOURCES = ClusterResources()


def placed(
    id: str, node: str = "", cpu: float = 1, gpu: int = 0, used: int | None = None, lack: str = ""
) -> PlacedReplica:
    made = replica(id, READY if id != "iris-bad" else FAILED)
    spec = replace(made.spec, cpu=cpu, mem_bytes=GIB, gpu=gpu)
    return PlacedReplica(spec, replace(made.status, node=node, lack=lack), used)


def resources(**groups: str) -> ClusterResources:
    """Return those of two nodes with 8 cores each."""
    nodes = {
        host: NodeResources(host, 8, 32 * GIB, 2, frozenset({groups[name]} if name in groups else ()))
        for name, host in (("one", "10.0.0.1"), ("two", "10.0.0.2"))
    }
    return ClusterResources(Amounts(16, 64 * GIB, 4), Amounts(11.5, 60 * GIB, 3), nodes)


def page_of(folder: Path, view: ClusterView) -> str:
    async def describe() -> ClusterView:
        return view

    with served_dashboard(folder, lambda parts: [cluster_pages(describe, parts.pages)]) as dashboard:
        page = dashboard.sign_in().get("/cluster")
        assert page.status_code == 200
        assert_readable(page)
        return page.text


def test_the_room_of_one_machine_is_what_replicas_do_not_request() -> None:
    inventory = Inventory(gpus=("GPU-1", "GPU-2"), cores=8.0, memory_bytes=16 * GIB)
    view = view_of_machine(inventory, [placed("iris-1", cpu=1.5, used=GIB), placed("iris-2", gpu=1)])
    assert view.total == Amounts(8.0, 16 * GIB, 2)
    assert view.free == Amounts(5.5, 14 * GIB, 1)
    (node,) = view.nodes
    assert (node.requested, node.used_bytes, node.is_lost) == (Amounts(2.5, 2 * GIB, 1), GIB, False)


def test_nothing_is_free_where_workers_share_the_cores_of_replicas() -> None:
    view = view_of_machine(Inventory(cores=2.0, memory_bytes=GIB // 2), [placed("iris-1", cpu=3)])
    assert view.free == Amounts(0.0, 0, 0)


def test_before_resources_are_known_none_are_shown(tmp_path: Path) -> None:
    view = view_of_machine(Inventory(), [])
    assert (view.total, view.free) == (None, None)
    assert "0 of – cores" in page_of(tmp_path, view)


def test_nodes_of_a_cluster_are_joined_from_ray_agents_and_replicas() -> None:
    connections = {"10.0.0.2": NodeConnection(True, 0.4), "10.0.0.9": NodeConnection(False, 8.0, "no route to host")}
    replicas = [placed("iris-1", "10.0.0.2"), placed("iris-2", "10.0.0.2"), placed("iris-3", lack="no GPU is free")]
    view = view_of_cluster(resources(two="gpu"), connections, replicas, {"10.0.0.2": "http://10.0.0.2:8888"}, "")
    assert [(node.name, node.is_lost, node.total is None) for node in view.nodes] == [
        ("10.0.0.9", True, True),
        ("10.0.0.1", False, False),
        ("10.0.0.2", False, False),
    ]
    newest = view.nodes[2]
    assert (newest.requested, newest.groups, newest.gateway) == (
        Amounts(2, 2 * GIB, 0),
        ("gpu",),
        "http://10.0.0.2:8888",
    )
    assert view.nodes[1].connection is None
    assert [each.spec.id for each in view.waiting] == ["iris-3"]
    assert view.free == Amounts(11.5, 60 * GIB, 3)


def test_a_cluster_shows_states_heartbeats_and_what_waits(tmp_path: Path) -> None:
    connections = {"10.0.0.2": NodeConnection(True, 0.4), "10.0.0.9": NodeConnection(False, 8.0, "no route to host")}
    replicas = [
        placed("iris-1", "10.0.0.2", used=3 * GIB),
        placed("iris-bad", "10.0.0.2"),
        placed("iris-3", lack="full"),
    ]
    text = page_of(tmp_path, view_of_cluster(resources(), connections, replicas, {}, ""))
    for part in ("does not answer", "no route to host", "last heartbeat 0.4 s ago", "no replica yet", "2 of 8 cores"):
        assert part in text
    for part in ("Replicas without a node", "full", "backing off", "3 GiB of 32 GiB", "2 replicas"):
        assert part in text


def test_a_cluster_that_does_not_answer_says_so(tmp_path: Path) -> None:
    view = view_of_cluster(None, {"10.0.0.2": NodeConnection(True, 0.4)}, [], {}, "Ray has not answered for 5 s")
    text = page_of(tmp_path, view)
    assert "No new replicas can be placed" in text
    assert "Ray has not answered for 5 s" in text
    assert "No nodes" in page_of(tmp_path, view_of_cluster(NO_RESOURCES, {}, [], {}, ""))


def test_the_replicas_of_many_nodes_are_folded(tmp_path: Path) -> None:
    hosts = [f"10.0.0.{number}" for number in range(1, 5)]
    nodes = {host: NodeResources(host, 8, GIB, 0) for host in hosts}
    replicas = [placed(f"iris-{host[-1]}", host) for host in hosts]
    view = view_of_cluster(ClusterResources(nodes=nodes), {}, replicas, {}, "")
    assert "<details open>" not in page_of(tmp_path, view)
    few = view_of_cluster(ClusterResources(nodes=nodes), {}, replicas[:1], {}, "")
    assert "<details>" in page_of(tmp_path, few)


def test_names_of_nodes_groups_and_problems_are_escaped(tmp_path: Path) -> None:
    node = NodeResources(HOSTILE, 8, GIB, 0, frozenset({HOSTILE}))
    connections = {HOSTILE: NodeConnection(False, 1.0, HOSTILE)}
    replicas = [placed("iris-1", HOSTILE), placed("iris-2", lack=HOSTILE)]
    view = view_of_cluster(ClusterResources(nodes={"1": node}), connections, replicas, {}, HOSTILE)
    text = page_of(tmp_path, view)
    assert HOSTILE not in text
    assert text.count("&lt;script&gt;") >= 5


@pytest.mark.parametrize(
    ("scope", "api", "status"), [("read", None, 200), ("metrics", None, 403), ("read", "iris", 403)]
)
def test_the_page_needs_the_scope_read_for_all_apis(tmp_path: Path, scope: str, api: str | None, status: int) -> None:
    async def describe() -> ClusterView:
        return view_of_machine(Inventory(), [])

    def session(dashboard: ServedDashboard) -> int:
        made = asyncio.run(dashboard.parts.tokens.create("narrow", TokenScope(scope), api))
        principal: Principal = dashboard.parts.tokens.identify(f"Bearer {made['token']}")
        return dashboard.sign_in(principal).get("/cluster").status_code

    with served_dashboard(tmp_path, lambda parts: [cluster_pages(describe, parts.pages)]) as dashboard:
        assert session(dashboard) == status
