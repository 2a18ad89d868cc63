"""The content store: downloads, leases, limits and garbage collection."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import StorageError
from cortex.models.agent import content_store
from cortex.models.agent.content_store import ContentRequest, ContentStore, StoredContent, choose_victim, unneeded
from cortex.telemetry import Logger

Gate = asyncio.Event


class Filler:
    """A fake download that fills folders when permitted, and counts calls."""

    def __init__(self, gate: Gate | None = None, error: Exception | None = None) -> None:
        self.calls = 0
        self._gate = gate
        self._error = error

    async def __call__(self, folder: Path) -> None:
        self.calls += 1
        folder.mkdir()
        (folder / "model.bin").write_bytes(b"half")
        if self._gate is not None:
            await self._gate.wait()
        if self._error is not None:
            raise self._error
        (folder / "model.bin").write_bytes(b"whole")


def opened(tmp_path: Path) -> ContentStore:
    contents = ContentStore(tmp_path, Logger("test"))
    contents.startup()
    return contents


def on_disk(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "content").iterdir()}


async def test_concurrent_requests_for_one_content_share_one_download(tmp_path: Path) -> None:
    contents, fill = opened(tmp_path), Filler(gate := Gate())
    waiting = [asyncio.create_task(contents.fetch(ContentRequest("aa", "iris", 5, fill))) for _ in range(100)]
    await asyncio.sleep(0)
    gate.set()
    paths = set(await asyncio.gather(*waiting))
    assert fill.calls == 1
    assert [(path / "model.bin").read_bytes() for path in paths] == [b"whole"]
    assert on_disk(tmp_path) == {"aa"}


async def test_a_content_is_not_found_before_it_is_complete(tmp_path: Path) -> None:
    contents, fill = opened(tmp_path), Filler(gate := Gate())
    task = asyncio.create_task(contents.fetch(ContentRequest("aa", "iris", 5, fill)))
    while not fill.calls:
        await asyncio.sleep(0)
    assert contents.find("aa") is None
    assert "aa" not in on_disk(tmp_path)
    gate.set()
    assert await task == contents.find("aa") == tmp_path / "content" / "aa"


async def test_a_failed_download_leaves_nothing_and_the_next_request_retries(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    with pytest.raises(StorageError, match="S3 is away"):
        await contents.fetch(ContentRequest("aa", "iris", 5, Filler(error=StorageError("S3 is away"))))
    assert on_disk(tmp_path) == set()
    await contents.fetch(ContentRequest("aa", "iris", 5, Filler()))


async def test_a_cancelled_request_does_not_cancel_the_shared_download(tmp_path: Path) -> None:
    contents, fill = opened(tmp_path), Filler(gate := Gate())
    first, second = (asyncio.create_task(contents.fetch(ContentRequest("aa", "iris", 5, fill))) for _ in range(2))
    while not fill.calls:
        await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await second == tmp_path / "content" / "aa"
    assert fill.calls == 1


async def test_startup_deletes_partial_contents_and_finds_complete_ones(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    await contents.fetch(ContentRequest("aa", "iris", 5, Filler(), limit=2))
    half = tmp_path / "content" / ".part-x" / "bb"
    half.mkdir(parents=True)
    (half / "model.bin").write_bytes(b"half")
    later, fill = opened(tmp_path), Filler()
    assert on_disk(tmp_path) == {"aa"}
    assert await later.fetch(ContentRequest("aa", "iris", 5, fill, limit=2)) == tmp_path / "content" / "aa"
    assert fill.calls == 0


async def test_a_content_truncated_by_a_crash_is_downloaded_again(tmp_path: Path) -> None:
    fill = Filler()
    path = await opened(tmp_path).fetch(ContentRequest("aa", "iris", 5, fill))
    (path / "model.bin").write_bytes(b"")
    path = await opened(tmp_path).fetch(ContentRequest("aa", "iris", 5, fill))
    assert (path / "model.bin").read_bytes() == b"whole"
    (path / "notes-of-the-users-code").write_bytes(b"more")
    await opened(tmp_path).fetch(ContentRequest("aa", "iris", 5, fill))
    assert fill.calls == 2


async def test_the_limit_of_an_api_is_never_exceeded(tmp_path: Path) -> None:
    contents, seen = opened(tmp_path), []

    class Watching(Filler):
        async def __call__(self, folder: Path) -> None:
            seen.append(len(on_disk(tmp_path)))  # itself, coming, included
            await super().__call__(folder)

    async def use(number: int) -> None:
        digest = f"d{number % 7}"
        contents.lease(number, "iris", digest)
        await contents.fetch(ContentRequest(digest, "iris", 5, Watching(), limit=3))
        assert contents.find(digest)
        await asyncio.sleep(0)
        contents.remove_client(number)

    await asyncio.gather(*(use(number) for number in range(60)))
    assert max(seen) == 3
    assert len(on_disk(tmp_path)) == 3


async def test_the_limit_holds_after_a_restart_and_the_oldest_content_is_evicted(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    for digest in ("aa", "bb"):
        await contents.fetch(ContentRequest(digest, "iris", 5, Filler(), limit=2))
    await contents.fetch(ContentRequest("aa", "iris", 5, Filler(), limit=2))
    later = opened(tmp_path)
    await later.fetch(ContentRequest("cc", "iris", 5, Filler(), limit=2))
    assert on_disk(tmp_path) == {"aa", "cc"}


async def test_a_leased_content_stays_and_the_next_request_waits(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    contents.lease("worker", "iris", "aa")
    await contents.fetch(ContentRequest("aa", "iris", 5, Filler(), limit=1))
    task = asyncio.create_task(contents.fetch(ContentRequest("bb", "iris", 5, Filler(), limit=1)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert on_disk(tmp_path) == {"aa"}
    contents.release("worker", "aa")
    await task
    assert on_disk(tmp_path) == {"bb"}


async def test_a_request_that_waits_too_long_for_room_fails_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_store, "ROOM_TIMEOUT_S", 0.1)
    contents = opened(tmp_path)
    contents.set_used("replica", "iris", {"aa"})
    await contents.fetch(ContentRequest("aa", "iris", 5, Filler(), limit=1))
    with pytest.raises(StorageError, match="disk_cache_size"):
        await contents.fetch(ContentRequest("bb", "iris", 5, Filler(), limit=1))


async def test_eviction_for_one_api_keeps_contents_of_another(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    for api in ("iris", "mnist"):
        await contents.fetch(ContentRequest("aa", api, 5, Filler(), limit=1 if api == "iris" else None))
    await contents.fetch(ContentRequest("bb", "iris", 5, Filler(), limit=1))
    assert on_disk(tmp_path) == {"aa", "bb"}
    await contents.fetch(ContentRequest("cc", "iris", 5, Filler(), limit=1))
    assert on_disk(tmp_path) == {"aa", "cc"}


async def test_a_content_used_only_by_another_api_no_longer_counts_but_stays(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    contents.set_used("replica", "mnist", {"aa"})
    contents.lease("worker", "mnist", "bb")
    for digest in ("aa", "bb", "cc"):
        await contents.fetch(ContentRequest(digest, "iris", 5, Filler(), limit=1))
    assert on_disk(tmp_path) == {"aa", "bb", "cc"}
    await contents.fetch(ContentRequest("dd", "iris", 5, Filler(), limit=1))
    assert on_disk(tmp_path) == {"aa", "bb", "dd"}


async def test_garbage_is_what_no_catalogue_lease_or_replica_needs(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    for digest in ("wanted", "leased", "used", "garbage"):
        await contents.fetch(ContentRequest(digest, "iris", 5, Filler()))
    contents.retain(("iris", 1), {"wanted"})
    contents.lease("worker", "iris", "leased")
    contents.set_used("replica", "iris", {"used"})
    await contents.collect_garbage(60)
    assert len(on_disk(tmp_path)) == 4
    await contents.collect_garbage(0)
    assert on_disk(tmp_path) == {"wanted", "leased", "used"}
    contents.remove_client("worker")
    contents.set_used("replica", "iris", ())
    contents.retain(("iris", 1), None)
    await contents.collect_garbage(0)
    assert on_disk(tmp_path) == set()


async def test_garbage_that_becomes_needed_during_a_collection_is_kept(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    for digest in ("a", "b", "c"):
        await contents.fetch(ContentRequest(digest, "iris", 5, Filler(), limit=3))
    contents.retain(("iris", 1), None)
    first = asyncio.create_task(contents.collect_garbage(0))
    await asyncio.sleep(0)  # it is busy removing the first
    assert contents.find("a") is None and contents.find("b") is not None
    contents.retain(("iris", 1), {"b"})
    await contents.collect_garbage(0)  # as a download does that finds the disk full
    await first
    assert on_disk(tmp_path) == {"b"}


async def test_a_full_disk_is_an_error_with_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    contents = opened(tmp_path)
    full = StorageError("x")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError, match=rf"disk is full.*{tmp_path}.*iB are free"):
        await contents.fetch(ContentRequest("aa", "iris", 5, Filler(error=full)))
    with pytest.raises(StorageError, match=rf"disk is full: 1 EiB are needed in {tmp_path}"):
        await contents.fetch(ContentRequest("bb", "iris", 2**60, Filler()))
    assert on_disk(tmp_path) == set()


async def test_contents_deleted_by_someone_else_are_downloaded_again(tmp_path: Path) -> None:
    contents, fill = opened(tmp_path), Filler()
    path = await contents.fetch(ContentRequest("aa", "iris", 5, fill))
    (path / "model.bin").unlink()
    path.rmdir()
    assert contents.drop_missing()
    await contents.fetch(ContentRequest("aa", "iris", 5, fill))
    assert fill.calls == 2


held_contents = st.lists(
    st.builds(
        StoredContent,
        st.sampled_from("abcdefgh"),
        st.frozensets(st.sampled_from(["iris", "mnist"])),
        st.floats(0, 10),
    ),
    unique_by=lambda item: item.digest,
)
digests = st.frozensets(st.sampled_from("abcdefgh"))


@given(held_contents, digests)
def test_the_least_recently_used_content_is_evicted_unless_it_is_in_use(
    held: list[StoredContent], kept: frozenset[str]
) -> None:
    victim = choose_victim(held, "iris", kept)
    free = [item for item in held if "iris" in item.apis and item.digest not in kept]
    if victim is None:
        assert not free
    else:
        assert victim in free
        assert victim.used_at == min(item.used_at for item in free)


@given(held_contents, digests, digests, digests)
def test_contents_of_catalogues_or_in_use_are_needed(
    held: list[StoredContent], one: frozenset[str], other: frozenset[str], kept: frozenset[str]
) -> None:
    assert unneeded(held, [one, other], kept) == {item.digest for item in held} - one - other - kept
