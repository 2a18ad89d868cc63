"""Streams outlive reloads of the gateway: the old HAProxy worker stays while it has connections, within limits."""

from __future__ import annotations

import asyncio
import time

import pytest

from cortex.gateway import haproxy
from cortex.gateway.haproxy import OldWorker, excess_workers
from cortex.gateway.runtime_api import RuntimeApi
from cortex.home import Home
from harness.servers.upstream import Client, World, ask, backend, eventually, table, world

pytestmark = pytest.mark.processes

MIB = 1024 * 1024


class Stream:
    """A response that the server "a" sends in chunks."""

    def __init__(self, w: World) -> None:
        self._upstream = w.upstreams["a"]
        self._client = Client(w.port)

    async def begin(self) -> Stream:
        (await self._client.connect()).write(b"GET /iris?chunks=1 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await self._read() == b"1\r\nx\r\n"
        self._transport = self._upstream.open_streams.pop()
        return self

    async def passes(self) -> bool:
        """Send a chunk, and return whether the client receives it."""
        if self._transport.is_closing():
            return False
        self._transport.write(b"1\r\ny\r\n")
        return (await self._read()) == b"1\r\ny\r\n"

    async def end(self) -> None:
        self._transport.write(b"0\r\n\r\n")
        assert await self._read() == b""
        self._client.close()

    async def _read(self) -> bytes:
        """Return the next chunk; empty after the last one, or if the connection is cut."""
        assert self._client.reader is not None
        received = b""
        while not received.endswith((b"x\r\n", b"y\r\n", b"0\r\n\r\n")):
            try:
                line = await self._client.reader.readuntil(b"\n")
            except (OSError, asyncio.IncompleteReadError):
                return b""
            received = line if line == b"1\r\n" else received + line
        return b"" if received.endswith(b"0\r\n\r\n") else received


async def test_a_stream_outlives_a_reload_for_longer_than_all_timeouts(home: Home) -> None:
    async with world(home, keep_alive_s=0.1) as w:
        iris = backend("iris", await w.server("a"), timeout_s=0.1)
        await w.gateway.startup(table(iris))
        stream = await Stream(w).begin()
        await w.gateway.apply(table(iris, backend("other", timeout_s=0.1)))
        reloaded_at = time.monotonic()
        while time.monotonic() < reloaded_at + 3:
            assert await stream.passes(), f"cut {time.monotonic() - reloaded_at:.1f} s after the reload"
            await w.gateway.ensure_running()
        await stream.end()
        await eventually(lambda: has_old_workers(w, 0))
        assert (await w.gateway.stats())["iris"].responses[2] == 1


async def test_the_oldest_workers_are_ended_beyond_the_limit(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"))
        await w.gateway.startup(table(iris))
        streams = []
        for number in range(4):
            streams.append(await Stream(w).begin())
            await w.gateway.apply(table(iris, backend(f"other{number}")))
        idle = Client(w.port)
        assert (await idle.get("/iris")).status == 200
        await w.gateway.apply(table(iris))
        assert await has_old_workers(w, 5)

        monkeypatch.setattr(haproxy, "OLD_WORKERS_MAX", 3)
        await w.gateway.ensure_running()

        await eventually(lambda: has_old_workers(w, 3))
        assert [await stream.passes() for stream in streams] == [False, True, True, True]
        assert idle.reader and await idle.reader.read() == b""
        assert (await ask(w.port, "/iris")).status == 200


async def has_old_workers(w: World, count: int) -> bool:
    await w.gateway.ensure_running()
    return len((await RuntimeApi(w.home.sockets_dir / "gateway-master.sock").workers()).old) == count


@pytest.mark.parametrize(
    ("old", "ended"),
    [
        ([], []),
        ([OldWorker(3, 1, 9 * MIB), OldWorker(2, 0, 9 * MIB), OldWorker(1, 5, 9 * MIB)], []),
        ([OldWorker(pid, 1, MIB) for pid in (5, 4, 3, 2, 1)], [2, 1]),
        ([OldWorker(5, 0, MIB), *(OldWorker(pid, 1, MIB) for pid in (4, 3, 2)), OldWorker(1, 0, MIB)], [5, 1]),
        ([OldWorker(3, 1, 40 * MIB), OldWorker(2, 1, 61 * MIB), OldWorker(1, 1, MIB)], [2, 1]),
        ([OldWorker(2, 0, 61 * MIB), OldWorker(1, 1, 40 * MIB)], [2]),
    ],
    ids=["none", "within the limits", "too many", "idle ones first", "too large", "a large idle one"],
)
def test_which_workers_are_ended(old: list[OldWorker], ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "OLD_WORKERS_MAX", 3)
    monkeypatch.setattr(haproxy, "OLD_WORKERS_MAX_BYTES", 100 * MIB)

    assert [worker.pid for worker in excess_workers(old)] == ended
