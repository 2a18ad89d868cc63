"""What nodes are given by the one who lists for all: over a socket, from a store that counts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cortex.errors import StorageError
from cortex.models.listing import FileMarks, Listing, ModelFolder, Prefix, VersionContent
from cortex.models.listing_rpc import ListingClient, ListingServer
from cortex.models.poller import RemoteListing
from cortex.telemetry import Logger
from harness.wait import PATIENCE_S

PREFIX = Prefix("s3://bucket/models", is_dir=True)
FOLDER = ModelFolder({"1": VersionContent("ab", 1, 1, 0.0, FileMarks(0), 0, "model.pkl", None)}, None)


@dataclass
class Store:
    """Stands for a store: answers once it may, or with what is wrong."""

    models: dict[str, ModelFolder] = field(default_factory=lambda: {"iris": FOLDER})
    passes: int = 0
    error: Exception | None = None
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def list(self, prefix: Prefix) -> Listing:
        self.passes += 1
        taken_at = time.time()
        await self.may_answer.wait()
        if self.error:
            raise self.error
        return Listing(prefix, taken_at, dict(self.models), len(self.models))


@dataclass
class Bench:
    """One who lists and those who ask."""

    path: Path
    store: Store = field(default_factory=Store)

    def asker(self, silence_s: float = PATIENCE_S) -> ListingClient:
        return ListingClient(self.path, silence_s, Logger("test"))

    async def asked(self, max_age_s: float = 3600, newer_than_s: float = math.inf) -> RemoteListing:
        asked = await self.asker().list(PREFIX, max_age_s, newer_than_s, None)
        assert asked is not None
        return asked


@contextlib.asynccontextmanager
async def listing(bench: Bench) -> AsyncIterator[ListingServer]:
    bench.path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(bench.path))
    listener.listen()
    shared = ListingServer(bench.store.list, asyncio.Semaphore(4), Logger("test"), linger_s=0)
    await shared.startup(listener)
    try:
        yield shared
    finally:
        shared.shutdown()


def run(tmp_path: Path, test: Callable[[Bench, ListingServer], Awaitable[None]]) -> None:
    async def go() -> None:
        bench = Bench(tmp_path / "listings")
        bench.store.may_answer.set()
        async with asyncio.timeout(PATIENCE_S), listing(bench) as shared:
            await test(bench, shared)

    asyncio.run(go())


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


def test_all_who_ask_meanwhile_and_soon_after_share_one_pass(tmp_path: Path) -> None:
    async def test(bench: Bench, shared: ListingServer) -> None:
        bench.store.may_answer.clear()
        asking = [asyncio.create_task(bench.asked()) for _ in range(50)]
        await until(lambda: bench.store.passes)
        bench.store.may_answer.set()
        found = [await each for each in asking] + [await bench.asked()]
        assert bench.store.passes == 1
        assert {asked.listing.taken_at for asked in found} == {found[0].listing.taken_at}
        assert found[0].listing.models == {"iris": FOLDER}

    run(tmp_path, test)


def test_nobody_is_given_the_listing_that_he_has(tmp_path: Path) -> None:
    async def test(bench: Bench, shared: ListingServer) -> None:
        asker, before = bench.asker(), await bench.asked()
        for passes in range(2, 6):
            age_s = time.monotonic() - before.begun_at
            asked = await asker.list(PREFIX, 3600, age_s, before)
            assert asked is not None
            assert asked.listing.taken_at > before.listing.taken_at
            assert asked.begun_at > before.begun_at
            assert bench.store.passes == passes
            assert asked.models_id == before.models_id
            assert asked.listing.models is before.listing.models  # the same was not sent again
            before = asked
        bench.store.models = {"iris": FOLDER, "mnist": FOLDER}
        asked = await asker.list(PREFIX, 3600, time.monotonic() - before.begun_at, before)
        assert asked is not None
        assert asked.listing.models == bench.store.models

    run(tmp_path, test)


def test_a_listing_that_has_become_too_old_is_not_given(tmp_path: Path) -> None:
    async def test(bench: Bench, shared: ListingServer) -> None:
        first = await bench.asked()
        await until(lambda: time.monotonic() - first.begun_at > 0.05)
        assert (await bench.asked(max_age_s=0.05)).listing.taken_at > first.listing.taken_at

    run(tmp_path, test)


def test_who_listed_by_himself_meanwhile_gets_none_that_began_before(tmp_path: Path) -> None:
    async def test(bench: Bench, shared: ListingServer) -> None:
        bench.store.may_answer.clear()
        early = asyncio.create_task(bench.asked())
        await until(lambda: bench.store.passes)
        his_own_at = time.monotonic()
        late = asyncio.create_task(bench.asked(newer_than_s=time.monotonic() - his_own_at))
        other = asyncio.create_task(bench.asked())
        bench.store.may_answer.set()
        assert (await early).listing.taken_at == (await other).listing.taken_at
        assert (await late).begun_at > his_own_at
        assert bench.store.passes == 2

    run(tmp_path, test)


def test_all_hear_why_a_prefix_can_not_be_listed_and_that_it_can_again(tmp_path: Path) -> None:
    async def test(bench: Bench, shared: ListingServer) -> None:
        bench.store.error = StorageError("S3 can't be reached")
        for _ in range(20):
            with pytest.raises(StorageError, match="S3 can't be reached"):
                await bench.asked()
        assert bench.store.passes < 20  # it is tried again at its own pace
        bench.store.error = None

        async def is_listed() -> bool:
            with contextlib.suppress(StorageError):
                return bool(await bench.asked())
            return False

        while not await is_listed():
            await asyncio.sleep(0.02)

    run(tmp_path, test)


def test_who_waits_long_is_told_so(tmp_path: Path) -> None:
    async def test(bench: Bench, shared: ListingServer) -> None:
        bench.store.may_answer.clear()
        reader, writer = await asyncio.open_unix_connection(str(bench.path))
        writer.write(b'{"url":"s3://b","is_dir":false,"max_age_s":1,"newer_than_s":null,"known":""}\n')
        assert await reader.readuntil() == b'{"op":"wait"}\n'
        bench.store.may_answer.set()
        while b"listed" not in await reader.readuntil():
            pass
        writer.close()

    run(tmp_path, test)


def test_who_says_nothing_is_away_and_is_not_waited_for_each_time(tmp_path: Path) -> None:
    async def test() -> None:
        connections = 0

        async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await reader.read()

        server = await asyncio.start_unix_server(ignore, str(tmp_path / "silent"))
        asker = ListingClient(tmp_path / "silent", 0.6, Logger("test"))
        for _ in range(3):
            assert await asker.list(PREFIX, 1, math.inf, None) is None
        assert connections == 1
        server.close()

    asyncio.run(test())


def test_nobody_there_is_noticed_and_so_is_who_comes_back(tmp_path: Path) -> None:
    async def test() -> None:
        bench = Bench(tmp_path / "listings")
        bench.store.may_answer.set()
        asker = bench.asker()
        assert await asker.list(PREFIX, 1, math.inf, None) is None
        for _ in range(2):  # the second time over a connection that is dead
            async with listing(bench):
                assert await asker.list(PREFIX, 1, math.inf, None) is not None

    asyncio.run(test())


@pytest.mark.parametrize("said", [b"nonsense\n", b"x" * 200_000, b'{"op":"listed","size":99999999999}\n'])
def test_who_talks_nonsense_is_no_help_and_no_harm(tmp_path: Path, said: bytes) -> None:
    async def test() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil()
            writer.write(said)
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(talk, str(tmp_path / "odd"))
        assert await ListingClient(tmp_path / "odd", PATIENCE_S, Logger("test")).list(PREFIX, 1, math.inf, None) is None
        server.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\n",
        b'{"url":"/etc","is_dir":false,"max_age_s":1,"newer_than_s":null,"known":""}\n',
        b'{"url":"s3://b","is_dir":false,"max_age_s":-1,"newer_than_s":null,"known":""}\n',
        b'{"url":"s3://b","is_dir":false,"max_age_s":1,"newer_than_s":-1,"known":""}\n',
        b"x" * 200_000,
    ],
)
def test_what_may_not_be_asked_is_not_answered(tmp_path: Path, request_: bytes) -> None:
    async def test(bench: Bench, shared: ListingServer) -> None:
        reader, writer = await asyncio.open_unix_connection(str(bench.path))
        writer.write(request_)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert bench.store.passes == 0
        assert await bench.asked()

    run(tmp_path, test)


def test_what_nobody_asks_for_any_more_is_forgotten(tmp_path: Path) -> None:
    async def test(bench: Bench, shared: ListingServer) -> None:
        first = await bench.asked(max_age_s=0.2)
        await until(lambda: time.monotonic() - first.begun_at > 0.3)
        shared.remove_unneeded()
        assert (await bench.asked()).models_id != first.models_id  # it knows nothing of that one
        await until(lambda: time.monotonic() - first.begun_at > 0.6)
        shared.remove_unneeded()
        await bench.asked()
        assert bench.store.passes == 2

    run(tmp_path, test)
