"""Read and write objects that do not fit into memory, in chunks.

An interrupted download resumes at its position, as long as the object is unchanged.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import ObjectStore

from cortex.errors import StorageError
from cortex.storage.credentials import StoreSettings
from cortex.storage.local_files import reading, remove, writing
from cortex.storage.locations import Location, is_without_credentials

#: Small, so that anything derived from one chunk is small too.
CHUNK_BYTES = 1024 * 1024
_PART_BYTES = 8 * 1024 * 1024
_PARALLEL_PARTS = 2
_RESUMPTIONS = 5
_PAUSE_S = 0.5

T = TypeVar("T")


class ObjectReader:
    """Reads objects with one connection pool per bucket."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._stores: dict[tuple[str, str], tuple[ObjectStore, StoreSettings]] = {}

    async def chunks(self, url: str, root: str | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the content of the object at `url` in chunks of about 1 MiB. Close the generator if you leave early.

        Raises: StorageError, also if the object changes during the download, or a link leads out of `root`.
        """
        location = Location.of(url)
        pieces = _file_chunks(location, root) if location.scheme == "file" else self._object_chunks(location)
        async for piece in pieces:
            yield piece

    async def _object_chunks(self, location: Location) -> AsyncIterator[bytes]:
        position, failures = 0, 0
        size: int | None = None
        etag: str | None = None
        while size is None or position < size:
            try:
                answer = await self._get(location, position, etag)
                size, etag = answer.meta["size"], answer.meta["e_tag"]
                async for piece in answer.stream(min_chunk_size=CHUNK_BYTES):
                    position += len(piece)
                    failures = 0
                    yield bytes(piece)
                if position < size:
                    raise OSError("the connection was closed early")
            except (BaseError, OSError, ValueError) as error:
                failures += 1
                if size is None or failures > _RESUMPTIONS or not _is_retryable(error):
                    raise StorageError(self._explain(location, error)) from error
                await asyncio.sleep(_PAUSE_S * failures)

    async def _get(self, location: Location, position: int, etag: str | None) -> obstore.GetResult:
        options: Any = {"range": {"offset": position}, "if_match": etag} if position else {}
        where = location.scheme, location.bucket
        if where not in self._stores:
            settings = await asyncio.to_thread(location.settings, self._environ)
            self._stores[where] = location.open(settings), settings
        store, settings = self._stores[where]
        try:
            return await obstore.get_async(store, location.key, options=options)
        except BaseError as error:
            if not (settings.may_be_unsigned and is_without_credentials(error)):
                raise
        self._stores[where] = location.open(settings.unsigned()), settings.unsigned()
        return await obstore.get_async(self._stores[where][0], location.key, options=options)

    def _explain(self, location: Location, error: Exception) -> str:
        if isinstance(error, PreconditionError):
            return f"{location.url} changed while it was read; try again"
        _, settings = self._stores.get((location.scheme, location.bucket), (None, StoreSettings()))
        return location.explain(error, settings)


async def upload(url: str, pieces: AsyncIterator[bytes], environ: Mapping[str, str], root: str | None = None) -> None:
    """Create or replace the object at `url` atomically with the concatenated pieces.

    Raises: StorageError, also if a link leads out of `root`.
    """
    location = Location.of(url)
    if location.scheme == "file":
        with location.explaining("write"):
            async with _in_threads(writing(location.path, Path(root) if root else None)) as file:
                async for piece in pieces:
                    await asyncio.to_thread(file.write, piece)
        return
    # No retry without a signature: the pieces are consumed, and public buckets are not writable anyway.
    settings = StoreSettings()
    try:
        settings = await asyncio.to_thread(location.settings, environ)
        store = location.open(settings)
        first = bytearray()
        async for piece in pieces:
            first += piece
            if len(first) > _PART_BYTES:
                content = _after(bytes(first), pieces)
                parts: Any = {"chunk_size": _PART_BYTES, "max_concurrency": _PARALLEL_PARTS}
                await obstore.put_async(store, location.key, content, **parts)
                return
        await obstore.put_async(store, location.key, bytes(first))
    except (BaseError, OSError, ValueError) as error:
        raise StorageError(location.explain(error, settings, "write")) from error


async def check_writable(url: str, environ: Mapping[str, str], root: str | None = None) -> None:
    """Check that objects can be created below `url`, by creating and deleting one.

    Raises: StorageError, also if a link leads out of `root`.
    """
    location = Location.of(f"{url.rstrip('/')}/.cortex-{uuid.uuid4().hex}")

    async def write_and_delete(store: ObjectStore) -> None:
        await obstore.put_async(store, location.key, b"")
        # Permission to write does not imply permission to delete.
        try:
            await obstore.delete_async(store, location.key)
        except (BaseError, OSError):
            return

    try:
        if location.scheme == "file":
            await asyncio.to_thread(_write_and_remove, location, Path(root) if root else None)
        else:
            await location.run(environ, write_and_delete, "write")
    except StorageError as error:
        raise StorageError(str(error).replace(location.url, url, 1)) from error


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


def _write_and_remove(location: Location, root: Path | None) -> None:
    with location.explaining("write"):
        with writing(location.path, root):
            pass
        remove(location.path, root)


async def _file_chunks(location: Location, root: str | None) -> AsyncIterator[bytes]:
    with location.explaining():
        async with _in_threads(reading(location.path, Path(root) if root else None)) as file:
            before = os.fstat(file.fileno())
            while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield piece
            after = os.fstat(file.fileno())
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise StorageError(f"{location.url} changed while it was read; try again")


@asynccontextmanager
async def _in_threads(context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and exit a context in threads: a network file system may block."""
    entered = await asyncio.to_thread(context.__enter__)
    try:
        yield entered
    except BaseException as error:
        await asyncio.to_thread(context.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(context.__exit__, None, None, None)


def _is_retryable(error: Exception) -> bool:
    """Return False for errors that another attempt cannot fix."""
    refusals = FileNotFoundError | PermissionError | PermissionDeniedError | UnauthenticatedError | PreconditionError
    return not isinstance(error, refusals)
