"""Mutual TLS between operator and nodes: roles, addresses, encryption and injected data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.cluster import transport
from cortex.cluster.credentials import ClusterCredentials, TlsIdentity, derive_key, node_identity
from cortex.cluster.node.relay import NodeRelay, OperatorPort, splice
from cortex.cluster.transport import PeerConnection, PeerError, connect, listen
from cortex.payloads.json_object import Json

HERE = "127.0.0.1"
CREDENTIALS = ClusterCredentials("a secret of tests", HERE, 0)
OTHERS = ClusterCredentials("another secret", HERE, 0)
OPERATOR, NODE = CREDENTIALS.identity, node_identity(CREDENTIALS.for_nodes, HERE)
STRANGER = OTHERS.identity, node_identity(OTHERS.for_nodes, HERE)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(in_time())


@contextlib.asynccontextmanager
async def listener(serve: Callable[[StreamReader, StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, HERE, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def echo(heard: list[Json], identity: TlsIdentity = NODE) -> AsyncIterator[int]:
    """Listen, keep each message and send it back."""

    async def serve(connection: PeerConnection) -> None:
        while (message := await connection.receive()) is not None:
            heard.append(message)
            connection.send(message)
        connection.close()

    server = await listen(serve, HERE, 0, identity)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_messages_of_any_size_arrive_unchanged() -> None:
    heard: list[Json] = []
    async with echo(heard) as port:
        connection = await connect(HERE, port, OPERATOR)
        sent = [{"n": 1}, {"text": os.urandom(4_000_000).hex()}, {"text": "ü\n\u2028"}]
        for message in sent:
            connection.send(message)
            assert await connection.receive() == message
        connection.close()
    assert heard == sent


async def test_the_connection_is_encrypted_with_tls_1_3() -> None:
    seen = bytearray()

    async def copy(reader: StreamReader, writer: StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async with echo([]) as far:

        async def tap(reader: StreamReader, writer: StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(HERE, far)
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

        async with listener(tap) as port:
            connection = await connect(HERE, port, OPERATOR)
            assert connection.writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            connection.send({"env": "a password"})
            assert await connection.receive() == {"env": "a password"}
            connection.close()
    assert seen
    for secret in ("password", "hello", CREDENTIALS.secret, derive_key(CREDENTIALS.secret, "node")):
        assert secret.encode() not in seen


@pytest.mark.parametrize(
    "identity",
    [
        OPERATOR,
        replace(STRANGER[1], peer_authority=NODE.peer_authority),
        node_identity(CREDENTIALS.for_nodes, "127.0.0.9"),
        node_identity(CREDENTIALS.for_nodes, "a.name"),
    ],
    ids=["an operator", "a node of another cluster", "a node with another address", "a node with another name"],
)
async def test_an_operator_accepts_only_the_node_that_it_connects_to(identity: TlsIdentity) -> None:
    heard: list[Json] = []
    # The listener accepts the operator, so that only the client's verification can fail.
    async with echo(heard, replace(identity, peer_authority=NODE.peer_authority)) as port:
        with pytest.raises(PeerError, match="no valid certificate of this cluster"):
            await connect(HERE, port, OPERATOR)
    assert heard == []


@pytest.mark.parametrize("identity", [NODE, STRANGER[0]], ids=["a node", "an operator of another cluster"])
async def test_a_node_accepts_only_operators_of_its_cluster(identity: TlsIdentity) -> None:
    heard: list[Json] = []
    async with echo(heard) as port:
        with pytest.raises(PeerError, match="does not accept our certificate"):
            await connect(HERE, port, replace(identity, peer_authority=OPERATOR.peer_authority))
    assert heard == []


@pytest.mark.parametrize("identity", [OPERATOR, STRANGER[1]], ids=["an operator", "a node of another cluster"])
async def test_an_operators_port_accepts_only_nodes_of_its_cluster(identity: TlsIdentity) -> None:
    heard: list[Json] = []
    async with echo(heard, OPERATOR) as port:
        with pytest.raises(PeerError, match="does not accept our certificate"):
            await connect(HERE, port, replace(identity, peer_authority=NODE.peer_authority))
        connection = await connect(HERE, port, NODE)
        connection.send({"from": "a node"})
        assert await connection.receive() == {"from": "a node"}
        connection.close()
    assert heard == [{"from": "a node"}]


async def test_a_client_without_a_certificate_is_refused() -> None:
    heard: list[Json] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with echo(heard) as port:
        reader, writer = await asyncio.open_connection(HERE, port, ssl=context)
        writer.write(b'{"command": "of a stranger"}\n')
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        writer.transport.abort()
    assert heard == []


async def test_a_man_in_the_middle_is_detected() -> None:
    heard: list[Json] = []
    async with echo(heard) as far:

        async def serve(near: PeerConnection) -> None:
            # It can't even connect: as an operator of another cluster it has no valid certificate.
            with pytest.raises(PeerError):
                await connect(HERE, far, replace(STRANGER[0], peer_authority=OPERATOR.peer_authority))
            near.close()

        server = await listen(serve, HERE, 0, replace(STRANGER[1], peer_authority=NODE.peer_authority))
        with pytest.raises(PeerError, match="no valid certificate of this cluster"):
            await connect(HERE, server.sockets[0].getsockname()[1], OPERATOR)
        server.close()
    assert heard == []


@pytest.mark.parametrize("data", [b'{"hello": "cortex-node 3"}\n{"put": "in"}\n', b"\x16\x03\x01", b"\0" * 4096])
async def test_data_injected_before_tls_fails_the_handshake(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 0.5)
    async with echo([]) as far:

        async def serve(reader: StreamReader, writer: StreamWriter) -> None:
            writer.write(data)
            far_reader, far_writer = await asyncio.open_connection(HERE, far)
            await splice(reader, writer, far_reader, far_writer)

        async with listener(serve) as port:
            with pytest.raises(PeerError):
                await connect(HERE, port, OPERATOR)


@pytest.mark.parametrize(
    "data", [b'{"command": "end"}\n', b"[1]\n", b"\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff"]
)
async def test_a_client_that_does_not_speak_tls_is_disconnected(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 0.5)
    unhandled: list[Json] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    async with echo([]) as port:
        reader, writer = await asyncio.open_connection(HERE, port)
        writer.write(data)
        answer = await reader.read()
        assert answer == b"" or answer.startswith(b"\x15\x03")  # a TLS alert
        writer.close()
    assert unhandled == []


async def test_a_listener_of_another_protocol_version_is_refused() -> None:
    async def serve(_: StreamReader, writer: StreamWriter) -> None:
        writer.write(b'{"hello": "cortex-node 99"}\n')

    server = await asyncio.start_server(serve, HERE, 0, ssl=NODE.server_context())
    with pytest.raises(PeerError, match="another version of cortex"):
        await connect(HERE, server.sockets[0].getsockname()[1], OPERATOR)
    server.close()


@pytest.mark.parametrize(("target", "answer"), [("jobs", b"hello"), ("listings", b"")])
async def test_the_operator_serves_jobs_and_ends_other_connections(target: str, answer: bytes, tmp_path: Path) -> None:
    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_unix_server(serve, str(tmp_path / "jobs")):
        operator = OperatorPort(tmp_path / "jobs", OPERATOR)
        port = await operator.startup(HERE, 0)
        connection = await connect(HERE, port, NODE)
        connection.send({"target": target})  # nodes of earlier versions request listings of models, too
        assert await connection.reader.read() == answer
        connection.close()
        await operator.shutdown()


async def test_a_relay_connects_to_the_operator_only_for_requests(tmp_path: Path) -> None:
    accepted: list[bytes] = []

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        accepted.append(await reader.readline())
        writer.write(b"answered")
        writer.close()

    async with await asyncio.start_unix_server(serve, str(tmp_path / "jobs")):
        operator, relay = OperatorPort(tmp_path / "jobs", OPERATOR), NodeRelay(tmp_path / "relay", NODE)
        await relay.startup()
        relay.lead(HERE, await operator.startup(HERE, 0))
        check, checker = await asyncio.open_unix_connection(str(tmp_path / "relay"))  # as a health check of HAProxy
        checker.close()
        assert await check.read() == b""
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "relay"))
        writer.write(b"GET / HTTP/1.1\r\n")
        assert await reader.read() == b"answered"
        writer.close()
        assert accepted == [b"GET / HTTP/1.1\r\n"]
        await relay.shutdown()
        await operator.shutdown()


async def test_a_relay_answers_while_there_is_no_operator(tmp_path: Path) -> None:
    relay = NodeRelay(tmp_path / "relay", NODE)
    await relay.startup()
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "relay"))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    writer.write_eof()
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    writer.close()
    await relay.shutdown()
