"""The protocol between the model agent and its clients: one JSON object per line over a Unix socket.

Supervisors send `Watch` and `Using`, workers `Fetch` and `Release`. Malformed messages raise ValueError and nothing
else. Supervisors and workers import this module, so it must stay light.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import orjson

from cortex.models.spec import Layout, ModelSource

#: Maximum length of a line; a set of 100,000 digests fits.
MAX_LINE_BYTES = 8 * 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Watch:
    """Subscribe to the catalogue of a source; once per connection."""

    api: str
    source: ModelSource


@dataclass(frozen=True)
class Using:
    """Keep these contents on disk for this client; replaces the previous set."""

    digests: frozenset[str]


@dataclass(frozen=True)
class Fetch:
    """Download a content and keep it on disk until this client releases it or disconnects."""

    id: int  #: chosen by the client; the answer repeats it
    api: str
    source: ModelSource
    model: str
    version: str
    digest: str


@dataclass(frozen=True)
class Release:
    """Release a fetched content."""

    digest: str


@dataclass(frozen=True)
class Fetched:
    """A fetch succeeded: the content is in the folder `path`."""

    id: int
    path: str


@dataclass(frozen=True)
class FetchFailed:
    """A fetch failed; `message` is one line."""

    id: int
    message: str


@dataclass(frozen=True)
class CatalogueUpdate:
    """Files with the newest catalogues; `error` is the reason why the source can't be listed at present."""

    confirmed: str | None
    candidate: str | None
    error: str | None


Request = Watch | Using | Fetch | Release
Answer = Fetched | FetchFailed | CatalogueUpdate


def write(message: Request | Answer) -> bytes:
    """Return a message as one line; `read_request` and `read_answer` parse it."""
    return orjson.dumps(_fields(message)) + b"\n"


def read_request(line: bytes) -> Request:
    """Parse a request. Raises: ValueError with the reason."""
    data = _object(line)
    match data.get("op"):
        case "watch":
            return Watch(_get(data, "api", str), _source(data))
        case "using":
            return Using(frozenset(_digest(item) for item in _get(data, "digests", list)))
        case "fetch":
            model, version = _get(data, "model", str), _get(data, "version", str)
            digest = _digest(data.get("digest"))
            return Fetch(_get(data, "id", int), _get(data, "api", str), _source(data), model, version, digest)
        case "release":
            return Release(_digest(data.get("digest")))
        case other:
            raise ValueError(f"unknown op {other!r}")


def read_answer(line: bytes) -> Answer | None:
    """Parse an answer; return None for an unknown kind, which a newer agent may send. Raises: ValueError."""
    data = _object(line)
    match data.get("op"):
        case "fetched":
            return Fetched(_get(data, "id", int), _get(data, "path", str))
        case "failed":
            return FetchFailed(_get(data, "id", int), _get(data, "message", str))
        case "catalogue":
            return CatalogueUpdate(*(_optional(data, name) for name in ("confirmed", "candidate", "error")))
        case _:
            return None


def _fields(message: Request | Answer) -> dict[str, Any]:
    match message:
        case Watch(api, source):
            return {"op": "watch", "api": api, "source": source.to_data()}
        case Using(digests):
            return {"op": "using", "digests": sorted(digests)}
        case Fetch(number, api, source, model, version, digest):
            content = {"model": model, "version": version, "digest": digest}
            return {"op": "fetch", "id": number, "api": api, "source": source.to_data(), **content}
        case Release(digest):
            return {"op": "release", "digest": digest}
        case Fetched(number, path):
            return {"op": "fetched", "id": number, "path": path}
        case FetchFailed(number, text):
            return {"op": "failed", "id": number, "message": text}
        case CatalogueUpdate(confirmed, candidate, error):
            return {"op": "catalogue", "confirmed": confirmed, "candidate": candidate, "error": error}


def _object(line: bytes) -> dict[str, Any]:
    data = orjson.loads(line)  # JSONDecodeError is a ValueError
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _get(data: dict[str, Any], name: str, kind: type[T]) -> T:
    value = data.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _optional(data: dict[str, Any], name: str) -> str | None:
    return None if data.get(name) is None else _get(data, name, str)


def _digest(value: object) -> str:
    """Validate a digest, which becomes a file name."""
    if not isinstance(value, str) or not value.isascii() or not value.isalnum() or len(value) > 128:
        raise ValueError("digest must be a string of letters and digits")
    return value


def _source(data: dict[str, Any]) -> ModelSource:
    try:
        source = ModelSource.from_data(_get(data, "source", dict))
        if bool(source.paths) == (source.dir is not None) or source.poll_interval_s <= 0:
            raise ValueError("exactly one of paths and dir, and a poll interval above 0")
        if not all(isinstance(url, str) for url in (source.dir or "", *(path.url for path in source.paths))):
            raise ValueError("a URL is a string")
        if source.layout not in get_args(Layout):
            raise ValueError(f"unknown layout {source.layout!r}")
        return source
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"source can't be read: {error!r}") from error
