"""Chunked reads and writes of large objects, and listings by prefix."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cortex.errors import StorageError
from cortex.storage.client import read
from cortex.storage.listing import walk_prefix
from cortex.storage.streams import ObjectReader, check_writable, upload
from harness.servers.buckets import Bucket, LocalBucket, all_kinds
from harness.servers.s3 import PAGE_KEYS, SwiftServer

pytestmark = pytest.mark.processes

KINDS = ("s3", "gs", "local")
#: The Google test server does not support writes by obstore.
WRITABLE = ("s3", "local")
EMPTY = ("data/empty", "data/zero")
KEYS = [
    "data/20",
    "data/2023/x",
    "data/2024",
    "data/2024-1.json",
    "data/2025",
    "data/empty",
    "data/zero",
    "data/zero-1",
    "data/é x?#%.txt",
    "many/in/a/b/c",
    "many/in/a-b",
    "top",
    "tops/1",
]


@pytest.fixture(autouse=True)
def _no_proxy_and_no_credentials_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def buckets(swift: SwiftServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bucket]]:
    with all_kinds(tmp_path_factory.mktemp("buckets"), swift) as found:
        for bucket in found.values():
            for key in KEYS:
                bucket.put(key, b"" if key in EMPTY else key.encode())
        yield found


def listed(url: str, bucket: Bucket) -> list[str]:
    async def all_of_it() -> list[str]:
        return [item.key async for batch in walk_prefix(url, bucket.environ) for item in batch]

    start = f"{bucket.folder}/".lstrip("/") if isinstance(bucket, LocalBucket) else ""
    return [key.removeprefix(start) for key in asyncio.run(all_of_it())]


def content_of(url: str, environ: dict[str, str]) -> list[bytes]:
    async def all_of_it() -> list[bytes]:
        return [piece async for piece in ObjectReader(environ).chunks(url)]

    return asyncio.run(all_of_it())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "prefix",
    ["data/2024", "data/2024/", "data/20", "data/", "to", "top", "data/e", "data/é", "nothing", "many/in/a", ""],
)
def test_lists_keys_that_begin_with_a_prefix(buckets: dict[str, Bucket], kind: str, prefix: str) -> None:
    expected = sorted(key for key in KEYS if key.startswith(prefix))
    assert sorted(listed(f"{buckets[kind].url}/{prefix}", buckets[kind])) == expected


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_leaves_out_folder_markers(buckets: dict[str, Bucket], kind: str) -> None:
    bucket = buckets[kind]
    for key in ("marks/", "marks/empty/", "marks/full/", "marks/zero/"):
        bucket.put(key, b"")
    for key, data in (("marks/full/1", b"1"), ("marks/zero", b""), ("marks/zero-1", b"")):
        bucket.put(key, data)
    assert listed(f"{bucket.url}/marks", bucket) == ["marks/full/1", "marks/zero", "marks/zero-1"]


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_invalid_keys_hide_no_others(buckets: dict[str, Bucket], kind: str) -> None:
    bucket = buckets[kind]
    for key in ("odd//x", "odd/../y", "odd/z"):
        bucket.put(key, b"1")
    assert sorted(listed(f"{bucket.url}/odd", bucket)) == ["odd/../y", "odd//x", "odd/z"]
    assert listed(f"{bucket.url}/odd//", bucket) == ["odd//x"]


def test_a_prefix_in_a_missing_bucket_or_folder(buckets: dict[str, Bucket], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"s3://absent/x: there is no bucket absent at 127\.0\.0\.1"):
        listed("s3://absent/x", buckets["s3"])
    assert listed(f"{tmp_path}/absent/x", LocalBucket(tmp_path)) == []


def test_a_listing_of_several_pages_and_batches_is_complete(
    buckets: dict[str, Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortex.storage.listing._BATCH", 30)
    bucket, count = buckets["s3"], PAGE_KEYS + 20
    for number in range(count):
        bucket.put(f"lots/{number:05}", b"1")
    assert listed(f"{bucket.url}/lots/0", bucket) == [f"lots/{number:05}" for number in range(count)]
    assert listed(f"{bucket.url}/lots/0001", bucket) == [f"lots/{number:05}" for number in range(10, 20)]


@pytest.mark.parametrize("kind", WRITABLE)
def test_uploads_and_reads_in_chunks(buckets: dict[str, Bucket], kind: str) -> None:
    count = 30
    url = f"{buckets[kind].url}/up/big"

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(count):
            yield bytes([number]) * 1_000_000

    asyncio.run(upload(url, pieces(), buckets[kind].environ))
    found = content_of(url, buckets[kind].environ)
    assert b"".join(found) == b"".join(bytes([number]) * 1_000_000 for number in range(count))
    assert max(map(len, found)) < 3_000_000


def test_an_interrupted_upload_leaves_the_old_object(buckets: dict[str, Bucket]) -> None:
    bucket = buckets["s3"]
    bucket.put("up/half", b"before")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b"x" * 1_000_000
        raise OSError("the disk is gone")

    with pytest.raises(StorageError, match="s3://models/up/half can't be written"):
        asyncio.run(upload(f"{bucket.url}/up/half", pieces(), bucket.environ))
    assert asyncio.run(read(f"{bucket.url}/up/half", bucket.environ)) == b"before"


@pytest.mark.parametrize("kind", WRITABLE)
def test_check_writable_leaves_nothing_behind(buckets: dict[str, Bucket], kind: str) -> None:
    url = f"{buckets[kind].url}/out"
    asyncio.run(check_writable(url, buckets[kind].environ))
    assert listed(url, buckets[kind]) == []


def test_check_writable_reports_the_reason(buckets: dict[str, Bucket], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="s3://absent/out: there is no bucket absent"):
        asyncio.run(check_writable("s3://absent/out", buckets["s3"].environ))
    wrong = {**buckets["s3"].environ, "AWS_SECRET_ACCESS_KEY": "wrong"}
    with pytest.raises(StorageError, match="s3://models/out: .* denies access; check AWS_ACCESS_KEY_ID"):
        asyncio.run(check_writable("s3://models/out", wrong))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=f"{tmp_path}/file/out can't be written"):
        asyncio.run(check_writable(f"{tmp_path}/file/out", {}))


def test_reports_a_missing_object(buckets: dict[str, Bucket], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="s3://models/absent does not exist"):
        content_of("s3://models/absent", buckets["s3"].environ)
    with pytest.raises(StorageError, match="absent does not exist"):
        content_of(str(tmp_path / "absent"), {})


def test_rejects_a_local_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 3_000_000)

    async def change_it() -> None:
        async for _ in ObjectReader({}).chunks(str(file)):
            file.write_bytes(b"y" * 3_000_001)

    with pytest.raises(StorageError, match="changed while it was read; try again"):
        asyncio.run(change_it())


class CutProxy:
    """Forwards to a server; truncates responses of the first connections."""

    def __init__(self, port: int, cuts: int, after: int) -> None:
        self._port, self._cuts, self._after = port, cuts, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            limit = self._after if self.connections <= self._cuts else sys.maxsize
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pump, args=(client, server, sys.maxsize), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, limit), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, limit: int) -> None:
        try:
            while limit > 0 and (data := source.recv(min(65_536, limit))):
                target.sendall(data)
                limit -= len(data)
        except OSError:
            pass
        for end in (source, target):
            with closing(end), suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop accepting connections."""
        self._listener.close()


@pytest.fixture
def big(buckets: dict[str, Bucket]) -> bytes:
    content = os.urandom(1000) * 6000
    buckets["s3"].put("big", content)
    return content


def through(proxy: CutProxy, swift: SwiftServer) -> dict[str, str]:
    # Requests are signed for the host name of the proxy.
    return {**swift.environ, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{proxy.port}"}


def test_an_interrupted_download_resumes_at_its_position(swift: SwiftServer, big: bytes) -> None:
    with closing(CutProxy(urlsplit(swift.url).port or 0, cuts=3, after=2_000_000)) as proxy:
        assert b"".join(content_of("s3://models/big", through(proxy, swift))) == big
        assert proxy.connections >= 4


def test_rejects_a_resumed_download_of_a_changed_object(
    swift: SwiftServer, buckets: dict[str, Bucket], big: bytes
) -> None:
    with closing(CutProxy(urlsplit(swift.url).port or 0, cuts=1, after=2_500_000)) as proxy:

        async def change_it() -> None:
            async for _ in ObjectReader(through(proxy, swift)).chunks("s3://models/big"):
                buckets["s3"].put("big", b"other" * 1_200_000)

        with pytest.raises(StorageError, match="s3://models/big changed while it was read; try again"):
            asyncio.run(change_it())


MEASURE = """
import asyncio, resource, sys
from cortex.storage.streams import ObjectReader

async def read_all():
    return sum([len(piece) async for piece in ObjectReader({}).chunks(sys.argv[1])])

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert asyncio.run(read_all()) == 400_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as target:
        target.truncate(400_000_000)
    grown = subprocess.run([sys.executable, "-c", MEASURE, str(file)], check=True, capture_output=True)
    assert int(grown.stdout) * 1024 < 50_000_000
