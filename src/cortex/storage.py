"""Lists, reads, writes and downloads at s3://, gs:// and local paths; knows nothing of models or APIs.

The only module that knows the library. What others set up for their own tools holds: see `storage_settings`. Local
files are listed and copied by `storage_files`.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, GenericError, InvalidPathError, PermissionDeniedError, UnauthenticatedError
from obstore.store import GCSStore, LocalStore, ObjectStore, S3Store

from cortex.errors import StorageError
from cortex.filelock import locked
from cortex.storage_entries import StoredObject, flaw_of_name, printable
from cortex.storage_files import copy, file_batches
from cortex.storage_pages import Page, fetch_page, page_address, read_page, signing
from cortex.storage_settings import StoreSettings, endpoint_name, gs_settings, s3_settings

T = TypeVar("T")

SCHEMES = ("s3", "gs")
_RETRIES: Any = {"max_retries": 3}
#: Big objects take as long as they take; silence does not.
_TIMEOUTS: Any = {"connect_timeout": "5s", "read_timeout": "60s", "timeout": "24h"}
_PARALLEL_DOWNLOADS = 8
_CHUNK_BYTES = 4 * 1024 * 1024
#: As many as a page of a listing has.
_BATCH = 1000
_SIGNED_FOR = timedelta(minutes=5)


def is_remote(path: str) -> bool:
    """Tell whether `path` is in an object store."""
    return urlsplit(path).scheme in SCHEMES


async def list_objects(url: str, environ: Mapping[str, str]) -> list[StoredObject]:
    """Return the object at `url`, or all below it as a folder, sorted by key; nothing there is an empty list.

    Raises: StorageError.
    """
    found = [item async for batch in walk(url, environ) for item in batch]
    return sorted(found, key=lambda item: item.key)


async def walk(url: str, environ: Mapping[str, str]) -> AsyncGenerator[list[StoredObject], None]:
    """Go through what `list_objects` returns, in batches as they arrive: memory doesn't grow with their number.

    Marks of folders with something in them are left out. Objects that can't be downloaded say so by their `flaw`.
    A bucket's come sorted. Close it if you leave early. Raises: StorageError.
    """
    place = _Place.of(url)
    if place.scheme == "file":
        batches = _local_batches(place)
    else:
        batches = _without_marks(_remote_batches(place, environ))
    async for batch in batches:
        if batch:
            yield batch


async def read(url: str, environ: Mapping[str, str]) -> bytes:
    """Return the content of the object at `url`. Raises: StorageError."""
    place = _Place.of(url)

    async def get(store: ObjectStore) -> bytes:
        return bytes(await (await obstore.get_async(store, place.key)).bytes_async())

    return await place.run(environ, get)


async def write(url: str, data: bytes, environ: Mapping[str, str]) -> None:
    """Create or replace the object at `url`; readers see all of it or what was there. Raises: StorageError."""
    place = _Place.of(url)
    await place.run(environ, lambda store: obstore.put_async(store, place.key, data))


async def download(url: str, destination: Path, environ: Mapping[str, str]) -> None:
    """Download the object, or the folder of objects, at `url` to the new path `destination`, all of it or nothing.

    Raises: StorageError, also if something is already at `destination` or an object changes meanwhile.
    """
    await download_objects(url, await _existing(url, environ), destination, environ)


async def download_objects(
    url: str, objects: Sequence[StoredObject], destination: Path, environ: Mapping[str, str]
) -> None:
    """Download just these objects, as they were listed at `url`, to the new path `destination`: all or nothing.

    An object that is `url` itself becomes the file `destination`. Raises: StorageError as `download`.
    """
    place = _Place.of(url)
    await place.run(environ, lambda store: _download(store, objects, destination))


async def fetch(url: str, cache: Path, environ: Mapping[str, str]) -> Path:
    """Download what is at `url`, unless its present content is in `cache`; return where it is there.

    However many ask at once, in however many processes, it is downloaded once. Raises: StorageError.
    """
    place = _Place.of(url)
    objects = await _existing(url, environ)
    folder = cache / _digest(url, objects)
    found = folder / (PurePosixPath(place.key).name or "model")
    if not found.exists():
        async with locked(cache / f"{folder.name}.lock"):
            if not found.exists():
                await place.run(environ, lambda store: _download(store, objects, found))
    return found


@dataclass(frozen=True)
class _Place:
    """A URL taken apart; local paths are keys below the root of the file system."""

    url: str
    scheme: str
    bucket: str
    key: str

    @classmethod
    def of(cls, url: str) -> _Place:
        parts = urlsplit(url)
        if parts.scheme in SCHEMES:
            if not parts.netloc:
                raise StorageError(f"{url} names no bucket")
            # Not parts.path: `?` and `#` are letters like others in a key.
            return cls(url, parts.scheme, parts.netloc, url.partition(f"//{parts.netloc}")[2].strip("/"))
        if parts.scheme == "file":
            path = Path(unquote(parts.path))
        elif "://" in url:
            raise StorageError(f"{url}: {parts.scheme}:// is not supported; use s3://, gs:// or a local path")
        else:
            path = Path(url).expanduser().absolute()
        return cls(url, "file", "", str(path).strip("/"))

    @property
    def base(self) -> str:
        """Return what the keys below begin with."""
        return f"{self.key}/" if self.key else ""

    async def run(self, environ: Mapping[str, str], action: Callable[[ObjectStore], Awaitable[T]]) -> T:
        """Do something in the store. Raises: StorageError, in plain words."""
        settings = StoreSettings()
        try:
            settings = await asyncio.to_thread(self.settings, environ)
            try:
                return await action(self.open(settings))
            except BaseError as error:
                if not (settings.may_be_unsigned and _is_without_credentials(error)):
                    raise
                return await action(self.open(settings.unsigned()))
        except (BaseError, OSError, ValueError) as error:
            raise StorageError(self.explain(error, settings)) from error

    def settings(self, environ: Mapping[str, str]) -> StoreSettings:
        """Return how it is reached; may ask S3 for a region, so it blocks."""
        if self.scheme == "s3":
            return s3_settings(self.bucket, environ)
        return gs_settings(environ) if self.scheme == "gs" else StoreSettings()

    def open(self, settings: StoreSettings) -> ObjectStore:
        """Return the store."""
        options: Any = {"allow_http": settings.allow_http, **_TIMEOUTS}
        config: Any = dict(settings.config)
        if self.scheme == "s3":
            return S3Store(self.bucket, config=config, client_options=options, retry_config=_RETRIES)
        if self.scheme == "gs":
            return GCSStore(self.bucket, config=config, client_options=options, retry_config=_RETRIES)
        return LocalStore("/", mkdir=True)

    def explain(self, error: Exception, settings: StoreSettings) -> str:
        text = str(error)
        host = endpoint_name(settings, self.scheme)
        if "NoSuchBucket" in text or "The specified bucket does not exist" in text:
            return f"{self.url}: there is no bucket {self.bucket} at {host}"
        if isinstance(error, FileNotFoundError):
            return f"{self.url} does not exist"
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError) or any(
            mark in text for mark in ("AccessDenied", "status code: 403", "status code: 401")
        ):
            return f"{self.url}: {host if self.bucket else 'the file system'} denies access; {self._credentials_hint()}"
        if _is_without_credentials(error):
            return f"{self.url}: there are no credentials for {host}; {self._credentials_hint()}"
        if "error sending request" in text or "error trying to connect" in text:
            return f"{self.url}: {host} can't be reached"
        return f"{self.url} can't be read: {_first_line(text) or type(error).__name__}"

    def _credentials_hint(self) -> str:
        return {
            "s3": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) of the operator",
            "gs": "check GOOGLE_APPLICATION_CREDENTIALS of the operator",
        }.get(self.scheme, "check who may read it")


async def _existing(url: str, environ: Mapping[str, str]) -> list[StoredObject]:
    objects = await list_objects(url, environ)
    if not objects:
        raise StorageError(f"{url} does not exist, or is an empty folder")
    return objects


async def _local_batches(place: _Place) -> AsyncIterator[list[StoredObject]]:
    batches = file_batches(Path("/") / place.key)
    try:
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield batch
    except OSError as error:
        raise StorageError(place.explain(error, StoreSettings())) from error


async def _remote_batches(place: _Place, environ: Mapping[str, str]) -> AsyncIterator[list[StoredObject]]:
    settings = StoreSettings()
    try:
        settings = await asyncio.to_thread(place.settings, environ)
        try:
            async for batch in _batches_or_object(place, settings):
                yield batch
        except BaseError as error:  # only with the first request, before there is a batch
            if not (settings.may_be_unsigned and _is_without_credentials(error)):
                raise
            async for batch in _batches_or_object(place, settings.unsigned()):
                yield batch
    except (BaseError, OSError, ValueError) as error:
        raise StorageError(place.explain(error, settings)) from error


async def _batches_or_object(place: _Place, settings: StoreSettings) -> AsyncIterator[list[StoredObject]]:
    is_empty = True
    try:
        async for batch in _batches(place, settings):
            is_empty = is_empty and not batch
            yield batch
        if is_empty and place.key:
            yield [_stored(await obstore.head_async(place.open(settings), place.key), place)]
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise


async def _batches(place: _Place, settings: StoreSettings) -> AsyncIterator[list[StoredObject]]:
    """List by the library; where it refuses a page for an odd key, read that page ourselves and go on after it."""
    store, last = place.open(settings), ""
    while True:
        try:
            found = obstore.list(store, place.base or None, offset=last or None, chunk_size=_BATCH)
            async for batch in found:
                objects = [_stored(item, place) for item in batch]
                last = objects[-1].key
                yield objects
            return
        except (InvalidPathError, GenericError) as error:
            refusal = error
        if not _is_about_names(refusal):
            raise refusal
        after: str | None = last
        while after is not None:
            page = await _page(place, settings, after, refusal)
            yield [item for item in page.objects if item.key != last]
            after = page.last_key
            if after is not None and flaw_of_name(after) is None:
                last = after
                break
        else:
            return


async def _page(place: _Place, settings: StoreSettings, after: str, refusal: BaseError) -> Page:
    """Read one page of the listing ourselves, with the library's signature."""
    address = page_address(place.scheme, place.bucket, settings.config, place.base, after)
    try:
        config = signing(place.scheme, settings.config, address)
        if config is not None:
            store: Any = place.open(replace(settings, config=config))
            address = await obstore.sign_async(store, "GET", "", _SIGNED_FOR)
        data = await asyncio.to_thread(fetch_page, address)
        return await asyncio.to_thread(read_page, data, place.base)
    except (BaseError, OSError, ValueError):
        raise refusal from None


async def _without_marks(batches: AsyncIterator[list[StoredObject]]) -> AsyncIterator[list[StoredObject]]:
    """Leave out empty objects that only mark a folder: the listing goes on with what is in that folder.

    The library hides the slash that their names end in.
    """
    held: StoredObject | None = None
    async for batch in batches:
        kept: list[StoredObject] = []
        for item in batch:
            if held and not item.key.startswith(f"{held.key}/"):
                kept.append(held)
            held = None if item.size_bytes else item
            if item.size_bytes:
                kept.append(item)
        yield kept
    if held:
        yield [held]


def _stored(meta: Any, place: _Place) -> StoredObject:
    key, etag = meta["path"], (meta["e_tag"] or "").strip('"')
    name = key[len(place.base) :]
    return StoredObject(key, name, meta["size"], etag, meta["last_modified"], flaw_of_name(name))


async def _download(store: ObjectStore, objects: Sequence[StoredObject], destination: Path) -> None:
    if flawed := next((item for item in objects if item.flaw), None):
        raise StorageError(f"{printable(flawed.key)} can't be downloaded: {flawed.flaw}")
    destination.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=destination.parent))
    waiting = iter(objects)

    async def take_turns() -> None:
        for item in waiting:
            target = part / "content" / item.name
            try:
                await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
                if isinstance(store, LocalStore):
                    await asyncio.to_thread(copy, item, target)
                else:
                    await _get(store, item, target)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise StorageError(f"{item.key} is both a file and a folder, which no disk can hold") from None

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_PARALLEL_DOWNLOADS):
                group.create_task(take_turns())
        if destination.exists():
            raise StorageError(f"{destination} is already there")
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
            return  # the mark of a folder without anything in it
        raise StorageError(f"{item.key} was removed while it was read; try again") from None
    if (answer.meta["size"], (answer.meta["e_tag"] or "").strip('"')) != (item.size_bytes, item.etag):
        raise StorageError(f"{item.key} changed while it was read; try again")
    size_bytes = 0
    with target.open("xb") as file:
        async for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
            size_bytes += len(chunk)
            await asyncio.to_thread(file.write, chunk)
    if size_bytes != item.size_bytes:
        raise StorageError(f"{item.key} was cut off while it was read; try again")


def _digest(url: str, objects: Sequence[StoredObject]) -> str:
    marks = [(item.key, item.size_bytes, item.mark) for item in objects]
    return hashlib.sha256(repr([url.rstrip("/"), marks]).encode()).hexdigest()[:32]


def _is_about_names(error: BaseError) -> bool:
    """Tell whether the library refused a listing for what is in it."""
    # A control character makes the XML unreadable, and at some servers unwritable.
    text = str(error)
    return isinstance(error, InvalidPathError) or "list response" in text or "status code: 500" in text


def _is_without_credentials(error: Exception) -> bool:
    """Tell whether the library looked for the credentials of a cloud's machine, and we are on none."""
    text = str(error)
    return "169.254." in text or "metadata.google.internal" in text


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
