"""Invalid and missing messages of nodes: the client of a node continues."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tempfile
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.test_cluster_engine import cluster, ready, stop, until
from cortex.cluster import node_client as client_module
from cortex.cluster import transport
from cortex.cluster.credentials import TlsIdentity, node_identity
from cortex.cluster.metrics_mirror import MetricsMirror
from cortex.cluster.node_client import SILENCE_S, LeaderAddress, NodeClient
from cortex.cluster.placement import NodeAddress
from cortex.cluster.transport import PeerConnection, PeerError, connect, listen
from cortex.errors import InputError
from cortex.home import Home
from cortex.lifecycle import ProcessState
from cortex.telemetry import Logger
from cortex.worker.spec import ProcessStatus, ReplicaStatus
from harness.cluster.local_nodes import CREDENTIALS, LocalNode, local_nodes
from harness.replicas.specs import replica_spec

pytestmark = pytest.mark.processes

OPERATOR, NODE = CREDENTIALS.identity, node_identity(CREDENTIALS.for_nodes, "127.0.0.1")


@dataclass
class Told:
    """Observer that records the events of one node."""

    events: list[str] = field(default_factory=list)

    def node_is_up(self, link: NodeClient) -> None:
        self.events.append("up")

    def node_is_lost(self, link: NodeClient, reason: str) -> None:
        self.events.append(f"lost: {reason}")

    def replica_changed(self, link: NodeClient, replica_id: str) -> None:
        self.events.append(f"changed {replica_id}")

    async def project_archive(self, project_hash: str) -> tuple[Path, str]:
        raise InputError("there is no such project")


@contextlib.asynccontextmanager
async def peer(serve: Callable[[PeerConnection], Awaitable[None]]) -> AsyncIterator[NodeClient]:
    """Follow an authenticated peer that serves each connection with `serve`."""

    async def follow(wire: PeerConnection) -> None:
        with contextlib.suppress(PeerError, OSError):
            await wire.receive()
            await serve(wire)
        wire.close()

    server = await listen(follow, "127.0.0.1", 0, NODE)
    address = NodeAddress("n", "127.0.0.1", server.sockets[0].getsockname()[1])
    link = NodeClient(address, OPERATOR, LeaderAddress("127.0.0.1", 1, 1), Told(), Logger("test"))
    link.startup()
    try:
        yield link
    finally:
        await link.shutdown()
        server.close()


def told(link: NodeClient) -> list[str]:
    owner = link._observer
    assert isinstance(owner, Told)
    return owner.events


@pytest.mark.parametrize(
    ("socket", "is_kept"),
    [
        ("127.0.0.1:5", True),
        ("127.0.0.2:5", False),
        ("[::1%a\n@1 shutdown frontend gateway\n]:80", False),
        ("/var/run/docker.sock", False),
        ("localhost:5", False),
        ("", False),
    ],
    ids=["its own", "another's address", "a zone", "a path", "a name", "not known yet"],
)
async def test_addresses_outside_of_the_node_are_dropped(socket: str, is_kept: bool) -> None:
    near = "/near"
    spec = replica_spec(id="a-1-2", api="a")
    process = ProcessStatus(0, socket, ProcessState.READY, near=near)
    status = ReplicaStatus(spec.id, "a", "x", 1, 0.0, (process,))

    async def serve(wire: PeerConnection) -> None:
        wire.send({"event": "node", "home": "/tmp"})
        replica = {"spec": spec.to_json(), "status": status.to_json(), "is_reserved": True}
        wire.send({"event": "replica", "id": spec.id, **replica})
        wire.send({"event": "complete"})
        await wire.receive()

    async with peer(serve) as link:
        await until(lambda: link.is_up)
        [found] = link.replicas[spec.id].status.processes
        assert (found.socket, found.near) == ((socket, near) if is_kept else ("", ""))


@pytest.mark.parametrize(
    "message",
    [
        {"event": "node"},
        {"event": "replica", "id": "a-1-2"},
        {"event": "replica", "id": "a-1-2", "spec": "7", "status": "[]", "is_reserved": 1},
        {"event": "cores", "cores": 7},
        {"event": "cores", "cores": {}, "usage": {"a-1-2": {"api": "a"}}},
        {"event": "needs_project", "project": "../.."},
    ],
    ids=lambda message: "-".join(sorted(message)),
)
async def test_an_invalid_message_ends_the_connection_but_not_the_client(message: dict[str, Any]) -> None:
    connections = 0

    async def serve(wire: PeerConnection) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            wire.send(message)
            await wire.receive()  # until it is hung up on, or for ever
        wire.send({"event": "node", "home": "/tmp"})
        wire.send({"event": "complete"})
        await wire.receive()

    async with peer(serve) as link:
        await until(lambda: link.is_up)
        assert told(link)[-1] == "up"


async def test_a_node_that_closes_each_connection_is_lost() -> None:
    connections = 0

    async def serve(wire: PeerConnection) -> None:
        nonlocal connections
        connections += 1
        wire.send({"event": "node", "home": "/tmp"})
        if connections == 1:
            wire.send({"event": "complete"})

    async with peer(serve) as link:
        await until(lambda: any(event.startswith("lost") for event in told(link)))
        assert not link.is_up


async def test_invalid_replica_ids_are_ignored(home: Home) -> None:
    async def serve(wire: PeerConnection) -> None:
        wire.send({"event": "node", "home": "/tmp"})
        wire.send({"event": "gone", "id": "../../logs", "is_left": True})
        wire.send({"event": "complete"})
        await wire.receive()

    async with peer(serve) as link:
        await until(lambda: link.is_up)
        assert link.ended == set()


async def test_a_reset_during_the_handshake_is_a_peer_error() -> None:
    def reset(_: StreamReader, writer: StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    try:
        for _ in range(20):  # at times the reset is there before the answer is waited for
            with pytest.raises(PeerError):
                await connect("127.0.0.1", server.sockets[0].getsockname()[1], OPERATOR)
    finally:
        server.close()


async def test_unreadable_metrics_are_an_error_of_the_node(tmp_path: Path) -> None:
    async def serve(wire: PeerConnection) -> None:
        wire.send({"size": 5000})
        wire.writer.write(b"x" * 5000)

    async with peer(serve) as link:
        with pytest.raises(PeerError, match="can't be read"):
            await MetricsMirror(tmp_path).fetch("a-1-2", link)


async def test_silent_connections_are_closed_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 4.0)  # of the listener, whose handshake with us may be slow

    async def serve(connection: PeerConnection) -> None:
        connection.send({"is": "known"})

    server = await listen(serve, "127.0.0.1", 0, NODE)
    port = server.sockets[0].getsockname()[1]
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 20.0)  # for us
    known = await connect("127.0.0.1", port, OPERATOR)
    assert await known.receive() == {"is": "known"}
    known.abort()
    async with asyncio.timeout(30):
        for reader, writer in silent:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()
    server.close()


async def test_a_connection_that_sends_too_much_is_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_LINE_BYTES", 16384)
    made: list[PeerConnection] = []

    async def kept(host: str, port: int, identity: TlsIdentity) -> PeerConnection:
        made.append(await connect(host, port, identity))
        return made[-1]

    monkeypatch.setattr(client_module, "connect", kept)

    async def serve(wire: PeerConnection) -> None:
        await wire.receive()
        for _ in range(20_000):
            wire.send({"lines": [], "more": "x" * 1000})

    server = await listen(serve, "127.0.0.1", 0, NODE)
    address = NodeAddress("n", "127.0.0.1", server.sockets[0].getsockname()[1])
    logs = NodeClient(address, OPERATOR, LeaderAddress("127.0.0.1", 1, 1), Told(), Logger("test")).logs(
        "api", None, None, True
    )
    assert await anext(logs) == []
    await logs.aclose()
    async with asyncio.timeout(20):
        await made[0].writer.wait_closed()
    server.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[LocalNode]]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as made:
        yield made


async def test_a_pause_of_the_operator_loses_no_node(
    home: Home, nodes: list[LocalNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    silence_s = 2 * SILENCE_S  # on a loaded machine, its agent may be silent for long without a pause of ours
    monkeypatch.setattr("cortex.cluster.node_client.SILENCE_S", silence_s)
    async with cluster(home, nodes) as made:
        spec = made.spec()
        before = await ready(made, spec)
        lost: list[bool] = []
        made.engine._on_change = lambda: lost.append(spec.id not in made.engine.replicas())
        time.sleep(silence_s + 1)  # as a database that answers late, or a machine that is paused, has it
        link = made.engine.nodes[nodes[0].host]
        await until(lambda: link.silent_s < 1)
        assert True not in lost
        assert made.status(spec.id) == before
        await stop(made, spec.id)
