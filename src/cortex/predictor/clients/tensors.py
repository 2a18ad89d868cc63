"""Values of users' code ↔ the arrays of a TensorFlow signature: what is accepted, and what is given back.

Pure. It knows TensorFlow's types by name and number, but not TensorFlow, nor models, sessions or servers.
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

#: What JSON, which has no such numbers, writes for them in protobuf's mapping.
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_MAX_EXACT_INTEGER = 2**53
_SHOWN_CHARS = 60
_SHOWN_BITS = 200
_MAX_RANK = 64  #: of numpy's arrays


@dataclass(frozen=True)
class DType:
    """One of TensorFlow's types that a tensor of a signature may have."""

    name: str  #: as in `types.proto`
    number: int  #: of the enum in `types.proto`
    numpy: np.dtype[Any]  #: of the arrays that hold it; numpy has no bfloat16: float32, which holds each exactly
    plain: str  #: what it is called in a list of inputs


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
#: Every supported type by its number on the wire.
DTYPES: Mapping[int, DType] = {row[1]: DType(row[0], row[1], np.dtype(row[2]), row[3]) for row in _TABLE}


@dataclass(frozen=True)
class TensorSpec:
    """What a signature says of one input or output."""

    dtype: int  #: number in `types.proto`; of unsupported types too
    shape: tuple[int | None, ...] | None  #: None: any size, any rank
    tensor: str = ""  #: its name in the graph

    @property
    def type_name(self) -> str:
        """Name the type as `types.proto` does."""
        known = DTYPES.get(self.dtype)
        return known.name if known else f"DT_{self.dtype}"

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.type_name} of any shape"
        return f"{self.type_name} of shape [{', '.join(map(str, self.shape))}]"


class TensorError(ValueError):
    """A value is not, and can't be made, the tensor that was asked for; says what is wrong with the value alone."""


def to_array(value: Any, spec: TensorSpec) -> Array:
    """Make the array that `spec` asks for out of what a user passed.

    Accepted are numbers, strings, (nested) lists and tuples, numpy arrays and scalars, and whatever numpy makes an
    array of. They are cast where nothing is lost but precision: integers and booleans to floats, whole floats to
    integers, 0 and 1 to booleans, text to its UTF-8. As in protobuf's JSON mapping, a string of digits is a 64-bit
    integer (these come back as strings), and "NaN", "Infinity" and "-Infinity" are floats; as in TensorFlow Serving's
    REST API, `{"b64": "…"}` is a string of bytes. One missing leading dimension is added where the signature leaves
    it open, as with a bare number for `[None]` or one row for `[None, 4]`; `[]` takes the shape of no rows.

    Raises: TensorError.
    """
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise TensorError("no value can be given for that type")
    array = _strings(value) if dtype.name == "DT_STRING" else _numbers(value, dtype)
    return _fit(array, spec.shape)


def to_flat(array: Array) -> list[Any]:
    """List the values of an output in row order, as protobuf's JSON mapping of a `TensorProto` has them.

    That is what TensorFlow Serving's response has always been for handlers, converted to a dictionary: 64-bit integers
    are strings of digits, strings are bytes and therefore base64, complex numbers are two floats each. Floats of less
    than 64 bits are the doubles that equal them exactly, not the shortest that round to them.
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
    """Give `array` the rank of `shape` where that is clear. Raises: TensorError where its shape is another."""
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
        raise TensorError("the value is a single one")
    raise TensorError(f"the value has shape [{', '.join(map(str, array.shape))}]")


def _numbers(value: Any, dtype: DType) -> Array:
    """Convert by numpy as a whole where it can tell what all the values are, else one by one."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return _one_by_one(value, dtype)
    if isinstance(value, list | tuple) and not _is_numeric(value):
        return _one_by_one(value, dtype)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return _one_by_one(value, dtype)
    if array.dtype.kind not in "biufc":
        # `asarray` turns [1, "a"] into text, and leaves objects alone.
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
    """Tell whether a list holds numbers only.

    Given text too, numpy makes text of all values, and room in each place for the longest: perhaps all memory.
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
    """Convert each value by itself, so that an error can say which is wrong."""
    leaves, shape = _leaves(value)
    return np.array([_number(leaf, dtype, place) for place, leaf in leaves], dtype.numpy).reshape(shape)


def _leaves(value: Any) -> tuple[list[tuple[str, Any]], tuple[int, ...]]:
    """List all values with their places (`[0][2]`), and the shape that they have together. Raises: TensorError."""
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
    if isinstance(value, float) and not value.is_integer():  # NaN and infinity are none either
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
    """Read a number that protobuf's JSON mapping writes as a string."""
    if dtype.numpy.kind in "fc" and text in _WORDS:
        return _WORDS[text]
    digits = text.removeprefix("-")
    if dtype.numpy.itemsize == 8 and dtype.numpy.kind in "iu" and digits.isascii() and digits.isdigit():
        return int(text) if len(digits) < 30 else _MAX_EXACT_INTEGER**3  # out of range in any case, and costly to read
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
    except UnicodeEncodeError:  # half of a pair, which JSON can spell
        raise TensorError(f"{_at(place)} is {_shown(value)}, which has no UTF-8") from None


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
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # Python refuses to write the very long ones
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
