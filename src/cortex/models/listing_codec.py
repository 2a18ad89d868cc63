"""How the model agent of a node asks the operator's for a listing, and what it is answered; pure.

A line of JSON each way. The answer's line says how many bytes follow it: the models that were found, left out where the
one who asks has the same already. Whatever can't be read is a ValueError, never another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from cortex.models.listing import Content, Folder, Listing, Marks, Prefix

MAX_LINE_BYTES = 64 * 1024
#: The models of a listing: 100,000 versions take about 12 MB.
MAX_MODELS_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class List:
    """Tell me a listing that began less than `newer_than_s` ago: a new one if none is younger than `max_age_s`."""

    prefix: Prefix
    max_age_s: float
    newer_than_s: float = math.inf
    known: str = ""  #: the state of the listing that I have


@dataclass(frozen=True)
class Listed:
    """A listing, without its models."""

    taken_at: float
    age_s: float  #: when this was sent
    objects: int
    is_cut: bool
    state: str  #: the same if the models are
    size: int  #: of what follows; 0: the models are those of the state that was known

    def listing(self, prefix: Prefix, models: Mapping[str, Folder]) -> Listing:
        """Put both together again."""
        return Listing(prefix, self.taken_at, models, self.objects, self.is_cut)


@dataclass(frozen=True)
class Unlisted:
    """The prefix can't be listed; `message` is one line."""

    message: str


@dataclass(frozen=True)
class Wait:
    """I am here; it takes longer."""


Answer = Listed | Unlisted | Wait


def write(message: List | Answer) -> bytes:
    """Return a message as one line; `read_request` and `read_answer` are the inverse."""
    return orjson.dumps(_fields(message)) + b"\n"


def read_request(line: bytes) -> List:
    """Read what a node asks. Raises: ValueError."""
    data = _object(line)
    try:
        newer_than_s = math.inf if data["newer_than_s"] is None else float(data["newer_than_s"])
        prefix = Prefix(_word(data["url"]), bool(data["is_dir"]))
        return List(prefix, float(data["max_age_s"]), newer_than_s, _word(data["known"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the request can't be read: {error!r}") from error


def read_answer(line: bytes) -> Answer:
    """Read what the operator's agent says. Raises: ValueError."""
    data = _object(line)
    try:
        match data.get("op"):
            case "wait":
                return Wait()
            case "unlisted":
                return Unlisted(_word(data["message"]))
            case "listed":
                times = float(data["taken_at"]), float(data["age_s"])
                size = int(data["size"])
                if not 0 <= size <= MAX_MODELS_BYTES:
                    raise ValueError(f"a listing of {size} bytes")
                return Listed(*times, int(data["objects"]), bool(data["is_cut"]), _word(data["state"]), size)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the answer can't be read: {error!r}") from error
    raise ValueError(f"unknown op {data.get('op')!r}")


def write_models(models: Mapping[str, Folder]) -> bytes:
    """Return the models of a listing; `read_models` is the inverse."""
    plain = {
        name: [
            {number: _plain(content) for number, content in folder.versions.items()},
            folder.rest and _plain(folder.rest),
            folder.is_file,
        ]
        for name, folder in models.items()
    }
    try:
        return orjson.dumps(plain)
    except TypeError:  # half of a surrogate pair in a name, which a store may have
        return json.dumps(plain).encode()


def read_models(data: bytes) -> dict[str, Folder]:
    """Read what `write_models` returned. Raises: ValueError."""
    try:
        plain = orjson.loads(data)
    except ValueError:
        plain = json.loads(data)
    try:
        return {
            name: Folder(
                {number: _content(each) for number, each in versions.items()}, rest and _content(rest), is_file
            )
            for name, (versions, rest, is_file) in plain.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the models can't be read: {error!r}") from error


def _fields(message: List | Answer) -> dict[str, Any]:
    match message:
        case List(prefix, max_age_s, newer_than_s, known):
            newer = None if math.isinf(newer_than_s) else newer_than_s
            asked = {"max_age_s": max_age_s, "newer_than_s": newer, "known": known}
            return {"op": "list", "url": prefix.url, "is_dir": prefix.is_dir, **asked}
        case Listed():
            return {"op": "listed", **vars(message)}
        case Unlisted(text):
            return {"op": "unlisted", "message": text}
        case Wait():
            return {"op": "wait"}


def _plain(content: Content) -> list[Any]:
    times = content.digest, content.files, content.size_bytes, content.modified_at
    return [*times, int(content.marks), content.onnx_files, content.example, content.flaw]


def _content(plain: list[Any]) -> Content:
    digest, files, size_bytes, modified_at, marks, onnx_files, example, flaw = plain
    return Content(digest, files, size_bytes, modified_at, Marks(marks), onnx_files, example, flaw)


def _object(line: bytes) -> dict[str, Any]:
    data = orjson.loads(line)  # its error is a ValueError
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text is expected")
    return value
