"""List the objects at a location or below a prefix, page by page, sorted by key.

obstore rejects a whole listing that contains one key that is not a valid path (`a//b`, `..`, a line break). Such a page
is fetched again without obstore, which then only signs the request: S3 and Google Cloud Storage both answer version 1
of the listing in the same XML. obstore takes any other XML, such as the page of a proxy, for an empty last page.
Therefore the end of an empty listing, or of one that may have several pages, is fetched in this way, too. obstore also
hides the trailing slash of folder markers.
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
from cortex.storage.locations import Location, is_without_credentials, store_message
from cortex.storage.objects import StoredObject, flaw_of_name, printable

#: Objects per page of a listing.
_BATCH = 1000
_SHOWN_LENGTH = 200  #: of each of two messages
_SIGNED_FOR = timedelta(minutes=5)
#: Concurrent requests to find out which empty objects are folder markers.
_PARALLEL_CHECKS = 32


async def walk(
    url: str, environ: Mapping[str, str], root: str | None = None
) -> AsyncGenerator[list[StoredObject], None]:
    """Yield the object at `url`, or all objects below it, in batches, so that memory stays bounded.

    Markers of non-empty folders are left out. Objects that cannot be downloaded have a `StoredObject.flaw`,
    such as links out of the local folder `root` (default: `url`). Objects of a bucket are sorted. Close the generator
    if you leave early. Raises: StorageError.
    """
    location = Location.of(url)
    if location.scheme == "file":
        batches = _in_threads(location, file_batches(location.path, Path(root) if root else None))
    else:
        batches = _without_parent_markers(
            _remote_batches(location, environ, lambda settings: _batches_or_object(location, settings))
        )
    async for batch in batches:
        if batch:
            yield batch


async def walk_prefix(
    url: str, environ: Mapping[str, str], root: str | None = None
) -> AsyncGenerator[list[StoredObject], None]:
    """Yield all objects whose URL begins with `url`, which may end in the middle of a name, in batches like `walk`.

    Folder markers are left out. Close the generator if you leave early. Links that lead out of the local folder `root`
    are flaws; without one, they may lead anywhere. Raises: StorageError.
    """
    location = Location.of(url)
    if location.scheme == "file":
        prefix = url if url.startswith("/") else f"/{location.key}"
        batches = _in_threads(location, prefix_batches(prefix, Path(root) if root else None))
    else:
        prefix = url.partition(f"//{location.bucket}")[2].removeprefix("/")
        batches = _remote_batches(location, environ, lambda settings: _below_prefix(location, settings, prefix))
    async for batch in batches:
        if batch:
            yield batch


@dataclass(frozen=True)
class _Range:
    """The keys to list: those that begin with `prefix` and sort after `after`."""

    folder: str  #: `prefix` up to its last slash, the longest prefix that obstore can list
    prefix: str
    after: str = ""


async def _in_threads(location: Location, batches: Iterator[list[StoredObject]]) -> AsyncIterator[list[StoredObject]]:
    with location.explaining():
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield batch


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
        except BaseError as error:  # raised only by the first request, before the first batch
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
        # A listing starts after a key, so query the key that equals the prefix.
        try:
            first = [_stored(await obstore.head_async(store, prefix), folder)]
        except FileNotFoundError:
            pass
        except (InvalidPathError, ValueError):
            wanted = replace(wanted, after="")  # obstore rejects the name; list the whole folder instead
    else:
        wanted = replace(wanted, after="")
    yield first
    last = prefix if first else ""
    async for batch in _batches(location, settings, wanted):
        found: list[StoredObject] = []
        for item in batch:
            # obstore hides the trailing slash of a marker, so the marker's key can appear out of order.
            if item.key.startswith(prefix) and item.key > last:
                found.append(item)
                last = item.key
        yield await _without_markers_by_query(store, found)
        if batch and batch[-1].key[: len(prefix)] > prefix:
            return


async def _without_markers_by_query(store: ObjectStore, objects: list[StoredObject]) -> list[StoredObject]:
    """Leave out folder markers: empty objects whose real key ends in a slash."""
    checks = asyncio.Semaphore(_PARALLEL_CHECKS)

    async def is_marker(item: StoredObject) -> bool:
        if item.size_bytes:
            return False
        if item.flaw:
            return item.key.endswith("/")  # one of two trailing slashes was hidden
        async with checks:
            try:
                await obstore.head_async(store, item.key)
            except FileNotFoundError:
                return True
            return False

    markers = await asyncio.gather(*map(is_marker, objects))
    return [item for item, is_marked in zip(objects, markers, strict=True) if not is_marked]


async def _batches(location: Location, settings: StoreSettings, wanted: _Range) -> AsyncIterator[list[StoredObject]]:
    """List with obstore; where it rejects a page for an invalid key, fetch that page directly and continue after it.

    The last page is also fetched directly, unless the only page had objects.
    """
    store, last = location.open(settings), wanted.after
    while True:
        refusal: Exception | None = None
        count = 0
        try:
            found = obstore.list(store, wanted.folder or None, offset=last or None, chunk_size=_BATCH)
            async for batch in found:
                objects = [_stored(item, wanted.folder) for item in batch]
                last = objects[-1].key
                count += len(objects)
                yield objects
            if 0 < count < _BATCH:
                return
        except (InvalidPathError, GenericError, ValueError) as error:
            if not _is_about_names(error):
                raise
            refusal = error
        after: str | None = last
        while after is not None:
            page = await _page(location, settings, replace(wanted, after=after), refusal)
            yield [item for item in page.objects if item.key != last]
            after = page.last_key
            if refusal is not None and after is not None and flaw_of_name(after) is None:
                last = after
                break
        else:
            return


async def _page(location: Location, settings: StoreSettings, wanted: _Range, refusal: Exception | None) -> Page:
    """Fetch one page of the listing, signed by obstore; the error if that fails names `refusal`, too.

    Without one, this checks the end of a listing. Where that can't be signed, as with Google's instance credentials,
    the page is empty.
    """
    address = page_address(location.scheme, location.bucket, settings.config, wanted.prefix, wanted.after)
    try:
        config = signing(location.scheme, settings.config, address)
        if config is not None:
            store: Any = location.open(replace(settings, config=config))
            address = await obstore.sign_async(store, "GET", "", _SIGNED_FOR)
    except (BaseError, OSError, ValueError) as error:
        if refusal is not None:
            raise _both(refusal, error) from None
        return Page([], None)
    try:
        data = await asyncio.to_thread(fetch_page, address)
        return await asyncio.to_thread(read_page, data, wanted.folder, wanted.after)
    except (OSError, ValueError) as error:
        raise _both(refusal, error) if refusal else error from None


def _both(refusal: Exception, error: Exception) -> Exception:
    """Return the error for a page that neither obstore nor a direct request could list."""
    first, second = (store_message(str(each))[:_SHOWN_LENGTH] or type(each).__name__ for each in (refusal, error))
    return GenericError(f"{first}; listing it page by page failed, too: {second}")


async def _without_parent_markers(batches: AsyncIterator[list[StoredObject]]) -> AsyncIterator[list[StoredObject]]:
    """Leave out empty objects that mark a folder, recognized by the next key, which is inside the folder."""
    pending: StoredObject | None = None
    async for batch in batches:
        kept: list[StoredObject] = []
        for item in batch:
            if pending and not item.key.startswith(f"{pending.key}/"):
                kept.append(pending)
            pending = None if item.size_bytes else item
            if item.size_bytes:
                kept.append(item)
        yield kept
    if pending:
        yield [pending]


def _stored(meta: Any, base: str) -> StoredObject:
    key, etag = meta["path"], (meta["e_tag"] or "").strip('"')
    name = key[len(base) :]
    return StoredObject(key, name, meta["size"], etag, meta["last_modified"], flaw_of_name(name))


def _is_about_names(error: Exception) -> bool:
    """Return True if obstore rejected a listing because of the names in it."""
    # A control character makes the XML invalid; some servers fail to write it.
    text = str(error)
    signs = ("Could not parse path", "list response", "status code: 500")
    return isinstance(error, InvalidPathError) or any(sign in text for sign in signs)


_GOOGLE = "https://storage.googleapis.com"
_TIMEOUT_S = 60.0


class Page(NamedTuple):
    """One page of a listing."""

    objects: list[StoredObject]
    last_key: str | None  #: the start of the next page; None on the last page


def page_address(scheme: str, bucket: str, config: Mapping[str, str], prefix: str, after: str) -> str:
    """Return the URL of the page after the key `after`. obstore appends "/", which stores ignore in "x-id"."""
    query = urlencode({"prefix": prefix, "marker": after, "max-keys": "1000", "encoding-type": "url", "x-id": ""})
    return f"{_bucket_address(scheme, bucket, config)}?{query}"


def signing(scheme: str, config: Mapping[str, str], address: str) -> dict[str, str] | None:
    """Return the configuration with which obstore signs `address` as the object ""; None if no signature is needed."""
    if scheme == "gs":
        return None if is_emulated(config) or "skip_signature" in config else {**config, "base_url": address}
    if "skip_signature" in config:
        return None
    return {**config, "endpoint": address, "virtual_hosted_style_request": "true"}


def is_emulated(config: Mapping[str, str]) -> bool:
    """Return True for the settings of a Google Cloud Storage emulator."""
    return "gcs_base_url" in config.get("service_account_key", "")


def fetch_page(address: str) -> bytes:
    """Return the response body; blocks. Raises: OSError, ValueError."""
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error


def read_page(data: bytes, prefix: str, after: str = "") -> Page:
    """Parse the page of a listing after the key `after`. Raises: ValueError if it is anything else."""
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise ValueError(f"the listing is not valid XML: {error}") from None
    if _name(root) != "ListBucketResult":
        raise ValueError(f"the answer is no listing, but has the element {printable(_name(root))}; check the endpoint")
    is_encoded = any(_name(child) == "EncodingType" and child.text == "url" for child in root)
    items = [{_name(child): child.text or "" for child in item} for item in root if _name(item) == "Contents"]
    if not all({"Key", "LastModified", "Size"} <= item.keys() for item in items):
        raise ValueError("the listing has an object without its key, time or size")
    keys = [unquote_plus(item["Key"]) if is_encoded else item["Key"] for item in items]
    is_truncated = any(_name(child) == "IsTruncated" and child.text == "true" for child in root)
    objects = [_object(key, prefix, item) for key, item in zip(keys, items, strict=True)]
    if is_truncated and not (keys and keys[-1] > after):
        raise ValueError("the listing is truncated, but its next page does not begin after this one")
    return Page(objects, keys[-1] if is_truncated else None)


def _object(key: str, prefix: str, item: Mapping[str, str]) -> StoredObject:
    # As in obstore, a folder marker is named like the folder.
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
