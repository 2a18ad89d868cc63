"""An estimator with named tensors: its table of inputs, its outputs, and its signature, found by running it once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cortex.errors import ModelError
from cortex.payloads.inference_tensors import DTYPES, datatype_of
from cortex.payloads.signature import ModelSignature, TensorSignature

Array = NDArray[Any]

#: Name of the only input of models that take a matrix.
INPUT = "input"
#: Names of outputs.
LABEL, PROBABILITIES, SCORES, PREDICTION, TRANSFORMED = "label", "probabilities", "scores", "prediction", "transformed"
_MESSAGE_CHARACTERS = 500
#: Times, places in sources and signatures of C++ functions, with which libraries begin their messages.
_SOURCES = re.compile(
    r"\[\d\d:\d\d:\d\d\] |\S+\.(?:cc|cpp|cu|cuh|h|hpp|py):\d+:? "
    r"(?:(?:[\w:]+ ){0,3}onnxruntime::[^()]{0,200}\([^()]{0,300}\)(?: const)? )?"
)

#: Output → function that computes it. A function for several outputs has the name "", and returns a dictionary.
Functions = Mapping[str, Callable[[Any], Any]]


class Table(Protocol):
    """The inputs of an estimator: tensors by name, and the object that its library takes."""

    @property
    def tensors(self) -> tuple[TensorSignature, ...]: ...

    def read(self, inputs: Mapping[str, Array]) -> Any:
        """Return the argument of the library's functions. Raises: ValueError."""
        ...

    def sample(self) -> dict[str, Array]:
        """Return one row that the model probably accepts."""
        ...

    def explain(self, inputs: Mapping[str, Array]) -> str:
        """Return which value a library may have rejected, with its row and column; "" if none stands out."""
        ...


class Matrix:
    """One input of shape [-1, columns]."""

    def __init__(
        self,
        names: Sequence[str],
        columns: int,
        datatype: str,
        convert: Callable[[Array], Any],
        samples: Mapping[int, Any] | None = None,
    ) -> None:
        """`names` are those of the columns, or empty; `convert` returns the library's argument for an array.

        `samples` has a valid value of columns, by their index, that don't take 0.
        """
        row = tuple((samples or {}).get(index, 0.0) for index in range(columns)) if samples else None
        self.tensors = (TensorSignature(INPUT, datatype, (-1, columns), labels=tuple(names), example=row),)
        self._names = tuple(names)
        self._columns = columns
        self._dtype = DTYPES[datatype]
        self._convert = convert

    def read(self, inputs: Mapping[str, Array]) -> Any:
        """Return the converted matrix. Raises: ValueError."""
        array = inputs[INPUT]
        if array.ndim != 2 or self._columns not in (-1, array.shape[1]):
            width = "any number of" if self._columns < 0 else self._columns
            raise ValueError(f"input {INPUT!r} has shape {list(array.shape)}; the model takes rows of {width} values")
        return self._convert(array.astype(self._dtype, copy=False))

    def sample(self) -> dict[str, Array]:
        """Return a row of valid values, as far as they are known; zeros otherwise."""
        row = self.tensors[0].example or np.zeros(max(self._columns, 1))
        return {INPUT: np.array([row], self._dtype)}

    def explain(self, inputs: Mapping[str, Array]) -> str:
        """Return the place of the first value that is not finite."""
        places = np.argwhere(~np.isfinite(inputs[INPUT])) if self._dtype.kind == "f" else np.empty((0, 2), int)
        if not len(places):
            return ""
        row, column = (int(each) for each in places[0])
        name = f" ({self._names[column]!r})" if self._names else ""
        return f"row {row + 1}, column {column + 1}{name} is {_shown(inputs[INPUT][row, column])}"


class Columns:
    """One input for each column, of shape [-1, 1] or [-1]: columns of several types."""

    def __init__(
        self,
        columns: Sequence[TensorSignature],
        samples: Mapping[str, Any],
        convert: Callable[[dict[str, Array]], Any],
        binary: Collection[str] = (),
    ) -> None:
        """`samples` has a valid value of columns that don't take 0 or ""; `convert` takes arrays by name.

        Columns in `binary` hold bytes, not texts.
        """
        self.tensors = tuple(
            replace(each, example={"b64": ""} if each.name in binary else samples.get(each.name)) for each in columns
        )
        self._samples = samples
        self._convert = convert
        self._binary = binary

    def read(self, inputs: Mapping[str, Array]) -> Any:
        """Return the converted columns. Raises: ValueError."""
        given = {}
        rows = -1
        for tensor in self.tensors:
            if tensor.name not in inputs:
                continue  # the model rejects it unless it is optional
            array = inputs[tensor.name]
            if array.ndim != 1 and not (array.ndim == 2 and array.shape[1] == 1):
                raise ValueError(f"input {tensor.name!r} has shape {list(array.shape)}; it must be [n, 1] or [n]")
            array = array.reshape(-1)
            if rows not in (-1, len(array)):
                raise ValueError(f"input {tensor.name!r} has {len(array)} rows, but the ones before it have {rows}")
            rows = len(array)
            given[tensor.name] = (
                texts(array, tensor.name)
                if tensor.datatype == "BYTES" and tensor.name not in self._binary
                else array.astype(DTYPES[tensor.datatype], copy=False)
            )
        return self._convert(given)

    def sample(self) -> dict[str, Array]:
        """Return a row of valid values, as far as they are known; zeros and "" otherwise."""
        row = {}
        for tensor in self.tensors:
            array = np.zeros((1, 1), DTYPES[tensor.datatype])
            array[0, 0] = self._samples.get(tensor.name, "" if tensor.datatype == "BYTES" else 0)
            row[tensor.name] = array
        return row

    def explain(self, inputs: Mapping[str, Array]) -> str:
        """Return the place of the first number that is not finite."""
        for name, array in inputs.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.argmin(np.isfinite(array.reshape(-1))))
                return f"row {row + 1}, column {name!r} is {_shown(array.reshape(-1)[row])}"
        return ""


class Texts:
    """One input of texts, for models that begin with a vectorizer."""

    def __init__(self) -> None:
        self.tensors = (TensorSignature(INPUT, "BYTES", (-1,)),)

    def read(self, inputs: Mapping[str, Array]) -> Any:
        """Return a list of str. Raises: ValueError."""
        return texts(inputs[INPUT].reshape(-1), INPUT).tolist()

    def sample(self) -> dict[str, Array]:
        """Return one text."""
        return {INPUT: np.array(["text"], object)}

    def explain(self, inputs: Mapping[str, Array]) -> str:
        """Return "": all texts are valid."""
        return ""


class Estimator:
    """A `RunnableModel` over the functions of a library."""

    def __init__(
        self,
        name: str,
        platform: str,
        description: str,
        table: Table,
        functions: Functions,
        classes: Sequence[Any] = (),
        declared: Sequence[TensorSignature] = (),
    ) -> None:
        """Run the model once, to learn its outputs.

        `classes` are the classes of a classifier, in the order of probabilities; `declared` are the outputs, if the
        model rejects the sample of its table. Raises: ModelError.
        """
        self._table = table
        self._functions = functions
        self._label = name
        self._classes = tuple(str(each) for each in np.asarray(classes).tolist()) if len(classes) else ()
        self.signature = ModelSignature(name, platform, table.tensors, self._outputs(classes, declared), description)

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Compute the requested outputs, all if none is requested. Raises: ValueError, ModelError."""
        if empty := [name for name, array in inputs.items() if array.ndim and not len(array)]:
            raise ValueError(f"input {empty[0]!r} has no rows")
        argument = self._table.read(inputs)
        try:
            return self._run(argument, outputs)
        except MemoryError:
            raise
        except Exception as exc:  # libraries raise errors of their own
            text = library_message(exc)[:_MESSAGE_CHARACTERS]
            where = self._table.explain(inputs)
            if where or isinstance(exc, ValueError):
                reason = text.partition(". ")[0]  # scikit-learn continues with advice on training
                raise ValueError(f"{where}, which the model does not accept: {reason}" if where else text) from exc
            raise ModelError(f"the model failed: {type(exc).__name__}: {text}") from exc

    def _run(self, argument: Any, outputs: Sequence[str]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, function in self._functions.items():
            if not name:
                found |= {each: tensor_of(value) for each, value in function(argument).items()}
            elif not outputs or name in outputs:
                found[name] = tensor_of(function(argument))
        return found

    def _outputs(self, classes: Sequence[Any], declared: Sequence[TensorSignature]) -> tuple[TensorSignature, ...]:
        found: dict[str, Array] = {}
        with contextlib.suppress(ValueError):  # a model may reject the sample
            found = self.infer(self._table.sample())
        if not found and declared:
            return tuple(declared)
        if not found:
            kinds = {LABEL: datatype_of(tensor_of(classes).dtype) or "BYTES"} if len(classes) else {}
            return tuple(
                TensorSignature(name, kinds.get(name, "FP64"), *self._shape(name)) for name in self._functions if name
            )
        return tuple(
            TensorSignature(
                name,
                datatype_of(array.dtype) or "BYTES",
                (-1, *array.shape[1:]),
                labels=self._labels(name, array.shape),
            )
            for name, array in found.items()
        )

    def _shape(self, name: str) -> Any:
        return ((-1, len(self._classes)), "", self._classes) if name == PROBABILITIES else ((-1,),)

    def _labels(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        is_by_class = name in (PROBABILITIES, SCORES) and len(shape) == 2 and shape[1] == len(self._classes)
        return self._classes if is_by_class else ()


def tensor_of(value: Any) -> Array:
    """Return a result of a library as an array of one of the datatypes; sparse matrices become dense."""
    array: Array = np.asarray(value.toarray() if hasattr(value, "toarray") else value)
    if array.dtype.kind in "US":
        return array.astype(object)
    values = array.reshape(-1).tolist() if array.dtype.kind == "O" else []
    if values and set(map(type, values)) <= {int, float, type(None)}:  # a row without a value must not change others
        return array.astype(np.float64)
    if not all(isinstance(each, str | bytes) for each in values):
        return np.array([str(each) for each in values], object).reshape(array.shape)
    if array.dtype.kind in "mM":
        return array.astype(str).astype(object)
    return array


def library_message(error: object) -> str:
    """Return the message of a library's error on one line, without places in its sources and stack traces."""
    text = " ".join(str(error).partition("Stack trace")[0].split())[: 4 * _MESSAGE_CHARACTERS]
    return _SOURCES.sub("", f"{text} ").strip()


def texts(array: Array, name: str) -> Array:
    """Return an array of str objects; bytes are UTF-8. Raises: ValueError."""
    decoded = np.empty(array.shape, object)
    flat = decoded.reshape(-1)
    for row, value in enumerate(array.reshape(-1).tolist()):
        try:
            flat[row] = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            raise ValueError(f"row {row + 1}, column {name!r} is not UTF-8") from None
    return decoded


def binary_probabilities(positive: Array) -> Array:
    """Return the probabilities of both classes, as scikit-learn's interfaces of XGBoost and LightGBM do."""
    return np.vstack((1.0 - positive, positive)).transpose()


def classify_by_most_probable(probabilities: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    """Return the outputs of a classifier whose labels are the indices of its classes."""
    found = probabilities(argument)
    return {LABEL: np.argmax(found, axis=1), PROBABILITIES: found}


def _shown(value: Any) -> str:
    return "missing (NaN)" if np.isnan(value) else "infinite"
