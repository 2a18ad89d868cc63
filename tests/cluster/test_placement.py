from __future__ import annotations

import pytest

from cortex.cluster.placement import (
    Amounts,
    ClusterResources,
    NodeResources,
    Occupant,
    Resources,
    choose_group,
    choose_node,
    fits,
    unschedulable_reason,
)

GIB = 1024**3
SMALL = NodeResources("10.0.0.2", cpu=4, memory_bytes=8 * GIB, gpu=0, node_groups=frozenset({"cheap"}))
LARGE = NodeResources("10.0.0.3", cpu=16, memory_bytes=32 * GIB, gpu=0, node_groups=frozenset({"cheap", "big"}))
GPU = NodeResources("10.0.0.4", cpu=8, memory_bytes=64 * GIB, gpu=2, node_groups=frozenset({"gpu"}))
HEAD = NodeResources("10.0.0.1", cpu=0, memory_bytes=4 * GIB, gpu=0)


def cluster(*nodes: NodeResources, free_cpu: float = 0.0) -> ClusterResources:
    total = Amounts(sum(n.cpu for n in nodes), sum(n.memory_bytes for n in nodes), sum(n.gpu for n in nodes))
    free = Amounts(free_cpu, total.memory_bytes, total.gpu)
    return ClusterResources(total, free, {node.host: node for node in nodes})


@pytest.mark.parametrize(
    ("wanted", "nodes", "said"),
    [
        (Resources(8), (HEAD, SMALL), "a replica needs 8 cores; the largest node has 4 cores"),
        (Resources(0.2), (), "a replica needs 0.2 cores; the cluster has no nodes"),
        (
            Resources(17, memory_bytes=48 * GIB),
            (SMALL, LARGE, GPU),
            "a replica needs 17 cores and 48 GiB of memory; the largest node has 16 cores and 32 GiB of memory",
        ),
        (Resources(1, gpu=1), (SMALL,), "a replica needs 1 core and 1 GPU; the largest node has 4 cores and 0 GPUs"),
        (
            Resources(1, memory_bytes=512 * 1024**2, gpu=4),
            (SMALL, GPU),
            "a replica needs 1 core, 512 MiB of memory and 4 GPUs; "
            "the largest node has 8 cores, 64 GiB of memory and 2 GPUs",
        ),
        (
            Resources(8, node_groups=("fast",)),
            (SMALL, LARGE),
            "a replica needs a node of node group fast; the cluster has none",
        ),
        (
            Resources(12, node_groups=("gpu", "fast")),
            (LARGE, GPU),
            "a replica needs 12 cores; the largest node of node groups gpu or fast has 8 cores",
        ),
        (
            Resources(4),
            (SMALL, HEAD),
            "a replica needs 4 cores on one node: no node has that free at the moment; "
            "the whole cluster has 2.5 cores free",
        ),
    ],
)
def test_unschedulable_reason(wanted: Resources, nodes: tuple[NodeResources, ...], said: str) -> None:
    assert unschedulable_reason(wanted, cluster(*nodes, free_cpu=2.5)) == said


def test_rounding_errors_of_cores_are_tolerated() -> None:
    assert fits(Resources(0.1 + 0.2), NodeResources("h", 0.3, 0, 0))


@pytest.mark.parametrize(
    ("wanted", "group"),
    [
        (Resources(1), None),
        (Resources(1, node_groups=("cheap",)), "cheap"),
        (Resources(8, node_groups=("gpu", "cheap")), "gpu"),
        (Resources(12, node_groups=("gpu", "cheap")), "cheap"),
        (Resources(64, node_groups=("gpu", "cheap")), "gpu"),
    ],
)
def test_the_first_group_in_which_a_request_fits_is_chosen(wanted: Resources, group: str | None) -> None:
    assert choose_group(wanted, cluster(SMALL, LARGE, GPU)) == group


def test_the_first_group_is_chosen_while_the_cluster_is_unknown() -> None:
    assert choose_group(Resources(1, node_groups=("gpu", "cheap")), None) == "gpu"


def node(host: str, cpu: float = 4, gpu: int = 0, zone: str = "", *groups: str) -> NodeResources:
    return NodeResources(host, cpu, 8 * GIB, gpu, frozenset(groups), zone)


def same(host: str, cpu: float = 1, gpu: int = 0) -> Occupant:
    return Occupant(host, Resources(cpu, gpu=gpu), is_same_api=True, is_same_revision=True)


def older(host: str) -> Occupant:
    return Occupant(host, Resources(1), is_same_api=True)


def other(host: str, cpu: float = 1, gpu: int = 0) -> Occupant:
    return Occupant(host, Resources(cpu, gpu=gpu))


THREE = (node("a"), node("b"), node("c"))
ZONES = (node("a", zone="east"), node("b", zone="east"), node("c", cpu=2, zone="west"))


@pytest.mark.parametrize(
    ("wanted", "nodes", "occupants", "avoided", "chosen"),
    [
        (Resources(1), THREE, [other("a"), other("b", 2)], [], "c"),
        (Resources(1), THREE, [same("a"), other("b", 3), other("c", 2)], [], "c"),
        (Resources(1), THREE, [same("a"), other("b", 4), other("c", 4)], [], "a"),
        (Resources(1), THREE, [older("a"), older("b"), same("c")], [], "a"),
        (Resources(1), THREE, [same("a"), older("b"), other("c", 3)], [], "c"),
        (Resources(1), THREE, [same("a")], ["b", "c"], "a"),
        (Resources(1), THREE, [same("a"), same("b")], ["c"], "a"),
        (Resources(1), ZONES, [same("a")], [], "c"),
        (Resources(1), ZONES, [same("a"), same("c")], [], "b"),
        (Resources(3), THREE, [other("a", 2), other("b", 2), other("c", 2)], [], ""),
        (Resources(1, gpu=1), (node("a", gpu=4), node("b", gpu=4)), [other("b", gpu=1)], [], "b"),
        (Resources(1, gpu=1), (node("a", gpu=4), node("b", gpu=4)), [same("b", gpu=1)], [], "a"),
        (Resources(1), (node("a", 8, 2), node("b", 4)), [], [], "b"),
        (Resources(1, node_groups=("fast",)), (node("a"), node("b", 4, 0, "", "fast")), [same("b")], [], "b"),
        (Resources(1), (), [], [], ""),
    ],
)
def test_the_best_node_for_a_replica(
    wanted: Resources, nodes: tuple[NodeResources, ...], occupants: list[Occupant], avoided: list[str], chosen: str
) -> None:
    assert choose_node(wanted, cluster(*nodes), occupants, avoided) == chosen
