from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from cortex.errors import StorageError
from cortex.storage import fetch, is_remote


class Bucket(ThreadingHTTPServer):
    """An S3 endpoint with one bucket: HEAD, GET and ListObjectsV2, enough to be read from."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.downloads: list[str] = []

    @property
    def environ(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}


class _Handler(BaseHTTPRequestHandler):
    server: Bucket

    def do_HEAD(self) -> None:  # noqa: N802 - the base class's name
        self._object(with_body=False)

    def do_GET(self) -> None:  # noqa: N802 - the base class's name
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
        else:
            self._object(with_body=True)

    def _object(self, with_body: bool) -> None:
        key = urlsplit(self.path).path.removeprefix("/models/")
        data = self.server.objects.get(key)
        if data is None:
            self._answer(404, b"" if not with_body else b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if with_body:
            self.server.downloads.append(key)
        self._answer(200, data, with_body)

    def _list(self, prefix: str) -> None:
        items = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
            f'<ETag>"{hash(data)}"</ETag><Size>{len(data)}</Size></Contents>'
            for key, data in self.server.objects.items()
            if key.startswith(prefix)
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        self._answer(200, body.encode())

    def _answer(self, status: int, data: bytes, with_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("last-modified", formatdate(0, usegmt=True))
        self.send_header("etag", f'"{hash(data)}"')
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Bucket() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(bucket: Bucket, url: str, cache: Path) -> Path:
    return asyncio.run(fetch(url, cache, bucket.environ))


def test_one_object_is_a_file_that_is_downloaded_once(bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects = {"iris/model.onnx": b"weights", "iris/model.onnx.old": b"other"}
    for _ in range(2):
        path = get(bucket, "s3://models/iris/model.onnx", tmp_path)
        assert (path.name, path.read_bytes()) == ("model.onnx", b"weights")
    assert bucket.downloads == ["iris/model.onnx"]


def test_a_prefix_is_a_folder_without_its_neighbours(bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects = {"iris/1/a": b"a", "iris/1/sub/b": b"b", "iris/10/c": b"c"}
    for url in ("s3://models/iris/1", "s3://models/iris/1/"):
        path = get(bucket, url, tmp_path)
        assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == ["a", "sub/b"]


def test_changed_content_is_downloaded_again(bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects = {"m": b"one"}
    first = get(bucket, "s3://models/m", tmp_path)
    bucket.objects = {"m": b"two"}
    second = get(bucket, "s3://models/m", tmp_path)
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")


def test_what_is_not_there_is_an_error_that_names_it(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="s3://models/none does not exist"):
        get(bucket, "s3://models/none", tmp_path)
    with pytest.raises(StorageError, match="names no bucket"):
        get(bucket, "s3:///none", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_local_paths_are_not_remote() -> None:
    assert [is_remote(path) for path in ("s3://b/k", "gs://b/k", "/a/b", "a/b", "s3/b")] == [True, True, *[False] * 3]
