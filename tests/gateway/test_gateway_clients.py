"""Streamed responses and slow clients at the gateway."""

from __future__ import annotations

import asyncio
import socket

import psutil
import pytest

from cortex.gateway.haproxy import TRIM_ABOVE_BYTES, buffer_limit
from cortex.gateway.runtime_api import RuntimeApi
from cortex.home import Home
from harness.servers.upstream import Client, ask, backend, eventually, table, world

pytestmark = pytest.mark.processes


async def test_each_chunk_of_a_streamed_response_is_forwarded_at_once(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        client = Client(w.port)
        (await client.connect()).write(b"GET /iris?chunks=1 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.reader
        await client.reader.readuntil(b"\r\n\r\n")
        assert (await client.reader.readuntil(b"x\r\n")).endswith(b"1\r\nx\r\n")
        stream = w.upstreams["a"].open_streams[0]
        for data in (b"y", b"z"):
            stream.write(b"1\r\n" + data + b"\r\n")
            assert (await client.reader.readuntil(data + b"\r\n")).endswith(b"1\r\n" + data + b"\r\n")
        stream.write(b"0\r\n\r\n")
        await client.reader.readuntil(b"0\r\n\r\n")
        client.close()


async def test_a_chunked_body_with_expect_continue_is_forwarded(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        client = Client(w.port)
        head = b"POST /iris HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
        (await client.connect()).write(head)
        assert client.reader and client.writer
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        client.writer.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert (await client.answer()).json()["body"] == 5
        client.close()


async def test_slow_uploads_occupy_no_replica(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a", 1))))
        slow = [Client(w.port) for _ in range(20)]
        for client in slow:
            (await client.connect()).write(
                b"POST /iris HTTP/1.1\r\nhost: x\r\ncontent-length: 1048576\r\n\r\n" + b"x" * 1_000_000
            )
        for _ in range(20):
            assert (await ask(w.port, "/iris")).status == 200
        assert w.upstreams["a"].served == 20
        slow[0].writer.write(b"x" * 48_576)  # type: ignore[union-attr]
        assert (await slow[0].answer()).json()["body"] == 1_048_576
        for client in slow:
            client.close()


async def test_memory_is_freed_after_many_slow_uploads(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        worker = (await RuntimeApi(home.sockets_dir / "gateway-master.sock").workers()).current
        slow = [Client(w.port) for _ in range(120)]
        for client in slow:
            (await client.connect()).write(
                b"POST /iris HTTP/1.1\r\nhost: x\r\ncontent-length: 1048576\r\n\r\n" + b"x" * 1_000_000
            )

        async def is_big() -> bool:
            return psutil.Process(worker).memory_info().rss > 100_000_000

        await eventually(is_big)
        for client in slow:
            client.close()

        async def none_left() -> bool:
            fetched = await RuntimeApi(home.sockets_dir / "gateway-master.sock").backends(worker or 0)
            return fetched["api:iris"].requests == 0

        await eventually(none_left)
        await w.gateway.ensure_running()

        async def is_small() -> bool:
            return psutil.Process(worker).memory_info().rss < TRIM_ABOVE_BYTES

        await eventually(is_small)
        assert (await ask(w.port, "/iris")).status == 200


async def test_slow_readers_occupy_no_replica(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a", 1))))
        loop = asyncio.get_running_loop()
        slow = []
        for _ in range(20):
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            await loop.sock_connect(reader, ("127.0.0.1", w.port))
            await loop.sock_sendall(reader, b"GET /iris?size=1000000 HTTP/1.1\r\nhost: x\r\n\r\n")
            slow.append(reader)

        async def free() -> bool:
            return w.upstreams["a"].served == 20 and (await w.gateway.stats())["iris"].in_flight == 0

        await eventually(free)
        assert (await ask(w.port, "/iris")).status == 200
        for reader in slow:
            reader.close()


async def test_slow_headers_are_refused_with_408(home: Home) -> None:
    async with world(home, header_timeout_s=0.3) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        client = Client(w.port)
        (await client.connect()).write(b"GET /iris HTTP/1.1\r\nhost")
        assert (await client.answer()).status == 408
        client.close()


async def test_a_call_may_take_longer_than_the_client_timeout(home: Home) -> None:
    async with world(home, client_timeout_s=0.3) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        assert (await ask(w.port, "/iris?sleep=1", "POST", b"{}")).status == 200


@pytest.mark.parametrize("path", ["/sum", "/sum/1", "/open", "/unknown", "/livez", "/keyed", "/none"])
async def test_a_client_that_half_closes_receives_the_complete_response(home: Home, path: str) -> None:
    async with world(home) as w:
        jobs = backend("sum", jobs_socket=(await w.server("jobs")).socket)
        calls = [backend("open", await w.server("a"), finishes_calls=True), backend("keyed", needs_key=True)]
        await w.gateway.startup(table(jobs, *calls, backend("none")))
        client = Client(w.port)
        writer = await client.connect()
        target = f"{path}?sleep=0.2"
        writer.write(f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc".encode())
        writer.write_eof()
        answer = await client.answer()
        if path in ("/sum", "/sum/1", "/open"):
            assert (answer.status, answer.json()["url"], answer.json()["body"]) == (200, target, 3)
        else:
            assert answer.status == {"/unknown": 404, "/livez": 200, "/keyed": 401, "/none": 503}[path]
            assert path == "/livez" or answer.json()["request_id"]


async def test_a_client_that_half_closes_while_its_call_can_be_cancelled_receives_499(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))

        async def waits() -> bool:
            return bool(w.upstreams["a"].waiting)

        async def was_aborted() -> bool:
            return w.upstreams["a"].aborted == 1

        client = Client(w.port)
        writer = await client.connect()
        writer.write(b"GET /iris?wait=1 HTTP/1.1\r\nhost: x\r\n\r\n")
        await eventually(waits)
        writer.write_eof()
        answer = await client.answer()
        assert (answer.status, answer.json()["error"]) == (499, "the client disconnected")
        assert "x-cortex-disconnected" not in answer.headers
        await eventually(was_aborted)


SLOW_BODY = b"POST /iris HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 900_000


async def test_a_body_whose_first_mebibyte_arrives_too_slowly_is_refused(home: Home) -> None:
    async with world(home, body_timeout_s=0.5) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        client = Client(w.port)
        (await client.connect()).write(SLOW_BODY)
        assert (await client.answer()).status == 408
        client.close()


@pytest.mark.parametrize("limit", [0, 5])
async def test_one_address_can_fill_a_part_of_the_buffers_only(
    home: Home, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(home, max_buffers=40) as w:  # a quarter for each address
        await w.gateway.startup(table(backend("iris", await w.server("a")), connections_per_address=limit))
        slow = [await asyncio.open_connection("127.0.0.1", w.port) for _ in range(limit or 10)]
        for _, writer in slow:
            writer.write(SLOW_BODY)
        await w.gateway.ensure_running()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await ask(w.port, "/iris")
        await w.gateway.ensure_running()
        assert w.gateway.refused_connections == 1
        assert "connections above the limit of one address were closed" in caplog.text
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port, local_addr=("127.0.0.2", 0))
        writer.write(b"GET /iris HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, each in [*slow, (reader, writer)]:
            each.close()


@pytest.mark.parametrize(
    ("memory_bytes", "buffers"),
    [(1 << 30, 2048), (8 << 30, 3855), (64 << 30, 10_000)],
)
def test_the_buffers_of_all_requests_fit_into_half_of_the_memory(memory_bytes: int, buffers: int) -> None:
    assert buffer_limit(10_000, memory_bytes) == buffers
