from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cortex.errors import StorageError
from cortex.storage.client import download, list_objects, write
from cortex.storage.listing import walk, walk_prefix
from cortex.storage.local_files import OUTSIDE, copy
from cortex.storage.objects import StoredObject
from cortex.storage.streams import ObjectReader, check_writable, upload

Put = Callable[[Path, Path], object]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that others may write into, beside a secret."""
    (tmp_path / "outside/deep").mkdir(parents=True)
    (tmp_path / "outside/secret").write_text("secret")
    (tmp_path / "outside/deep/secret").write_text("secret")
    (tmp_path / "root/3").mkdir(parents=True)
    (tmp_path / "root/3/file").write_text("good")
    return tmp_path / "root"


def listed(root: Path, url: Path | None = None) -> dict[str, str | None]:
    async def collect() -> list[StoredObject]:
        return [item async for batch in walk(str(url or root), {}, str(root)) for item in batch]

    return {item.name: item.flaw for item in asyncio.run(collect())}


def listed_prefix(root: Path, prefix: str) -> dict[str, str | None]:
    async def collect() -> list[StoredObject]:
        return [item async for batch in walk_prefix(prefix, {}, str(root)) for item in batch]

    return {item.name: item.flaw for item in asyncio.run(collect())}


def read(path: Path, root: Path) -> bytes:
    async def collect() -> bytes:
        return b"".join([piece async for piece in ObjectReader({}).chunks(str(path), str(root))])

    return asyncio.run(collect())


async def pieces(content: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    yield content
    if error:
        raise error


def test_links_that_stay_in_the_folder_are_followed(root: Path) -> None:
    (root / "latest").symlink_to("3")
    (root / "absolute").symlink_to(root / "3/file")
    (root / "..2026").mkdir()
    (root / "..2026/model").write_text("x")
    (root / "..data").symlink_to("..2026")
    (root / "model").symlink_to("..data/model")
    assert set(listed(root)) == {"3/file", "latest/file", "absolute", "..2026/model", "..data/model", "model"}
    assert set(listed(root).values()) == {None}
    assert read(root / "latest/file", root) == b"good"
    assert listed_prefix(root, f"{root}/latest/") == {"file": None}
    assert set(listed_prefix(root, f"{root}/la")) == {"latest/file"}


def test_the_folder_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert listed(tmp_path / "link") == {"3/file": None}
    assert read(tmp_path / "link/3/file", tmp_path / "link") == b"good"
    asyncio.run(write(str(tmp_path / "link/new/file"), b"x", {}, str(tmp_path / "link")))
    assert (root / "new/file").read_bytes() == b"x"


@pytest.mark.parametrize("target", ["../outside", "{outside}", "/etc", "3/../../outside", "/proc/self/cwd"])
def test_a_link_to_a_folder_outside_is_a_flaw(root: Path, target: str) -> None:
    (root / "4").symlink_to(target.format(outside=root.parent / "outside"))
    assert listed(root) == {"3/file": None, "4/": OUTSIDE}
    with pytest.raises(StorageError, match="a link leads out of the folder"):
        listed(root, root / "4")
    with pytest.raises(StorageError, match="a link leads out of the folder"):
        listed_prefix(root, f"{root}/4/")
    assert listed_prefix(root, f"{root}/4") == {"4/": OUTSIDE}


@pytest.mark.parametrize("target", ["../../outside/secret", "/etc/passwd", "/proc/self/environ", "../chain"])
def test_a_link_to_a_file_outside_is_a_flaw_and_not_read(root: Path, tmp_path: Path, target: str) -> None:
    (root / "chain").symlink_to("../outside/secret")
    (root / "3/data").symlink_to(target)
    assert listed(root) == {"3/file": None, "3/data": OUTSIDE, "chain": OUTSIDE}
    assert listed(root, root / "3") == {"file": None, "data": OUTSIDE}
    with pytest.raises(StorageError, match="a link leads out of the folder"):
        read(root / "3/data", root)
    with pytest.raises(StorageError, match="can't be downloaded: a link leads out of the folder"):
        asyncio.run(download(str(root / "3"), tmp_path / "out", {}))
    assert not (tmp_path / "out").exists()


def test_a_file_that_was_replaced_by_a_link_after_the_listing_is_not_copied(root: Path, tmp_path: Path) -> None:
    [item] = asyncio.run(list_objects(str(root), {}))
    secret, found = root.parent / "outside/secret", (root / "3/file").stat()
    secret.write_text("evil")
    os.utime(secret, ns=(found.st_atime_ns, found.st_mtime_ns))
    (root / "3/file").unlink()
    (root / "3/file").symlink_to(secret)
    with pytest.raises(StorageError, match="changed while it was read"):
        copy(item, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""


WRITERS: dict[str, Put] = {
    "write": lambda path, root: asyncio.run(write(str(path), b"x", {}, str(root))),
    "upload": lambda path, root: asyncio.run(upload(str(path), pieces(b"x"), {}, str(root))),
    "check": lambda path, root: asyncio.run(check_writable(str(path.parent), {}, str(root))),
}


@pytest.mark.parametrize("put", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("path", ["out/file", "out/new/file", "out/deep/file", "3/out/file"])
def test_nothing_is_written_through_a_link_out_of_the_folder(root: Path, path: str, put: Put) -> None:
    (root / "out").symlink_to("../outside")
    (root / "3/out").symlink_to("../../outside/deep")
    before = sorted(root.parent.rglob("*"))
    with pytest.raises(StorageError, match="a link leads out of the folder"):
        put(root / path, root)
    assert sorted(root.parent.rglob("*")) == before


@pytest.mark.parametrize("put", [WRITERS["write"], WRITERS["upload"]], ids=["write", "upload"])
def test_a_link_in_place_of_the_file_is_replaced_and_its_target_left_alone(root: Path, put: Put) -> None:
    (root / "file").symlink_to("../outside/secret")
    put(root / "file", root)
    assert (root / "file").read_bytes() == b"x"
    assert (root.parent / "outside/secret").read_text() == "secret"
    assert not list(root.rglob("*.part"))


def test_an_interrupted_upload_leaves_nothing(root: Path) -> None:
    with pytest.raises(StorageError, match="broken"):
        asyncio.run(upload(str(root / "new"), pieces(b"x", StorageError("broken")), {}, str(root)))
    assert sorted(path.name for path in root.rglob("*")) == ["3", "file"]


@contextmanager
def swapping(path: Path, target: str, content: bytes | None) -> Iterator[None]:
    """Switch a path between a link and a file, or a folder without `content`, as fast as possible."""
    is_over = threading.Event()

    def swap() -> None:
        other, number = path.with_name("other"), 0
        while not is_over.is_set():
            number += 1
            if content is None:
                with suppress(FileNotFoundError):
                    path.rename(path.with_name(f"old-{number}"))
                with suppress(FileExistsError):
                    path.symlink_to(target)
            else:
                other.symlink_to(target)
                other.replace(path)
                other.write_bytes(content)
                other.replace(path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.heavy
def test_a_link_that_appears_in_between_is_never_read(root: Path) -> None:
    seen = set()
    with swapping(root / "3/file", "../../outside/secret", b"good"):
        for _ in range(200):
            try:
                seen.add(read(root / "3/file", root))
            except StorageError:
                continue
    assert seen <= {b"good"}


@pytest.mark.heavy
def test_a_folder_that_becomes_a_link_in_between_is_never_written_through(root: Path) -> None:
    with swapping(root / "out", "../outside", None):
        for number in range(200):
            try:
                WRITERS["write"](root / f"out/{number}", root)
            except StorageError:
                continue
    assert sorted(path.name for path in (root.parent / "outside").rglob("*")) == ["deep", "secret", "secret"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_hard_link_to_a_file_of_another_user_is_a_flaw(root: Path) -> None:
    os.chown(root / "3", 1234, 1234)
    (root / "3/data").hardlink_to(root.parent / "outside/secret")
    assert listed(root) == {"3/file": None, "3/data": "it is a hard link to a file of another user"}
    with pytest.raises(StorageError, match="hard link to a file of another user"):
        read(root / "3/data", root)
    os.chown(root / "3", os.geteuid(), os.getegid())
    assert listed(root) == {"3/file": None, "3/data": None}


def test_a_pipe_does_not_block(root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert listed(root) == {"3/file": None}
    with pytest.raises(StorageError, match="pipe is not a file"):
        read(root / "pipe", root)


def test_an_etag_changes_with_content_of_the_same_size_and_time(root: Path) -> None:
    file = root / "3/file"
    [before] = asyncio.run(list_objects(str(root), {}))
    found = file.stat()
    file.write_text("GOOD")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))  # as `cp -p`
    [after] = asyncio.run(list_objects(str(root), {}))
    assert (before.size_bytes, before.modified_at) == (after.size_bytes, after.modified_at)
    assert before.etag != after.etag
