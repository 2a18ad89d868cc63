"""Storage of test models: a bucket of S3, one of GCS, or a folder, written to as other people's tools do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from harness.requirements import skip
from harness.servers import gcs, s3
from harness.servers.gcs import FakeGcsServer
from harness.servers.s3 import SwiftServer

BUCKET = "models"


class Bucket(Protocol):
    """A storage from which models can be served."""

    @property
    def url(self) -> str: ...

    @property
    def environ(self) -> dict[str, str]: ...  #: what an operator needs to read it

    def put(self, key: str, data: bytes) -> None: ...

    def delete(self, key: str) -> None: ...


@dataclass(frozen=True)
class RemoteBucket:
    """A bucket of a server."""

    url: str
    server: SwiftServer | FakeGcsServer

    @property
    def environ(self) -> dict[str, str]:
        """The server's address and credentials."""
        return self.server.environ

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""
        self.server.put(BUCKET, key, data)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.server.delete(BUCKET, key)


@dataclass(frozen=True)
class LocalBucket:
    """A folder."""

    folder: Path

    @property
    def url(self) -> str:
        """The folder itself."""
        return str(self.folder)

    @property
    def environ(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def put(self, key: str, data: bytes) -> None:
        """Create or replace a file, in place."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def delete(self, key: str) -> None:
        """Remove a file, if it is there, and its folders if they are empty then."""
        path = self.folder / key
        if not path.exists():
            return
        path.unlink()
        while (path := path.parent) != self.folder and not any(path.iterdir()):
            path.rmdir()


def upload(bucket: Bucket, key: str, folder: Path) -> None:
    """Put all files of a folder below `key`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            bucket.put(f"{key}/{path.relative_to(folder)}", path.read_bytes())


def start_swift(folder: Path) -> SwiftServer:
    """Start Swift with an empty bucket; skips the test where it is not installed."""
    if not s3.is_installed():
        skip("Swift is not installed: scripts/test-services")
    server = SwiftServer(folder)
    try:
        server.start()
        server.create_bucket(BUCKET)
    except BaseException:
        server.stop()
        raise
    return server


@pytest.fixture(scope="session")
def swift_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    """Swift for all tests of a process, because its start takes seconds of CPU; each user takes another account."""
    server = start_swift(tmp_path_factory.mktemp("swift") / "s")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def swift(swift_server: SwiftServer) -> SwiftServer:
    """Swift with an account of the module's own, which has an empty bucket."""
    account = swift_server.other_account()
    account.create_bucket(BUCKET)
    return account


def start_gcs(folder: Path) -> FakeGcsServer:
    """Start the GCS server with an empty bucket; skips the test where it is not installed."""
    if not gcs.is_installed():
        skip("fake-gcs-server is not installed: make test")
    server = FakeGcsServer(folder)
    server.start()
    server.create_bucket(BUCKET)
    return server


@contextlib.contextmanager
def all_kinds(folder: Path, swift: SwiftServer) -> Iterator[dict[str, Bucket]]:
    """Start those that do not run yet: the buckets `s3`, `gs` and `local`."""
    with contextlib.ExitStack() as stack:
        google = start_gcs(folder / "gs")
        stack.callback(google.stop)
        yield {
            "s3": RemoteBucket(f"s3://{BUCKET}", swift),
            "gs": RemoteBucket(f"gs://{BUCKET}", google),
            "local": LocalBucket(folder / "local"),
        }


def variables(buckets: Iterable[Bucket]) -> dict[str, str]:
    """Return the variables with which an operator can read all of them."""
    merged = {name: value for bucket in buckets for name, value in bucket.environ.items()}
    return {name: value for name, value in merged.items() if name != "HOME"}
