"""A method with an annotated payload as an inference model: tensors become its payload, its result becomes tensors.

| annotation of the payload | inputs | calls |
|---|---|---|
| `numpy.ndarray`, also with datatype and shape | one | one |
| `pandas.DataFrame` | its columns, or one matrix | one |
| a type whose JSON is an object of scalars | one per field, each with one element per row | one per row |

numpy and pandas are imported only for a request, or because the user's code annotates them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from cortex.payloads.annotations import JsonType
from cortex.payloads.inference_protocol import V2Error, shorten
from cortex.payloads.json_object import Json
from cortex.payloads.payload_type import PayloadType
from cortex.payloads.signature import ModelSignature, TensorSignature
from cortex.payloads.validation import PayloadError
from cortex.predictor.binding import BoundMethod
from cortex.predictor.inference.inference_model import ONLY_OUTPUT, MethodModel

if TYPE_CHECKING:
    from cortex.predictor.inference.inference_model import Arrays

#: The name of the input of a method whose payload is an array.
ONLY_INPUT = "payload"
_DATATYPES = {"number": "FP64", "integer": "INT64", "boolean": "BOOL", "string": "BYTES"}


def bind_payload_model(api: str, method: BoundMethod) -> PayloadModel | None:
    """Return a method as an inference model; None if its payload is no array, frame or row."""
    if method.payload_type is None or method.kind not in ("sync", "async") or method.arguments != ("payload",):
        return None
    inputs = _inputs_of(method.payload_type)
    if inputs is None or importlib.util.find_spec("numpy") is None:
        return None
    return PayloadModel(ModelSignature(api, "python", inputs, ()), method, method.payload_type)


class PayloadModel(MethodModel):
    """A method with an annotated payload."""

    def __init__(self, signature: ModelSignature, method: BoundMethod, payload_type: PayloadType) -> None:
        self.name = method.name
        self.kind = method.kind
        self._signature = signature
        self._method = method
        self._type = payload_type

    def call(self, inputs: Arrays, parameters: Mapping[str, Any]) -> Arrays | Awaitable[Arrays]:
        """Call the method. Raises: V2Error for inputs that are no payload, UserError for a result without tensors."""
        if isinstance(self._type, JsonType):
            payloads = [self._row(row, number) for number, row in enumerate(_rows(inputs))]
            if self.kind == "async":
                return self._await_rows(payloads)
            return _join([self._method.call(payload, None, None) for payload in payloads])
        result = self._method.call(_payload(self._type, inputs), None, None)
        return self._await_one(result) if self.kind == "async" else outputs_of(result)

    def _row(self, row: Json, number: int) -> Any:
        try:
            return self._type.from_json(row, orjson.dumps(row))
        except PayloadError as error:
            raise V2Error(400, f"row {number}: {error}") from None

    async def _await_rows(self, payloads: list[Any]) -> Arrays:
        return _join([await self._method.call(payload, None, None) for payload in payloads])

    async def _await_one(self, result: Awaitable[Any]) -> Arrays:
        return outputs_of(await result)


def outputs_of(result: Any) -> Arrays:
    """Return a result as arrays by name: fields, columns, or the only output."""
    import numpy as np  # noqa: PLC0415 - see above

    if hasattr(result, "model_dump"):
        result = result.model_dump()
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = dataclasses.asdict(result)
    elif hasattr(result, "columns") and hasattr(result, "to_numpy"):  # a frame
        return {str(name): result[name].to_numpy() for name in result.columns}
    if isinstance(result, Mapping):
        return {str(name): np.atleast_1d(np.asarray(value)) for name, value in result.items()}
    return {ONLY_OUTPUT: np.atleast_1d(np.asarray(result))}


def _join(results: list[Any]) -> Arrays:
    """Return the results of several rows as arrays, whose first axis are the rows."""
    import numpy as np  # noqa: PLC0415 - see above

    found = [outputs_of(result) for result in results]
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]} if found else {}


def _inputs_of(payload_type: PayloadType) -> tuple[TensorSignature, ...] | None:
    """Return the inputs of a payload; empty: any are accepted. None: it has no tensors."""
    if isinstance(payload_type, JsonType):
        properties = payload_type.schema.get("properties", {})
        datatypes = {name: _DATATYPES.get(field.get("type")) for name, field in properties.items()}
        if payload_type.schema.get("type") != "object" or not datatypes:
            return None
        required = payload_type.schema.get("required", ())
        columns = [
            TensorSignature(name, datatype, (-1,), optional=name not in required)
            for name, datatype in datatypes.items()
            if datatype
        ]
        return tuple(columns) if len(columns) == len(datatypes) else None
    arrays = sys.modules.get("cortex.payloads.annotated_arrays")  # it is not imported for other annotations
    if arrays is None or not isinstance(payload_type, arrays.ArrayType | arrays.FrameType):
        return None
    if isinstance(payload_type, arrays.FrameType) or payload_type.dtype is None or payload_type.shape is None:
        return ()
    from cortex.payloads.inference_tensors import datatype_of  # noqa: PLC0415 - numpy is imported already

    datatype = datatype_of(payload_type.dtype) if payload_type.dtype.kind not in "OU" else "BYTES"
    return (TensorSignature(ONLY_INPUT, datatype, payload_type.shape),) if datatype else None


def _payload(payload_type: Any, inputs: Arrays) -> Any:
    """Return the array or frame of a request, with str instead of bytes, and writable. Raises: V2Error."""
    from cortex.payloads.annotated_arrays import ArrayType  # noqa: PLC0415 - numpy is imported already
    from cortex.payloads.inference_tensors import datatype_of  # noqa: PLC0415 - likewise

    texts = {name: _as_text(name, array) for name, array in inputs.items()}
    if isinstance(payload_type, ArrayType):
        if len(texts) != 1:
            raise V2Error(400, f"the payload is one array, but the request has {len(texts)} inputs")
        [(name, array)] = texts.items()
        wanted = payload_type.dtype
        if wanted is not None and wanted.kind not in "OU" and wanted != array.dtype:
            found = f"input {shorten(name)} has the datatype {datatype_of(array.dtype)}"
            raise V2Error(400, f"{found}; the model expects {datatype_of(wanted) or wanted}")
        return array if array.flags.writeable else array.copy()
    import pandas as pd  # noqa: PLC0415 - the user's code imports it

    if len(texts) == 1 and next(iter(texts.values())).ndim == 2:
        [array] = texts.values()
        if array.shape[1] > 1:
            return pd.DataFrame(array.copy())
    return pd.DataFrame({name: column.copy() for name, column in _columns(texts).items()})


def _rows(inputs: Arrays) -> list[Json]:
    columns = {name: column.tolist() for name, column in _columns(inputs).items()}
    for name, column in columns.items():
        columns[name] = [_decode(name, value) if isinstance(value, bytes) else value for value in column]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _columns(inputs: Arrays) -> dict[str, Any]:
    """Return columns of one length. Raises: V2Error."""
    columns = {}
    rows = next(iter(inputs.values())).size
    for name, array in inputs.items():
        if array.shape not in ((rows,), (rows, 1)):
            raise V2Error(
                400, f"input {shorten(name)} has the shape {list(array.shape)}; columns have [{rows}] elements"
            )
        columns[name] = array.reshape(rows)
    return columns


def _as_text(name: str, array: Any) -> Any:
    if array.dtype.kind != "O":
        return array
    import numpy as np  # noqa: PLC0415 - imported already

    decoded = np.empty(array.size, np.object_)
    decoded[:] = [_decode(name, value) if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]
    return decoded.reshape(array.shape)


def _decode(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise V2Error(400, f"input {shorten(name)} is not UTF-8") from None
