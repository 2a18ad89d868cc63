"""The placer against a real Ray cluster: three nodes, each of which can be lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cortex import __version__
from cortex.cluster.credentials import ClusterCredentials
from cortex.cluster.node.start import IDENTITY_FILE, NodeStart
from cortex.cluster.placement import Placement, Resources, unschedulable_reason
from cortex.cluster.ray_placer import RayPlacer
from cortex.processes.identity import Identity
from cortex.telemetry import Logger
from harness.cluster.ray_cluster import RayCluster, RayNode, ray_cluster

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(240)]
CLUSTER_ID = "0123456789ab"
SECRET = ClusterCredentials("a secret of this test", "127.0.0.1", 0).for_nodes
CORES = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(nodes=3, cpus=CORES, groups={2: ("special",)}) as started:
        yield started


class Running:
    """A placer with helpers for tests."""

    def __init__(self, cluster: RayCluster, folder: Path, is_beside_head: bool = True) -> None:
        self.cluster = cluster
        self.head = cluster.head.machine
        self.placer = RayPlacer(
            cluster.address if is_beside_head else f"ray://{cluster.head.host}:10001",
            NodeStart(CLUSTER_ID, SECRET, __version__),
            {**os.environ, **cluster.head.environ},
            folder / "ray.log",
            Logger("test"),
            prefix=self.head.command([]) if is_beside_head else (),
        )

    async def start(self) -> None:
        """Start the placer, and wait for Ray."""
        await self.placer.startup(lambda: None)
        await until(lambda: self.placer.is_available, "Ray answers", self.placer)

    async def remove_all(self) -> None:
        """Give up all that is placed."""
        for name in self.placer.placements():
            await self.placer.remove(name)
        await until(lambda: not self.placer._removed, "all is given up", self.placer)

    async def place(self, name: str, resources: Resources) -> Placement:
        """Place something, as often as it takes: while the cluster changes, what was just placed may be lost."""
        while True:
            await self.placer.place(name, resources)
            found = await self.state(name, "placed", "lost")
            if found.state == "placed":
                return found

    async def state(self, name: str, *states: str) -> Placement:
        """Wait until something is in one of these states."""
        await until(lambda: self.placer.placements()[name].state in states, f"{name} is {states}", self.placer)
        return self.placer.placements()[name]

    def node_of(self, placement: Placement) -> RayNode:
        """Return the node that something was placed on."""
        assert placement.node is not None
        return next(node for node in self.cluster.nodes if node.host == placement.node.host)

    def kill_bridge(self) -> None:
        """Kill the process that speaks with Ray; the one that the placer started only waits for it."""
        for pid in _processes(self.cluster.head, b"cortex.cluster.ray_bridge"):
            os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], bool], message: str, placer: RayPlacer) -> None:
    try:
        async with asyncio.timeout(90):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not so: {message}; {placer.reason}; {placer.placements()}") from None


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as started:
        yield started


@pytest.fixture(scope="module")
def shared(cluster: RayCluster, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    started = Running(cluster, tmp_path_factory.mktemp("placer"))
    runner.run(started.start())
    yield started
    runner.run(started.placer.shutdown())


@pytest.fixture
def it(shared: Running, runner: asyncio.Runner) -> Iterator[Running]:
    """A placer without reservations."""
    runner.run(until(lambda: shared.placer.is_available, "Ray answers", shared.placer))
    yield shared
    runner.run(shared.remove_all())


def agent_of(node: RayNode) -> Identity:
    """Return the pid of a node's agent in the node's namespace."""
    told = json.loads(
        (Path(node.environ["CORTEX_NODE_HOME"]) / CLUSTER_ID / node.host / "run" / IDENTITY_FILE).read_text()
    )
    return Identity.from_json(json.loads(told["identity"]))


def test_resources_are_reserved_until_they_are_removed(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        await it.placer.place("one", Resources(CORES))
        await it.placer.place("two", Resources(CORES))
        one, two = await it.state("one", "placed"), await it.state("two", "placed")
        assert one.node is not None and two.node is not None
        assert one.node.host != two.node.host
        await until(lambda: _free(it) == CORES, "two of three nodes are taken", it.placer)
        await it.placer.remove("one")
        assert "one" not in it.placer.placements()
        await until(lambda: _free(it) == 2 * CORES, "one node is free again", it.placer)

    runner.run(test())


def test_a_preferred_node_is_used_while_it_has_room(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        resources = it.placer.resources()
        assert resources is not None
        node_id = next(node_id for node_id, node in resources.nodes.items() if node.cpu == CORES)
        found = []
        for number in range(CORES + 1):
            await it.placer.place(f"near-{number}", Resources(1), preferred=node_id)
            found.append(await it.state(f"near-{number}", "placed"))
        used = [placement.node.node_id == node_id for placement in found if placement.node is not None]
        assert used == [True] * CORES + [False]

    runner.run(test())


def test_a_request_that_does_not_fit_is_pending_with_a_reason(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        for number in range(3):
            await it.placer.place(f"big-{number}", Resources(CORES))
            await it.state(f"big-{number}", "placed")
        await it.placer.place("next", Resources(CORES))
        await it.placer.place("never", Resources(CORES * 2))
        await until(lambda: _free(it) == 0, "all is taken", it.placer)
        resources = it.placer.resources()
        assert resources is not None
        assert "no node has that free" in unschedulable_reason(Resources(CORES), resources)
        too_large = unschedulable_reason(Resources(CORES * 2), resources)
        assert too_large == "a replica needs 8 cores; the largest node has 4 cores"
        assert {it.placer.placements()[name].state for name in ("next", "never")} == {"pending"}
        await it.placer.remove("big-1")
        await it.state("next", "placed")

    runner.run(test())


def test_a_request_for_a_node_group_is_placed_there(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        for number in range(2):
            await it.placer.place(f"special-{number}", Resources(1, node_groups=("missing", "special")))
            placement = await it.state(f"special-{number}", "placed")
            assert it.node_of(placement) is it.cluster.nodes[2]

    runner.run(test())


def test_the_next_operator_finds_reservations(it: Running, runner: asyncio.Runner, tmp_path: Path) -> None:
    async def test() -> None:
        before = await it.place("adopted", Resources(1))
        await it.placer.place("waiting", Resources(100))
        another = Running(it.cluster, tmp_path)
        await another.start()
        try:
            found = another.placer.placements()
            assert (found["adopted"].state, found["adopted"].node) == ("placed", before.node)
            assert found["waiting"].state == "pending"
            await another.remove_all()
            await it.state("adopted", "lost")
            await it.state("waiting", "lost")
        finally:
            await another.placer.shutdown()

    runner.run(test())


def test_a_killed_actor_is_a_lost_reservation_and_the_agent_lives(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        node = it.node_of(await it.place("killed", Resources(1)))
        agent = agent_of(node)
        for pid in _processes(node, b"ray::Reservation"):
            os.kill(pid, signal.SIGKILL)
        lost = await it.state("killed", "lost")
        assert "worker process has died" in lost.reason
        assert lost.node is not None, "it is known where it was"
        await it.placer.place("killed", Resources(1), node_id=lost.node.node_id)
        again = await it.state("killed", "placed")
        assert again.node == lost.node, "the same agent at the same port"
        assert agent_of(node) == agent

    runner.run(test())


def test_a_killed_agent_is_restarted_and_its_reservations_stay(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        placed = await it.place("kept", Resources(CORES))
        node = it.node_of(placed)
        before = agent_of(node)
        for pid in _processes(node, b"cortex.cluster.node.agent\0"):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: agent_of(node) != before, "another agent runs", it.placer)
        await until(lambda: _free(it) == 2 * CORES, "its node is taken", it.placer)
        assert it.placer.placements()["kept"] == placed
        await it.placer.remove("kept")
        await until(lambda: _free(it) == 3 * CORES, "its node is free", it.placer)

    runner.run(test())


def test_an_agent_outlives_ray_on_its_node(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        placed = await it.place("outlived", Resources(1))
        node = it.node_of(placed)
        agent = agent_of(node)
        node.kill_ray()
        await it.state("outlived", "lost")
        await asyncio.to_thread(node.restart)
        # To Ray it is another node; the one before may not have been given up yet.
        before = placed.node.node_id if placed.node is not None else ""
        await until(lambda: bool(_ids(it, node) - {before}), "it is there again", it.placer)
        await it.placer.place("outlived", Resources(1), (_ids(it, node) - {before}).pop())
        assert (await it.state("outlived", "placed", "lost")).state == "placed"
        assert agent_of(node) == agent

    runner.run(test())


def test_reservations_survive_the_bridge(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        kept = await it.place("kept", Resources(1))
        it.kill_bridge()
        await until(lambda: not it.placer.is_available, "it is noticed", it.placer)
        assert it.placer.resources() is None
        await it.placer.place("meanwhile", Resources(1))
        await it.state("meanwhile", "placed")
        assert it.placer.placements()["kept"] == kept

    runner.run(test())


def test_reservations_survive_rays_head(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        kept = await it.place("kept", Resources(1))
        agent = agent_of(it.node_of(kept))
        it.cluster.head.kill_ray()
        await until(lambda: not it.placer.is_available, "it is noticed", it.placer)
        assert it.placer.placements()["kept"] == kept
        await it.placer.place("meanwhile", Resources(1))
        await asyncio.to_thread(it.cluster.head.restart)
        await it.place("meanwhile", Resources(1))
        assert it.placer.placements()["kept"] == kept
        assert agent_of(it.node_of(kept)) == agent

    runner.run(test())


def test_reservations_of_a_lost_node_are_lost_and_can_be_placed_elsewhere(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        node = it.node_of(await it.place("there", Resources(1)))
        node.kill()
        lost = await it.state("there", "lost")
        assert "node" in lost.reason
        assert it.node_of(await it.place("elsewhere", Resources(1))) is not node
        node.machine.start()  # not from a thread that ends: it would end with it
        await asyncio.to_thread(node.restart)
        await until(lambda: _nodes(it) == 4, "it is there again", it.placer)

    runner.run(test())


def test_an_operator_on_another_machine_reaches_ray(it: Running, runner: asyncio.Runner, tmp_path: Path) -> None:
    async def test() -> None:
        elsewhere = Running(it.cluster, tmp_path, is_beside_head=False)
        await elsewhere.start()
        try:
            placed = await elsewhere.place("from-afar", Resources(1))
            await elsewhere.remove_all()
            assert elsewhere.node_of(placed) in it.cluster.nodes
        finally:
            await elsewhere.placer.shutdown()

    runner.run(test())


@pytest.mark.parametrize("port", ["6379", "10001"])
@pytest.mark.parametrize(
    ("shown", "advice"),
    [
        ({}, "it requires a token: set RAY_AUTH_MODE=token for `cortex up`, and the token of Ray's head in RAY_"),
        ({"RAY_AUTH_MODE": "token"}, "there is no token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, "it rejects the token of RAY_AUTH_TOKEN"),
    ],
)
def test_a_missing_or_wrong_token_is_reported(
    cluster: RayCluster, runner: asyncio.Runner, tmp_path: Path, port: str, shown: dict[str, str], advice: str
) -> None:
    host = cluster.head.host
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    placer = RayPlacer(
        f"{host}:{port}" if port == "6379" else f"ray://{host}:{port}",
        NodeStart(CLUSTER_ID, SECRET, __version__),
        {**environ, "HOME": str(tmp_path), **shown},
        tmp_path / "ray.log",
        Logger("test"),
        prefix=cluster.head.machine.command([]),
    )

    async def test() -> None:
        await placer.startup(lambda: None)
        try:
            assert advice in placer.reason
        finally:
            await placer.shutdown()

    runner.run(test())


def test_a_machine_outside_of_the_cluster_gets_advice(
    cluster: RayCluster, runner: asyncio.Runner, tmp_path: Path
) -> None:
    guest = cluster.network.add("guest", tmp_path, cluster.folder / "ray")
    guest.start()
    placer = RayPlacer(
        cluster.address,
        NodeStart(CLUSTER_ID, SECRET, __version__),
        {**os.environ, **cluster.environ, "HOME": str(tmp_path)},
        tmp_path / "ray.log",
        Logger("test"),
        prefix=guest.command([]),
    )

    async def test() -> None:
        await placer.startup(lambda: None)
        try:
            advice = "if this machine is not a node of the cluster, make it one or use --ray-address ray://"
            assert advice in placer.reason
        finally:
            await placer.shutdown()
            guest.kill()

    runner.run(test())


def test_reservations_that_the_head_forgot_are_lost_and_the_agents_live(it: Running, runner: asyncio.Runner) -> None:
    async def test() -> None:
        placed = await it.place("forgotten", Resources(1))
        assert placed.node is not None
        it.cluster.head.kill_ray()
        shutil.rmtree(it.cluster.head.machine.folder / "gcs")
        await asyncio.to_thread(it.cluster.head.restart)
        lost = await it.state("forgotten", "lost")
        assert lost.node == placed.node
        with socket.create_connection((placed.node.host, placed.node.port), 5):
            pass

    runner.run(test())


def _processes(node: RayNode, command: bytes) -> list[int]:
    found = []
    for pid in node.machine.pids():
        with contextlib.suppress(OSError):
            if command in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _ids(it: Running, node: RayNode) -> set[str]:
    resources = it.placer.resources()
    return {key for key, found in resources.nodes.items() if found.host == node.host} if resources else set()


def _free(it: Running) -> float:
    resources = it.placer.resources()
    return resources.free.cpu if resources is not None else -1.0


def _nodes(it: Running) -> int:
    resources = it.placer.resources()
    return len(resources.nodes) if resources is not None else 0
