"""Requests and documents of the Open Inference Protocol, version 2 (REST), without their tensors' data.

Source: https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md, with the extension
`binary_tensor_data` of Triton: a body may begin with JSON, whose size a header has, and continue with the bytes of
tensors. `inference_tensors` converts data to arrays. This module does not import numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from cortex.payloads.json_bodies import parse_json
from cortex.payloads.json_object import Json
from cortex.payloads.signature import DATATYPES, ModelSignature, TensorSignature

#: Number of bytes of a body that are JSON; 0: all are the data of the only input.
JSON_LENGTH_HEADER = b"inference-header-content-length"
EXTENSIONS = ("binary_tensor_data",)
#: Known values of the parameter `content_type`, which MLServer introduced.
CONTENT_TYPES = ("np", "str", "base64", "pd")

_MAX_RANK = 64  #: of numpy's arrays
_MAX_ELEMENTS = 2**59  #: numpy counts the bytes of an array with 64 bits
_SHOWN_CHARACTERS = 60
_SHOWN_NAMES = 20
#: Parameters of extensions that would change the meaning of a request.
_UNSUPPORTED = ("shared_memory_region", "classification")


class V2Error(Exception):
    """A response with an error: a status, and a message for the caller."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """An input of a request without its data."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content_type: str = ""  #: one of `CONTENT_TYPES`; empty: none
    values: list[Any] | None = None  #: `data` of the JSON, nested or flat; None: binary
    binary_bytes: int = 0  #: size of the binary data

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """An inference request without the data of its binary inputs."""

    inputs: tuple[TensorHeader, ...]
    outputs: tuple[str, ...] = ()  #: requested; empty: all
    binary_outputs: Mapping[str, bool] = field(default_factory=dict)  #: those that say it
    binary_output: bool = False  #: for all others
    id: str | None = None
    parameters: Json = field(default_factory=dict)

    def is_binary(self, output: str) -> bool:
        """Return whether the caller asked for the binary form of an output."""
        return self.binary_outputs.get(output, self.binary_output)


@dataclass(frozen=True, slots=True)
class InferenceRoute:
    """A parsed path below `/v2`."""

    kind: str  #: `server`, `live`, `ready`, `models`, `model`, `model_ready` or `infer`
    model: str = ""
    version: str | None = None

    @property
    def verb(self) -> str:
        """Return the only HTTP verb of the route, apart from HEAD."""
        return "POST" if self.kind == "infer" else "GET"


def parse_route(path: bytes) -> InferenceRoute:
    """Parse the path behind the endpoint, `/v2/…`, without the query string. Raises: V2Error."""
    quoted = path.removesuffix(b"/").split(b"/")[1:]
    segments = [unquote_to_bytes(segment).decode("utf-8", "replace") for segment in quoted]
    match segments:
        case ["v2"]:
            return InferenceRoute("server")
        case ["v2", "health", "live" | "ready"]:
            return InferenceRoute(segments[2])
        case ["v2", "models"]:
            return InferenceRoute("models")
        case ["v2", "models", model, *rest]:
            version = None
            if len(rest) >= 2 and rest[0] == "versions":
                version, rest = rest[1], rest[2:]
            kinds = {(): "model", ("ready",): "model_ready", ("infer",): "infer"}
            if (kind := kinds.get(tuple(rest), "")) and model and version != "":
                return InferenceRoute(kind, model, version)
    shown = shorten("/".join(segments))
    raise V2Error(
        404,
        f"{shown} is not a path of the Open Inference Protocol; its paths are v2, v2/health/live, v2/health/ready, "
        "v2/models, v2/models/MODEL, v2/models/MODEL/ready and v2/models/MODEL/infer; behind MODEL, /versions/VERSION "
        "selects a version",
    )


def server_document(version: str) -> Json:
    """Return the response to `GET v2`."""
    return {"name": "cortex", "version": version, "extensions": EXTENSIONS}


def model_document(name: str, signature: ModelSignature, versions: tuple[str, ...]) -> Json:
    """Return the metadata of a model."""
    document: Json = {"name": name}
    if versions:
        document["versions"] = versions
    return document | {
        "platform": signature.platform,
        "inputs": [_tensor_document(tensor) for tensor in signature.inputs],
        "outputs": [_tensor_document(tensor) for tensor in signature.outputs],
    }


def _tensor_document(tensor: TensorSignature) -> Json:
    document = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    parameters: Json = {"labels": list(tensor.labels)} if tensor.labels else {}
    if tensor.optional:
        parameters["optional"] = True
    if tensor.example is not None:
        parameters["example"] = tensor.example
    if tensor.any_shape:
        parameters["any_shape"] = True
    return {**document, "parameters": parameters} if parameters else document


def parse_json_length(value: bytes | None, body_bytes: int) -> int | None:
    """Parse the header `Inference-Header-Content-Length`; None: the body is JSON alone. Raises: V2Error."""
    if value is None:
        return None
    if not value.isdigit() or len(value) > 19:
        shown = shorten(value.decode("latin-1"))
        raise V2Error(400, f"Inference-Header-Content-Length is {shown}; send the number of bytes of the JSON")
    length = int(value)
    if length > body_bytes:
        raise V2Error(400, f"Inference-Header-Content-Length is {length}, but the body has {body_bytes} bytes")
    return length


def parse_request(text: bytes, has_binary: bool) -> RequestHeader:
    """Parse the JSON of an inference request. Raises: V2Error."""
    try:
        data = parse_json(text)
    except orjson.JSONDecodeError as error:
        raise V2Error(400, f"{_json_problem(error, text, has_binary)}") from None
    if not isinstance(data, dict):
        raise V2Error(400, f"the request must be a JSON object with inputs, not {_type_name(data)}")
    given_id = data.get("id")
    if given_id is not None and not isinstance(given_id, str):
        raise V2Error(400, f"id must be a string, not {_type_name(given_id)}")
    parameters = _parameters(data, "the request")
    default_type = _content_type(parameters, "the request")
    inputs = _entries(data, "inputs")
    if not inputs:
        raise V2Error(400, "the request has no inputs; send inputs, a list of tensors")
    tensors = tuple(_input(entry, number, default_type) for number, entry in enumerate(inputs))
    _refuse_duplicates("input", [tensor.name for tensor in tensors])
    outputs: dict[str, bool | None] = {}
    names = []
    for number, entry in enumerate(_entries(data, "outputs")):
        name = _name(entry, "output", number)
        names.append(name)
        outputs[name] = _flag(_parameters(entry, f"output {shorten(name)}"), "binary_data", f"output {shorten(name)}")
    _refuse_duplicates("output", names)
    binary_outputs = {name: is_binary for name, is_binary in outputs.items() if is_binary is not None}
    default = bool(_flag(parameters, "binary_data_output", "the request"))
    return RequestHeader(tensors, tuple(outputs), binary_outputs, default, given_id, parameters)


def raw_request(signature: ModelSignature, body_bytes: int, item_bytes: int) -> RequestHeader:
    """Return the request whose body is the data of a model's only input; all outputs are binary.

    `item_bytes` is the size of an element; 0 for BYTES, of which the body is one element. Raises: V2Error.
    """
    if len(signature.inputs) != 1:
        number = f"has {len(signature.inputs)} inputs" if signature.inputs else "does not declare its inputs"
        raise V2Error(
            400, f"Inference-Header-Content-Length is 0: the body would be the only input, but the model {number}"
        )
    tensor = signature.inputs[0]
    shape = tuple(1 if size < 0 and not item_bytes else size for size in tensor.shape)
    if shape.count(-1) > 1:
        raise V2Error(400, f"input {shorten(tensor.name)} has several open sizes, {show_shape(shape)}; send its shape")
    if -1 in shape:
        known = item_bytes
        for size in shape:
            known *= abs(size)
        shape = tuple(body_bytes // known if size < 0 and known else size for size in shape)
    header = TensorHeader(tensor.name, tensor.datatype, shape, binary_bytes=body_bytes)
    return RequestHeader((header,), binary_output=True)


def check_inputs(header: RequestHeader, signature: ModelSignature) -> None:
    """Check names, datatypes and shapes against a signature; one without inputs accepts any. Raises: V2Error."""
    expected = {tensor.name: tensor for tensor in signature.inputs}
    if not expected:
        return
    for given in header.inputs:
        tensor = expected.get(given.name)
        name = shorten(given.name)
        if tensor is None:
            raise V2Error(400, f"the model has no input {name}; its inputs are {_describe(signature.inputs)}")
        if given.datatype != tensor.datatype:
            raise V2Error(400, f"input {name} has the datatype {given.datatype}; the model expects {tensor.datatype}")
        if not tensor.any_shape and not fits(given.shape, tensor.shape):
            found, wanted = show_shape(given.shape), show_shape(tensor.shape)
            raise V2Error(400, f"input {name} has the shape {found}; the model expects {wanted}")
    given_names = {given.name for given in header.inputs}
    for tensor in signature.inputs:
        if tensor.name not in given_names and not tensor.optional:
            raise V2Error(400, f"input {shorten(tensor.name)} is missing; the model expects {_describe([tensor])}")


def check_outputs(header: RequestHeader, names: tuple[str, ...]) -> None:
    """Check that requested outputs exist. Raises: V2Error."""
    for name in header.outputs:
        if name not in names:
            raise V2Error(400, f"the model has no output {shorten(name)}; its outputs are {_list(names)}")


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a shape matches one that may have open sizes."""
    return len(shape) == len(wanted) and all(w in (-1, size) for size, w in zip(shape, wanted, strict=True))


def show_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as text."""
    return shorten(str(list(shape)), quoted=False)


def shorten(text: str, quoted: bool = True) -> str:
    """Return a text of a caller in printable form, for messages."""
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
    return repr(shown) if quoted else shown


def show_value(value: Any) -> str:
    """Return a value of a caller's JSON, for messages."""
    if isinstance(value, list | dict):
        return _type_name(value)
    return shorten(orjson.dumps(value).decode(), quoted=False)


def _input(entry: Any, number: int, default_type: str) -> TensorHeader:
    name = _name(entry, "input", number)
    what = f"input {shorten(name)}"
    datatype = entry.get("datatype")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        shown = shorten(datatype) if isinstance(datatype, str) else "missing" if datatype is None else "no string"
        raise V2Error(400, f"{what}: the datatype is {shown}; use one of {', '.join(DATATYPES)}")
    shape = _shape(entry.get("shape"), what)
    parameters = _parameters(entry, what)
    content_type = _content_type(parameters, what) or default_type
    size = parameters.get("binary_data_size")
    values = entry.get("data")
    if size is None:
        if values is None:
            raise V2Error(400, f"{what} has no data; send data, or binary_data_size in its parameters")
        if not isinstance(values, list):
            raise V2Error(400, f"{what}: data must be a list, not {_type_name(values)}")
        return TensorHeader(name, datatype, shape, content_type, values)
    if values is not None:
        raise V2Error(400, f"{what} has both data and binary_data_size; send one of them")
    if type(size) is not int or size < 0:
        raise V2Error(400, f"{what}: binary_data_size must be a number of bytes, not {show_value(size)}")
    return TensorHeader(name, datatype, shape, content_type, None, size)


def _shape(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        found = "missing" if value is None else _type_name(value)
        raise V2Error(400, f"{what}: shape must be a list of sizes, not {found}")
    if len(value) > _MAX_RANK:
        raise V2Error(400, f"{what}: shape has {len(value)} dimensions; at most {_MAX_RANK} are possible")
    total = 1
    for size in value:
        if type(size) is not int or size < 0:
            raise V2Error(400, f"{what}: {show_value(size)} in its shape is not a size; sizes are integers from 0")
        total *= max(size, 1)
    if total > _MAX_ELEMENTS:
        raise V2Error(400, f"{what}: the shape {show_shape(tuple(value))} is too large")
    return tuple(value)


def _parameters(entry: Json, what: str) -> Json:
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise V2Error(400, f"{what}: parameters must be an object, not {_type_name(parameters)}")
    for name in _UNSUPPORTED:
        if name in parameters:
            raise V2Error(400, f"{what}: the parameter {name} is not supported")
    return parameters


def _content_type(parameters: Json, what: str) -> str:
    value = parameters.get("content_type")
    if value is None:
        return ""
    if value not in CONTENT_TYPES:
        known = ", ".join(CONTENT_TYPES)
        raise V2Error(400, f"{what}: the content_type {show_value(value)} is not supported; use one of {known}")
    return str(value)


def _flag(parameters: Json, name: str, what: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise V2Error(400, f"{what}: {name} must be true or false, not {show_value(value)}")
    return value


def _entries(data: Json, key: str) -> list[Any]:
    entries = data.get(key)
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise V2Error(400, f"{key} must be a list of tensors, not {_type_name(entries)}")
    return entries


def _name(entry: Any, what: str, number: int) -> str:
    if not isinstance(entry, dict):
        raise V2Error(400, f"{what}s[{number}] must be an object, not {_type_name(entry)}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise V2Error(400, f"{what}s[{number}] has no name")
    return name


def _refuse_duplicates(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise V2Error(400, f"{what} {shorten(name)} occurs twice")
        seen.add(name)


def _json_problem(error: orjson.JSONDecodeError, text: bytes, has_binary: bool) -> str:
    if not text:
        return "the body is empty; send a JSON object with inputs"
    reason = f"malformed JSON: {error.msg}: line {error.lineno} column {error.colno}"
    if has_binary:
        return (
            f"{reason}, in the first {len(text)} bytes of the body; Inference-Header-Content-Length gives that number"
        )
    if error.pos and text[:1].strip() == b"{" and text[error.pos - 1 : error.pos] == b"}":
        return f"{reason}; with binary tensors behind the JSON, send its size as Inference-Header-Content-Length"
    if text[error.pos : error.pos + 3] in (b"NaN", b"Inf", b"-In"):
        return f"{reason}; JSON has no NaN or Infinity, so send the tensor in binary form"
    return reason


def _describe(tensors: tuple[TensorSignature, ...] | list[TensorSignature]) -> str:
    return _list([f"{tensor.name} ({tensor.datatype}, shape {list(tensor.shape)})" for tensor in tensors])


def _list(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
