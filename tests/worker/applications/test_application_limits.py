"""Applications whose clients lag behind, and clients whose applications do, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import CloseConnection, Event, Ping, Request, TextMessage

from cortex.worker.applications.application_scope import http_scope, websocket_scope
from cortex.worker.applications.http_call import MAX_UNSENT_BYTES, HttpCall
from cortex.worker.applications.websocket_call import PING_S, WebSocketCall
from cortex.worker.http.connection import Connection
from cortex.worker.http.connection_pool import ConnectionPool
from cortex.worker.http.streaming_connection import MAX_UNREAD_BYTES, StreamingConnection
from cortex.worker.monitoring.metrics import RequestRecorder
from cortex.worker.shared_state import SharedConnectionState
from harness.replicas.specs import limits
from harness.wait import PATIENCE_S


def new_pool(handle: Callable[[Connection], None]) -> ConnectionPool:
    loop = asyncio.get_running_loop()
    recorder = RequestRecorder(None)
    return ConnectionPool(loop, SharedConnectionState(), recorder, handle, limits(10**6), StreamingConnection)


class Pair:
    """An accepted WebSocket, and its client."""

    def __init__(self) -> None:
        self.sock, server = socket.socketpair()
        self.sock.settimeout(PATIENCE_S)
        self.errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.errors.append(context["message"]))
        new_pool(self._handle).add(server, 0, lambda _: None)
        self.client = WSConnection(ConnectionType.CLIENT)
        self.sock.sendall(self.client.send(Request("x", "/app/x")))

    def _handle(self, connection: Connection) -> None:
        assert isinstance(connection, StreamingConnection)
        scope = websocket_scope(connection.url, connection.headers, {})
        self.connection = connection
        self.call = connection.call = WebSocketCall(connection, scope, lambda: None, 1_000_000)
        assert self.call.begin()

    async def accept(self) -> None:
        while not hasattr(self, "call"):
            await asyncio.sleep(0)
        assert await self.call.receive() == {"type": "websocket.connect"}
        await self.call.send({"type": "websocket.accept"})
        self.client.receive_data(self.sock.recv(4096))
        list(self.client.events())

    async def send(self, data: bytes) -> bool:
        """Send as much as the server takes; return whether that was all."""
        self.sock.setblocking(False)
        idle = 0
        while data and idle < 100:
            try:
                data = data[self.sock.send(data) :]
                idle = 0
            except BlockingIOError:
                idle += 1
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        self.sock.settimeout(PATIENCE_S)
        return not data

    def next(self) -> Event:
        while not (events := list(self.client.events())):
            data = self.sock.recv(4096)
            assert data, "the connection was closed without a close frame"
            self.client.receive_data(data)
        return events[0]


@contextlib.asynccontextmanager
async def open_pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.accept()
    yield pair
    pair.sock.close()
    pair.connection.close()
    assert pair.errors == []


async def test_pings_of_a_client_that_does_not_read_do_not_fill_the_memory() -> None:
    async with open_pair() as pair:
        ping = pair.client.send(Ping(bytes(125)))
        assert await pair.send(ping * 6_000)
        assert pair.connection.unsent_bytes <= MAX_UNSENT_BYTES + len(ping)


@pytest.mark.heavy
async def test_empty_messages_wait_in_the_socket_if_the_application_does_not_receive_them() -> None:
    async with open_pair() as pair:
        count = 500_000
        assert not await pair.send(pair.client.send(TextMessage("")) * count)
        for _ in range(50_000):  # those in the socket are read then
            assert await pair.call.receive() == {"type": "websocket.receive", "text": ""}
            await asyncio.sleep(0)


async def test_an_application_that_lags_behind_does_not_blame_the_client() -> None:
    async with open_pair() as pair:
        assert await pair.send(pair.client.send(TextMessage("x" * (MAX_UNREAD_BYTES + 1))))
        now = pair.call._heard_at
        for _ in range(4):
            now += PING_S + 1
            pair.call.tick(now)
        assert not pair.call.is_over


async def test_a_client_that_does_not_read_loses_its_connection() -> None:
    async with open_pair() as pair:
        sending = asyncio.create_task(pair.call.send({"type": "websocket.send", "bytes": bytes(10_000_000)}))
        await asyncio.sleep(0)
        now = pair.call._heard_at
        for _ in range(2):
            now += PING_S + 1
            pair.call.tick(now)
        assert not pair.connection.open
        await sending


async def test_a_ping_after_the_close_frame_is_ignored() -> None:
    async with open_pair() as pair:
        pair.call.close(1000, "done")
        assert await pair.send(pair.client.send(Ping(b"late")))
        assert pair.next() == CloseConnection(1000, "done")


@pytest.mark.parametrize(("frame", "code"), [(b"\x81\x82\0\0\0\0\xff\xfe", 1007), (b"\x81\x02hi", 1002)])
async def test_the_close_frame_after_an_invalid_frame_has_the_reason(frame: bytes, code: int) -> None:
    async with open_pair() as pair:
        await pair.send(frame)
        closed = pair.next()
        assert isinstance(closed, CloseConnection)
        assert closed.code == code
        assert closed.reason
        assert (await pair.call.receive())["code"] == code


async def test_a_large_part_of_a_response_makes_progress_while_its_client_reads_it() -> None:
    client, server = socket.socketpair()
    client.settimeout(PATIENCE_S)
    calls: asyncio.Future[HttpCall] = asyncio.get_running_loop().create_future()
    progress = []

    def handle(connection: Connection) -> None:
        assert isinstance(connection, StreamingConnection)
        scope = http_scope(connection.method, connection.url, connection.headers, {})
        connection.call = HttpCall(connection, scope, lambda: progress.append(1), lambda: None)
        calls.set_result(connection.call)

    new_pool(handle).add(server, 0, lambda _: None)
    client.sendall(b"GET /app/x HTTP/1.1\r\n\r\n")
    call = await calls
    await call.send({"type": "http.response.start", "status": 200})
    part = {"type": "http.response.body", "body": bytes(5_000_000), "more_body": True}
    sending = asyncio.create_task(call.send(part))
    await asyncio.sleep(0)
    for _ in range(3):
        before = len(progress)
        while len(progress) == before:
            assert client.recv(100_000)
            await asyncio.sleep(0)
    assert not sending.done()
    client.close()
    await sending
