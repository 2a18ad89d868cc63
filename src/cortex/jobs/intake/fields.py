"""Reads the fields of a submission and collects what is wrong with them, each with its fix; knows none by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

from cortex.config import values
from cortex.config.values import nearest, problem, quote

T = TypeVar("T")

#: Levels of maps and lists in what is kept with a job; far below where Python's recursion ends.
MAX_DEPTH = 100
#: Workers get it with each job, and it is read again whenever the job is looked at.
MAX_MAP_BYTES = 1024 * 1024
#: A list of paths may have ten thousand mistakes; nobody reads more of them than this.
_SHOWN_ELEMENTS = 10


class Fields:
    """The fields of one map. Reading one that is wrong adds to `problems` and returns None.

    `name` is where the map is (`item_list`), empty for the whole body. Fields that are null were not given.
    """

    def __init__(self, data: Mapping[str, object], problems: list[str], name: str = "") -> None:
        self.data = data
        self._name = name
        self.problems = problems
        self.lacks_something = False

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def read(self, key: str, reader: Callable[[object], T], fix: str) -> T | None:
        """Return a field's value, None if it isn't given; `fix` is what to write instead of a wrong one."""
        value = self.data.get(key)
        if value is None:
            return None
        try:
            return reader(value)
        except PydanticCustomError as error:
            context = error.context or {}
            for one in context.get("elements", [context]):
                self.add(f"{key}{one.get('place', '')}", str(one.get("text")), str(one.get("fix") or fix))
            return None

    def require(self, key: str, reader: Callable[[object], T], fix: str) -> T | None:
        """Return the value of a field that must be given."""
        if key not in self:
            self.lacks_something = True
            self.add(key, "cannot be null" if key in self.data else "must be defined", fix)
            return None
        return self.read(key, reader, fix)

    def section(self, key: str, fix: str, reader: Callable[[object], dict[str, Any]] | None = None) -> Fields | None:
        """Return the fields of a map inside this one."""
        found = self.read(key, reader or a_map, fix)
        return None if found is None else Fields(found, self.problems, self.path(key))

    def add(self, key: str, message: str, fix: str) -> None:
        """Note a mistake."""
        self.problems.append(f"{self.path(key)}: {message}; {fix}")

    def path(self, key: str) -> str:
        """Return the full name of a field."""
        return f"{self._name}.{key}" if self._name else key

    def name_misspelt(self, known: Iterable[str]) -> None:
        """Note the unknown keys that nearly are ones we know."""
        names = set(known)
        for key in self.data:
            meant = None if key in names else nearest(key, names)
            if meant is not None and meant not in self.data:
                self.problems.append(f"{self.path(key)}: is not known; did you mean {quote(meant)}?")


def integer(at_least: int, at_most: int) -> Callable[[object], int]:
    """Make a reader of an integer in a range."""

    def read(value: object) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            raise problem(f"must be an integer (got {value!r})", f"write {int(value)}")
        if isinstance(value, bool) or not isinstance(value, int):
            digits = isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value)
            raise problem(f"must be an integer (got {quote(value)})", f"write {value} without quotes" if digits else "")
        if not at_least <= value <= at_most:
            bound = f"at least {at_least:,}" if value < at_least else f"at most {at_most:,}"
            raise problem(f"must be {bound} (got {value})")
        return value

    return read


def seconds(value: object) -> float:
    """Read a time above 0, in seconds or as `30s` or `5m`."""
    found = values.duration_s(above=0)(value)
    if not math.isfinite(found):
        raise problem(f"must be finite (got {quote(value)})")
    return found


def boolean(value: object) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise problem(f"must be true or false (got {quote(value)})")
    return value


def a_map(value: object) -> dict[str, Any]:
    """Read a map."""
    if not isinstance(value, dict):
        raise problem(f"must be a map (got {quote(value)})")
    return value


def a_flat_map(value: object) -> dict[str, Any]:
    """Read a map that every part of cortex can walk through: one of a bounded depth and size."""
    found = a_map(value)
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        maps = [each for each in level if isinstance(each, dict)]
        level = [item for each in level if isinstance(each, list) for item in each]
        level += [item for each in maps for item in each.values()]
    if any(isinstance(each, dict | list) for each in level):
        raise problem(f"is nested deeper than {MAX_DEPTH} levels", "make it flatter, or send it as a string of JSON")
    size = len(json.dumps(found))
    if size > MAX_MAP_BYTES:
        fix = "put it in a file or a bucket, and its path here"
        raise problem(f"has {size:,} bytes as JSON, more than {MAX_MAP_BYTES:,}", fix)
    return found


def text(value: object) -> str:
    """Read a string with something in it, without what no address or path has."""
    if not isinstance(value, str):
        raise problem(f"must be a string (got {quote(value)})")
    if not value.strip():
        raise problem("cannot be empty")
    if "\0" in value or re.search(r"[\ud800-\udfff]", value):
        raise problem("has a character in it that no path or address can have", "remove it")
    return value


def a_list(of: Callable[[object], T], least: int = 0) -> Callable[[object], list[T]]:
    """Make a reader of a list; mistakes in it name their positions, the first few of them."""

    def read(value: object) -> list[T]:
        if not isinstance(value, list):
            raise problem(f"must be a list (got {quote(value)})")
        if len(value) < least:
            raise problem("cannot be empty")
        found: list[T] = []
        wrong: list[dict[str, Any]] = []
        for index, item in enumerate(value):
            try:
                found.append(of(item))
            except PydanticCustomError as error:
                wrong.append({**(error.context or {}), "place": f"[{index}]"})
                if len(wrong) == _SHOWN_ELEMENTS:
                    break
        if wrong:
            raise PydanticCustomError("value", "{text}", {**wrong[0], "elements": wrong})
        return found

    return read


def from_text(value: str) -> object:
    """Return what a value of a query means: JSON if it is any, else the text itself."""
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return value


def _refuse_constant(name: str) -> object:
    raise ValueError(name)
