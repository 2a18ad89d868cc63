"""What users pass to `onnx_client.predict` → what ONNX Runtime takes: the inputs of one model, prepared once.

Pure. It knows ONNX Runtime's names of types, but neither sessions nor where models come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cortex.errors import ModelError
from cortex.predictor.clients.tensors import Array, TensorError, TensorSpec, to_array

_STRING = "tensor(string)"
#: What ONNX Runtime calls a type → numpy's name of it and its number in `tensors`. Others are passed on unchanged:
#: sequences and maps, and what numpy has no type for.
_TYPES: Mapping[str, tuple[str, int]] = {
    "tensor(float)": ("float32", 1),
    "tensor(double)": ("float64", 2),
    "tensor(int32)": ("int32", 3),
    "tensor(uint8)": ("uint8", 4),
    "tensor(int16)": ("int16", 5),
    "tensor(int8)": ("int8", 6),
    "tensor(complex64)": ("complex64", 8),
    "tensor(int64)": ("int64", 9),
    "tensor(bool)": ("bool", 10),
    "tensor(uint16)": ("uint16", 17),
    "tensor(complex128)": ("complex128", 18),
    "tensor(float16)": ("float16", 19),
    "tensor(uint32)": ("uint32", 22),
    "tensor(uint64)": ("uint64", 23),
    _STRING: ("string", 7),
}


#: What most values are, and no dictionaries; asking the abstract class takes longer than converting a row.
_NEVER_NAMED = frozenset({np.ndarray, list, tuple, float, int, str, bytes})

_LISTS = frozenset({list, tuple})


class NodeArg(Protocol):
    """An input as ONNX Runtime describes it."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> list[int | str | None]: ...


class Input:
    """One input: the type and shape that it takes, and how a value becomes one."""

    def __init__(self, arg: NodeArg) -> None:
        plain, number = _TYPES.get(arg.type, (arg.type, 0))
        self.name = arg.name
        self.type = plain  #: numpy's name of the type, "string", or ONNX Runtime's where numpy has none
        self.declared_shape = list(arg.shape)  #: names and None are sizes that are left open
        self.is_tensor = number != 0
        self.is_string = arg.type == _STRING
        self.is_required = not arg.type.startswith("optional(")
        #: No sizes at all: a single value or any shape, which ONNX Runtime describes alike.
        self.shape = tuple(size if isinstance(size, int) and size >= 0 else None for size in arg.shape)
        self._dtype = np.dtype(object if self.is_string else plain) if self.is_tensor else None
        self._spec = TensorSpec(number, None)
        self._rank = len(self.shape)
        self._known = tuple((axis, size) for axis, size in enumerate(self.shape) if size is not None)

    def __str__(self) -> str:
        if not self.is_tensor:
            return self.type
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.type} of shape [{sizes}]" if self.shape else self.type

    def convert(self, value: Any) -> Any:
        """Return what ONNX Runtime takes for `value`; an array that fits already is passed on as it is.

        Raises: TensorError, ValueError.
        """
        if type(value) is np.ndarray and value.dtype == self._dtype and not self.is_string:
            array = value
        elif self._dtype is None or type(value).__name__ == "OrtValue":
            return value
        elif self.is_string:
            array = _to_strings(value)
        else:
            array = self._cast(value)
        return array if self._fits(array) else self._reshape(array)

    def zeros(self) -> Array | None:
        """Return a value to try the model with, open sizes being 1; None if none can be made up."""
        if self._dtype is None or self.is_string:
            return None
        return np.zeros([1 if size is None else size for size in self.shape], self._dtype)

    def _cast(self, value: Any) -> Array:
        """Do what `to_array` does; the usual, numbers for floats, in a fraction of its time.

        In such lists null is NaN, and text that spells a number is that number.
        """
        wants_floats = self._dtype is not None and self._dtype.kind == "f"
        if wants_floats and type(value) is np.ndarray and value.dtype.kind in "fiub":
            return value.astype(self._dtype)
        if wants_floats and type(value) in _LISTS:
            with contextlib.suppress(ValueError, TypeError, OverflowError):  # `to_array` says what is wrong where
                return np.array(value, self._dtype)
        return to_array(value, self._spec)

    def _fits(self, array: Array) -> bool:
        if not self._rank:
            return True
        if array.ndim != self._rank:
            return False
        shape = array.shape
        for axis, size in self._known:  # noqa: SIM110 - on the path of every request: all() takes twice as long
            if shape[axis] != size:
                return False
        return True

    def _reshape(self, array: Array) -> Array:
        """Fill in the sizes that are clear: of a flat list, of a row without its batch.

        A matrix of the right rank but other sizes is refused: it was meant otherwise, and would be garbled.
        """
        shown = f"the value has shape [{', '.join(map(str, array.shape))}]"
        if array.ndim == self._rank and sum(size != 1 for size in array.shape) > 1:
            raise TensorError(shown)
        if self._rank == array.ndim + 1 and self.shape[0] is None:
            lifted = array.reshape((1, *array.shape))
            if self._fits(lifted):
                return lifted
        if len(self._known) < self._rank - 1:
            raise TensorError(shown)
        try:
            return array.reshape([-1 if size is None else size for size in self.shape])
        except ValueError:
            raise TensorError(shown if array.ndim else "the value is a single one") from None


class Inputs:
    """All inputs of one model."""

    def __init__(self, args: Sequence[NodeArg], overridable: Sequence[NodeArg], model: str) -> None:
        """`overridable` are inputs with a default; `model` names the model in messages."""
        self.all = tuple(Input(arg) for arg in args)
        self._only = self.all[0] if len(self.all) == 1 else None
        self._optional = {arg.name: Input(arg) for arg in overridable}
        self._by_name = {given.name: given for given in self.all}
        self._model = model

    def feed(self, model_input: Any) -> dict[str, Any]:
        """Return what to run a session on: a dictionary by name, or the value itself if there is only one input.

        Raises: ModelError that names the input, and what it must be.
        """
        only = self._only
        if only is not None and (type(model_input) in _NEVER_NAMED or not _is_named(only, model_input)):
            return {only.name: self._convert(only, model_input)}
        if not isinstance(model_input, Mapping):
            kind = type(model_input).__name__
            raise ModelError(f"input for {self._model} is a {kind}, not a dictionary; {self._expected()}")
        feed = {}
        for given in self.all:
            if given.name in model_input:
                feed[given.name] = self._convert(given, model_input[given.name])
            elif given.is_required:
                raise ModelError(f"missing key {given.name!r} for {self._model}; {self._expected()}")
        if len(feed) != len(model_input):
            self._add_others(feed, model_input)
        return feed

    def _add_others(self, feed: dict[str, Any], model_input: Mapping[str, Any]) -> None:
        for name, value in model_input.items():
            if name in self._optional:
                feed[name] = self._convert(self._optional[name], value)
            elif name not in self._by_name:
                raise ModelError(f"unknown key {name!r} for {self._model}; {self._expected()}")

    def _convert(self, given: Input, value: Any) -> Any:
        try:
            return given.convert(value)
        except (TensorError, ValueError, TypeError) as exc:
            raise ModelError(f"input {given.name!r} of {self._model} must be {given}, but {exc}") from None

    def _expected(self) -> str:
        return "expected: " + ", ".join(f"{given.name!r} ({given})" for given in self.all)


def _is_named(only: Input, model_input: Any) -> bool:
    """Tell whether this is a dictionary that holds the only input by its name, not a value that is itself a map."""
    return isinstance(model_input, Mapping) and (only.is_tensor or only.name in model_input)


def _to_strings(value: Any) -> Array:
    """Make an array of str objects; bytes are UTF-8. Raises: TensorError, UnicodeDecodeError."""
    if type(value) is np.ndarray and value.dtype.kind == "U":
        return value
    try:
        array = np.array(value, dtype=object)
    except ValueError:  # numpy's words for rows that differ below the first level
        raise TensorError("the value is ragged: its rows differ in length") from None
    flat = array.ravel()
    for index, item in enumerate(flat.tolist()):
        if isinstance(item, bytes):
            flat[index] = item.decode()
        elif isinstance(item, list | tuple):
            raise TensorError("the value is ragged: its rows differ in length")
        elif not isinstance(item, str):
            raise TensorError(f"value {index} is of type {type(item).__name__}, not a string")
    return flat.reshape(array.shape)
