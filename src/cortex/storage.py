"""Lists, reads, writes and downloads at s3://, gs:// and local paths; knows nothing of models or APIs.

The only module that knows the library. What others set up for their own tools holds: see `storage_settings`.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import GCSStore, LocalStore, ObjectStore, S3Store

from cortex.errors import StorageError
from cortex.filelock import locked
from cortex.storage_settings import StoreSettings, endpoint_name, gs_settings, s3_settings

T = TypeVar("T")

SCHEMES = ("s3", "gs")
_RETRIES: Any = {"max_retries": 3}
#: Big objects take as long as they take; silence does not.
_TIMEOUTS: Any = {"connect_timeout": "5s", "read_timeout": "60s", "timeout": "24h"}
_PARALLEL_DOWNLOADS = 8
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class StoredObject:
    """One object."""

    key: str  #: from the root of the bucket
    size_bytes: int
    etag: str  #: without quotes; empty where a store has none
    modified_at: datetime


def is_remote(path: str) -> bool:
    """Tell whether `path` is in an object store."""
    return urlsplit(path).scheme in SCHEMES


async def list_objects(url: str, environ: Mapping[str, str]) -> list[StoredObject]:
    """Return the object at `url`, or all below it as a folder, sorted by key; nothing there is an empty list.

    Markers of folders are left out. Raises: StorageError.
    """
    place = _Place.of(url)
    return await place.run(environ, lambda store: _list(store, place.key))


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
    place = _Place.of(url)
    objects = await _existing(place, environ)
    await place.run(environ, lambda store: _download(store, objects, place, destination))


async def fetch(url: str, cache: Path, environ: Mapping[str, str]) -> Path:
    """Download what is at `url`, unless its present content is in `cache`; return where it is there.

    However many ask at once, in however many processes, it is downloaded once. Raises: StorageError.
    """
    place = _Place.of(url)
    objects = await _existing(place, environ)
    folder = cache / _digest(url, objects)
    found = folder / (PurePosixPath(place.key).name or "model")
    if not found.exists():
        async with locked(cache / f"{folder.name}.lock"):
            if not found.exists():
                await place.run(environ, lambda store: _download(store, objects, place, found))
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

    async def run(self, environ: Mapping[str, str], action: Callable[[ObjectStore], Awaitable[T]]) -> T:
        """Do something in the store. Raises: StorageError, in plain words."""
        settings = StoreSettings()
        try:
            settings = await asyncio.to_thread(self._settings, environ)
            try:
                return await action(self._open(settings.config, settings.allow_http))
            except BaseError as error:
                if not (settings.may_be_unsigned and _is_without_credentials(error)):
                    raise
                return await action(self._open({**settings.config, "skip_signature": "true"}, settings.allow_http))
        except (BaseError, OSError, ValueError) as error:
            raise StorageError(self._explain(error, settings)) from error

    def _settings(self, environ: Mapping[str, str]) -> StoreSettings:
        if self.scheme == "s3":
            return s3_settings(self.bucket, environ)
        return gs_settings(environ) if self.scheme == "gs" else StoreSettings()

    def _open(self, config: Mapping[str, str], allow_http: bool) -> ObjectStore:
        options: Any = {"allow_http": allow_http, **_TIMEOUTS}
        settings: Any = dict(config)
        if self.scheme == "s3":
            return S3Store(self.bucket, config=settings, client_options=options, retry_config=_RETRIES)
        if self.scheme == "gs":
            return GCSStore(self.bucket, config=settings, client_options=options, retry_config=_RETRIES)
        return LocalStore("/", mkdir=True)

    def _explain(self, error: Exception, settings: StoreSettings) -> str:
        text = str(error)
        host = endpoint_name(settings, self.scheme)
        if "NoSuchBucket" in text or "The specified bucket does not exist" in text:
            return f"{self.url}: there is no bucket {self.bucket} at {host}"
        if isinstance(error, FileNotFoundError):
            return f"{self.url} does not exist"
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError) or "AccessDenied" in text:
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


async def _existing(place: _Place, environ: Mapping[str, str]) -> list[StoredObject]:
    objects = await place.run(environ, lambda store: _list(store, place.key))
    if not objects:
        raise StorageError(f"{place.url} does not exist, or is an empty folder")
    return objects


async def _list(store: ObjectStore, key: str) -> list[StoredObject]:
    alone: StoredObject | None = None
    if key:
        try:
            alone = _stored(await obstore.head_async(store, key))
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
        if alone and alone.size_bytes:
            return [alone]
    found: list[StoredObject] = []
    try:
        async for batch in obstore.list(store, f"{key}/" if key else None):
            found += [_stored(item) for item in batch]
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise
    # An empty object with others below it only marks the folder; the library hides the slash that its name ends in.
    folders = {str(folder) for item in found for folder in PurePosixPath(item.key).parents} | {key}
    objects = [item for item in found if item.size_bytes or item.key not in folders]
    return sorted(objects, key=lambda item: item.key) or ([alone] if alone else [])


def _stored(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], (meta["e_tag"] or "").strip('"'), meta["last_modified"])


async def _download(store: ObjectStore, objects: Sequence[StoredObject], place: _Place, destination: Path) -> None:
    destination.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=destination.parent))
    try:
        targets = [(item, _inside(part, item.key.removeprefix(place.key).strip("/"))) for item in objects]
        turns = asyncio.Semaphore(_PARALLEL_DOWNLOADS)

        async def get(item: StoredObject, target: Path) -> None:
            async with turns:
                await _get(store, item, target)

        async with asyncio.TaskGroup() as group:
            for item, target in targets:
                group.create_task(get(item, target))
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
    size_bytes = 0
    await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
    with target.open("xb") as file:
        async for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
            size_bytes += len(chunk)
            await asyncio.to_thread(file.write, chunk)
    if (size_bytes, _stored(answer.meta).etag) != (item.size_bytes, item.etag):
        raise StorageError(f"{item.key} changed while it was read; try again")


def _inside(part: Path, relative: str) -> Path:
    """Return where an object goes. Raises: StorageError if its name, which comes from outside, leads out of there."""
    names = ["content", *(relative.split("/") if relative else [])]
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise StorageError(f"the object {relative!r} has a name that no file can have")
    return part.joinpath(*names)


def _digest(url: str, objects: Sequence[StoredObject]) -> str:
    # The time counts only where there is no better mark of a change.
    marks = [(item.key, item.size_bytes, item.etag or item.modified_at.isoformat()) for item in objects]
    return hashlib.sha256(repr([url.rstrip("/"), marks]).encode()).hexdigest()[:32]


def _is_without_credentials(error: Exception) -> bool:
    """Tell whether the library looked for the credentials of a cloud's machine, and we are on none."""
    text = str(error)
    return "169.254." in text or "metadata.google.internal" in text


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
