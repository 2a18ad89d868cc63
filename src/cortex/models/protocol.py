"""The words between the model agent and its clients: one JSON object per line, over a unix socket.

A client says what it watches, uses, fetches and releases; the agent answers. Whatever can't be read is a ValueError,
never another. Light: supervisors and workers import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import orjson

from cortex.models.spec import Layout, ModelSource

#: A line may be so long; a set of 100,000 digests fits.
MAX_LINE_BYTES = 8 * 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Watch:
    """Tell me the catalogue of this source, now and whenever it changes; once per connection."""

    api: str
    source: ModelSource


@dataclass(frozen=True)
class Using:
    """These contents have to stay on disk for me; replaces what I said before."""

    digests: frozenset[str]


@dataclass(frozen=True)
class Fetch:
    """Have this content on disk, and keep it there until I release it or hang up."""

    id: int  #: of the connection's own choosing; the answer carries it
    api: str
    source: ModelSource
    model: str
    version: str
    digest: str


@dataclass(frozen=True)
class Release:
    """I no longer need what I fetched."""

    digest: str


@dataclass(frozen=True)
class Fetched:
    """The content is in the folder `path`."""

    id: int
    path: str


@dataclass(frozen=True)
class Failed:
    """The content can't be had; `message` is one line."""

    id: int
    message: str


@dataclass(frozen=True)
class CatalogueNews:
    """Files with the newest catalogues; `error`: why the source can't be listed just now."""

    confirmed: str | None
    candidate: str | None
    error: str | None


Request = Watch | Using | Fetch | Release
Answer = Fetched | Failed | CatalogueNews


def write(message: Request | Answer) -> bytes:
    """Return a message as one line; `read_request` and `read_answer` are the inverse."""
    return orjson.dumps(_fields(message)) + b"\n"


def read_request(line: bytes) -> Request:
    """Read what a client said. Raises: ValueError, with what is wrong."""
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
    """Read what the agent said; None for what only a newer agent knows. Raises: ValueError."""
    data = _object(line)
    match data.get("op"):
        case "fetched":
            return Fetched(_get(data, "id", int), _get(data, "path", str))
        case "failed":
            return Failed(_get(data, "id", int), _get(data, "message", str))
        case "catalogue":
            return CatalogueNews(*(_optional(data, name) for name in ("confirmed", "candidate", "error")))
        case _:
            return None


def _fields(message: Request | Answer) -> dict[str, Any]:
    match message:
        case Watch(api, source):
            return {"op": "watch", "api": api, "source": source.to_data()}
        case Using(digests):
            return _using(digests)
        case Fetch(number, api, source, model, version, digest):
            place = {"model": model, "version": version, "digest": digest}
            return {"op": "fetch", "id": number, "api": api, "source": source.to_data(), **place}
        case Release(digest):
            return {"op": "release", "digest": digest}
        case Fetched(number, path):
            return {"op": "fetched", "id": number, "path": path}
        case Failed(number, text):
            return {"op": "failed", "id": number, "message": text}
        case CatalogueNews(confirmed, candidate, error):
            return {"op": "catalogue", "confirmed": confirmed, "candidate": candidate, "error": error}


def _using(digests: Iterable[str]) -> dict[str, Any]:
    return {"op": "using", "digests": sorted(digests)}


def _object(line: bytes) -> dict[str, Any]:
    data = orjson.loads(line)  # its error is a ValueError
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
    """Read a digest, which becomes a file name."""
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
