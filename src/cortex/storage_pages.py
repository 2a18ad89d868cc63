"""One page of a bucket's listing as the store sends it: the question and the reading of the answer; does no I/O.

The library refuses a whole listing for one key that it can't take for a path (`a//b`, `..`, a line break). S3 and
Google Cloud Storage both answer the first version of the listing in the same XML.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import unquote_plus, urlencode
from xml.etree import ElementTree

from cortex.storage_entries import StoredObject, flaw_of_name


class Page(NamedTuple):
    """Some objects in a row."""

    objects: list[StoredObject]
    last_key: str | None  #: where the next page begins; None: there is none


def page_query(prefix: str, after: str) -> str:
    """Return the query that asks for the page after the key `after`."""
    return urlencode({"prefix": prefix, "marker": after, "max-keys": "1000", "encoding-type": "url"})


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
