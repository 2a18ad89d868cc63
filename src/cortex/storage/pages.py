"""One page of a bucket's listing as the store sends it; the library only signs the question.

The library refuses a whole listing for one key that it can't take for a path (`a//b`, `..`, a line break). S3 and
Google Cloud Storage both answer the first version of the listing in the same XML.
"""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import unquote_plus, urlencode
from xml.etree import ElementTree

from cortex.storage.entries import StoredObject, flaw_of_name

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
