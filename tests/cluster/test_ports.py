"""The ports of a node without credentials: no access, no effect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.test_cluster_engine import cluster, ready, stop
from cortex.cluster.credentials import derive_key, node_identity
from cortex.cluster.transport import PeerError, connect
from cortex.home import Home
from harness.cluster.local_nodes import CREDENTIALS, SECRET, LocalNode, local_nodes

pytestmark = pytest.mark.processes

TLS_ALERT = b"\x15\x03"
TRIES = {
    "nothing": b"",
    "a request": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n1",
    "a wrong secret": b"POST / HTTP/1.1\r\nhost: x\r\nx-cortex-gateway: wrong\r\ncontent-length: 1\r\n\r\n1",
    "a command": json.dumps({"purpose": "control", "epoch": 10**9, "host": "x", "port": 1}).encode() + b"\n",
    "a TLS hello": bytes.fromhex("160301005f0100005b0303") + b"\0" * 90,
    "anything": os.urandom(4096),
}


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as [made]:
        yield made


def listening(node: LocalNode) -> set[tuple[str, int]]:
    """Return where processes of the node can be reached from other machines, loopback being its network here."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if any(str(node.home.path) in part for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
                for each in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        listeners = (c for c in each.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
                        found |= {(c.laddr.ip, c.laddr.port) for c in listeners}
    return found


def answer(address: tuple[str, int], data: bytes) -> bytes:
    """Send data and return all that comes back until the other side closes, or waits for more."""
    with socket.create_connection(address, 10) as sock:
        sock.settimeout(1 if not data else 10)
        received = b""
        with contextlib.suppress(OSError):  # it waits for more, or has reset the connection, maybe before we were done
            sock.sendall(data)
            if data:
                sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(65536):
                received += chunk
        return received


async def test_no_port_of_a_node_answers_without_credentials(home: Home, node: LocalNode) -> None:
    async with cluster(home, [node]) as made:
        spec = made.spec()
        before = await ready(made, spec)
        ports = await asyncio.to_thread(listening, node)
        assert (node.host, node.address.port) in ports
        assert before.processes[0].socket in {f"{host}:{port}" for host, port in ports}
        for address in ports:
            for name, data in TRIES.items():
                said = await asyncio.to_thread(answer, address, data)
                is_refused = not said or said.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400", TLS_ALERT))
                assert is_refused and said.count(b"\n") < 20, (address, name, said)
                assert SECRET.encode() not in said and derive_key(SECRET, "gateway").encode() not in said
                assert b"word" not in said
        assert made.status(spec.id) == before
        await stop(made, spec.id)


async def test_a_node_refuses_other_nodes_and_strangers(node: LocalNode) -> None:
    identities = [
        node_identity(CREDENTIALS.for_nodes, "127.0.0.1"),
        replace(CREDENTIALS.identity, authority_key=derive_key("another secret", "operator")),
    ]
    for identity in identities:
        # They accept the node, which is not the question here.
        identity = replace(identity, peer_authority=CREDENTIALS.identity.peer_authority)
        with pytest.raises(PeerError, match="does not accept our certificate"):
            await connect(node.host, node.address.port, identity)
