"""Connections to the operator's TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from cortex.operator.bootstrap import listen
from cortex.operator.http import server
from cortex.operator.settings import OperatorSettings
from harness.ports import free_port
from harness.wait import PATIENCE_S

REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n17"


@contextlib.asynccontextmanager
async def serving(answers: asyncio.Event) -> AsyncIterator[int]:
    """Serve an application that answers once the event is set; yield the port."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answers.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 100_000})

    listener = listen(OperatorSettings(operator_port=free_port()))
    made = server.create_server(app)
    task = asyncio.create_task(made.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        made.should_exit = True
        await task


async def test_a_client_that_half_closes_receives_the_complete_response() -> None:
    answers = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), serving(answers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        writer.write_eof()
        asyncio.get_running_loop().call_later(0.1, answers.set)
        response = await reader.read()
        assert response.startswith(b"HTTP/1.1 200 ") and response.count(b"x") >= 100_000
        writer.close()


async def test_a_client_that_half_closes_is_disconnected_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HALF_CLOSED_S", 0.01)
    answers = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), serving(answers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        writer.write_eof()
        assert await reader.read() == b""
        answers.set()
        writer.close()


async def test_a_client_that_ends_in_the_middle_of_its_body_is_gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HALF_CLOSED_S", 100 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S), serving(answers := asyncio.Event()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST[:-1])
        writer.write_eof()
        assert await reader.read() == b""
        answers.set()
        writer.close()


@pytest.mark.parametrize(
    ("version", "head"),
    [("1.0", b"connection: close\r\n\r\nxxx"), ("1.1", b"transfer-encoding: chunked\r\n\r\n186a0\r\nxxx")],
)
async def test_a_response_of_unknown_length_to_http_1_0_ends_with_the_connection(version: str, head: bytes) -> None:
    async with asyncio.timeout(PATIENCE_S), serving(answers := asyncio.Event()) as port:
        answers.set()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/%b\r\nhost: a\r\n\r\n" % version.encode())
        writer.write_eof()
        response = await reader.read()
        assert head in response
        assert (response.partition(b"\r\n\r\n")[2] == b"x" * 100_000) == (version == "1.0")
        writer.close()


def test_connections_to_the_port_send_without_delay() -> None:
    with listen(OperatorSettings(operator_port=free_port())) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # of which asyncio makes TCP_NODELAY
