"""List, read, write and download objects at s3://, gs:// and local paths.

Only this package imports obstore. Objects that do not fit into memory are read and written by `streams.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import obstore
from obstore.store import LocalStore, ObjectStore

from cortex.errors import StorageError
from cortex.processes.filelock import locked
from cortex.storage.credentials import endpoint_name
from cortex.storage.listing import walk
from cortex.storage.local_files import copy, writing
from cortex.storage.locations import SCHEMES, Location
from cortex.storage.objects import StoredObject, printable

_PARALLEL_DOWNLOADS = 8
_CHUNK_BYTES = 4 * 1024 * 1024


def is_remote(path: str) -> bool:
    """Return True if `path` is in an object store."""
    return urlsplit(path).scheme in SCHEMES


async def store_name(url: str, environ: Mapping[str, str]) -> str:
    """Return the name of the store at a URL for messages, such as its host and port. Raises: StorageError."""
    location = Location.of(url)
    return endpoint_name(await asyncio.to_thread(location.settings, environ), location.scheme)


async def list_objects(url: str, environ: Mapping[str, str]) -> list[StoredObject]:
    """Return the object at `url`, or all objects below it, sorted by key; empty if there are none.

    Raises: StorageError.
    """
    found = [item async for batch in walk(url, environ) for item in batch]
    return sorted(found, key=lambda item: item.key)


async def read(url: str, environ: Mapping[str, str]) -> bytes:
    """Return the content of the object at `url`. Raises: StorageError."""
    location = Location.of(url)

    async def get(store: ObjectStore) -> bytes:
        return bytes(await (await obstore.get_async(store, location.key)).bytes_async())

    return await location.run(environ, get)


async def write(url: str, data: bytes, environ: Mapping[str, str], root: str | None = None) -> None:
    """Create or replace the object at `url` atomically; links must not lead out of `root`. Raises: StorageError."""
    location = Location.of(url)
    if location.scheme == "file":
        await asyncio.to_thread(_write_file, location, data, root)
        return
    await location.run(environ, lambda store: obstore.put_async(store, location.key, data), "write")


def _write_file(location: Location, data: bytes, root: str | None) -> None:
    with location.explaining("write"), writing(location.path, Path(root) if root else None) as file:
        file.write(data)


async def delete(url: str, environ: Mapping[str, str]) -> None:
    """Delete the object at `url`, if it exists. Raises: StorageError."""
    location = Location.of(url)

    async def delete_object(store: ObjectStore) -> None:
        with contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(store, location.key)

    await location.run(environ, delete_object, "write")


async def download(url: str, destination: Path, environ: Mapping[str, str]) -> None:
    """Download the object, or the folder of objects, at `url` to the new path `destination` atomically.

    Raises: StorageError, also if `destination` exists or an object changes during the download.
    """
    await download_objects(url, await _existing(url, environ), destination, environ)


async def download_objects(
    url: str, objects: Sequence[StoredObject], destination: Path, environ: Mapping[str, str]
) -> None:
    """Download the given objects, listed at `url`, to the new path `destination` atomically.

    If an object is `url` itself, `destination` becomes a file. Raises: StorageError as `download`.
    """
    location = Location.of(url)
    await location.run(environ, lambda store: _download(store, objects, destination))


async def fetch(url: str, cache: Path, environ: Mapping[str, str]) -> Path:
    """Return the path in `cache` of the present content of `url`; download it if it is missing.

    Concurrent calls, also from several processes, download it once. Raises: StorageError.
    """
    location = Location.of(url)
    objects = await _existing(url, environ)
    folder = cache / _digest(url, objects)
    found = folder / (PurePosixPath(location.key).name or "model")
    if not found.exists():
        async with locked(cache / f"{folder.name}.lock"):
            if not found.exists():
                await location.run(environ, lambda store: _download(store, objects, found))
    return found


async def _existing(url: str, environ: Mapping[str, str]) -> list[StoredObject]:
    objects = await list_objects(url, environ)
    if not objects:
        raise StorageError(f"{url} does not exist, or is an empty folder")
    return objects


async def _download(store: ObjectStore, objects: Sequence[StoredObject], destination: Path) -> None:
    if flawed := next((item for item in objects if item.flaw), None):
        raise StorageError(f"{printable(flawed.key)} can't be downloaded: {flawed.flaw}")
    destination.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=destination.parent))
    waiting = iter(objects)

    async def download_next() -> None:
        for item in waiting:
            target = part / "content" / item.name
            try:
                await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
                if isinstance(store, LocalStore):
                    await asyncio.to_thread(copy, item, target)
                else:
                    await _get(store, item, target)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise StorageError(f"{item.key} is both a file and a folder, which no file system supports") from None

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_PARALLEL_DOWNLOADS):
                group.create_task(download_next())
        if destination.exists():
            raise StorageError(f"{destination} already exists")
        (part / "content").rename(destination)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)


async def _get(store: ObjectStore, item: StoredObject, target: Path) -> None:
    try:
        answer = await obstore.get_async(store, item.key)
    except FileNotFoundError:
        if not item.size_bytes:
            return  # the marker of an empty folder
        raise StorageError(f"{item.key} was removed while it was read; try again") from None
    if (answer.meta["size"], (answer.meta["e_tag"] or "").strip('"')) != (item.size_bytes, item.etag):
        raise StorageError(f"{item.key} changed while it was read; try again")
    size_bytes = 0
    with target.open("xb") as file:
        async for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
            size_bytes += len(chunk)
            await asyncio.to_thread(file.write, chunk)
    if size_bytes != item.size_bytes:
        raise StorageError(f"{item.key} was truncated while it was read; try again")


def _digest(url: str, objects: Sequence[StoredObject]) -> str:
    marks = [(item.key, item.size_bytes, item.mark) for item in objects]
    return hashlib.sha256(repr([url.rstrip("/"), marks]).encode()).hexdigest()[:32]
