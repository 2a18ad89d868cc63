"""Problems of a payload: one sentence for people, and the list that FastAPI answers with, without the input itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

#: Problems in the list of one response.
MAX_PROBLEMS = 100
#: Problems that are worth listing at all: pydantic needs about a kilobyte of memory for each.
MAX_LISTED = 20_000
_MAX_MESSAGE_CHARS = 500
_MAX_KEY_CHARS = 100

Place = tuple[str | int, ...]

#: Key in the context of pydantic's errors: the place within a part that cortex reads, such as an array.
PLACE = "place"


#: Types of problems that repeat the input: in which key of their context, and their message without it.
_INPUTS = {
    "union_tag_invalid": ("tag", "Input should have {discriminator} as one of the expected tags: {expected_tags}"),
    "uuid_parsing": ("error", "Input should be a valid UUID"),
}


class BadBody(Exception):
    """A body that can't be read by its content type and coding; `str(error)` is sent to the caller."""

    def __init__(self, message: str, status: int = 400, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers  #: of the response


class PayloadError(Exception):
    """A payload that is not of the annotated type: status 422. `str(error)` names the first place that is wrong."""

    def __init__(self, message: str, detail: Sequence[dict[str, Any]], place: Place = ()) -> None:
        super().__init__(message)
        self.detail = list(detail)  #: problems in the form of FastAPI: `type`, `loc`, `msg`, perhaps `ctx`
        self.place = place  #: of the first problem, as the message has it: without the names that pydantic adds

    @property
    def as_openai_detail(self) -> dict[str, Any]:
        """Return the first problem with the fields of errors of OpenAI's API."""
        param = ".".join(str(_key(each)) for each in self.place)
        return {"param": param or None, "code": self.detail[0]["type"] if self.detail else None}


def payload_error(kind: str, message: str, place: Place = ()) -> PayloadError:
    """Return an error about one place of a payload; `kind` is the `type` of its problem."""
    return PayloadError(f"{_path(place)}: {message}", [{"type": kind, "loc": ["body", *place], "msg": message}], place)


def from_pydantic(
    error: ValidationError,
    value: Any,
    name: str = "payload",
    location: Place = ("body",),
    total: int | None = None,
) -> PayloadError:
    """Return the problems that pydantic found in `value`, a parsed JSON value; `location` begins each `loc`.

    `total` is the number of problems if `error` lacks some.
    """
    count = total or error.error_count()
    if error.error_count() > MAX_LISTED:
        return PayloadError(f"{name}: {count} values are not of the annotated type", [])
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    message = _message(first)
    others = f" (and {count - 1} more problem{'s' if count > 2 else ''})" if count > 1 else ""
    place = _existing_place(_place(first), value, is_missing=first["type"] == "missing")
    return PayloadError(
        f"{_path(place, name)}: {message}{others}",
        [_problem(each, location) for each in problems[:MAX_PROBLEMS]],
        (*location[1:], *place),
    )


def _problem(problem: Any, location: Place) -> dict[str, Any]:
    shown = {
        "type": problem["type"],
        "loc": [*location, *map(_key, _place(problem))],
        "msg": _message(problem),
    }
    hidden = (PLACE, _INPUTS.get(problem["type"], ("", ""))[0])
    if context := {name: _context(value) for name, value in problem.get("ctx", {}).items() if name not in hidden}:
        shown["ctx"] = context
    return shown


def _message(problem: Any) -> str:
    """Return the message of a problem, without the parts of the input that a few have."""
    _, plain = _INPUTS.get(problem["type"], ("", ""))
    text = plain.format(**problem.get("ctx", {})) if plain else problem["msg"]
    return _truncate(text, _MAX_MESSAGE_CHARS)


def _place(problem: Any) -> Place:
    return (*problem["loc"], *problem.get("ctx", {}).get(PLACE, ()))


def _context(value: Any) -> Any:
    """Return a limit as it is; exceptions, dates and so on as text."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 64):
        return value
    return _truncate(str(value), _MAX_MESSAGE_CHARS)


def _existing_place(place: Place, value: Any, is_missing: bool) -> Place:
    """Return a place without the names of union members and validators, which pydantic adds to it."""
    kept: list[str | int] = []
    for number, key in enumerate(place):
        in_list = isinstance(value, list) and isinstance(key, int) and key < len(value)
        if in_list or (isinstance(value, dict) and key in value):
            value = value[key]
        elif not (is_missing and number == len(place) - 1):
            continue
        kept.append(key)
    return tuple(kept)


def _path(place: Place, name: str = "payload") -> str:
    """Return a place as Python would write it: `payload.flowers[3].sepal_length`."""
    return name + "".join(f"[{key}]" if isinstance(key, int) else f".{_key(key)}" for key in place)


def _key(key: str | int) -> str | int:
    return key if isinstance(key, int) else _truncate(key, _MAX_KEY_CHARS)


def _truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
