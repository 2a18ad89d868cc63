"""Forms of requests to models without code, and the answers in the same form. Pure.

| body | one of | answer |
|---|---|---|
| `{"instances": [row, …]}` | TensorFlow Serving, KServe V1, MLflow | `{"predictions": [row, …]}` |
| `{"inputs": tensor or {name: tensor}}` | TensorFlow Serving, MLflow | `{"outputs": tensor or {name: tensor}}` |
| `{"dataframe_split": {"columns", "data"}}` | MLflow | `{"predictions": [row, …]}` |
| `{"dataframe_records": [record, …]}` | MLflow | `{"predictions": [row, …]}` |
| `[row, …]`, `[record, …]`, CSV with a header | | `[row, …]` |
| a row or record | | a row |
| `{name: tensor}` | | `{name: tensor}` |

A row is a list of values, or one value. A record is a map by the names of columns or inputs. A row of an answer is a
value, or a map by the names of outputs if there are several. Rows and columns in messages count from 1.
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, dropwhile
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from cortex.errors import ModelInputError, with_article
from cortex.payloads.content_type import to_utf8
from cortex.payloads.inference_tensors import DTYPES
from cortex.payloads.json_bodies import parse_json
from cortex.payloads.signature import ModelSignature, TensorSignature

Array = NDArray[Any]
Arrays = Mapping[str, Array]

AnswerForm = Literal["predictions", "outputs", "rows", "row", "values"]

_FORMS = ("instances", "inputs", "dataframe_split", "dataframe_records")
#: Other keys of these forms, and the values that change nothing.
_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "signature_name": ("", "serving_default", None),
    "params": ({}, None),
    "parameters": ({}, None),
}
_SEND = (
    'send rows ([[1, 2]]), records ([{"x": 1}]), {"instances": …}, {"inputs": …}, {"dataframe_split": …}, '
    '{"dataframe_records": …} or text/csv'
)
_FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")  #: curl sends the first one by default
_MAX_RANK = 32
_SHOWN_NAMES = 20
_SHOWN_CHARACTERS = 60
#: Python types of JSON values that numpy converts to each kind of array without a doubt.
_PLAIN: Mapping[str, frozenset[type]] = {
    "f": frozenset({float, int, bool, type(None)}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "b": frozenset({bool}),
    "O": frozenset({str, bytes}),
}
_EXPECTED = {
    "f": "a number",
    "i": "a whole number",
    "u": "a whole number, 0 or more",
    "b": "true or false",
    "O": "a text",
}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The arrays of a request, and the form of its answer."""

    inputs: Arrays
    form: AnswerForm

    def answer(self, outputs: Arrays) -> Any:
        """Return the answer for the outputs of the model, as JSON values."""
        if self.form == "predictions":
            return {"predictions": _rows(outputs)}
        if self.form == "outputs":
            return {"outputs": _only(outputs)}
        if self.form == "values":
            return {name: _json(name, array) for name, array in outputs.items()}
        rows = _rows(outputs)
        return rows[0] if self.form == "row" and isinstance(rows, list) and len(rows) == 1 else rows


def read_request(payload: Any, signature: ModelSignature, content_type: str = "") -> ModelRequest:
    """Return the arrays of a parsed body, with the names, datatypes and shapes of the signature.

    A body of str or bytes is CSV or JSON, by its content type. Raises: ModelInputError with a message for the caller;
    BadBody for a character set.
    """
    reader = _Reader(signature)
    media_type = content_type.partition(";")[0].strip().lower()
    if payload in ("", b"") or (media_type in _FORM_TYPES and not payload):
        raise ModelInputError(f"the body is empty; {_SEND}")
    if isinstance(payload, bytes):
        payload = to_utf8(payload, content_type.encode("latin-1"))
    if isinstance(payload, str | bytes):
        if media_type == "text/csv":
            return ModelRequest(reader.csv(payload), "rows")
        payload = _parse_json(payload)
    if isinstance(payload, Mapping):
        # JSON is a dict even if curl declares a form; forms are other mappings.
        is_form = media_type in _FORM_TYPES and not isinstance(payload, dict)
        if is_form and not set(payload) & {*_FORMS, *reader.names}:
            raise ModelInputError(
                f"the body was sent as a form ({media_type}); send the header `content-type: application/json`, "
                "or `content-type: text/csv` with CSV"
            )
        return _read_object(reader, payload)
    if isinstance(payload, list):
        if reader.is_row(payload):
            return ModelRequest(reader.rows([payload]), "row")
        return ModelRequest(reader.rows(payload), "rows")
    if reader.takes_scalars and isinstance(payload, str | int | float):
        return ModelRequest(reader.rows([payload]), "row")
    raise ModelInputError(f"the body is {_kind(payload)}; {_SEND}")


def _read_object(reader: _Reader, payload: Mapping[str, Any]) -> ModelRequest:
    forms = [form for form in _FORMS if form in payload and form not in reader.names]
    if not forms:
        return reader.record(payload)
    if len(forms) > 1:
        raise ModelInputError(f"the body has the keys {_list(forms)}; send one of them")
    form = forms[0]
    for key, value in payload.items():
        if key != form and key not in _OPTIONS:
            raise ModelInputError(f"the body has the key {_shown(key)} besides {form!r}; remove it")
        if key != form and value not in _OPTIONS[key]:
            raise ModelInputError(f"the key {key!r} can't be used: this API runs the model with its own settings")
    value = payload[form]
    if form == "dataframe_split":
        return ModelRequest(reader.split(value), "predictions")
    if form == "inputs":
        # MLflow's own server answers `inputs` with predictions, too.
        return ModelRequest(reader.tensors(value), "predictions" if reader.platform == "mlflow" else "outputs")
    if not isinstance(value, list):
        raise ModelInputError(f"{form} is {_kind(value)}; it must be a list of rows")
    return ModelRequest(reader.rows(value), "predictions")


def _parse_json(body: str | bytes) -> Any:
    try:
        return parse_json(body.encode() if isinstance(body, str) else body)
    except orjson.JSONDecodeError as exc:
        raise ModelInputError(
            f"the body is not JSON ({exc}); send JSON, or CSV with the content type text/csv"
        ) from None


class _Reader:
    """Converts rows, records and tensors to the inputs of one model."""

    def __init__(self, signature: ModelSignature) -> None:
        self._inputs = signature.inputs
        self._by_name = {tensor.name: tensor for tensor in self._inputs}
        self.platform = signature.platform
        #: Rows have values of these: ONNX models have weights as optional inputs, and MLflow models columns.
        rows_of = [each for each in self._inputs if not each.optional or signature.platform == "mlflow"]
        self._columns = tuple(each.name for each in rows_of)
        only = rows_of[0] if len(rows_of) == 1 else None
        #: The input whose last axis are columns.
        self._matrix = only if only is not None and len(only.shape) == 2 and only.datatype != "BYTES" else None
        self._labels = self._matrix.labels if self._matrix is not None else ()
        self._only = only
        self._optional = {tensor.name for tensor in self._inputs if tensor.optional}
        #: Columns that may lack values; those of numbers are NaN in any case.
        self._nullable = self._optional if signature.platform == "mlflow" else set()
        self._takes_bytes = only is not None and only.datatype == "BYTES"
        #: Whether each input is one column, so that a row has a value for each.
        self._is_columns = self._matrix is None and not any(
            each.any_shape or each.shape[1:] not in ((), (1,)) for each in rows_of
        )
        self.takes_scalars = only is not None and only.shape[1:] in ((), (1,))

    @property
    def names(self) -> Sequence[str]:
        """Return the names that records may have."""
        return self._labels or tuple(self._by_name)

    def is_row(self, values: list[Any]) -> bool:
        """Return whether a list is one row, not a list of rows."""
        if not values or any(isinstance(value, list | Mapping) for value in values):
            return False
        if self._only is None:
            return self._is_columns
        return self._matrix is not None or (not self._is_columns and not self._only.any_shape)

    def rows(self, rows: list[Any]) -> dict[str, Array]:
        """Convert a list of rows or records."""
        if not rows:
            raise ModelInputError("there are no rows")
        kinds = set(map(type, rows))
        if dict in kinds and not (self._takes_bytes and any(map(_is_base64, rows))):
            if len(kinds) > 1:
                odd = next(index for index, row in enumerate(rows) if type(row) is not type(rows[0]))
                raise ModelInputError(f"row {odd + 1} is {_kind(rows[odd])}, but row 1 is {_kind(rows[0])}")
            return self._records(rows)
        if self._only is not None and not (self._is_columns and list in kinds):
            return {self._only.name: self._convert(self._only, rows, is_rows=True)}
        if not self._is_columns:
            raise ModelInputError(f"the model has several inputs: send rows as maps by name ({_list(self.names)})")
        return self._table(self._columns, rows)

    def split(self, value: Any) -> dict[str, Array]:
        """Convert `{"columns": names, "data": rows}`."""
        columns, data = (value.get("columns"), value.get("data")) if isinstance(value, Mapping) else (None, None)
        if not isinstance(data, list) or not (columns is None or isinstance(columns, list)):
            raise ModelInputError('dataframe_split must be {"columns": [name, …], "data": [row, …]}')
        if not data:
            raise ModelInputError("there are no rows")
        if columns is None:
            return self.rows(data)
        return self._table([str(name) for name in columns], data)

    def csv(self, body: str | bytes) -> dict[str, Array]:
        """Convert CSV with a header."""
        if self._matrix is None and not self._is_columns:
            raise ModelInputError("the model takes tensors, not columns: send JSON instead of CSV")
        try:
            text = body.decode("utf-8-sig") if isinstance(body, bytes) else body
            lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        except UnicodeDecodeError:
            raise ModelInputError("the body is not UTF-8; the content type must name another character set") from None
        except csv.Error as exc:
            raise ModelInputError(f"the body is not CSV: {exc}") from None
        lines = list(dropwhile(operator.not_, lines))
        is_one_column = bool(lines) and len(lines[0]) == 1  # an empty line is an empty cell, also at the end
        lines = [line or [""] for line in lines if line or is_one_column]
        if len(lines) < 2:
            raise ModelInputError(
                "CSV must have a header with the names of the columns, and at least one row; "
                "with curl, use --data-binary: -d removes the line breaks"
            )
        header, cells = [name.strip() for name in lines[0]], lines[1:]
        if not set(header) & set(self.names) and all(map(_is_number, header)):
            raise ModelInputError("the first line of CSV must be a header with the names of the columns")
        self._check_columns(header)
        for number, row in enumerate(cells, 1):
            if len(row) != len(header):
                raise ModelInputError(f"row {number} has {len(row)} cells, but the header has {len(header)}")
        kinds = [DTYPES[(self._matrix or self._by_name[name]).datatype].kind for name in header]
        readers = [
            _nullable_cell(_CELLS[kind]) if name in self._nullable else _CELLS[kind]
            for kind, name in zip(kinds, header, strict=True)
        ]
        rows = [[read(cell) for read, cell in zip(readers, row, strict=True)] for row in cells]
        return self._table(header, rows)

    def tensors(self, value: Any) -> dict[str, Array]:
        """Convert one tensor, or tensors or columns by name."""
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and not _is_base64(value[0]):
            return self._records(value)
        if not isinstance(value, Mapping) or _is_base64(value):
            if self._only is None:
                raise ModelInputError(f"inputs must be a map by name: the model has the inputs {_list(self.names)}")
            return {self._only.name: self._convert(self._only, value)}
        if self._labels and not set(value) & set(self._by_name):
            self._check_names(value, "inputs")
            assert self._matrix is not None
            columns = TensorSignature("", self._matrix.datatype, (-1,))
            parts = [self._convert(columns, value[name], name).reshape(-1) for name in self._labels]
            self._check_lengths(dict(zip(self._labels, parts, strict=True)))
            return {self._matrix.name: np.stack(parts, axis=1)}
        self._check_names(value, "inputs", tuple(self._by_name))
        arrays = {
            name: self._convert(tensor, value[name], name) for name, tensor in self._by_name.items() if name in value
        }
        if self._is_columns:
            self._check_lengths(arrays)
        return arrays

    def record(self, record: Mapping[str, Any]) -> ModelRequest:
        """Convert a map by name: one row, or tensors if its values have one more axis."""
        if not set(record) & (set(self.names) | set(self._by_name)):
            keys = f"the keys {_list(list(record))}" if record else "no keys"
            raise ModelInputError(f"the body is a map with {keys}; the model has {_list(self.names)}; {_SEND}")
        by_column = bool(self._labels) and not set(record) & set(self._by_name)
        names = self._labels if by_column else tuple(self._by_name)
        self._check_names(record, "the record", names)
        names = tuple(name for name in names if name in record)
        shapes = [self._by_name[name].shape if not by_column else (-1,) for name in names]
        ranks = [min(len(shape), 1) if self._is_columns else len(shape) for shape in shapes]
        is_batch = any(ranks) and all(_depth(record[name]) >= rank for name, rank in zip(names, ranks, strict=True))
        if is_batch:
            return ModelRequest(self.tensors(record), "values")
        return ModelRequest(self._records([record]), "row")

    def _records(self, records: Sequence[Any]) -> dict[str, Array]:
        names = self._labels if self._labels and set(records[0]) != set(self._by_name) else tuple(self._by_name)
        wanted = dict.fromkeys(name for name in names if name in records[0] or name not in self._optional).keys()
        for number, record in enumerate(records, 1):
            if not isinstance(record, Mapping):
                raise ModelInputError(f"row {number} is {_kind(record)}, but row 1 is a map")
            if record.keys() != wanted:
                self._check_names(record, f"row {number}", names)
                raise ModelInputError(f"row {number} has {_list(list(record))}, but row 1 has {_list(list(wanted))}")
        if self._labels and names is self._labels and self._matrix is not None:
            rows = [[record[name] for name in names] for record in records]
            return {self._matrix.name: self._convert(self._matrix, rows)}
        return {
            name: self._convert(tensor, [record[name] for record in records], name, is_rows=True)
            for name, tensor in self._by_name.items()
            if name in wanted
        }

    def _table(self, names: Sequence[str], rows: list[Any]) -> dict[str, Array]:
        """Convert rows whose columns have names."""
        self._check_columns(names)
        if self._matrix is not None:
            return {self._matrix.name: self._convert(self._matrix, rows, is_rows=True)}
        if not self._is_columns:
            raise ModelInputError('the model takes tensors, not columns: send {"inputs": …}')
        for number, row in enumerate(rows, 1):
            if not isinstance(row, list) or len(row) != len(names):
                found = f"{len(row)} values" if isinstance(row, list) else _kind(row)
                raise ModelInputError(f"row {number} has {found}; there are {len(names)} columns: {_list(names)}")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        given = {name: tensor for name, tensor in self._by_name.items() if name in columns}
        return {name: self._convert(tensor, list(columns[name]), name) for name, tensor in given.items()}

    def _check_columns(self, names: Sequence[str]) -> None:
        """Check the names of columns that are in an order: a model that takes a matrix requires its own."""
        name, count = Counter(names).most_common(1)[0] if names else ("", 0)
        if count > 1:
            raise ModelInputError(f"the column {_shown(name)} is there twice")
        if self._matrix is None:
            self._check_names(dict.fromkeys(names), "the table")
        elif self._labels:
            self._check_names(dict.fromkeys(names), "the table", self._labels)
            if tuple(names) != self._labels:
                raise ModelInputError(
                    f"the columns are in another order than the model's: they are {_list(names)}; "
                    f"the model has {_list(self._labels)}"
                )
        elif self._matrix.shape[1] not in (-1, len(names)):
            raise ModelInputError(f"there are {len(names)} columns; the model takes {self._matrix.shape[1]}")

    def _check_names(self, given: Mapping[str, Any], what: str, names: Sequence[str] = ()) -> None:
        names = names or self.names
        known = set(names)
        missing = [name for name in names if name not in given and name not in self._optional]
        unknown = [name for name in given if name not in known]
        if missing or unknown:
            problems = [f"has no {_list(missing)}"] if missing else []
            problems += [f"has {_list(unknown)}, which the model lacks"] if unknown else []
            raise ModelInputError(f"{what} {' and '.join(problems)}; the model has {_list(names)}")

    def _check_lengths(self, columns: Mapping[str, Array]) -> None:
        columns = {name: column for name, column in columns.items() if column.ndim}  # a scalar is for all rows
        first = next(iter(columns), "")
        for name, column in columns.items():
            if len(column) != len(columns[first]):
                raise ModelInputError(
                    f"column {name!r} has {len(column)} values, but column {first!r} has {len(columns[first])}"
                )

    def _convert(self, tensor: TensorSignature, value: Any, column: str = "", *, is_rows: bool = False) -> Array:
        """Return the array of an input; with `is_rows`, each item of the value is a row. Raises: ModelInputError."""
        place = _Place(tensor.labels, column or ("" if self._only is not None else tensor.name), len(tensor.shape))
        values, shape = _flatten(value, place, tensor.datatype == "BYTES")
        array = _array(values, shape, tensor.datatype, place, tensor.name in self._nullable).reshape(shape)
        if array.ndim and not len(array):
            raise ModelInputError("there are no rows")
        return array if tensor.any_shape else _fit(array, tensor, place, is_rows)


# Values to arrays.


@dataclass(frozen=True, slots=True)
class _Place:
    """Words for a place within an input."""

    labels: Sequence[str]
    column: str  #: the name of the whole input; "": the only one
    rank: int

    def of(self, index: Sequence[int]) -> str:
        """Return the words for the value, or the part, at an index."""
        if not index:
            return f"column {self.column!r}" if self.column else "the value"
        words = f"row {index[0] + 1}"
        if self.column:
            words += f", column {self.column!r}"
        elif len(index) > 1:
            label = f" ({self.labels[index[1]]!r})" if index[1] < len(self.labels) else ""
            return f"{words}, column {index[1] + 1}{label}" + "".join(f"[{each}]" for each in index[2:])
        return words + "".join(f"[{each}]" for each in index[1:])


def _flatten(value: Any, place: _Place, is_text: bool) -> tuple[list[Any], tuple[int, ...]]:
    """Return the innermost values in row order, and the shape. Raises: ModelInputError if it is ragged."""
    level: list[Any] = [value]
    shape: list[int] = []
    while level and (kinds := set(map(type, level))) and kinds & {list, tuple}:
        if len(shape) == _MAX_RANK:
            raise ModelInputError(f"the value is nested more than {_MAX_RANK} deep")
        lengths = {len(part) if isinstance(part, list | tuple) else -1 for part in level}
        if len(lengths) > 1:
            raise _ragged(level, shape, place)
        shape.append(lengths.pop())
        level = list(chain.from_iterable(level))
    if is_text and dict in set(map(type, level)):
        level = [_from_base64(each, place.of(_index(at, shape))) for at, each in enumerate(level)]
    return level, tuple(shape)


def _ragged(level: list[Any], shape: Sequence[int], place: _Place) -> ModelInputError:
    sizes = [len(part) if isinstance(part, list | tuple) else None for part in level]
    odd = next(at for at, size in enumerate(sizes) if size != sizes[0])

    def words(at: int) -> str:
        return "is one value" if sizes[at] is None else f"has {sizes[at]} values"

    here, first = place.of(_index(odd, shape)), place.of(_index(0, shape))
    names = f"; the columns are {_list(place.labels)}" if place.labels and len(shape) == 1 else ""
    return ModelInputError(f"{here} {words(odd)}, but {first} {words(0)}{names}")


def _array(values: list[Any], shape: Sequence[int], datatype: str, place: _Place, is_nullable: bool = False) -> Array:
    """Convert values to an array of a datatype; a value of another type is an error that names it."""
    dtype = DTYPES[datatype]
    kinds = set(map(type, values))
    if is_nullable and type(None) in kinds:
        if dtype.kind not in "fO":
            where = place.of(_index(values.index(None), shape))
            raise ModelInputError(
                f"{where} is null, which columns of the type {datatype} can't hold; leave the column out of all rows, "
                "or save the model with the type double"
            )
        kinds.remove(type(None))
    if kinds <= _PLAIN[dtype.kind]:
        if dtype.kind == "O":
            array: Array = np.empty(len(values), object)
            array[:] = values
            return array
        try:
            with np.errstate(over="ignore"):
                array = np.array(values, dtype)
            if dtype.kind != "f" or not np.isinf(array).any():
                return array
        except (OverflowError, ValueError):
            pass
    return np.array([_number(each, datatype, place, at, shape) for at, each in enumerate(values)], dtype)


def _number(value: Any, datatype: str, place: _Place, at: int, shape: Sequence[int]) -> Any:
    """Return a value that fits a datatype; text and other types are errors."""
    dtype = DTYPES[datatype]
    kind = dtype.kind
    if kind in "iu" and isinstance(value, float) and value.is_integer():
        value = int(value)
    problem = ""
    if type(value) not in _PLAIN[kind]:
        problem = f"; it must be {_EXPECTED[kind]}"
    elif not _is_in_range(value, dtype):
        problem = f", which is out of the range of {datatype}"
    if problem:
        raise ModelInputError(f"{place.of(_index(at, shape))} is {_shown(value)}{problem}")
    return value


def _is_in_range(value: Any, dtype: np.dtype[Any]) -> bool:
    if dtype.kind in "iu":
        return bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)
    try:
        return dtype.kind != "f" or value is None or not abs(float(value)) > float(np.finfo(dtype).max)
    except OverflowError:
        return False


def _fit(array: Array, tensor: TensorSignature, place: _Place, is_rows: bool) -> Array:
    """Add a missing axis for the only row, or behind a column, and check the sizes."""
    wanted = tensor.shape
    if array.ndim + 1 == len(wanted):
        is_column = wanted[1:] == (1,) and (is_rows or not tensor.labels)
        if is_rows and not is_column:  # several rows must not become one
            found = f"has the shape {_shape(array.shape[1:])}" if array.ndim > 1 else "is one value"
            raise ModelInputError(f"{place.of((0,))} {found}; a row of the model has the shape {_shape(wanted[1:])}")
        array = array.reshape((*array.shape, 1) if is_column and array.ndim else (1, *array.shape))
    elif array.ndim == len(wanted) + 1 and array.shape[-1:] == (1,):
        array = array.reshape(array.shape[:-1])
    if array.ndim == len(wanted) and all(want in (-1, have) for want, have in zip(wanted, array.shape, strict=True)):
        return array
    if len(wanted) == 2 and array.ndim == 2 and wanted[0] in (-1, len(array)):
        names = f": {_list(tensor.labels)}" if tensor.labels else ""
        raise ModelInputError(f"rows have {array.shape[1]} values; the model takes {wanted[1]}{names}")
    found = f"the shape {_shape(array.shape)}" if array.ndim else "no axes"
    raise ModelInputError(f"{place.of(())} has {found}; the model takes {_shape(wanted) if wanted else 'one value'}")


def _shape(sizes: Sequence[int]) -> str:
    return f"[{', '.join('?' if size < 0 else str(size) for size in sizes)}]"


# CSV.


def _float_cell(cell: str) -> Any:
    if not cell.strip():
        return None
    return float(cell) if _is_number(cell) else cell


def _whole_cell(cell: str) -> Any:
    text = cell.strip()
    digits = text.removeprefix("-").removeprefix("+")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 30 else _float_cell(cell)


_CELLS: Mapping[str, Callable[[str], Any]] = {
    "f": _float_cell,
    "i": _whole_cell,
    "u": _whole_cell,
    "b": lambda cell: _TRUTH.get(cell.strip().lower(), cell),
    "O": lambda cell: cell,
}


def _nullable_cell(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda cell: read(cell) if cell.strip() else None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


# Answers.


def _rows(outputs: Arrays) -> Any:
    """Return a list of values, or of maps if there are several outputs; outputs by name if they have no rows."""
    if outputs and not any(array.ndim for array in outputs.values()):
        return [_only(outputs)]  # a model of scalars has one row
    if len(outputs) == 1:
        return _only(outputs)
    if len({array.shape[0] if array.ndim else -1 for array in outputs.values()}) != 1:
        return {name: _json(name, array) for name, array in outputs.items()}
    columns = {name: _json(name, array) for name, array in outputs.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _only(outputs: Arrays) -> Any:
    found = {name: _json(name, array) for name, array in outputs.items()}
    return next(iter(found.values())) if len(found) == 1 else found


def _json(name: str, array: Array) -> Any:
    """Return the JSON value of an output; bytes that are not UTF-8, and outputs named `…_bytes`, are base64."""
    if array.dtype.kind != "O":
        return array.tolist()
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [_text(each, name.endswith("_bytes")) for each in array.reshape(-1).tolist()]
    return texts.tolist()


def _text(value: Any, is_binary: bool) -> Any:
    if isinstance(value, bytes):
        if not is_binary:
            try:
                return value.decode()
            except UnicodeDecodeError:
                pass
        return {"b64": base64.b64encode(value).decode()}
    return value


# Words.


def _is_base64(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"b64"}


def _from_base64(value: Any, where: str) -> Any:
    if not _is_base64(value):
        return value
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ModelInputError(f"{where} is {_shown(value)}, which is not base64") from None


def _index(at: int, shape: Sequence[int]) -> list[int]:
    """Return the index, in an array of a shape, of a value by its place in row order."""
    index = []
    for size in reversed(shape):
        at, rest = divmod(at, size)
        index.append(rest)
    return index[::-1]


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list) and depth < _MAX_RANK:
        depth += 1
        value = value[0] if value else None
    return depth


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "map", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return with_article(names.get(type(value), type(value).__name__))


def _shown(value: Any) -> str:
    if isinstance(value, list | Mapping):
        return _kind(value)
    if value is None:
        return "null"
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a huge number"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(_shown(str(name)) for name in names[:_SHOWN_NAMES])
    return shown + (", …" if len(names) > _SHOWN_NAMES else "")
