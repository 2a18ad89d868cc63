"""Convert values of users' code to arrays of a TensorFlow signature, and outputs to lists. Pure.

This module has the names and numbers of TensorFlow's types, but does not import TensorFlow.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class DType:
    """A supported type of TensorFlow tensors."""

    name: str  #: as in `types.proto`
    number: int  #: of the enum in `types.proto`
    numpy: np.dtype[Any]  #: of the arrays; float32 for bfloat16, which numpy does not have
    plain: str  #: the name in a list of inputs


_TABLE: tuple[tuple[str, int, Any, str], ...] = (
    ("DT_FLOAT", 1, np.float32, "float32"),
    ("DT_DOUBLE", 2, np.float64, "float64"),
    ("DT_INT32", 3, np.int32, "int32"),
    ("DT_UINT8", 4, np.uint8, "uint8"),
    ("DT_INT16", 5, np.int16, "int16"),
    ("DT_INT8", 6, np.int8, "int8"),
    ("DT_STRING", 7, np.object_, "string"),
    ("DT_COMPLEX64", 8, np.complex64, "complex64"),
    ("DT_INT64", 9, np.int64, "int64"),
    ("DT_BOOL", 10, np.bool_, "bool"),
    ("DT_BFLOAT16", 14, np.float32, "bfloat16"),
    ("DT_UINT16", 17, np.uint16, "uint16"),
    ("DT_COMPLEX128", 18, np.complex128, "complex128"),
    ("DT_HALF", 19, np.float16, "float16"),
    ("DT_UINT32", 22, np.uint32, "uint32"),
    ("DT_UINT64", 23, np.uint64, "uint64"),
)
#: All supported types by their number in the enum.
DTYPES: Mapping[int, DType] = {row[1]: DType(row[0], row[1], np.dtype(row[2]), row[3]) for row in _TABLE}


@dataclass(frozen=True)
class TensorSpec:
    """The type and shape of an input or output of a signature."""

    dtype: int  #: number in `types.proto`, also of unsupported types
    shape: tuple[int | None, ...] | None  #: None for any rank; a size of None is unspecified
    tensor: str = ""  #: its name in the graph

    @property
    def type_name(self) -> str:
        """Return the name of the type in `types.proto`."""
        known = DTYPES.get(self.dtype)
        return known.name if known else f"DT_{self.dtype}"

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.type_name} of any shape"
        return f"{self.type_name} of shape [{', '.join(map(str, self.shape))}]"


class TensorError(ValueError):
    """A value can't be converted to the required tensor; the message describes only the value."""


def to_array(value: Any, spec: TensorSpec) -> Array:
    """Convert a value to an array of the type and shape of `spec`.

    Numbers, strings, nested lists and tuples, numpy arrays and scalars, and everything that numpy can convert are
    accepted. Casts may lose precision only: integers and booleans to floats, whole floats to integers, 0 and 1 to
    booleans, text to UTF-8. As in protobuf's JSON mapping, a string of digits is a 64-bit integer (outputs have them
    as strings), and "NaN", "Infinity" and "-Infinity" are floats. As in TensorFlow Serving's REST API, `{"b64": "…"}`
    is a string of bytes. A missing first dimension is added if its size is unspecified or 1: a number for `[None]`, a
    row for `[None, 4]`. `[]` becomes zero rows.

    Raises: TensorError.
    """
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise TensorError("values of this type are not supported")
    array = _strings(value) if dtype.name == "DT_STRING" else _numbers(value, dtype)
    return _fit(array, spec.shape)


def to_flat(array: Array) -> list[Any]:
    """Return the values of an output in row order, as in protobuf's JSON mapping of a `TensorProto`.

    The original passes handlers the response of TensorFlow Serving in this form: 64-bit integers are strings of
    digits, strings are base64, complex numbers are two floats each. Floats of less than 64 bits are converted to the
    equal double, not to the shortest that rounds to them.
    """
    flat = array.ravel()
    kind = flat.dtype.kind
    if kind in "iu" and flat.dtype.itemsize == 8:
        return list(map(str, flat.tolist()))
    if kind == "c":
        flat = flat.view(np.float32 if flat.dtype.itemsize == 8 else np.float64)
    if kind in "OSU":
        return [base64.b64encode(_utf8(item)).decode() for item in flat.tolist()]
    values: list[Any] = flat.tolist()
    return values


def _fit(array: Array, shape: tuple[int | None, ...] | None) -> Array:
    """Reshape `array` to the rank of `shape` if this is unambiguous. Raises: TensorError."""
    if shape is None:
        return array
    missing = len(shape) - array.ndim
    fitted = array
    if missing > 0 and array.ndim and not array.size:
        fitted = array.reshape(array.shape + tuple(size or 0 for size in shape[array.ndim :]))
    elif missing > 0 and not array.ndim and all(size in (None, 1) for size in shape):
        fitted = array.reshape((1,) * missing)
    elif missing == 1 and shape[0] in (None, 1):
        fitted = array.reshape((1, *array.shape))
    if fitted.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, fitted.shape, strict=True)):
        return fitted
    if not array.ndim:
        raise TensorError("the value is a scalar")
    raise TensorError(f"the value has shape [{', '.join(map(str, array.shape))}]")


def _numbers(value: Any, dtype: DType) -> Array:
    """Convert with numpy as a whole if all values are numbers, otherwise one by one."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return _one_by_one(value, dtype)
    if isinstance(value, list | tuple) and not _is_numeric(value):
        return _one_by_one(value, dtype)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return _one_by_one(value, dtype)
    if array.dtype.kind not in "biufc":
        # `asarray` converts [1, "a"] to text, and does not convert objects.
        return _one_by_one(value, dtype)
    target = dtype.numpy
    if target.kind in "fc" and (array.dtype.kind != "c" or target.kind == "c"):
        with np.errstate(over="ignore"):
            return array.astype(target, copy=False)
    if array.dtype == target or (
        array.size and array.dtype.kind in "biu" and target.kind in "iu" and _holds(target, array)
    ):
        return array.astype(target, copy=False)
    if not array.size:
        return array.astype(target)
    return _one_by_one(value if isinstance(value, list | tuple) else array, dtype)


def _is_numeric(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether a list contains numbers only.

    With a string among them, numpy would convert all values to strings of the size of the longest: perhaps gigabytes.
    """
    try:
        kinds = set(map(type, np.array(value, object).ravel().tolist()))
    except ValueError:  # ragged below the first level
        return False
    return all(issubclass(kind, int | float | complex | np.number | np.bool_) for kind in kinds)


def _holds(target: np.dtype[Any], array: Array) -> bool:
    limits = np.iinfo(target)
    return int(array.min()) >= limits.min and int(array.max()) <= limits.max


def _strings(value: Any) -> Array:
    leaves, shape = _leaves(value)
    array = np.empty(len(leaves), np.object_)
    for index, (place, leaf) in enumerate(leaves):
        array[index] = _string(leaf, place)
    return array.reshape(shape)


def _one_by_one(value: Any, dtype: DType) -> Array:
    """Convert each value separately, so that an error can name the invalid one."""
    leaves, shape = _leaves(value)
    return np.array([_number(leaf, dtype, place) for place, leaf in leaves], dtype.numpy).reshape(shape)


def _leaves(value: Any) -> tuple[list[tuple[str, Any]], tuple[int, ...]]:
    """Return all values with their places (`[0][2]`), and the shape of the whole. Raises: TensorError."""
    found: list[tuple[str, Any]] = []

    def walk(item: Any, place: str) -> tuple[int, ...]:
        if hasattr(item, "__array__"):
            item = np.asarray(item).tolist()
        if not isinstance(item, list | tuple):
            found.append((place, item))
            return ()
        if place.count("[") == _MAX_RANK:
            raise TensorError(f"the value is nested more than {_MAX_RANK} deep")
        shapes = []
        for index, part in enumerate(item):
            shapes.append(walk(part, f"{place}[{index}]"))
            if shapes[-1] != shapes[0]:
                first, other = _size(shapes[0]), _size(shapes[-1])
                raise TensorError(f"the value is ragged: {place}[0] {first}, but {place}[{index}] {other}")
        return (len(item), *(shapes[0] if shapes else ()))

    return found, walk(value, "")


def _size(shape: tuple[int, ...]) -> str:
    if not shape:
        return "is a single value"
    return f"has {shape[0]} values" if len(shape) == 1 else f"has shape [{', '.join(map(str, shape))}]"


def _number(value: Any, dtype: DType, place: str) -> Any:
    target = dtype.numpy
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        value = _spelled(value, dtype, place)
    if not isinstance(value, int | float | complex):
        raise _wrong(value, dtype, place)
    if target.kind == "c":
        return value
    if isinstance(value, complex):
        raise _wrong(value, dtype, place)
    if target.kind == "f":
        try:
            return float(value)
        except OverflowError:
            raise _wrong(value, dtype, place) from None
    if isinstance(value, float) and not value.is_integer():  # also false for NaN and infinity
        raise _wrong(value, dtype, place)
    whole = int(value)
    if target.kind == "b":
        if whole not in (0, 1):
            raise _wrong(value, dtype, place)
        return bool(whole)
    limits = np.iinfo(target)
    if not limits.min <= whole <= limits.max:
        raise TensorError(f"{_at(place)} is {_shown(value)}, which is out of the range of {dtype.plain}")
    return whole


def _spelled(text: str, dtype: DType, place: str) -> int | float:
    """Parse a number that is a string in protobuf's JSON mapping."""
    if dtype.numpy.kind in "fc" and text in _FLOAT_WORDS:
        return _FLOAT_WORDS[text]
    digits = text.removeprefix("-")
    if dtype.numpy.itemsize == 8 and dtype.numpy.kind in "iu" and digits.isascii() and digits.isdigit():
        return int(text) if len(digits) < 30 else _MAX_EXACT_INTEGER**3  # out of range, and slow to parse
    raise _wrong(text, dtype, place)


def _string(value: Any, place: str) -> bytes:
    if isinstance(value, Mapping) and set(value) == {"b64"} and isinstance(value["b64"], str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except binascii.Error:
            raise TensorError(f"{_at(place)} is {_shown(value)}, which is not base64") from None
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise _wrong(value, DTYPES[7], place)
    try:
        return _utf8(value)
    except UnicodeEncodeError:  # a lone surrogate, which JSON can contain
        raise TensorError(f"{_at(place)} is {_shown(value)}, which can't be encoded as UTF-8") from None


def _utf8(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _wrong(value: Any, dtype: DType, place: str) -> TensorError:
    wanted = {"i": "a whole number", "u": "a whole number", "f": "a number", "c": "a number", "b": "a boolean"}
    return TensorError(f"{_at(place)} is {_shown(value)}, not {wanted.get(dtype.numpy.kind, 'a string')}")


def _at(place: str) -> str:
    return place or "the value"


def _shown(value: Any) -> str:
    if not isinstance(value, str | bytes | int | float | complex | Mapping | None):
        return f"of type {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # Python limits the conversion of long integers
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
