"""Copies of the metrics folders of replicas on nodes, at the place where local replicas have theirs.

Aggregation reads local folders only, wherever replicas run. A copy is a few seconds old at most while its node answers;
whatever a replica counts after the last copy is lost if its node is lost.

A folder travels as a tar archive: `pack` runs on the node, `MetricsMirror.fetch` at the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from cortex.cluster.transport import PeerError

if TYPE_CHECKING:  # node agents use `pack`, and no client of nodes
    from cortex.cluster.node_client import NodeClient

REFRESH_S = 2.0
#: Folders that are fetched concurrently.
_CONCURRENCY = 16
#: While a supervisor moves counts from one file to another, files read at different moments don't agree.
_READ_ATTEMPTS = 10


class MetricsMirror:
    """The copies of one operator."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def startup(self, led: Path, epoch: int) -> None:
        """Delete all copies if another operator has led since: it has already aggregated the replicas that ended.

        `led` is a file of this home with the last epoch in which this operator led.
        """
        with contextlib.suppress(OSError, ValueError):
            if int(led.read_text()) not in (epoch - 1, epoch):
                for name in self.names():
                    shutil.rmtree(self._folder / name, ignore_errors=True)
        led.write_text(str(epoch))

    def names(self) -> set[str]:
        """Return the ids of the replicas that have a copy."""
        try:
            return {folder.name for folder in self._folder.iterdir()}
        except OSError:
            return set()

    async def refresh(self, replicas: Mapping[str, NodeClient]) -> None:
        """Fetch the metrics of running replicas, given by id with their nodes."""
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def refresh_one(name: str, node: NodeClient) -> None:
            async with limit:
                with contextlib.suppress(PeerError, OSError):  # `NodeClient` reports nodes that are away
                    async with self.lock(name):
                        if name in node.replicas:  # the metrics of an ended replica are fetched once, at its end
                            await self.fetch(name, node)

        await asyncio.gather(*(refresh_one(name, node) for name, node in replicas.items()))

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock of one replica's copy."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def fetch(self, name: str, node: NodeClient) -> None:
        """Fetch the metrics of one replica. Raises: PeerError, OSError."""
        data = await node.fetch_metrics(name)
        try:
            await asyncio.to_thread(lambda: _store(self._folder / name, _unpack(data)))
        except tarfile.TarError as error:
            raise PeerError(f"{node.address.host} sent metrics that can't be read: {error}") from error


def pack(folder: Path) -> bytes:
    """Return a tar archive of a folder's files in a consistent state, without files that vanish meanwhile."""
    before = _read(folder)
    for _ in range(_READ_ATTEMPTS):
        after = _read(folder)
        if set(before) == set(after) and before.get("ended.json") == after.get("ended.json"):
            break
        before = after
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for name, data in before.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _unpack(data: bytes) -> dict[str, bytes]:
    """Return the files of an archive, by names relative to the folder. Raises: tarfile.TarError."""
    with tarfile.open(fileobj=io.BytesIO(data)) as packed:
        files = {entry.name: packed.extractfile(entry) for entry in packed if entry.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None and _is_inside(name)}


def _store(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make `files` the only files of a folder. Each is replaced atomically."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(data)
        part.rename(path)
    for old in _names(folder) - set(files):
        (folder / old).unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, bytes]:
    found = {}
    for name in sorted(_names(folder)):
        with contextlib.suppress(OSError):
            found[name] = (folder / name).read_bytes()
    return found


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
