"""Connections to the operator's TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cortex.errors import UnauthorizedError
from cortex.jobs.spec import WorkloadView
from cortex.lifecycle import WorkloadStatus
from cortex.operator.bootstrap import listen
from cortex.operator.http import operator_server
from cortex.operator.http.async_routes import AsyncRoutes
from cortex.operator.http.gateway_routes import create_jobs_app
from cortex.operator.http.job_routes import JobRoutes
from cortex.operator.settings import OperatorSettings
from cortex.processes.sockets import replace_listener
from cortex.telemetry import Logger
from harness.jobs.jobs_server import MemoryJobs, MemoryWorkloads
from harness.ports import free_port
from harness.wait import PATIENCE_S

GET = b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n"
REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n17"


@contextlib.asynccontextmanager
async def serving(answers: asyncio.Event, check_validity: Callable[[Any], None] = lambda _: None) -> AsyncIterator[int]:
    """Serve an application that answers once the event is set; yield the port."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/permitted"):
            scope["state"]["principal"] = scope["query_string"].decode() or "ci"
        if scope["path"] == "/permitted/stream":
            await receive()
        if scope["path"] != "/permitted/now":
            await answers.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 100_000})

    listener = listen(OperatorSettings(operator_port=free_port()))
    made = operator_server.create_server(app, None, check_validity)
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
    monkeypatch.setattr(operator_server, "HALF_CLOSED_S", 0.01)
    answers = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), serving(answers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        writer.write_eof()
        assert await reader.read() == b""
        answers.set()
        writer.close()


async def test_a_client_that_ends_in_the_middle_of_its_body_is_gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_server, "HALF_CLOSED_S", 100 * PATIENCE_S)
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


async def send(port: int, request: bytes, count: int = 1) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open connections that each send a request; return them once all are accepted."""
    made = []
    for _ in range(count):
        made.append(await asyncio.open_connection("127.0.0.1", port))
        made[-1][1].write(request)
        await asyncio.sleep(0)
    return made


@pytest.mark.parametrize(
    ("request_", "read"),
    [
        (GET % b"/permitted/now", True),  # idle after its response
        (GET % b"/permitted/now", False),  # its response is never read
        (REQUEST[:-1], False),
        (GET % b"/livez" * 2, False),  # pipelined
        (b"GET /livez HT", False),
    ],
)
async def test_connections_without_a_permitted_request_in_progress_give_way_to_new_ones(
    request_: bytes, read: bool
) -> None:
    async with asyncio.timeout(PATIENCE_S), serving(asyncio.Event()) as port:
        held = await send(port, request_, operator_server.MAX_CONNECTIONS + 2)
        if read:
            await asyncio.gather(*(reader.readuntil(b"200 OK") for reader, _ in held[2:]))
        for _ in range(2):
            ((reader, _),) = await send(port, GET % b"/permitted/now")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, writer in held:
            writer.transport.abort()


async def test_a_connection_that_is_reset_before_it_is_accepted_counts_as_any_other() -> None:
    async with asyncio.timeout(PATIENCE_S), serving(asyncio.Event()) as port:
        for _ in range(operator_server.MAX_CONNECTIONS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        held = await send(port, b"GET /livez HT", operator_server.MAX_CONNECTIONS + 2)
        ((reader, _),) = await send(port, GET % b"/permitted/now")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert await held[0][0].read() == b""
        for _, writer in held:
            writer.transport.abort()


STREAM = b"GET /permitted/stream?%b HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n\r\n"


async def test_a_token_gives_up_a_place_only_if_it_has_more_than_half_of_them() -> None:
    async with asyncio.timeout(PATIENCE_S), serving(answers := asyncio.Event()) as port:
        half = operator_server.MAX_CONNECTIONS // 2
        held = [*await send(port, STREAM % b"many", half + 1), *await send(port, STREAM % b"few", half - 1)]
        await asyncio.gather(*(reader.readuntil(b"100 Continue\r\n\r\n") for reader, _ in held))
        ((reader, _),) = await send(port, GET % b"/permitted/now")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionError):
            assert await held[0][0].read() == b""
        answers.set()
        for stream, _ in held[1:]:
            assert (await stream.readline()).startswith(b"HTTP/1.1 200 ")


async def test_requests_that_their_token_permits_keep_their_connections() -> None:
    async with asyncio.timeout(PATIENCE_S), serving(answers := asyncio.Event()) as port:
        half = operator_server.MAX_CONNECTIONS // 2
        held = [*await send(port, STREAM % b"one", half), *await send(port, STREAM % b"two", half)]
        await asyncio.gather(*(reader.readuntil(b"100 Continue\r\n\r\n") for reader, _ in held))
        ((reader, _),) = await send(port, GET % b"/permitted/now")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        answers.set()
        for stream, _ in held:
            assert (await stream.readline()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("request_", [b"", b"GET /", REQUEST[:-1], GET % b"/livez", GET % b"/permitted/now" + b"GET /"])
async def test_requests_without_a_token_have_a_deadline(request_: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_server, "ANONYMOUS_S", 0.05)
    monkeypatch.setattr(operator_server, "CHECK_S", 0.01)
    async with asyncio.timeout(PATIENCE_S), serving(asyncio.Event()) as port:
        ((reader, writer),) = await send(port, request_)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()


@pytest.mark.parametrize(
    "head", [b"GET /", b"GET / HTTP/1.1\r\nx: ", GET % b"/permitted/now" + b"GET / HTTP/1.1\r\nx: "]
)
async def test_a_head_without_end_is_not_collected(head: bytes) -> None:
    async with asyncio.timeout(PATIENCE_S), serving(asyncio.Event()) as port:
        ((reader, writer),) = await send(port, head)
        parts = 0
        with contextlib.suppress(ConnectionError):
            while parts < 512 and not reader.at_eof():
                writer.write(b"x" * 65536)
                await writer.drain()
                parts += 1
        assert parts < 512  # the buffers of the kernel have several megabytes
        writer.close()


async def test_a_body_may_be_longer_than_a_head() -> None:
    async with asyncio.timeout(PATIENCE_S), serving(asyncio.Event()) as port:
        request = b"POST /permitted/now HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000
        ((reader, writer),) = await send(port, request)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_permitted_request_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_server, "ANONYMOUS_S", 0.01)
    monkeypatch.setattr(operator_server, "CHECK_S", 0.01)
    async with asyncio.timeout(PATIENCE_S), serving(answers := asyncio.Event()) as port:
        ((reader, writer),) = await send(port, GET % b"/permitted/stream")
        asyncio.get_running_loop().call_later(0.1, answers.set)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_stream_ends_when_its_token_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_server, "CHECK_S", 0.01)
    revoked: list[str] = []

    def check_validity(principal: str) -> None:
        if principal in revoked:
            raise UnauthorizedError("revoked")

    async with asyncio.timeout(PATIENCE_S), serving(answers := asyncio.Event(), check_validity) as port:
        ((reader, writer),) = await send(port, STREAM % b"")
        await reader.readuntil(b"100 Continue\r\n\r\n")
        revoked.append("ci")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        answers.set()
        writer.close()


class Idle(NamedTuple):
    peer: int | str
    idle_since: float


@pytest.mark.parametrize(
    ("connections", "victim"),
    [
        ([Idle(0, 1), Idle(1000, 3), Idle(1000, 2)], 2),  # the user with most of them
        ([Idle(1000, 3), Idle(0, 1), Idle(0, 2)], 1),  # the longest idle of that user
        ([Idle("10.0.0.1", 2), Idle(0, 1)], 1),
        ([Idle("10.0.0.1", 2), Idle("10.0.0.1", 3), Idle("10.0.0.2", 1)], 0),
    ],
)
def test_the_connection_that_is_closed_is_of_the_peer_that_has_most(connections: list[Idle], victim: int) -> None:
    assert operator_server.choose_victim(connections) is connections[victim]


async def status_at(path: Path) -> bytes:
    """Return the status line of the answer at a Unix socket; nothing if nobody listens there."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return b""
    writer.write(GET % b"/")
    line = await reader.readline()
    writer.close()
    return line


async def test_the_jobs_socket_is_listened_at_again_once_nobody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    monkeypatch.setattr(operator_server, "_SOCKET_CHECK_S", 0.01)
    path = tmp_path / "jobs"
    server = operator_server.JobsServer(app, path, lambda: None)
    server.listen()
    keeping = asyncio.create_task(server.keep_listening())
    try:
        async with asyncio.timeout(PATIENCE_S):
            path.unlink()
            while not (await status_at(path)).startswith(b"HTTP/1.1 204"):
                await asyncio.sleep(0.01)
            with replace_listener(path) as other:  # another process listens in its place
                other.setblocking(False)
                for _ in range(3):
                    await asyncio.get_running_loop().sock_accept(other)  # it is asked, and keeps the path
            while not (await status_at(path)).startswith(b"HTTP/1.1 204"):
                await asyncio.sleep(0.01)
    finally:
        keeping.cancel()
        await server.stop()


async def test_requests_that_outlast_the_stop_of_the_jobs_server_are_answered(tmp_path: Path) -> None:
    workloads, jobs = MemoryWorkloads(), MemoryJobs()
    routes = AsyncRoutes(workloads, workloads.check_body, Logger("test")), JobRoutes(jobs, Logger("test"))
    name, path = uuid.uuid4(), tmp_path / "jobs"
    workloads.views[name] = WorkloadView(name, 1, WorkloadStatus.IN_PROGRESS, 1.0, None, b"")
    workloads.may_end.clear()
    app = create_jobs_app(routes[1], routes[0], Response(), Response(), workloads.is_async)
    server = operator_server.JobsServer(app, path, lambda: [each.stop() for each in routes] and None)
    server.listen()
    poll = b"GET /greet/x?wait=40 HTTP/1.1\r\nhost: a\r\nx-cortex-api: greet\r\nx-cortex-job: %b\r\n\r\n"
    upload = b"POST /sum?workers=1 HTTP/1.1\r\nhost: a\r\nx-cortex-api: sum\r\ncontent-type: application/x-ndjson\r\n"
    requests = poll % str(name).encode(), upload + b"transfer-encoding: chunked\r\n\r\n4\r\n1\n2\n\r\n"
    answers = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            opened = [await asyncio.open_unix_connection(path) for _ in requests]
            for (_, writer), request in zip(opened, requests, strict=True):
                writer.write(request)
            while not (workloads.waited and jobs.uploads):
                await asyncio.sleep(0.01)
            await server.stop()
            for reader, writer in opened:
                answers.append((await reader.read()).partition(b"\r\n\r\n"))
                writer.close()
    finally:
        workloads.may_end.set()
    (polled, _, status), (refused, _, error) = answers
    assert polled.startswith(b"HTTP/1.1 200 ") and json.loads(status) == {"id": str(name), "status": "in_progress"}
    assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused
    assert json.loads(error)["kind"] == "operator_unavailable"
    assert not jobs.records
