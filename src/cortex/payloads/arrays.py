"""Convert values of users' code and of JSON to numpy arrays, without changing more than their precision. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Floats that JSON can't represent, as strings of protobuf's JSON mapping.
_FLOAT_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_MAX_EXACT_INTEGER = 2**53
_SHOWN_CHARS = 60
_SHOWN_BITS = 200
_MAX_RANK = 64  #: of numpy's arrays
_STRINGS = np.dtype(np.object_)


class TensorError(ValueError):
    """A value can't be converted to the required array; the message describes only the value."""

    def __init__(self, message: str, place: str = "", wanted: str = "") -> None:
        super().__init__(message)
        self.place = place  #: `[0][2]`; "" for the value itself
        self.wanted = wanted or message  #: what the place should be, without its value


def to_numbers(value: Any, dtype: np.dtype[Any]) -> Array:
    """Convert to numbers or booleans: with numpy as a whole if all values are numbers, otherwise one by one.

    Raises: TensorError.
    """
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return _one_by_one(value, dtype)
    if isinstance(value, list | tuple) and not is_numeric(value):
        return _one_by_one(value, dtype)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return _one_by_one(value, dtype)
    if array.dtype.kind not in "biufc":
        # `asarray` converts [1, "a"] to text, and does not convert objects.
        return _one_by_one(value, dtype)
    if dtype.kind in "fc" and (array.dtype.kind != "c" or dtype.kind == "c"):
        with np.errstate(over="ignore"):
            return array.astype(dtype, copy=False)
    if array.dtype == dtype or (
        array.size and array.dtype.kind in "biu" and dtype.kind in "iu" and _holds(dtype, array)
    ):
        return array.astype(dtype, copy=False)
    if not array.size:
        return array.astype(dtype)
    return _one_by_one(value if isinstance(value, list | tuple) else array, dtype)


def is_numeric(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether a list contains numbers only.

    With a string among them, numpy would convert all values to strings of the size of the longest: perhaps gigabytes.
    """
    try:
        kinds = set(map(type, np.array(value, object).ravel().tolist()))
    except ValueError:  # ragged below the first level
        return False
    return all(issubclass(kind, int | float | complex | np.number | np.bool_) for kind in kinds)


def _holds(dtype: np.dtype[Any], array: Array) -> bool:
    limits = np.iinfo(dtype)
    return int(array.min()) >= limits.min and int(array.max()) <= limits.max


def to_strings(value: Any) -> Array:
    """Convert to an array of bytes objects, text to UTF-8. Raises: TensorError."""
    leaves, shape = leaves_of(value)
    array = np.empty(len(leaves), np.object_)
    for index, (place, leaf) in enumerate(leaves):
        array[index] = _string(leaf, place)
    return array.reshape(shape)


def _one_by_one(value: Any, dtype: np.dtype[Any]) -> Array:
    """Convert each value separately, so that an error can name the invalid one."""
    leaves, shape = leaves_of(value)
    with np.errstate(over="ignore"):
        return np.array([_number(leaf, dtype, place) for place, leaf in leaves], dtype).reshape(shape)


def leaves_of(value: Any) -> tuple[list[tuple[str, Any]], tuple[int, ...]]:
    """Return all values with their places (`[0][2]`), and the shape of the whole. Raises: TensorError."""
    found: list[tuple[str, Any]] = []

    def walk(item: Any, place: str) -> tuple[int, ...]:
        if hasattr(item, "__array__"):
            item = np.asarray(item).tolist()
        if not isinstance(item, list | tuple):
            found.append((place, item))
            return ()
        if place.count("[") == _MAX_RANK:
            message = f"the value is nested more than {_MAX_RANK} deep"
            raise TensorError(message, wanted=f"nested at most {_MAX_RANK} deep")
        shapes = []
        for index, part in enumerate(item):
            shapes.append(walk(part, f"{place}[{index}]"))
            if shapes[-1] != shapes[0]:
                first, other = _size(shapes[0]), _size(shapes[-1])
                rows = f"{place}[0] {first}, but {place}[{index}] {other}"
                wanted = f"like {place}[0], which {first}, but {other}"
                raise TensorError(f"the value is ragged: {rows}", f"{place}[{index}]", wanted)
        return (len(item), *(shapes[0] if shapes else ()))

    return found, walk(value, "")


def _size(shape: tuple[int, ...]) -> str:
    if not shape:
        return "is a single value"
    return f"has {shape[0]} values" if len(shape) == 1 else f"has shape [{', '.join(map(str, shape))}]"


def _number(value: Any, dtype: np.dtype[Any], place: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        value = _spelled(value, dtype, place)
    if not isinstance(value, int | float | complex):
        raise _wrong(value, dtype, place)
    if dtype.kind == "c":
        return value
    if isinstance(value, complex):
        raise _wrong(value, dtype, place)
    if dtype.kind == "f":
        try:
            return float(value)
        except OverflowError:
            raise _wrong(value, dtype, place) from None
    if isinstance(value, float) and not value.is_integer():  # also false for NaN and infinity
        raise _wrong(value, dtype, place)
    whole = int(value)
    if dtype.kind == "b":
        if whole not in (0, 1):
            raise _wrong(value, dtype, place)
        return bool(whole)
    limits = np.iinfo(dtype)
    if not limits.min <= whole <= limits.max:
        message = f"{_at(place)} is {_shown(value)}, which is out of the range of {dtype.name}"
        raise TensorError(message, place, f"in the range of {dtype.name}")
    return whole


def _spelled(text: str, dtype: np.dtype[Any], place: str) -> int | float:
    """Parse a number that is a string in protobuf's JSON mapping."""
    if dtype.kind in "fc" and text in _FLOAT_WORDS:
        return _FLOAT_WORDS[text]
    digits = text.removeprefix("-")
    if dtype.itemsize == 8 and dtype.kind in "iu" and digits.isascii() and digits.isdigit():
        return int(text) if len(digits) < 30 else _MAX_EXACT_INTEGER**3  # out of range, and slow to parse
    raise _wrong(text, dtype, place)


def _string(value: Any, place: str) -> bytes:
    if isinstance(value, Mapping) and set(value) == {"b64"} and isinstance(value["b64"], str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except binascii.Error:
            raise TensorError(f"{_at(place)} is {_shown(value)}, which is not base64", place, "base64") from None
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise _wrong(value, _STRINGS, place)
    try:
        return utf8(value)
    except UnicodeEncodeError:  # a lone surrogate, which JSON can contain
        raise TensorError(f"{_at(place)} is {_shown(value)}, which can't be encoded as UTF-8", place, "text") from None


def utf8(value: Any) -> bytes:
    """Return text as UTF-8, and anything else as bytes."""
    return value.encode() if isinstance(value, str) else bytes(value)


def _wrong(value: Any, dtype: np.dtype[Any], place: str) -> TensorError:
    wanted = {"i": "a whole number", "u": "a whole number", "f": "a number", "c": "a number", "b": "a boolean"}
    expected = wanted.get(dtype.kind, "a string")
    return TensorError(f"{_at(place)} is {_shown(value)}, not {expected}", place, expected)


def _at(place: str) -> str:
    return place or "the value"


def _shown(value: Any) -> str:
    if not isinstance(value, str | bytes | int | float | complex | Mapping | None):
        return f"of type {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # Python limits the conversion of long integers
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
