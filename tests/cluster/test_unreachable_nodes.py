"""Nodes whose agents moved, are unreachable, or fall silent: every wait is limited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.test_cluster_engine import cluster, ready, run, stop, until
from cluster.test_hostile_nodes import peer
from cortex import __version__
from cortex.cluster import engine
from cortex.cluster import node_client as node_client
from cortex.cluster.node.start import NodeStart, RunningAgent, is_over, reserve
from cortex.cluster.placement import NodeAddress
from cortex.cluster.ray_placer import RayPlacer
from cortex.cluster.transport import PeerConnection, PeerError
from cortex.home import Home
from cortex.telemetry import Logger
from harness.cluster.local_nodes import LocalNode, local_nodes

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as [made]:
        yield made


@contextlib.contextmanager
def taken(host: str, port: int) -> Iterator[None]:
    """Listen on a port, so that it is taken."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        yield


def kill_replica(supervisor_pid: int) -> None:
    supervisor = psutil.Process(supervisor_pid)
    every = [supervisor, *supervisor.children(recursive=True)]
    for process in every:
        with contextlib.suppress(psutil.NoSuchProcess):  # workers end with their supervisor
            process.kill()
    psutil.wait_procs(every)


async def test_an_agent_that_moves_to_another_port_is_followed(home: Home, node: LocalNode) -> None:
    async with cluster(home, [node]) as made:
        kept, ended = made.spec(), made.spec()
        before = await ready(made, kept)
        over = await ready(made, ended)
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(kill_replica, over.supervisor_pid)
        with taken(node.host, node.address.port):
            old = node.address
            await asyncio.to_thread(node.start)
            assert node.address.port != old.port
            made.placer.nodes = [node.address]
            other = made.spec()
            await ready(made, other)  # it is placed at the new port
            await until(lambda: made.status(kept.id) == before)
            await until(lambda: ended.id not in made.engine.replicas())
            await stop(made, kept.id, other.id)


async def test_an_agent_of_another_version_is_ended_once_and_its_replicas_stay(
    home: Home, node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(home, [node]) as made:
        spec = made.spec()
        before = await ready(made, spec)
    held = reserve(RunningAgent(node.host, node.address.port, __version__, node.home), spec.id, ())
    monkeypatch.setattr(node_client, "__version__", "999.0")
    async with cluster(home, [node]) as made:
        await until(lambda: node.process is not None and node.process.poll() == 0)
        assert not is_over(held)  # so that whoever holds the reservation starts the next agent
        await asyncio.to_thread(node.start)
        other = made.spec()
        await ready(made, other)
        assert made.status(spec.id) == before
        assert node.process is not None and node.process.poll() is None  # one that stays of that version serves on
        await stop(made, spec.id, other.id)


async def test_a_replica_that_ended_while_its_agent_was_away_is_not_restarted(home: Home, node: LocalNode) -> None:
    async with cluster(home, [node]) as made:
        spec = made.spec()
        before = await ready(made, spec)
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(kill_replica, before.supervisor_pid)
        await asyncio.to_thread(node.start)
        await until(lambda: spec.id not in made.engine.replicas())
        await until(lambda: spec.id in made.ended)
        assert made.ended.count(spec.id) == 1


@pytest.fixture
def nowhere() -> Iterator[NodeAddress]:
    """A node of the Ray cluster that the operator can't reach."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield NodeAddress("nowhere", "127.0.0.1", held.getsockname()[1])


async def test_a_replica_on_an_unreachable_node_reports_it_and_can_be_stopped(home: Home, nowhere: NodeAddress) -> None:
    async with cluster(home, []) as made:
        made.placer.nodes = [nowhere]
        spec = made.spec()
        await made.engine.start(spec)
        await until(lambda: (status := made.status(spec.id)) and status.lack)
        status = made.status(spec.id)
        assert status is not None
        assert status.lack.startswith("the operator's machine can't reach node 127.0.0.1: 127.0.0.1:")
        await made.engine.stop(spec.id, 5)
        assert made.engine.replicas() == {}
        assert made.placer.placements() == {}


async def test_a_replica_on_an_unreachable_node_is_placed_elsewhere(
    home: Home, node: LocalNode, nowhere: NodeAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "UNREACHABLE_S", 1.0)
    async with cluster(home, []) as made:
        made.placer.nodes = [nowhere]
        spec = made.spec()
        await made.engine.start(spec)
        made.placer.nodes = [node.address]
        await until(lambda: (status := made.status(spec.id)) and status.is_ready)
        await stop(made, spec.id)


async def test_requests_to_a_node_that_falls_silent_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("METRICS_TIMEOUT_S", "LINES_TIMEOUT_S", "FOLLOW_TIMEOUT_S"):
        monkeypatch.setattr(node_client, name, 0.2)

    async def serve(wire: PeerConnection) -> None:
        wire.send({"size": 1000, "lines": [], "more": False})
        await wire.receive()

    async with peer(serve) as silent:
        with pytest.raises(TimeoutError):
            await silent.fetch_metrics("a-1-2")
        for follow in (True, False):
            for lines in (silent.logs("a", None, 10, follow), silent.access("a", None, 10, follow)):
                with pytest.raises(PeerError, match="stopped sending lines"):
                    async for _ in lines:
                        pass


async def test_a_connection_that_ends_within_logs_is_an_error() -> None:
    async def serve(wire: PeerConnection) -> None:
        wire.send({"lines": []})

    async with peer(serve) as broken:
        with pytest.raises(PeerError, match="closed the connection"):
            async for _ in broken.logs("a", None, 10, False):
                pass


def test_a_bridge_that_sends_invalid_events_is_restarted(tmp_path: Path) -> None:
    script = tmp_path / "bridge.py"
    script.write_text('import os; os.write(1, b\'{"event": "connected"}\\n\'); os.read(0, 9)')
    start = NodeStart("0", "secret", "1")

    async def test(port: int) -> None:
        prefix = (sys.executable, str(script))
        placer = RayPlacer(f"127.0.0.1:{port}", start, os.environ, tmp_path / "log", Logger("test"), prefix)
        await placer.startup(lambda: None)
        seen = set()
        try:
            async with asyncio.timeout(60):
                while len(seen) < 2:
                    seen.add(placer.bridge_pid)
                    seen.discard(None)
                    await asyncio.sleep(0.01)
        finally:
            await placer.shutdown()

    with socket.create_server(("127.0.0.1", 0)) as head:
        run(test(head.getsockname()[1]))
