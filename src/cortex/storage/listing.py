"""One page of a bucket's listing as the store sends it; the library only signs the question.

The library refuses a whole listing for one key that it can't take for a path (`a//b`, `..`, a line break). S3 and
Google Cloud Storage both answer the first version of the listing in the same XML.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_plus, urlencode
from xml.etree import ElementTree

import obstore
from obstore.exceptions import BaseError, GenericError, InvalidPathError
from obstore.store import ObjectStore

from cortex.errors import StorageError
from cortex.storage.credentials import StoreSettings
from cortex.storage.local_files import file_batches, prefix_batches
from cortex.storage.locations import Location, is_without_credentials
from cortex.storage.objects import StoredObject, flaw_of_name

#: As many as a page of a listing has.
_BATCH = 1000
_SIGNED_FOR = timedelta(minutes=5)
#: Empty objects that are looked at together: each may be a mark of a folder.
_PARALLEL_LOOKS = 32


async def walk(url: str, environ: Mapping[str, str]) -> AsyncGenerator[list[StoredObject], None]:
    """Go through the object at `url`, or all below it as a folder, in batches: memory doesn't grow with their number.

    Marks of folders with something in them are left out. Objects that can't be downloaded say so by their `flaw`.
    A bucket's come sorted. Close it if you leave early. Raises: StorageError.
    """
    location = Location.of(url)
    if location.scheme == "file":
        batches = _in_threads(location, file_batches(Path("/") / location.key))
    else:
        batches = _without_marks(
            _remote_batches(location, environ, lambda settings: _batches_or_object(location, settings))
        )
    async for batch in batches:
        if batch:
            yield batch


async def walk_prefix(url: str, environ: Mapping[str, str]) -> AsyncGenerator[list[StoredObject], None]:
    """Go through everything whose URL begins with `url`, be that in the middle of a name, in batches like `walk`.

    Marks of folders are left out. Close it if you leave early. Raises: StorageError.
    """
    location = Location.of(url)
    if location.scheme == "file":
        batches = _in_threads(location, prefix_batches(url if url.startswith("/") else f"/{location.key}"))
    else:
        prefix = url.partition(f"//{location.bucket}")[2].removeprefix("/")
        batches = _remote_batches(location, environ, lambda settings: _below_prefix(location, settings, prefix))
    async for batch in batches:
        if batch:
            yield batch


@dataclass(frozen=True)
class _Range:
    """Which keys to list: those that begin with `prefix`, later than `after`."""

    folder: str  #: what is in `prefix` up to its last slash: all that the library can ask for
    prefix: str
    after: str = ""


async def _in_threads(location: Location, batches: Iterator[list[StoredObject]]) -> AsyncIterator[list[StoredObject]]:
    try:
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield batch
    except OSError as error:
        raise StorageError(location.explain(error, StoreSettings())) from error


async def _remote_batches(
    location: Location,
    environ: Mapping[str, str],
    batches: Callable[[StoreSettings], AsyncIterator[list[StoredObject]]],
) -> AsyncIterator[list[StoredObject]]:
    settings = StoreSettings()
    try:
        settings = await asyncio.to_thread(location.settings, environ)
        try:
            async for batch in batches(settings):
                yield batch
        except BaseError as error:  # only with the first request, before there is a batch
            if not (settings.may_be_unsigned and is_without_credentials(error)):
                raise
            async for batch in batches(settings.unsigned()):
                yield batch
    except (BaseError, OSError, ValueError) as error:
        raise StorageError(location.explain(error, settings)) from error


async def _batches_or_object(location: Location, settings: StoreSettings) -> AsyncIterator[list[StoredObject]]:
    is_empty = True
    try:
        async for batch in _batches(location, settings, _Range(location.base, location.base)):
            is_empty = is_empty and not batch
            yield batch
        if is_empty and location.key:
            yield [_stored(await obstore.head_async(location.open(settings), location.key), location.base)]
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise


async def _below_prefix(location: Location, settings: StoreSettings, prefix: str) -> AsyncIterator[list[StoredObject]]:
    folder = prefix[: prefix.rfind("/") + 1]
    store, wanted, first = location.open(settings), _Range(folder, prefix, prefix), []
    if prefix != folder:
        # Listing begins after a key, so the one that is the prefix itself is asked for.
        try:
            first = [_stored(await obstore.head_async(store, prefix), folder)]
        except FileNotFoundError:
            pass
        except (InvalidPathError, ValueError):
            wanted = replace(wanted, after="")  # no name for the library: `_batches` will ask without it
    else:
        wanted = replace(wanted, after="")
    yield first
    last = prefix if first else ""
    async for batch in _batches(location, settings, wanted):
        found: list[StoredObject] = []
        for item in batch:
            # The library hides the slash that a mark ends in, so a mark's key may seem out of order.
            if item.key.startswith(prefix) and item.key > last:
                found.append(item)
                last = item.key
        yield await _that_are_no_marks(store, found)
        if batch and batch[-1].key[: len(prefix)] > prefix:
            return


async def _that_are_no_marks(store: ObjectStore, objects: list[StoredObject]) -> list[StoredObject]:
    """Leave out those whose real key ends in a slash; only empty ones are looked at."""
    looks = asyncio.Semaphore(_PARALLEL_LOOKS)

    async def is_mark(item: StoredObject) -> bool:
        if item.size_bytes:
            return False
        if item.flaw:
            return item.key.endswith("/")  # of two slashes one was hidden
        async with looks:
            try:
                await obstore.head_async(store, item.key)
            except FileNotFoundError:
                return True
            return False

    marks = await asyncio.gather(*map(is_mark, objects))
    return [item for item, is_one in zip(objects, marks, strict=True) if not is_one]


async def _batches(location: Location, settings: StoreSettings, wanted: _Range) -> AsyncIterator[list[StoredObject]]:
    """List by the library; where it refuses a page for an odd key, read that page ourselves and go on after it."""
    store, last = location.open(settings), wanted.after
    while True:
        try:
            found = obstore.list(store, wanted.folder or None, offset=last or None, chunk_size=_BATCH)
            async for batch in found:
                objects = [_stored(item, wanted.folder) for item in batch]
                last = objects[-1].key
                yield objects
            return
        except (InvalidPathError, GenericError, ValueError) as error:
            refusal: Exception = error
        if not _is_about_names(refusal):
            raise refusal
        after: str | None = last
        while after is not None:
            page = await _page(location, settings, replace(wanted, after=after), refusal)
            yield [item for item in page.objects if item.key != last]
            after = page.last_key
            if after is not None and flaw_of_name(after) is None:
                last = after
                break
        else:
            return


async def _page(location: Location, settings: StoreSettings, wanted: _Range, refusal: Exception) -> Page:
    """Read one page of the listing ourselves, with the library's signature."""
    address = page_address(location.scheme, location.bucket, settings.config, wanted.prefix, wanted.after)
    try:
        config = signing(location.scheme, settings.config, address)
        if config is not None:
            store: Any = location.open(replace(settings, config=config))
            address = await obstore.sign_async(store, "GET", "", _SIGNED_FOR)
        data = await asyncio.to_thread(fetch_page, address)
        return await asyncio.to_thread(read_page, data, wanted.folder)
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


def _stored(meta: Any, base: str) -> StoredObject:
    key, etag = meta["path"], (meta["e_tag"] or "").strip('"')
    name = key[len(base) :]
    return StoredObject(key, name, meta["size"], etag, meta["last_modified"], flaw_of_name(name))


def _is_about_names(error: Exception) -> bool:
    """Tell whether the library refused a listing for what is in it."""
    # A control character makes the XML unreadable, and at some servers unwritable.
    text = str(error)
    marks = ("Could not parse path", "list response", "status code: 500")
    return isinstance(error, InvalidPathError) or any(mark in text for mark in marks)


_GOOGLE = "https://storage.googleapis.com"
_TIMEOUT_S = 60.0


class Page(NamedTuple):
    """Some objects in a row."""

    objects: list[StoredObject]
    last_key: str | None  #: where the next page begins; None: there is none


def page_address(scheme: str, bucket: str, config: Mapping[str, str], prefix: str, after: str) -> str:
    """Return where the page after the key `after` is. The library appends "/" to it, which stores ignore in "x-id"."""
    query = urlencode({"prefix": prefix, "marker": after, "max-keys": "1000", "encoding-type": "url", "x-id": ""})
    return f"{_bucket_address(scheme, bucket, config)}?{query}"


def signing(scheme: str, config: Mapping[str, str], address: str) -> dict[str, str] | None:
    """Return the configuration with which the library signs `address` as its object ""; None: it needs no signature."""
    if scheme == "gs":
        return None if is_emulated(config) or "skip_signature" in config else {**config, "base_url": address}
    if "skip_signature" in config:
        return None
    return {**config, "endpoint": address, "virtual_hosted_style_request": "true"}


def is_emulated(config: Mapping[str, str]) -> bool:
    """Tell whether these are the settings of an emulator of Google Cloud Storage."""
    return "gcs_base_url" in config.get("service_account_key", "")


def fetch_page(address: str) -> bytes:
    """Return the answer; blocks. Raises: OSError, ValueError."""
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error


def read_page(data: bytes, prefix: str) -> Page:
    """Read the answer. Raises: ValueError if it is none."""
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise ValueError(f"the listing is no XML: {error}") from None
    is_encoded = any(_name(child) == "EncodingType" and child.text == "url" for child in root)
    items = [{_name(child): child.text or "" for child in item} for item in root if _name(item) == "Contents"]
    keys = [unquote_plus(item["Key"]) if is_encoded else item["Key"] for item in items]
    is_truncated = any(_name(child) == "IsTruncated" and child.text == "true" for child in root)
    objects = [_object(key, prefix, item) for key, item in zip(keys, items, strict=True)]
    return Page(objects, keys[-1] if is_truncated and keys else None)


def _object(key: str, prefix: str, item: Mapping[str, str]) -> StoredObject:
    # As the library does it: the mark of a folder is named like the folder.
    key = key.removesuffix("/")
    name = key[len(prefix) :]
    modified_at = datetime.fromisoformat(item["LastModified"]).astimezone(UTC)
    return StoredObject(key, name, int(item["Size"]), item.get("ETag", "").strip('"'), modified_at, flaw_of_name(name))


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _bucket_address(scheme: str, bucket: str, config: Mapping[str, str]) -> str:
    if scheme == "gs":
        key = json.loads(config["service_account_key"]) if is_emulated(config) else {}
        return f"{key.get('gcs_base_url', _GOOGLE)}/{bucket}"
    endpoint = config.get("endpoint", "").rstrip("/")
    if endpoint and config.get("virtual_hosted_style_request") == "true":
        return f"{endpoint}/"
    return f"{endpoint or 'https://s3.{}.amazonaws.com'.format(config['region'])}/{bucket}"
