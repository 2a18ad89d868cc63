"""Dataclasses as JSON data and back, by their type hints: messages and files that our own processes exchange.

Types are checked. Keys that the reader doesn't know, of a newer version, are ignored; those that the writer didn't know
get the defaults of their fields. A hint `Annotated[T, check]` calls `check` with the value, which raises ValueError.
This module imports only the standard library: workers run with the packages of a project, and imports delay starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import MISSING, Field, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Decoder = Callable[[Any], Any]

#: Metadata of a dataclass field that is left out at its default: readers of older versions refuse its key.
NEWER = {"is_newer": True}


def newer(default: T) -> T:
    """Define a field with the metadata `NEWER`."""
    return field(default=default, metadata=NEWER)


def encode(value: Any) -> Any:
    """Return a value as data for `json` or `orjson`; `decode` is the inverse."""
    if is_dataclass(value):
        items = [(each, getattr(value, each.name)) for each in fields(value)]
        return {each.name: encode(item) for each, item in items if not _is_left_out(each, item)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return sorted(value) if isinstance(value, Set) else value


def decode(kind: type[T], data: object, *, refuse_unknown: bool = False) -> T:
    """Return JSON data as a value of the type `kind`. Raises: ValueError, which names the key."""
    return cast(T, _decoder(cast(Any, kind), refuse_unknown)(data))


def _is_left_out(each: Field[Any], value: Any) -> bool:
    if "is_newer" not in each.metadata:
        return False
    return bool(value == (each.default if each.default_factory is MISSING else each.default_factory()))


@cache
def _decoder(kind: Any, refuse_unknown: bool) -> Decoder:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda data: data
    if is_dataclass(kind):
        return _object_decoder(kind, refuse_unknown)
    if origin is None:
        return kind if issubclass(kind, Enum) else lambda data: _require(kind, data)
    if origin is Literal:
        return lambda data: data if data in arguments else _refuse(f"one of {arguments}", data)
    each = _decoder(arguments[0], refuse_unknown)
    if origin is Annotated:
        return lambda data: arguments[1](each(data))
    if origin in (Union, UnionType):  # with None: no message needs another one
        return lambda data: None if data is None else each(data)
    if origin in (dict, Mapping):  # keys are strings in JSON
        item = _decoder(arguments[1], refuse_unknown)
        return lambda data: {arguments[0](key): item(value) for key, value in _require(dict, data).items()}
    return lambda data: origin(map(each, _require(list, data)))


def _object_decoder(kind: Any, refuse_unknown: bool) -> Decoder:
    hints = get_type_hints(kind, include_extras=True)
    decoders = {each.name: _decoder(hints[each.name], refuse_unknown) for each in fields(kind)}
    required = {each.name for each in fields(kind) if each.default is each.default_factory is MISSING}

    def decode_object(data: Any) -> Any:
        values = {}
        for key, value in _require(dict, data).items():
            if key in decoders:
                try:
                    values[key] = decoders[key](value)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None
            elif refuse_unknown:
                raise ValueError(f"{key}: unknown")
        if missing := required - values.keys():
            raise ValueError(f"{', '.join(sorted(missing))}: missing")
        return kind(**values)

    return decode_object


def _require(kind: type[T], data: Any) -> T:
    if kind is float and type(data) is int:
        with suppress(OverflowError):
            return cast(T, float(data))
    if type(data) is not kind:  # a bool is an int
        _refuse(kind.__name__, data)
    return data


def _refuse(expected: str, data: Any) -> NoReturn:
    raise ValueError(f"{expected} expected, got {type(data).__name__}")  # the value may be a secret
