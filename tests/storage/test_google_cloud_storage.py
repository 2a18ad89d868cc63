"""The storage package with a Google Cloud Storage server; common behaviour is tested with S3."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.errors import StorageError
from cortex.storage.client import download, fetch, list_objects, read
from harness.servers.buckets import RemoteBucket, start_gcs

pytestmark = pytest.mark.processes

CONTENT = {"1/model.bin": b"one", "1/vars/a.txt": b"a", "1/with space é+%?#&.txt": b"odd", "10/model.bin": b"ten"}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteBucket]:
    server = start_gcs(tmp_path_factory.mktemp("gcs"))
    try:
        yield RemoteBucket("gs://models", server)
    finally:
        server.stop()


@pytest.fixture
def environ(bucket: RemoteBucket) -> dict[str, str]:
    return {**os.environ, **bucket.environ}


@pytest.fixture(autouse=True)
def _content(bucket: RemoteBucket) -> None:
    for key, data in CONTENT.items():
        bucket.put(f"net/{key}", data)


def test_objects_are_listed_with_etags_and_read(environ: dict[str, str]) -> None:
    listed = asyncio.run(list_objects("gs://models/net/1", environ))
    assert [item.key for item in listed] == sorted(f"net/{key}" for key in CONTENT if key.startswith("1/"))
    assert all(item.etag and '"' not in item.etag and item.modified_at.tzinfo for item in listed)
    assert [asyncio.run(read(f"gs://models/{item.key}", environ)) for item in listed] == [b"one", b"a", b"odd"]
    [alone] = asyncio.run(list_objects("gs://models/net/1/model.bin", environ))
    assert alone == listed[0]._replace(name="")


def test_an_etag_changes_with_the_content(bucket: RemoteBucket, environ: dict[str, str]) -> None:
    [before] = asyncio.run(list_objects("gs://models/net/10", environ))
    bucket.put("net/10/model.bin", b"TEN")
    [after] = asyncio.run(list_objects("gs://models/net/10", environ))
    assert (before.size_bytes, before.etag) != (after.size_bytes, after.etag)
    assert before.size_bytes == after.size_bytes


def test_downloads_a_folder_without_its_siblings(environ: dict[str, str], tmp_path: Path) -> None:
    asyncio.run(download("gs://models/net/1/", tmp_path / "out", environ))
    found = {str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in tmp_path.rglob("*.*")}
    assert found == {key[2:]: data for key, data in CONTENT.items() if key.startswith("1/")}


def test_downloads_the_same_content_once(bucket: RemoteBucket, environ: dict[str, str], tmp_path: Path) -> None:
    bucket.put("once/model.bin", b"x")
    first = asyncio.run(fetch("gs://models/once", tmp_path, environ))
    assert asyncio.run(fetch("gs://models/once", tmp_path, environ)) == first
    assert sum("once" in path for path in bucket.server.downloads()) == 1  # type: ignore[union-attr]


def test_reports_a_missing_object(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gs://models/none does not exist"):
        asyncio.run(download("gs://models/none", tmp_path / "out", environ))
