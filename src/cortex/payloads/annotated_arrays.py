"""Payloads that are numpy arrays and pandas frames. Imported only if a user's method annotates one."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections import Counter
from typing import Annotated, Any, get_args, get_origin

import numpy as np
import orjson

from cortex.payloads.annotated_files import only_file
from cortex.payloads.arrays import Array, TensorError, is_numeric, leaves_of, to_numbers
from cortex.payloads.content_type import to_utf8
from cortex.payloads.json_bodies import parse_json
from cortex.payloads.json_object import Json
from cortex.payloads.payload_type import TEXT_SCHEMA, Part, PayloadType
from cortex.payloads.signature import BodySignature
from cortex.payloads.validation import PayloadError, payload_error

#: A frame may have that many cells, or as many as `_CELLS_PER_VALUE` for each value in the body: records that have no
#: columns in common would need memory for rows × columns.
_MIN_CELLS = 1_000_000
_CELLS_PER_VALUE = 20
#: pandas needs seconds for the names of more columns.
_MAX_CSV_COLUMNS = 20_000

#: Whole numbers up to this are exact in a float.
_MAX_EXACT = 2**53
#: Keys under which other systems expect a frame: MLflow, TensorFlow Serving, Vertex AI.
_FOREIGN_FORMS = frozenset({"dataframe_records", "dataframe_split", "instances", "inputs"})

#: Media types whose bodies are no CSV, though a first line of some text would do.
_NO_TABLES = ("image/", "audio/", "video/", "font/", "multipart/", "application/xml", "text/xml", "application/pdf")

_LINE_END = re.compile(rb"[\r\n]")
_WHOLE = re.compile(r"[+-]?\d{1,400}")
_SUPPORTED_KINDS = "biufcOU"
_JSON_TYPES = {"b": "boolean", "i": "integer", "u": "integer", "f": "number", "O": "string", "U": "string"}


class Shape:
    """The shape and datatype of an array: `Annotated[numpy.ndarray, cortex.Shape(-1, 4)]`.

    -1 stands for any size. Without `dtype`, such as "float32", the datatype is that of the values.
    """

    def __init__(self, *sizes: int, dtype: str | None = None) -> None:
        if not all(type(size) is int and size >= -1 for size in sizes):
            raise ValueError(f"Shape{sizes}: sizes are whole numbers, or -1 for any")
        self.sizes = sizes
        self.dtype = dtype

    def __repr__(self) -> str:
        dtype = [] if self.dtype is None else [f"dtype={self.dtype!r}"]
        return f"Shape({', '.join([*map(str, self.sizes), *dtype])})"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the core schema of a field that is such an array."""
        return handler.generate_schema(Annotated[Any, Part(array_type(Annotated[source, self]))])


def array_type(annotation: Any) -> ArrayType:
    """Return the type of `numpy.ndarray`, `NDArray[numpy.float32]` or `Annotated[numpy.ndarray, Shape(-1, 4)]`.

    Raises: TypeError for a datatype that no JSON can hold.
    """
    metadata: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, metadata = annotation.__origin__, annotation.__metadata__
    sizes, dtype = None, _dtype_of(annotation)
    for item in metadata:
        if isinstance(item, Shape):
            sizes, dtype = item.sizes, item.dtype or dtype
        elif isinstance(item, str | np.dtype) or (isinstance(item, type) and issubclass(item, np.generic)):
            dtype = item
    found = None if dtype is None else np.dtype(dtype)
    if found is not None and found.kind not in _SUPPORTED_KINDS:
        raise TypeError(f"arrays of {found} can't be read from JSON")
    return ArrayType(sizes, found)


def _dtype_of(annotation: Any) -> Any:
    """Return `float32` of `NDArray[float32]`; None if the annotation names no datatype."""
    arguments = get_args(annotation)
    scalar = get_args(arguments[1])[0] if len(arguments) == 2 and get_args(arguments[1]) else None
    if not isinstance(scalar, type) or not issubclass(scalar, np.generic) or scalar in (np.generic, np.number):
        return None
    kinds: dict[Any, Any] = {np.floating: np.float64, np.integer: np.int64}
    return kinds.get(scalar, scalar)


class ArrayType(PayloadType):
    """An array of numbers, booleans or strings, from nested lists."""

    def __init__(self, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None) -> None:
        super().__init__(_array_schema(shape, dtype))
        self.shape = shape  #: None: any; -1: any size
        self.dtype = dtype  #: None: that of the values

    def from_json(self, value: Any, text: bytes) -> Any:
        if self.is_none(value):
            return None
        try:
            array = _to_array(value, self.dtype)
        except TensorError as error:
            place = tuple(map(int, re.findall(r"\[(\d+)\]", error.place)))
            raise payload_error("array_type", f"Input should be {error.wanted}", place) from None
        if self.shape is not None and not _fits(array, self.shape):
            wanted, has = _shown(self.shape), _shown(array.shape)
            raise payload_error("array_shape", f"Input should have the shape {wanted}, but has {has}")
        return array


def _to_array(value: Any, dtype: np.dtype[Any] | None) -> Array:
    """Convert JSON to an array. Raises: TensorError."""
    if dtype is not None and dtype.kind not in "OU":
        array = _to_floats(value, dtype) if dtype.kind == "f" else to_numbers(value, dtype)
        if dtype.kind == "f" and np.isinf(array).any():  # JSON has no infinity: a number is too large for the datatype
            place = "".join(f"[{index}]" for index in np.argwhere(np.isinf(array))[0])
            raise TensorError("", place, f"in the range of {dtype.name}")
        return array
    if dtype is None and (is_numeric(value) if isinstance(value, list) else isinstance(value, int | float)):
        return _numbers(value)
    leaves, shape = leaves_of(value)
    if dtype is None and any(isinstance(leaf, str) for _, leaf in leaves):
        is_text = isinstance(leaves[0][1], str)
        odd = next((place for place, leaf in leaves if isinstance(leaf, str) is not is_text), None)
        if odd is not None:
            raise TensorError("", odd, f"a {'string' if is_text else 'number'}, like the first value")
    if dtype is None and not isinstance(leaves[0][1], str):
        odd = next((place for place, leaf in leaves if not isinstance(leaf, int | float)), leaves[0][0])
        raise TensorError("", odd, "numbers only, or strings only")
    for place, leaf in leaves:
        if not isinstance(leaf, str):
            raise TensorError("", place, "a string" if dtype is not None else "numbers only, or strings only")
    strings = np.empty(len(leaves), object)
    strings[:] = [leaf for _, leaf in leaves]
    return strings.reshape(shape)


def _numbers(value: Any) -> Array:
    """Convert numbers to an array of a type that holds them. Raises: TensorError for whole numbers beyond 64 bits."""
    array = np.asarray(value)
    if array.dtype.kind == "O" or (array.dtype.kind == "f" and array.size and float(np.abs(array).max()) >= _MAX_EXACT):
        leaves, _ = leaves_of(value)
        wholes = [(place, leaf) for place, leaf in leaves if type(leaf) is int]
        if len(wholes) == len(leaves) and all(0 <= leaf < 2**64 for _, leaf in wholes):
            return np.asarray(value, np.uint64)
        if len(wholes) == len(leaves) or array.dtype.kind == "O":  # beside fractions, they are floats, too
            place = next((place for place, leaf in wholes if leaf.bit_length() > 63), wholes[0][0])
            raise TensorError("", place, "a whole number in the range of int64")
    return array


def _to_floats(value: Any, dtype: np.dtype[Any]) -> Array:
    """Convert at once what numpy converts, in which strings of digits are numbers; otherwise one by one."""
    if isinstance(value, list):
        with contextlib.suppress(ValueError, TypeError, OverflowError), np.errstate(over="ignore"):
            return np.array(value, dtype)
    return to_numbers(value, dtype)


def _fits(array: Array, shape: tuple[int, ...]) -> bool:
    return array.ndim == len(shape) and all(want in (-1, have) for want, have in zip(shape, array.shape, strict=True))


def _shown(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _array_schema(shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None) -> Json:
    kind = _JSON_TYPES.get(dtype.kind) if dtype is not None else None
    schema: Json = {"type": kind} if kind else {}
    if shape is None:
        return {"type": "array", "items": {}}
    for size in reversed(shape):
        limits = {} if size == -1 else {"minItems": size, "maxItems": size}
        schema = {"type": "array", "items": schema, **limits}
    return schema


class FrameType(PayloadType):
    """A pandas frame: from records, from columns, from `{"columns": …, "data": …}`, or from CSV."""

    reads_bytes = True
    alternatives = (BodySignature(TEXT_SCHEMA, "text/csv", is_typed=True),)

    def __init__(self) -> None:
        records = {"type": "array", "items": {"type": "object"}}
        columns = {"type": "object", "additionalProperties": {"type": "array", "items": {}}}
        super().__init__({"anyOf": [records, columns]}, result_schema=records)

    def from_json(self, value: Any, text: bytes) -> Any:
        import pandas as pd  # noqa: PLC0415 - only for what is annotated

        if self.is_none(value):
            return None
        if isinstance(value, list):
            import pandas as pd  # noqa: PLC0415 - as above

            names = _names_of_records(value)
            columns = {name: _column([record.get(name) for record in value]) for name in names}
            return pd.DataFrame(columns, index=pd.RangeIndex(len(value)))
        if not isinstance(value, dict):
            raise payload_error("frame_type", "Input should be a list of records, or lists by the name of a column")
        if value.keys() - {"index"} == {"columns", "data"} and _is_rows(value["data"]):
            return _from_rows(value)
        for name, column in value.items():
            if name in _FOREIGN_FORMS and _is_nested(column):
                message = f"Input should be a list of records, or lists by column, not an object with the key {name!r}"
                raise payload_error("frame_type", message, (name,))
            if not isinstance(column, list):
                raise payload_error("list_type", "Input should be a list, the values of a column", (name,))
        rows = len(next(iter(value.values()), ()))
        for name, column in value.items():
            if len(column) != rows:
                message = f"Input should have as many values as the first column, {rows}, but has {len(column)}"
                raise payload_error("frame_type", message, (name,))
        return pd.DataFrame({name: _column(column) for name, column in value.items()})

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        if media_type.startswith(_NO_TABLES):
            raise payload_error("frame_type", f"Input should be JSON or CSV, not {media_type[:40]}")
        if "csv" not in media_type:
            try:
                return self.from_json(parse_json(body), body)
            except orjson.JSONDecodeError as error:
                # `curl -d` sends JSON as a form, but takes the ends of lines out of CSV.
                if "urlencoded" in media_type or body.lstrip()[:1] in (b"[", b"{"):
                    hint = f"Input should be JSON, or CSV with the content type text/csv: {error}"
                    raise payload_error("json_invalid", hint) from None
        return _read_csv(body)

    def from_form(self, form: Any) -> Any:
        file = only_file(form)
        content_type = file.content_type or "text/csv"
        return self.from_bytes(to_utf8(file.file.read(), content_type.encode("latin-1")), content_type)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) for row in value)


def _is_nested(value: Any) -> bool:
    """Return whether a value is an object, or a list of rows."""
    return isinstance(value, dict) or (isinstance(value, list) and isinstance(next(iter(value), None), list | dict))


def _names_of_records(records: list[Any]) -> dict[str, Any]:
    """Return the names of the columns, in order."""
    columns: dict[str, Any] = {}  # a dict, for the order
    values = 0
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise payload_error("dict_type", "Input should be a record: values by the name of a column", (index,))
        columns.update(record)
        values += len(record)
    if len(records) * len(columns) > max(_MIN_CELLS, _CELLS_PER_VALUE * values):
        raise payload_error("frame_type", "Input should have records with the same columns")
    return columns


def _column(values: list[Any]) -> Any:
    """Return the values of a column, with NaN for null, however many rows there are.

    Whole numbers that a float can't hold exactly stay what they are: the column has the type `Int64` or `UInt64` beside
    nulls, and `object` beside fractions.
    """
    import pandas as pd  # noqa: PLC0415 - as above

    kinds = set(map(type, values))
    if kinds <= {int} or not values:
        return values
    numbers = kinds <= {int, float, type(None)}
    if numbers and int in kinds and not all(map(_is_exact, values)):
        whole = [value for value in values if value is not None]
        if float not in kinds:
            for dtype in ("Int64", "UInt64"):
                limits = np.iinfo(dtype.lower())
                if limits.min <= min(whole) and max(whole) <= limits.max:
                    return pd.array(values, dtype=dtype)
        return pd.Series([np.nan if value is None else value for value in values], dtype=object)
    with_nan = [np.nan if value is None else value for value in values] if type(None) in kinds else values
    return np.array(with_nan, np.float64) if numbers else with_nan


def _is_exact(value: Any) -> bool:
    """Return whether a float can hold a value that is no fraction."""
    if type(value) is not int or -_MAX_EXACT <= value <= _MAX_EXACT:
        return True
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _from_rows(value: dict[str, Any]) -> Any:
    """Convert `{"columns": […], "data": [[…], …]}`."""
    import pandas as pd  # noqa: PLC0415 - as above

    columns, rows = value["columns"], value["data"]
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise payload_error("list_type", "Input should be a list of names", ("columns",))
    seen: set[str] = set()
    for index, name in enumerate(columns):
        if name in seen:
            raise payload_error("frame_type", "Input should be a list of names that differ", ("columns", index))
        seen.add(name)
    for index, row in enumerate(rows):
        if len(row) != len(columns):
            message = f"Input should have {len(columns)} values, one per column, but has {len(row)}"
            raise payload_error("frame_type", message, ("data", index))
    if not rows:
        return pd.DataFrame(columns=columns)
    found = map(_column, map(list, zip(*rows, strict=True)))
    return pd.DataFrame(dict(zip(columns, found, strict=True)), index=pd.RangeIndex(len(rows)))


def _has_wide_line(body: bytes) -> bool:
    """Return whether a line has too many commas, without a look at each line: only long lines can have so many."""
    start = 0
    while len(body) - start > _MAX_CSV_COLUMNS:
        stop = start + _MAX_CSV_COLUMNS
        end = max(body.rfind(b"\n", start, stop), body.rfind(b"\r", start, stop))
        if end < 0:
            found = _LINE_END.search(body, stop)
            end = found.start() if found else len(body)
            if body.count(b",", start, end) >= _MAX_CSV_COLUMNS:
                return True
        start = end + 1
    return False


def _read_csv(body: bytes) -> Any:
    import pandas as pd  # noqa: PLC0415 - as above

    if _has_wide_line(body):
        raise payload_error("csv_invalid", f"Input should be CSV with at most {_MAX_CSV_COLUMNS} columns")
    try:
        head = pd.read_csv(io.BytesIO(body), nrows=1)
        lines = max(body.count(b"\n"), body.count(b"\r"))  # pandas ends lines at both
        _check_header(body)
        # With more values than names, pandas uses the first values as labels of the rows.
        has_labels = not isinstance(head.index, pd.RangeIndex)
        if has_labels or len(head.columns) * lines > max(_MIN_CELLS, _CELLS_PER_VALUE * len(body)):
            raise payload_error("csv_invalid", "Input should have rows with as many values as the first line has names")
        frame = pd.read_csv(io.BytesIO(body))
        return _with_exact_numbers(frame, body)
    except PayloadError:
        raise
    except pd.errors.ParserError as error:
        reason = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        raise payload_error("csv_invalid", f"Input should be CSV: {reason}") from None
    except ValueError:  # no columns, or not UTF-8
        raise payload_error(
            "csv_invalid", "Input should be CSV in UTF-8, with the names of columns in its first line"
        ) from None


def _check_header(body: bytes) -> None:
    """Check the names in the first line of CSV, of which pandas would rename those that occur twice."""
    rows = csv.reader(io.TextIOWrapper(io.BytesIO(body), "utf-8-sig", newline=""))
    try:
        names = next((row for row in rows if row), [])
    except (csv.Error, UnicodeDecodeError):
        return  # pandas says what is wrong
    if len(names) == 1 and (other := next((each for each in ";\t|" if each in names[0]), None)):
        raise payload_error("csv_invalid", f"Input should be CSV with commas, but its first line has {other!r}")
    if repeated := next((name for name, count in Counter(names).items() if count > 1 and name), None):
        message = f"Input should be CSV with names that differ, but {repeated!r} is there twice"
        raise payload_error("csv_invalid", message)


def _with_exact_numbers(frame: Any, body: bytes) -> Any:
    """Return a frame in which no whole number has changed: pandas makes floats of those beside empty cells.

    Those beyond 64 bits it leaves as text.
    """
    import pandas as pd  # noqa: PLC0415 - as above

    names = [name for name in frame if _may_have_changed(frame[name])]
    if not names:
        return frame
    texts = pd.read_csv(io.BytesIO(body), usecols=names, dtype=str)
    for name in names:
        cells = [text.strip() if isinstance(text, str) else None for text in texts[name]]
        is_whole = [cell is None or bool(_WHOLE.fullmatch(cell)) for cell in cells]
        if frame[name].dtype == np.float64 or all(is_whole):
            values = zip(cells, is_whole, frame[name], strict=True)
            frame[name] = _column(
                [None if cell is None else int(cell) if whole else number for cell, whole, number in values]
            )
    return frame


def _may_have_changed(column: Any) -> bool:
    """Return whether a column of CSV may have whole numbers that its type can't hold."""
    if column.dtype.kind in "iub":
        return False
    if column.dtype.kind == "f":
        return bool((column.abs() >= _MAX_EXACT).any())
    first = column.first_valid_index()
    return first is not None and bool(_WHOLE.fullmatch(str(column[first]).strip()))
