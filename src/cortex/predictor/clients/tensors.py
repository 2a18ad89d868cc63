"""Convert values of users' code to arrays of a TensorFlow signature, and outputs to lists. Pure.

This module has the names and numbers of TensorFlow's types, but does not import TensorFlow.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cortex.payloads.arrays import Array, TensorError, to_numbers, to_strings, utf8


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

    @property
    def open_shape(self) -> tuple[int, ...]:
        """Return the shape with -1 for unspecified sizes, and for any shape."""
        return (-1,) if self.shape is None else tuple(-1 if size is None else size for size in self.shape)

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.type_name} of any shape"
        return f"{self.type_name} of shape [{', '.join(map(str, self.shape))}]"


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
    array = to_strings(value) if dtype.name == "DT_STRING" else to_numbers(value, dtype.numpy)
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
        return [base64.b64encode(utf8(item)).decode() for item in flat.tolist()]
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
