"""Tensors of the Open Inference Protocol: JSON and binary data to arrays, arrays to JSON and binary data. Pure.

| datatype | array | JSON | binary, little-endian, row-major |
|---|---|---|---|
| BOOL | bool | true, false | one byte each, 0 or 1 |
| INT8 … UINT64 | of the same size | integers | as in memory |
| FP16 | float16 | none | as in memory |
| FP32, FP64 | float32, float64 | numbers; null: NaN | as in memory |
| BYTES | object: bytes; str with the content type `str` | strings | 4 bytes with the length, then the bytes, each |

Sizes are compared before anything is allocated, so the memory of a request is a small multiple of its body.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cortex.errors import UserError
from cortex.payloads.inference_protocol import (
    RequestHeader,
    TensorHeader,
    V2Error,
    check_inputs,
    check_outputs,
    parse_request,
    raw_request,
    shorten,
    show_shape,
    show_value,
)
from cortex.payloads.signature import ModelSignature, TensorSignature

Array = NDArray[Any]

#: Arrays of each datatype, in the byte order of the protocol.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    "BYTES": np.dtype(np.object_),
}
_DATATYPES: Mapping[tuple[str, int], str] = {(dtype.kind, dtype.itemsize): name for name, dtype in DTYPES.items()}

_LENGTH = struct.Struct("<I")
#: Python types of JSON values that each kind of array accepts.
_JSON_TYPES: Mapping[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float, type(None)}),
    "O": frozenset({str}),
}
_EXPECTED = {"b": "true and false", "i": "integers", "u": "integers", "f": "numbers", "O": "strings"}


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Return the datatype of arrays; None if there is none. Arrays of objects are BYTES."""
    return _DATATYPES.get((dtype.kind, dtype.itemsize))


def decode_request(
    body: bytes, json_length: int | None, signature: ModelSignature
) -> tuple[RequestHeader, dict[str, Array]]:
    """Decode an inference request for a model, whose signature may lack inputs: then any are accepted.

    Arrays of binary inputs are read-only views of the body. Raises: V2Error.
    """
    if json_length == 0:
        only = signature.inputs[0] if len(signature.inputs) == 1 else None
        is_bytes = only is None or only.datatype == "BYTES"
        header = raw_request(signature, len(body), 0 if is_bytes or only is None else DTYPES[only.datatype].itemsize)
        if is_bytes:
            body = _LENGTH.pack(len(body)) + body
        rest = memoryview(body)
    else:
        header = parse_request(body if json_length is None else body[:json_length], json_length is not None)
        rest = memoryview(body)[len(body) if json_length is None else json_length :]
    header = _with_shapes_of_columns(header, signature)
    joined = _columns_of(header, signature)
    if joined is None:
        check_inputs(header, signature)
    check_outputs(header, tuple(tensor.name for tensor in signature.outputs) or header.outputs)
    arrays: dict[str, Array] = {}
    for tensor in header.inputs:
        if tensor.values is None:
            size = len(rest) if json_length == 0 else _binary_size(tensor, len(rest), json_length)
            array, rest = _from_binary(tensor, rest[:size]), rest[size:]
        else:
            array = _from_json(tensor, tensor.values)
        arrays[tensor.name] = _by_content_type(tensor, array)
    if len(rest):
        raise V2Error(400, f"the body has {len(rest)} bytes more than the tensors that its JSON describes")
    return header, arrays if joined is None else {joined.name: _join_columns(joined, arrays)}


def encode_response(
    header: RequestHeader, outputs: Mapping[str, Any], signature: ModelSignature, model: str, version: str | None
) -> tuple[bytes, int | None]:
    """Encode the outputs of a model; return the body, and the size of its JSON if binary data follows.

    Raises: V2Error for outputs that do not exist or have no JSON form, UserError for values that are no tensors.
    """
    order = [tensor.name for tensor in signature.outputs if tensor.name in outputs]
    order += [name for name in outputs if name not in order]
    check_outputs(header, tuple(order))
    entries = []
    binary: list[bytes] = []
    for name in header.outputs or order:
        array = _as_tensor(name, outputs[name])
        entry: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": datatype_of(array.dtype)}
        if header.is_binary(name):
            data = _to_binary(array)
            binary.append(data)
            entry["parameters"] = {"binary_data_size": len(data)}
        else:
            entry["data"] = _to_json(name, array)
        entries.append(entry)
    document: dict[str, Any] = {"model_name": model}
    if version is not None:
        document["model_version"] = version
    if header.id is not None:
        document["id"] = header.id
    document["outputs"] = entries
    try:
        text = orjson.dumps(document)
    except TypeError as error:  # a lone surrogate
        raise UserError(f"an output has text that is not valid Unicode: {error}") from None
    return (b"".join([text, *binary]), len(text)) if binary else (text, None)


def rows(outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of each row, for the tracker; outputs that differ in their rows count as one."""
    columns = {name: np.asarray(value) for name, value in outputs.items()}
    lengths = {column.shape[:1] for column in columns.values()}
    if () in lengths or len(lengths) != 1:
        return [{name: column.tolist() for name, column in columns.items()}]
    lists = [column.reshape(len(column), -1).tolist() for column in columns.values()]
    return [
        {name: cell[0] if len(cell) == 1 else cell for name, cell in zip(columns, cells, strict=True)}
        for cells in zip(*lists, strict=True)
    ]


# Requests.


def _binary_size(tensor: TensorHeader, left: int, json_length: int | None) -> int:
    if tensor.binary_bytes <= left:
        return tensor.binary_bytes
    hint = "; send Inference-Header-Content-Length" if json_length is None else ""
    claim = f"binary_data_size is {shorten(str(tensor.binary_bytes), quoted=False)}"
    raise V2Error(400, f"input {shorten(tensor.name)}: {claim}, but the body has only {left} bytes left{hint}")


def _from_binary(tensor: TensorHeader, data: memoryview) -> Array:
    dtype = DTYPES[tensor.datatype]
    what = f"input {shorten(tensor.name)}: shape {show_shape(tensor.shape)} of {tensor.datatype}"
    if dtype.kind == "O":
        return _object_array(_split_bytes(what, tensor.elements, data), tensor.shape)
    if len(data) != tensor.elements * dtype.itemsize:
        raise V2Error(400, f"{what} takes {tensor.elements * dtype.itemsize} bytes, but {len(data)} were sent")
    if dtype.kind == "b" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise V2Error(400, f"{what} has a byte other than 0 and 1")
    return np.frombuffer(data, dtype).reshape(tensor.shape)


def _split_bytes(what: str, count: int, data: memoryview) -> list[bytes]:
    if count * _LENGTH.size > len(data):
        raise V2Error(400, f"{what} takes at least {count * _LENGTH.size} bytes, but {len(data)} were sent")
    values = []
    position = 0
    for index in range(count):
        start = position + _LENGTH.size
        if start > len(data):
            raise V2Error(400, f"{what}: the data ends before element {index}")
        position = start + _LENGTH.unpack_from(data, position)[0]
        if position > len(data):
            raise V2Error(
                400, f"{what}: element {index} has {position - start} bytes, but only {len(data) - start} are left"
            )
        values.append(bytes(data[start:position]))
    if position != len(data):
        raise V2Error(400, f"{what}: {len(data) - position} bytes follow the last element")
    return values


def _from_json(tensor: TensorHeader, data: list[Any]) -> Array:
    dtype = DTYPES[tensor.datatype]
    name = shorten(tensor.name)
    if tensor.datatype == "FP16":
        raise V2Error(400, f"input {name}: FP16 has no JSON form; send it in binary form, or as FP32")
    flat = _flatten(tensor, data)
    kinds = set(map(type, flat))
    if not kinds <= _JSON_TYPES[dtype.kind]:
        index = next(i for i, value in enumerate(flat) if type(value) not in _JSON_TYPES[dtype.kind])
        expected = f"{tensor.datatype} takes {_EXPECTED[dtype.kind]}"
        raise V2Error(400, f"input {name}: {expected}, but element {index} is {show_value(flat[index])}")
    if dtype.kind == "O":
        return _object_array([value.encode() for value in flat], tensor.shape)
    if dtype.kind in "iu" and flat:
        limits = np.iinfo(dtype)
        for extreme in (min(flat), max(flat)):
            if not limits.min <= extreme <= limits.max:
                raise V2Error(400, f"input {name}: {extreme} is outside the range of {tensor.datatype}")
    with np.errstate(over="ignore"):
        array: Array = np.array(flat, dtype).reshape(tensor.shape)
    if dtype.kind == "f" and (infinite := np.flatnonzero(np.isinf(array))).size:
        raise V2Error(400, f"input {name}: {flat[infinite[0]]} is outside the range of {tensor.datatype}")
    return array


def _flatten(tensor: TensorHeader, data: list[Any]) -> list[Any]:
    """Return the elements of flat or nested data, which must match the shape."""
    what = f"input {shorten(tensor.name)}: shape {show_shape(tensor.shape)}"
    if len(tensor.shape) < 2 or not (data and isinstance(data[0], list)):
        if len(data) != tensor.elements:
            raise V2Error(400, f"{what} takes {tensor.elements} elements, but data has {len(data)}")
        return data
    level: list[Any] = [data]
    for axis, size in enumerate(tensor.shape):
        if set(map(type, level)) - {list} or set(map(len, level)) - {size}:
            part = next(part for part in level if type(part) is not list or len(part) != size)
            found = f"one of {len(part)}" if type(part) is list else show_value(part)
            raise V2Error(400, f"{what} takes a list of {size} on axis {axis} of data, but found {found}")
        level = list(chain.from_iterable(level))
    return level


def _by_content_type(tensor: TensorHeader, array: Array) -> Array:
    """Convert an array of bytes as its content type says."""
    if array.dtype.kind != "O" or tensor.content_type not in ("str", "base64"):
        return array
    name = shorten(tensor.name)
    values = array.reshape(-1).tolist()
    try:
        if tensor.content_type == "str":
            return _object_array([value.decode() for value in values], tensor.shape)
        return _object_array([base64.b64decode(value, validate=True) for value in values], tensor.shape)
    except UnicodeDecodeError:
        raise V2Error(400, f"input {name} has the content_type str, but is not UTF-8") from None
    except binascii.Error as error:
        raise V2Error(400, f"input {name} has the content_type base64, but is not: {error}") from None


def _with_shapes_of_columns(header: RequestHeader, signature: ModelSignature) -> RequestHeader:
    """Give columns of a frame, [n] or [n, 1], the shape that the model expects."""
    if not any(tensor.content_type == "pd" for tensor in header.inputs):
        return header
    ranks = {tensor.name: len(tensor.shape) for tensor in signature.inputs}

    def reshaped(tensor: TensorHeader) -> TensorHeader:
        rank = ranks.get(tensor.name)
        if tensor.content_type != "pd" or tensor.shape[1:] not in ((), (1,)) or not tensor.shape:
            return tensor
        shape = {1: tensor.shape[:1], 2: (tensor.shape[0], 1)}.get(rank or 0, tensor.shape)
        return replace(tensor, shape=shape)

    return replace(header, inputs=tuple(reshaped(tensor) for tensor in header.inputs))


def _columns_of(header: RequestHeader, signature: ModelSignature) -> TensorSignature | None:
    """Return the model's only input if the request has its columns instead, by their labels."""
    if len(signature.inputs) != 1:
        return None
    tensor = signature.inputs[0]
    names = [given.name for given in header.inputs]
    if not tensor.labels or len(tensor.shape) != 2 or tensor.name in names or tensor.datatype == "BYTES":
        return None
    return tensor if set(names) == set(tensor.labels) else None


def _join_columns(tensor: TensorSignature, columns: Mapping[str, Array]) -> Array:
    """Join columns in the order of the labels. Raises: V2Error."""
    dtype = DTYPES[tensor.datatype]
    parts = []
    rows = next(iter(columns.values())).size
    for label in tensor.labels:
        column = columns[label]
        if column.shape not in ((rows,), (rows, 1)):
            found = show_shape(column.shape)
            raise V2Error(400, f"input {shorten(label)} has the shape {found}; columns have [{rows}] or [{rows}, 1]")
        if not np.can_cast(column.dtype, dtype, "same_kind"):
            given = f"input {shorten(label)} has the datatype {datatype_of(column.dtype)}"
            raise V2Error(400, f"{given}; the model expects {tensor.datatype}")
        parts.append(column.reshape(rows).astype(dtype))
    return np.stack(parts, axis=1)


def _object_array(values: Sequence[Any], shape: tuple[int, ...]) -> Array:
    array: Array = np.empty(len(values), np.object_)
    array[:] = values
    return array.reshape(shape)


# Responses.


def _as_tensor(name: str, value: Any) -> Array:
    """Return an output as an array of one of the datatypes. Raises: UserError."""
    what = f"output {shorten(name)}"
    try:
        array: Array = np.asarray(value)
    except ValueError as error:
        raise UserError(f"{what} is not an array: {error}") from None
    if array.dtype.kind in "US":
        array = array.astype(np.object_)
    if datatype_of(array.dtype) is None:
        raise UserError(f"{what} has the dtype {array.dtype}, which the Open Inference Protocol lacks; convert it")
    if array.dtype.kind == "O":
        elements = array.reshape(-1).tolist()
        other = next((element for element in elements if not isinstance(element, str | bytes)), None)
        if other is not None or None in elements:
            kind = type(other).__name__
            raise UserError(f"{what} has an element of the type {kind}; return an array of numbers, str or bytes")
    return array


def _to_binary(array: Array) -> bytes:
    if array.dtype.kind != "O":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    parts = []
    for value in array.reshape(-1).tolist():
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def _to_json(name: str, array: Array) -> Any:
    flat = array.reshape(-1)
    if array.dtype.kind == "O":
        try:
            return [value.decode() if isinstance(value, bytes) else value for value in flat.tolist()]
        except UnicodeDecodeError:
            raise V2Error(400, f"output {shorten(name)} is not UTF-8; request it with binary_data: true") from None
    if datatype_of(array.dtype) == "FP16":
        raise V2Error(400, f"output {shorten(name)} is FP16, which has no JSON form; request it with binary_data: true")
    native = np.ascontiguousarray(flat, array.dtype.newbyteorder("="))
    return orjson.Fragment(orjson.dumps(native, None, orjson.OPT_SERIALIZE_NUMPY))
