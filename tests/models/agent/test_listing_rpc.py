"""Listings that nodes get from the operator's model agent: messages, server and client."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import StorageError
from cortex.models.agent.listing import FileMarks, Listing, ModelFolder, Prefix, VersionContent
from cortex.models.agent.listing_rpc import (
    MAX_MODELS_BYTES,
    ListAnswer,
    ListFailed,
    ListingClient,
    ListingServer,
    ListPending,
    ListReply,
    ListRequest,
    read_answer,
    read_models,
    read_request,
    write,
    write_models,
)
from cortex.models.agent.poller import RemoteListing
from cortex.telemetry import Logger
from harness.wait import PATIENCE_S

PREFIX = Prefix("s3://bucket/models", is_dir=True)
FOLDER = ModelFolder({"1": VersionContent("ab", 1, 1, 0.0, FileMarks(0), 0, "model.pkl", None)}, None)


@dataclass
class Store:
    """A fake store that answers when permitted, or with an error."""

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
    """A listing server with a fake store, and its clients."""

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


@contextlib.asynccontextmanager
async def sharing(folder: Path) -> AsyncIterator[tuple[Bench, ListingServer]]:
    bench = Bench(folder / "listings")
    bench.store.may_answer.set()
    async with asyncio.timeout(PATIENCE_S), listing(bench) as shared:
        yield bench, shared


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


async def test_concurrent_and_recent_requests_share_one_listing(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (bench, shared):
        bench.store.may_answer.clear()
        asking = [asyncio.create_task(bench.asked()) for _ in range(50)]
        await until(lambda: bench.store.passes)
        bench.store.may_answer.set()
        found = [await each for each in asking] + [await bench.asked()]
        assert bench.store.passes == 1
        assert {asked.listing.taken_at for asked in found} == {found[0].listing.taken_at}
        assert found[0].listing.models == {"iris": FOLDER}


async def test_a_client_never_receives_the_same_listing_twice(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (bench, shared):
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


async def test_a_listing_that_is_too_old_is_not_returned(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (bench, shared):
        first = await bench.asked()
        await until(lambda: time.monotonic() - first.begun_at > 0.05)
        assert (await bench.asked(max_age_s=0.05)).listing.taken_at > first.listing.taken_at


async def test_a_client_that_listed_by_itself_receives_only_newer_listings(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (bench, shared):
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


async def test_all_clients_receive_the_error_of_a_prefix_and_its_recovery(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (bench, shared):
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


async def test_a_client_that_waits_long_receives_heartbeats(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (bench, shared):
        bench.store.may_answer.clear()
        reader, writer = await asyncio.open_unix_connection(str(bench.path))
        writer.write(b'{"url":"s3://b","is_dir":false,"max_age_s":1,"newer_than_s":null,"known":""}\n')
        assert await reader.readuntil() == b'{"op":"wait"}\n'
        bench.store.may_answer.set()
        while b"listed" not in await reader.readuntil():
            pass
        writer.close()


async def test_a_silent_server_is_considered_unreachable_for_a_while(tmp_path: Path) -> None:
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


async def test_an_unreachable_server_is_detected_and_so_is_its_return(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "listings")
    bench.store.may_answer.set()
    asker = bench.asker()
    assert await asker.list(PREFIX, 1, math.inf, None) is None
    for _ in range(2):  # the second time over a connection that is dead
        async with listing(bench):
            assert await asker.list(PREFIX, 1, math.inf, None) is not None


@pytest.mark.parametrize("said", [b"nonsense\n", b"x" * 200_000, b'{"op":"listed","size":99999999999}\n'])
async def test_malformed_answers_and_requests_do_no_harm(tmp_path: Path, said: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil()
        writer.write(said)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(talk, str(tmp_path / "odd"))
    assert await ListingClient(tmp_path / "odd", PATIENCE_S, Logger("test")).list(PREFIX, 1, math.inf, None) is None
    server.close()


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
async def test_requests_that_are_not_permitted_close_the_connection(tmp_path: Path, request_: bytes) -> None:
    async with sharing(tmp_path) as (bench, shared):
        reader, writer = await asyncio.open_unix_connection(str(bench.path))
        writer.write(request_)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert bench.store.passes == 0
        assert await bench.asked()


async def test_a_prefix_without_requests_is_removed(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (bench, shared):
        first = await bench.asked(max_age_s=0.2)
        await until(lambda: time.monotonic() - first.begun_at > 0.3)
        shared.remove_unneeded()
        assert (await bench.asked()).models_id != first.models_id  # it knows nothing of that one
        await until(lambda: time.monotonic() - first.begun_at > 0.6)
        shared.remove_unneeded()
        await bench.asked()
        assert bench.store.passes == 2


CONTENT = VersionContent(
    "ab12", 3, 2**40, 1769860805.25, FileMarks.SAVED_MODEL | FileMarks.VARIABLES_DATA, 1, "a.onnx", None
)


@pytest.mark.parametrize("request_", [ListRequest(PREFIX, 10, 2.5, "state"), ListRequest(Prefix("gs://b"), 0.5)])
def test_a_request_is_read_as_it_was_written(request_: ListRequest) -> None:
    assert read_request(write(request_)) == request_


@pytest.mark.parametrize("answer", [ListReply(1.5, 0.25, 7, True, "state", 12), ListFailed("no bucket"), ListPending()])
def test_an_answer_is_read_as_it_was_written(answer: ListAnswer) -> None:
    assert read_answer(write(answer)) == answer


def test_the_json_keys_are_those_of_earlier_versions() -> None:
    assert orjson.loads(write(ListRequest(PREFIX, 10, 2.5, "id"))) == {
        "op": "list", "url": "s3://bucket/models", "is_dir": True, "max_age_s": 10, "newer_than_s": 2.5, "known": "id"
    }  # fmt: skip
    assert orjson.loads(write(ListReply(1.5, 0.25, 7, True, "id", 12))) == {
        "op": "listed", "taken_at": 1.5, "age_s": 0.25, "objects": 7, "is_cut": True, "state": "id", "size": 12
    }  # fmt: skip


def test_a_listing_round_trips() -> None:
    flawed = VersionContent("cd", 1, 0, 0.0, FileMarks(0), 0, "..", "../x: leads out of the folder")
    models = {"iris": ModelFolder({"1": CONTENT, "10": flawed}, None), "": ModelFolder({}, CONTENT, is_file=True)}
    assert read_models(write_models(models)) == models
    listing = read_answer(write(ListReply(1769860805.123456, 1, 7, False, "s", 1)))
    assert isinstance(listing, ListReply)
    assert listing.listing(PREFIX, models).taken_at == 1769860805.123456


def test_a_name_with_a_lone_surrogate_round_trips() -> None:
    models = {"\udc80": ModelFolder({}, CONTENT), "iris": ModelFolder({"1": CONTENT}, None)}
    assert read_models(write_models(models)) == models


@pytest.mark.parametrize(
    "line",
    [b"[]", b"{}", b'{"op":"listed"}', b'{"op":"unlisted","message":1}', b'{"url":1,"is_dir":true,"max_age_s":1}', b""],
)
def test_malformed_messages_are_value_errors(line: bytes) -> None:
    for read in (read_request, read_answer):
        with pytest.raises(ValueError):
            read(line)


@pytest.mark.parametrize("size", [-1, MAX_MODELS_BYTES + 1])
def test_a_listing_of_an_impossible_size_is_rejected(size: int) -> None:
    with pytest.raises(ValueError, match="a listing of"):
        read_answer(write(ListReply(0, 0, 0, False, "", size)))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_malformed_models_raise_only_value_errors(plain: object) -> None:
    with contextlib.suppress(ValueError):
        read_models(orjson.dumps(plain))


def test_an_unlimited_age_is_written_as_null() -> None:
    assert read_request(write(ListRequest(PREFIX, 1, math.inf))).newer_than_s == math.inf
