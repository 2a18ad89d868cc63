"""Measure the cost of a reservation through Ray, and the time to detect a lost node: `benchmarks.reservations`.

It uses the cluster of the tests, in network namespaces (requires root and `iproute2`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

_TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "cluster")]

from cortex import __version__  # noqa: E402
from cortex.cluster.credentials import ClusterCredentials  # noqa: E402
from cortex.cluster.node.start import NodeStart  # noqa: E402
from cortex.cluster.placement import Resources  # noqa: E402
from cortex.cluster.ray_placer import RayPlacer  # noqa: E402
from cortex.telemetry import Logger  # noqa: E402
from harness.cluster.ray_cluster import RayCluster, RayNode, ray_cluster  # noqa: E402

#: Initial delay, period, timeout, in milliseconds; failures. None: what Ray has by itself.
HEALTH_CHECKS = {
    "Ray's own settings": None,
    "1000, 500, 2000 ms, 4 failures": (1000, 500, 2000, 4),
    "1000, 500, 500 ms, 3 failures": (1000, 500, 500, 3),
}
_NAMES = ("initial_delay_ms", "period_ms", "timeout_ms", "failure_threshold")
_TIMEOUT_S = 120.0


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reservations", description=__doc__)
    parser.add_argument("--reservations", type=int, default=8)
    parser.add_argument("--skip-detection", action="store_true", help="only measure the cost of a reservation")
    arguments = parser.parse_args()
    started = time.monotonic()
    with ray_cluster(nodes=1, cpus=arguments.reservations) as cluster:
        print(f"| a head and one node of Ray started in | {time.monotonic() - started:.1f} s |\n|---|---|")
        print(f"| memory of Ray's head (PSS) | {_total_mb(cluster.head):.0f} MB |")
        print(f"| memory of Ray on a node (PSS) | {_total_mb(cluster.nodes[0]):.0f} MB |")
        asyncio.run(_cost(cluster, arguments.reservations))
    if arguments.skip_detection:
        return
    print("\n| health checks | node killed: noticed after | node cut off: noticed after |\n|---|---|---|")
    for title, values in HEALTH_CHECKS.items():
        settings = {f"RAY_health_check_{name}": str(value) for name, value in zip(_NAMES, values or (), strict=False)}
        with ray_cluster(nodes=2, health_checks=settings) as cluster:
            killed = asyncio.run(_detection(cluster, cluster.nodes[0], RayNode.kill))
            cut_off = asyncio.run(_detection(cluster, cluster.nodes[1], RayNode.partition))
        print(f"| {title} | {killed:.1f} s | {cut_off:.1f} s |", flush=True)


async def _cost(cluster: RayCluster, count: int) -> None:
    async with _placer(cluster) as placer:
        times = []
        for number in range(count):
            began = time.monotonic()
            await placer.place(f"measured-{number}", Resources(1))
            await _until(lambda name=f"measured-{number}": placer.placements()[name].state == "placed")
            times.append(time.monotonic() - began)
        machine = cluster.nodes[0].machine
        actors = [_pss_mb(pid) for pid in machine.pids() if _command(pid).startswith("ray::Reservation")]
        agents = [_pss_mb(pid) for pid in machine.pids() if "cortex.cluster.node.agent " in _command(pid)]
        bridges = [_pss_mb(pid) for pid in cluster.head.machine.pids() if "cortex.cluster.ray_bridge" in _command(pid)]
        print(f"| first reservation on a node, with the start of its agent | {times[0]:.2f} s |")
        print(f"| each further one (median of {count - 1}) | {median(times[1:]):.2f} s |")
        print(f"| memory of a reservation, an actor (median, PSS) | {median(actors):.0f} MB |")
        print(f"| memory of the agent of a node (PSS) | {sum(agents):.0f} MB |")
        print(f"| memory of the operator's process that speaks with Ray (PSS) | {sum(bridges):.0f} MB |")
        for name in placer.placements():
            await placer.remove(name)


async def _detection(cluster: RayCluster, node: RayNode, strike: Callable[[RayNode], None]) -> float:
    """Return the seconds until a reservation on a node is known to be lost."""
    async with _placer(cluster) as placer:
        resources = placer.resources()
        assert resources is not None
        node_id = next(node_id for node_id, found in resources.nodes.items() if found.host == node.host)
        await placer.place("struck", Resources(1), node_id)
        await _until(lambda: placer.placements()["struck"].state == "placed")
        began = time.monotonic()
        strike(node)
        await _until(lambda: placer.placements()["struck"].state == "lost")
        return time.monotonic() - began


@contextlib.asynccontextmanager
async def _placer(cluster: RayCluster):  # type: ignore[no-untyped-def]
    start = NodeStart("benchmark", ClusterCredentials("a secret", "127.0.0.1", 0).for_nodes, __version__)
    environ = {**os.environ, **cluster.head.environ}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ray.log"
        placer = RayPlacer(
            cluster.address, start, environ, log, Logger("benchmark"), prefix=cluster.head.machine.command([])
        )
        await placer.startup(lambda: None)
        try:
            await _until(lambda: placer.is_available)
            yield placer
        finally:
            await placer.shutdown()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


def _total_mb(node: RayNode) -> float:
    return sum(_pss_mb(pid) for pid in node.machine.pids())


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
