"""Reads and writes what doesn't fit into memory, piece by piece; knows no listing.

A download that breaks off goes on where it was, for as long as the object is the same.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import ObjectStore

from cortex.errors import StorageError
from cortex.storage.credentials import StoreSettings
from cortex.storage.locations import Location, is_without_credentials

#: What is read at a time: small enough that what is made of it, too, is small.
CHUNK_BYTES = 1024 * 1024
_PART_BYTES = 8 * 1024 * 1024
_PARALLEL_PARTS = 2
_RESUMPTIONS = 5
_PAUSE_S = 0.5


class ObjectReader:
    """Reads many objects, with one connection pool per bucket."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._stores: dict[tuple[str, str], tuple[ObjectStore, StoreSettings]] = {}

    async def chunks(self, url: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of the object at `url` in pieces of about a MiB. Close it if you leave early.

        Raises: StorageError, also if the object changes meanwhile.
        """
        location = Location.of(url)
        pieces = _file_chunks(location) if location.scheme == "file" else self._object_chunks(location)
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
                    raise OSError("it was cut off")
            except (BaseError, OSError, ValueError) as error:
                failures += 1
                if size is None or failures > _RESUMPTIONS or not _may_pass(error):
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


async def upload(url: str, pieces: AsyncIterator[bytes], environ: Mapping[str, str]) -> None:
    """Create or replace the object at `url` with these pieces in a row; readers see all of it or what was there.

    Raises: StorageError.
    """
    location = Location.of(url)
    # A failed attempt has used up the pieces, so there is no second one: nobody may write without a signature anyway.
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


async def check_writable(url: str, environ: Mapping[str, str]) -> None:
    """Make sure that objects can be created below `url`, by creating one and removing it. Raises: StorageError."""
    location = Location.of(f"{url.rstrip('/')}/.cortex-{uuid.uuid4().hex}")

    async def try_it(store: ObjectStore) -> None:
        await obstore.put_async(store, location.key, b"")
        # Who may write need not be allowed to delete.
        try:
            await obstore.delete_async(store, location.key)
        except (BaseError, OSError):
            return

    try:
        await location.run(environ, try_it, "write")
    except StorageError as error:
        raise StorageError(str(error).replace(location.url, url, 1)) from error


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


async def _file_chunks(location: Location) -> AsyncIterator[bytes]:
    path = Path("/") / location.key
    try:
        with await asyncio.to_thread(path.open, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield piece
            after = os.fstat(file.fileno())
    except OSError as error:
        raise StorageError(location.explain(error, StoreSettings())) from error
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise StorageError(f"{location.url} changed while it was read; try again")


def _may_pass(error: Exception) -> bool:
    """Tell whether another attempt may go better."""
    refusals = FileNotFoundError | PermissionError | PermissionDeniedError | UnauthenticatedError | PreconditionError
    return not isinstance(error, refusals)
