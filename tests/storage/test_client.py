from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from cortex.errors import StorageError
from cortex.storage import locations
from cortex.storage.client import download, fetch, is_remote, list_objects, read, write
from cortex.storage.credentials import bucket_region
from harness.ports import free_port
from harness.servers.public_bucket import PublicBucket, public_bucket
from harness.servers.s3 import SwiftServer

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _no_proxy_and_no_credentials_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def bucket() -> Iterator[PublicBucket]:
    with public_bucket() as server:
        yield server


@pytest.fixture
def public(bucket: PublicBucket, tmp_path: Path) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": bucket.url, "HOME": str(tmp_path / "home")}


def put(url: str, content: Mapping[str, bytes], environ: Mapping[str, str]) -> None:
    async def all_of_it() -> None:
        await asyncio.gather(*(write(f"{url}/{key}", data, environ) for key, data in content.items()))

    asyncio.run(all_of_it())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CONTENT = {"1/model.bin": b"one", "1/vars/a.txt": b"a", "1/with space é+%?#&.txt": b"odd", "10/model.bin": b"ten"}


@pytest.fixture(params=["s3", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A folder of a store, and the environment for access to it."""
    if request.param == "local":
        return str(tmp_path / "store"), {}
    swift: SwiftServer = request.getfixturevalue("swift")
    return f"s3://models/{tmp_path.name}", swift.environ


def test_written_objects_can_be_read_and_listed(place: tuple[str, dict[str, str]]) -> None:
    url, environ = place
    put(url, CONTENT, environ)
    for key, data in CONTENT.items():
        assert asyncio.run(read(f"{url}/{key}", environ)) == data
    listed = asyncio.run(list_objects(f"{url}/1", environ))
    assert [item.key.rpartition("/1/")[2] for item in listed] == sorted(key[2:] for key in CONTENT if key[1] == "/")
    assert [item.size_bytes for item in listed] == [3, 1, 3]
    assert all(item.etag and '"' not in item.etag and item.modified_at.tzinfo for item in listed)
    [alone] = asyncio.run(list_objects(f"{url}/1/model.bin", environ))
    assert alone == listed[0]._replace(name="")
    assert asyncio.run(list_objects(f"{url}/none", environ)) == []


def test_an_etag_changes_with_the_content(place: tuple[str, dict[str, str]]) -> None:
    url, environ = place
    put(url, {"a": b"one"}, environ)
    [before] = asyncio.run(list_objects(f"{url}/a", environ))
    put(url, {"a": b"two"}, environ)
    [after] = asyncio.run(list_objects(f"{url}/a", environ))
    assert before.etag != after.etag


def test_downloads_a_folder_without_its_siblings(place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    url, environ = place
    put(url, CONTENT, environ)
    asyncio.run(download(f"{url}/1/", tmp_path / "new" / "out", environ))
    assert tree(tmp_path / "new") == {f"out/{key[2:]}": data for key, data in CONTENT.items() if key[1] == "/"}


def test_a_file_is_downloaded_as_a_file(place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    url, environ = place
    put(url, CONTENT, environ)
    asyncio.run(download(f"{url}/1/model.bin", tmp_path / "out", environ))
    assert (tmp_path / "out").read_bytes() == b"one"
    with pytest.raises(StorageError, match="already exists"):
        asyncio.run(download(f"{url}/1/model.bin", tmp_path / "out", environ))


def test_an_empty_file_is_a_file(place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    url, environ = place
    put(url, {"empty": b""}, environ)
    asyncio.run(download(f"{url}/empty", tmp_path / "out", environ))
    assert (tmp_path / "out").read_bytes() == b""


def test_downloads_a_large_object_in_chunks(place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    url, environ = place
    data = random.Random(1).randbytes(1024 * 1024) * 160
    put(url, {"big": data}, environ)
    before = psutil.Process().memory_info().rss
    asyncio.run(download(f"{url}/big", tmp_path / "out", environ))
    grown = psutil.Process().memory_info().rss - before
    assert (tmp_path / "out").read_bytes() == data
    assert grown < 80 * 1024 * 1024


def test_reports_a_missing_object(place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    url, environ = place
    with pytest.raises(StorageError, match=f"{url}/none does not exist"):
        asyncio.run(read(f"{url}/none", environ))
    with pytest.raises(StorageError, match=f"{url}/none does not exist, or is an empty folder"):
        asyncio.run(download(f"{url}/none", tmp_path / "out", environ))
    assert not (tmp_path / "out").exists()


def test_translates_s3_errors(swift: SwiftServer) -> None:
    with pytest.raises(StorageError, match=r"^s3://nowhere/x: there is no bucket nowhere at 127\.0\.0\.1:\d+$"):
        asyncio.run(list_objects("s3://nowhere/x", swift.environ))
    with pytest.raises(StorageError, match="there is no bucket nowhere"):
        asyncio.run(fetch("s3://nowhere/x", swift.folder / "cache", swift.environ))
    with pytest.raises(
        StorageError, match=r"^s3://b/x can't be read: InvalidBucketName: The specified bucket is not valid"
    ):
        asyncio.run(list_objects("s3://b/x", swift.environ))
    wrong = {**swift.environ, "AWS_SECRET_ACCESS_KEY": "do-not-show"}
    with pytest.raises(StorageError, match=r"denies access; check AWS_ACCESS_KEY_ID") as caught:
        asyncio.run(read("s3://models/x", wrong))
    assert "do-not-show" not in str(caught.value)


def test_credentials_can_come_from_the_profile_of_a_file(swift: SwiftServer, tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[default]\naws_access_key_id = wrong\naws_secret_access_key = wrong\n"
        f"[mine]\naws_access_key_id = {swift.environ['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {swift.environ['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (tmp_path / ".aws/config").write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {swift.url}\n")
    environ = {"HOME": str(tmp_path), "AWS_PROFILE": "mine"}
    put("s3://models/profile", {"x": b"1"}, environ)
    assert asyncio.run(read("s3://models/profile/x", environ)) == b"1"


def test_a_store_that_never_answers_is_asked_once_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(locations._TIMEOUTS, "read_timeout", "1s")
    monkeypatch.setitem(locations._RETRIES, "retry_timeout", timedelta(seconds=0.5))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        environ = {"AWS_ENDPOINT_URL": f"http://{address}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        message = f"s3://models/x: {address} accepted the connection, but did not answer within 60 s"
        with pytest.raises(StorageError, match=f"^{message}$"):
            asyncio.run(list_objects("s3://models/x", environ))
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # there was no second attempt
            silent.accept()


def test_reports_an_unreachable_store_quickly() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(StorageError, match=rf"^s3://models/x: {address} can't be reached$"):
        asyncio.run(read("s3://models/x", {"AWS_ENDPOINT_URL": f"http://{address}", "HOME": "/nowhere"}))


def test_reads_a_public_bucket_unsigned(bucket: PublicBucket, public: dict[str, str], tmp_path: Path) -> None:
    bucket.objects = {"a/b": b"1"}
    assert asyncio.run(read("s3://models/a/b", public)) == b"1"
    signed = {**public, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}
    assert asyncio.run(read("s3://models/a/b", {**signed, "AWS_SKIP_SIGNATURE": "true"})) == b"1"
    assert bucket.signatures == {None}
    asyncio.run(read("s3://models/a/b", signed))
    assert len(bucket.signatures) == 2


def test_the_emulator_of_google_cloud_storage_is_read(bucket: PublicBucket, tmp_path: Path) -> None:
    bucket.objects = {"iris/1/model.bin": b"one", "iris/1/vars/a": b"a"}
    for host in (bucket.url, bucket.url.removeprefix("http://")):
        environ = {"STORAGE_EMULATOR_HOST": host}
        path = asyncio.run(fetch("gs://models/iris/1", tmp_path, environ))
        assert tree(path) == {"model.bin": b"one", "vars/a": b"a"}
    with pytest.raises(StorageError, match="gs://models/none does not exist"):
        asyncio.run(fetch("gs://models/none", tmp_path, environ))


def test_downloads_cached_content_once(bucket: PublicBucket, public: dict[str, str], tmp_path: Path) -> None:
    bucket.objects = {"iris/model.onnx": b"weights", "iris/model.onnx.old": b"other"}
    for _ in range(2):
        path = asyncio.run(fetch("s3://models/iris/model.onnx", tmp_path / "cache", public))
        assert (path.name, path.read_bytes()) == ("model.onnx", b"weights")
    assert bucket.downloads == ["iris/model.onnx"]


def test_concurrent_fetches_download_once(bucket: PublicBucket, public: dict[str, str], tmp_path: Path) -> None:
    bucket.objects = {f"m/{number}": bytes([number]) for number in range(20)}

    async def scenario() -> list[Path]:
        return await asyncio.gather(*(fetch("s3://models/m", tmp_path / "cache", public) for _ in range(5)))

    assert len(set(asyncio.run(scenario()))) == 1
    assert sorted(bucket.downloads) == sorted(bucket.objects)


def test_changed_content_is_cached_separately(bucket: PublicBucket, public: dict[str, str], tmp_path: Path) -> None:
    paths = []
    for content in (b"one", b"two"):
        bucket.objects = {"m": content}
        paths.append(asyncio.run(fetch("s3://models/m", tmp_path / "cache", public)))
    assert [path.read_bytes() for path in paths] == [b"one", b"two"]


def test_a_bucket_can_be_downloaded_as_a_folder(bucket: PublicBucket, public: dict[str, str], tmp_path: Path) -> None:
    # With folder markers, as consoles of stores create them; one folder is empty.
    bucket.objects = {"a": b"1", "b/c": b"2", "b/": b"", "empty/": b""}
    path = asyncio.run(fetch("s3://models", tmp_path / "cache", public))
    assert tree(path) == {"a": b"1", "b/c": b"2"}


def test_rejects_an_object_that_changes_during_the_download(
    bucket: PublicBucket, public: dict[str, str], tmp_path: Path
) -> None:
    bucket.objects = {"m/a": b"one", "m/b": b"one"}
    bucket.before_download = lambda: bucket.objects.update({"m/b": b"two"})
    with pytest.raises(StorageError, match="m/b changed while it was read; try again"):
        asyncio.run(fetch("s3://models/m", tmp_path / "cache", public))
    assert tree(tmp_path / "cache").keys() == {path.name for path in (tmp_path / "cache").glob("*.lock")}


@pytest.mark.parametrize("key", ["m/../../x", "m/./x", "m//x"])
def test_names_of_objects_cannot_escape_the_destination(
    bucket: PublicBucket, public: dict[str, str], tmp_path: Path, key: str
) -> None:
    bucket.objects = {key: b"x"}
    with pytest.raises(StorageError):
        asyncio.run(fetch("s3://models/m", tmp_path / "cache" / "deep", public))
    assert [name for name in tree(tmp_path) if not name.endswith(".lock")] == []


def test_a_denied_object_is_not_reported_as_missing(
    bucket: PublicBucket, public: dict[str, str], tmp_path: Path
) -> None:
    bucket.answers_with = 403
    with pytest.raises(StorageError, match="denies access"):
        asyncio.run(fetch("s3://models/m", tmp_path, public))


@pytest.mark.parametrize("status", [200, 301, 403])
def test_queries_the_region_of_a_bucket_once(bucket: PublicBucket, status: int) -> None:
    bucket.answers_with = status
    assert bucket_region(bucket.url) == "eu-central-1"
    bucket.server_close()  # another query would fail
    assert bucket_region(bucket.url) == "eu-central-1"


def test_queries_the_region_again_after_a_failure() -> None:
    with public_bucket() as server:
        url = server.url
    assert bucket_region(url) == bucket_region(url) == "us-east-1"


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3:///none", "has no bucket name"), ("ftp://x/y", r"ftp:// is not supported; use s3://, gs:// or a local path")],
)
def test_rejects_invalid_urls(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        asyncio.run(read(url, {}))


def test_local_paths_are_not_remote() -> None:
    assert [is_remote(path) for path in ("s3://b/k", "gs://b/k", "/a/b", "a/b", "s3/b")] == [True, True, *[False] * 3]
