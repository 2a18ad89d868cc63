"""Reads s3://, gs:// and local paths through one library; knows nothing of models or APIs.

The ecosystem's own settings hold: `AWS_*` (with `AWS_ENDPOINT_URL`) and `GOOGLE_APPLICATION_CREDENTIALS`.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from cortex.errors import StorageError

SCHEMES = ("s3", "gs")
_RETRIES: Any = {"max_retries": 3}


@dataclass(frozen=True)
class StoredObject:
    """One object under a path."""

    key: str  #: from the root of the bucket
    size_bytes: int
    etag: str


def is_remote(path: str) -> bool:
    """Tell whether `path` is in an object store."""
    return urlsplit(path).scheme in SCHEMES


async def fetch(url: str, cache: Path, environ: Mapping[str, str]) -> Path:
    """Download the object, or the folder of objects, at `url`; return where it is under `cache`.

    The same content is downloaded once. It is there whole or not at all. Raises: StorageError.
    """
    bucket, prefix = _split(url)
    try:
        store = _open(bucket, environ)
        objects = await _list(store, prefix)
        if not objects:
            raise StorageError(f"{url} does not exist, or is empty")
        place = cache / _digest(url, objects)
        name = PurePosixPath(prefix).name or "model"
        if not place.exists():
            await _download(store, objects, prefix, place, name)
    except (BaseError, OSError, ValueError) as error:
        raise StorageError(f"{url} can't be read: {_first_line(error)}") from error
    return place / name


def _split(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    if not parts.netloc:
        raise StorageError(f"{url} names no bucket")
    return f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")


def _open(bucket: str, environ: Mapping[str, str]) -> ObjectStore:
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
    config: Any = {"endpoint": endpoint} if endpoint and bucket.startswith("s3:") else None
    # Plain HTTP is what a store on one's own machine speaks; the address says so itself.
    options: Any = {"allow_http": endpoint.startswith("http:")}
    return from_url(bucket, config=config, client_options=options, retry_config=_RETRIES)


async def _list(store: ObjectStore, prefix: str) -> Sequence[StoredObject]:
    """Return the object at `prefix`, or all below it as a folder, sorted; markers of empty folders are left out."""
    found: list[StoredObject] = []
    try:
        head = await obstore.head_async(store, prefix) if prefix else None
        if head and head["size"]:
            return [StoredObject(head["path"], head["size"], head["e_tag"] or "")]
    except FileNotFoundError:
        pass
    async for batch in obstore.list(store, f"{prefix}/" if prefix else None):
        found += [StoredObject(item["path"], item["size"], item["e_tag"] or "") for item in batch]
    return sorted((item for item in found if not item.key.endswith("/")), key=lambda item: item.key)


async def _download(store: ObjectStore, objects: Sequence[StoredObject], prefix: str, place: Path, name: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=place.parent))
    try:
        for item in objects:
            relative = item.key.removeprefix(prefix).strip("/")
            target = _inside(part, f"{name}/{relative}" if relative else name)
            target.parent.mkdir(parents=True, exist_ok=True)
            answer = await obstore.get_async(store, item.key)
            with target.open("wb") as file:
                async for chunk in answer.stream():
                    file.write(chunk)
        part.rename(place)
    except OSError:
        if not place.exists():  # else somebody was faster with the same content
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _inside(root: Path, relative: str) -> Path:
    """Resolve a name that comes from outside. Raises: StorageError if it leads out of `root`."""
    parts = PurePosixPath(relative).parts
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or relative.startswith("/"):
        raise StorageError(f"the object {relative!r} has a name that no file can have")
    return root.joinpath(*parts)


def _digest(url: str, objects: Sequence[StoredObject]) -> str:
    text = repr([url, [(item.key, item.size_bytes, item.etag) for item in objects]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
