"""Why something can't be placed, and which group of nodes it is placed in: decided from data alone."""

from __future__ import annotations

from cortex.cluster.placement import ClusterResources, NodeResources, Resources

_GIB = 1024**3
_MIB = 1024**2
#: Shares of cores add up to a little more or less than they should.
_TOLERANCE = 1e-6


def may_run_on(wanted: Resources, node: NodeResources) -> bool:
    """Tell whether a node has what is wanted, were nothing of it taken."""
    return (
        wanted.cpu <= node.cpu + _TOLERANCE
        and wanted.memory_bytes <= node.memory_bytes
        and wanted.gpu <= node.gpu
        and (not wanted.node_groups or not node.node_groups.isdisjoint(wanted.node_groups))
    )


def seems_free(wanted: Resources, cluster: ClusterResources) -> bool:
    """Tell whether a node could have it, and the nodes together have as much free."""
    free = cluster.free
    has_cores = wanted.cpu <= free.cpu + _TOLERANCE
    is_free = has_cores and wanted.memory_bytes <= free.memory_bytes and wanted.gpu <= free.gpu
    return is_free and any(may_run_on(wanted, node) for node in cluster.nodes.values())


def lack(wanted: Resources, cluster: ClusterResources) -> str:
    """Say why something that is wanted is not placed: what was asked, and what the largest node has."""
    nodes = list(cluster.nodes.values())
    if not nodes:
        return f"a replica wants {_listed(wanted)}; the cluster has no node"
    if wanted.node_groups:
        nodes = [node for node in nodes if not node.node_groups.isdisjoint(wanted.node_groups)]
        if not nodes:
            return f"a replica wants a node of {_groups(wanted)}; the cluster has none"
    among = f" of {_groups(wanted)}" if wanted.node_groups else ""
    if any(may_run_on(wanted, node) for node in nodes):
        free = Resources(cluster.free.cpu, cluster.free.memory_bytes, cluster.free.gpu)
        return (
            f"a replica wants {_listed(wanted)} on one node{among}: no node has that free at the moment; "
            f"of the whole cluster {_like(wanted, free)} are free"
        )
    return f"a replica wants {_listed(wanted)}, the largest node{among} has {_like(wanted, _largest(wanted, nodes))}"


def choose_group(wanted: Resources, cluster: ClusterResources | None) -> str | None:
    """Choose one of the groups that will do: the first with a node that has what is wanted, else the first."""
    if not wanted.node_groups:
        return None
    nodes = list(cluster.nodes.values()) if cluster is not None else []
    for group in wanted.node_groups:
        if any(group in node.node_groups and may_run_on(wanted, node) for node in nodes):
            return group
    return wanted.node_groups[0]


def _largest(wanted: Resources, nodes: list[NodeResources]) -> Resources:
    """Of all nodes the one that comes closest: by the kind of resource that is lacking most."""

    def met(node: NodeResources) -> tuple[float, float]:
        shares = [
            node.cpu / wanted.cpu if wanted.cpu else 1.0,
            node.memory_bytes / wanted.memory_bytes if wanted.memory_bytes else 1.0,
            node.gpu / wanted.gpu if wanted.gpu else 1.0,
        ]
        return min(min(shares), 1.0), sum(min(share, 1.0) for share in shares)

    best = max(nodes, key=met)
    return Resources(best.cpu, best.memory_bytes, best.gpu)


def _listed(wanted: Resources) -> str:
    return _like(wanted, wanted)


def _like(wanted: Resources, amounts: Resources) -> str:
    """Name the amounts of those kinds that are wanted."""
    parts = []
    if wanted.cpu or not (wanted.memory_bytes or wanted.gpu):
        parts.append(f"{amounts.cpu:.3g} {'core' if amounts.cpu == 1 else 'cores'}")
    if wanted.memory_bytes:
        parts.append(f"{_size(amounts.memory_bytes)} of memory")
    if wanted.gpu:
        parts.append(f"{amounts.gpu} {'GPU' if amounts.gpu == 1 else 'GPUs'}")
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _groups(wanted: Resources) -> str:
    kind = "group" if len(wanted.node_groups) == 1 else "groups"
    return f"node {kind} {' or '.join(wanted.node_groups)}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.3g} GiB" if size_bytes >= _GIB else f"{size_bytes / _MIB:.3g} MiB"
