"""The signature of an API: what its methods and models take and return.

A worker process determines it once, when it has loaded the user's code, from annotations and from the inputs and
outputs of a model. Validation, OpenAPI documents, sample requests and the metadata of the Open Inference Protocol are
views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

import orjson

from cortex.payloads.json_object import Json

#: Datatypes of tensors in the Open Inference Protocol.
DATATYPES = (
    "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64", "BYTES"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """An input or output of a model."""

    name: str
    datatype: str  #: one of `DATATYPES`
    shape: tuple[int, ...]  #: -1: any size
    description: str = ""
    labels: tuple[str, ...] = ()  #: of the entries of the last axis: the names of columns or classes
    optional: bool = False  #: an input that requests may leave out
    any_shape: bool = False  #: even the number of axes is open; `shape` is then (-1,)
    #: A row as JSON, where models reject zeros or the text of other examples; None: they are as good.
    example: Any = field(default=None, compare=False)


def example_row(datatype: str, shape: Sequence[int], example: Any = None) -> Any:
    """Return an example of a row: one that the model states, or zeros; `shape` begins with the rows."""
    if example is not None:
        return example
    value: Any = {"BOOL": False, "BYTES": "text"}.get(datatype, 0)
    for size in reversed(shape[1:]):
        value = [value] * max(1, size)
    return value


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """A model that the Open Inference Protocol offers."""

    name: str
    platform: str  #: `onnxruntime_onnx`, `tensorflow_savedmodel`, `sklearn`, `python`, …
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    description: str = ""  #: what was found in its files, and why it counts as this platform


@dataclass(frozen=True, slots=True)
class BodySignature:
    """A body of requests or responses."""

    schema: Json = field(default_factory=dict)  #: JSON Schema 2020-12, with its own `$defs`; {}: any value
    media_type: str = "application/json"
    is_typed: bool = False  #: the user's code annotates it; otherwise nothing is validated
    is_required: bool = True  #: False if an empty body has a default
    alternatives: tuple[BodySignature, ...] = ()  #: the same in other media types

    @property
    def is_any(self) -> bool:
        """Return whether it may be anything: its content type decides how it is parsed."""
        return not self.is_typed and not self.alternatives  # a form has them


@dataclass(frozen=True, slots=True)
class MethodSignature:
    """A serving method."""

    verb: str  #: HTTP verb; POST for methods of jobs
    name: str
    payload: BodySignature | None  #: None: it takes no body. Of a BatchAPI, one item of a job
    result: BodySignature
    summary: str = ""  #: first line of its docstring
    description: str = ""  #: the rest
    query_params: bool = False
    headers: bool = False
    streams: bool = False  #: it is a generator, whose items are sent as they are made


@dataclass(frozen=True, slots=True)
class ParameterSignature:
    """A parameter of a route."""

    name: str
    schema: Json
    location: Literal["path", "query"] = "path"
    is_required: bool = False  #: a parameter of a query without default; those of paths always are


@dataclass(frozen=True, slots=True)
class RouteSignature:
    """A method that answers requests at a path below the endpoint."""

    path: str  #: as OpenAPI documents write it: `/users/{id}`
    parameters: tuple[ParameterSignature, ...]
    method: MethodSignature


@dataclass(frozen=True, slots=True)
class ApiSignature:
    """All methods and models of an API."""

    methods: tuple[MethodSignature, ...] = ()
    models: tuple[ModelSignature, ...] = ()
    routes: tuple[RouteSignature, ...] = ()

    def to_json(self) -> bytes:
        """Return its JSON form; `parse_signature` is the inverse."""
        return orjson.dumps(self)


def parse_signature(text: bytes | str) -> ApiSignature:
    """Parse the JSON form of a signature; unknown keys, of a newer version, are ignored. Raises: ValueError."""
    return cast(ApiSignature, _adapter().validate_json(text))


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # noqa: PLC0415 - worker processes never parse signatures

    return TypeAdapter(ApiSignature)
