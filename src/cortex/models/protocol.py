"""The protocol between the model agent and its clients: one JSON object per line over a Unix socket.

Supervisors send `Watch` and `Using`, workers `Fetch` and `Release`. Malformed messages raise ValueError and nothing
else. Supervisors and workers import this module, so it must stay light.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

import orjson

from cortex.models.spec import ModelSource
from cortex.processes.codec import decode, encode

#: Maximum length of a line; a set of 100,000 digests fits.
MAX_LINE_BYTES = 8 * 1024 * 1024

T = TypeVar("T")


def _check_digest(digest: str) -> str:
    """Validate a digest, which becomes a file name."""
    if not digest.isascii() or not digest.isalnum() or len(digest) > 128:
        raise ValueError("letters and digits expected")
    return digest


def _check_source(source: ModelSource) -> ModelSource:
    if bool(source.paths) == (source.dir is not None) or source.poll_interval_s <= 0:
        raise ValueError("exactly one of paths and dir, and a poll interval above 0")
    return source


Digest = Annotated[str, _check_digest]
Source = Annotated[ModelSource, _check_source]


@dataclass(frozen=True)
class Watch:
    """Subscribe to the catalogue of a source; once per connection."""

    api: str
    source: Source


@dataclass(frozen=True)
class Using:
    """Keep these contents on disk for this client; replaces the previous set."""

    digests: frozenset[Digest]


@dataclass(frozen=True)
class Fetch:
    """Download a content and keep it on disk until this client releases it or disconnects."""

    id: int  #: chosen by the client; the answer repeats it
    api: str
    source: Source
    model: str
    version: str
    digest: Digest


@dataclass(frozen=True)
class Release:
    """Release a fetched content."""

    digest: Digest


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

    confirmed: str | None = None
    candidate: str | None = None
    error: str | None = None


Request = Watch | Using | Fetch | Release
Answer = Fetched | FetchFailed | CatalogueUpdate

_REQUESTS: dict[str, type[Request]] = {"watch": Watch, "using": Using, "fetch": Fetch, "release": Release}
_ANSWERS: dict[str, type[Answer]] = {"fetched": Fetched, "failed": FetchFailed, "catalogue": CatalogueUpdate}
_NAMES = {kind: name for name, kind in (_REQUESTS | _ANSWERS).items()}


def write(message: Request | Answer) -> bytes:
    """Return a message as one line; `read_request` and `read_answer` parse it."""
    return orjson.dumps({"op": _NAMES[type(message)], **encode(message)}) + b"\n"


def read_request(line: bytes) -> Request:
    """Parse a request. Raises: ValueError with the reason."""
    request = _read(_REQUESTS, line)
    if request is None:
        raise ValueError("unknown op")
    return request


def read_answer(line: bytes) -> Answer | None:
    """Parse an answer; return None for an unknown kind, which a newer agent may send. Raises: ValueError."""
    return _read(_ANSWERS, line)


def _read(kinds: Mapping[str, type[T]], line: bytes) -> T | None:
    data = decode(dict, orjson.loads(line))  # JSONDecodeError is a ValueError
    kind = kinds.get(str(data.get("op")))
    return decode(kind, data) if kind else None
