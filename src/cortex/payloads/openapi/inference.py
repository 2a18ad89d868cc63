"""Paths of models in OpenAPI documents: the routes of the Open Inference Protocol below an endpoint."""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import quote

from cortex.payloads.json_object import Json
from cortex.payloads.openapi.api import DocumentedApi
from cortex.payloads.openapi.errors import json_content, of_requests, response, schema
from cortex.payloads.openapi.schemas import SchemaComponents
from cortex.payloads.signature import DATATYPES, ModelSignature, TensorSignature, example_row

_JSON = "application/json"
#: Values of a row that an example shows; longer rows, such as images, have none.
_MAX_VALUES = 50
_PARAMETERS: Json = {"type": "object", "additionalProperties": True}
_SHAPE: Json = {"type": "array", "items": {"type": "integer"}}
_METADATA: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {"name": {"type": "string"}, "datatype": {"enum": list(DATATYPES)}, "shape": _SHAPE},
    },
}

SCHEMAS: Json = {
    "Tensor": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string", "enum": list(DATATYPES)},
            "shape": _SHAPE,
            "parameters": _PARAMETERS,
            "data": {"type": "array", "items": {}, "description": "Nested by the shape, or flat"},
        },
    },
    "InferenceResponse": {
        "type": "object",
        "required": ["model_name", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "parameters": _PARAMETERS,
            "outputs": {"type": "array", "items": schema("Tensor")},
        },
    },
    "ModelMetadata": {
        "type": "object",
        "required": ["name", "platform", "inputs", "outputs"],
        "properties": {
            "name": {"type": "string"},
            "versions": {"type": "array", "items": {"type": "string"}},
            "platform": {"type": "string"},
            "inputs": _METADATA,
            "outputs": _METADATA,
        },
        "additionalProperties": True,
    },
}


def model_paths(api: DocumentedApi, model: ModelSignature, schemas: SchemaComponents) -> dict[str, Json]:
    """Return the paths of one model: inference and metadata."""
    path = f"{api.endpoint.rstrip('/')}/v2/models/{quote(model.name, safe='')}"
    name = re.sub(r"[^A-Za-z0-9]+", "_", model.name)
    request = schemas.register(f"{''.join(part.capitalize() for part in name.split('_'))}Request", _request(model))
    infer = {
        "operationId": f"infer_{name}",
        "summary": f"Run the model {model.name} by the Open Inference Protocol",
        "description": model.description or f"Platform: {model.platform}",
        "requestBody": {"content": {_JSON: {"schema": request, **_example(model)}}, "required": True},
        "responses": {
            "200": response("The outputs", json_content("InferenceResponse")),
            **of_requests(api, has_body=True, is_typed=False),
        },
    }
    metadata = {
        "operationId": f"describe_{name}",
        "summary": f"Get the inputs and outputs of the model {model.name}",
        "responses": {
            "200": response("The metadata", json_content("ModelMetadata")),
            **of_requests(api, has_body=False, is_typed=False),
        },
    }
    return {path: {"get": metadata}, f"{path}/infer": {"post": infer}}


def _request(model: ModelSignature) -> Json:
    inputs: Json = {"type": "array", "items": schema("Tensor")}
    if model.inputs:
        inputs["description"] = "\n".join(f"- {_described(tensor)}" for tensor in model.inputs)
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": _PARAMETERS,
            "inputs": inputs,
            "outputs": {
                "type": "array",
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
                "description": "\n".join(f"- {_described(tensor)}" for tensor in model.outputs) or "All by default",
            },
        },
    }


def row_of_zeros(model: ModelSignature) -> Any:
    """Return a row for `{"instances": [row]}`; None if it is too long to be read, or if the inputs are not known."""
    shapes = [tensor.shape for tensor in model.inputs]
    if not shapes or sum(math.prod(map(abs, shape)) for shape in shapes) > _MAX_VALUES:
        return None
    rows = {
        tensor.name: example_row(tensor.datatype, tensor.shape, tensor.example)
        for tensor in model.inputs
        if not tensor.optional
    }
    return next(iter(rows.values())) if len(rows) == 1 else rows


def _example(model: ModelSignature) -> Json:
    """Return the field of a media type that shows a request with zeros."""
    if row_of_zeros(model) is None:
        return {}
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": [max(1, size) for size in tensor.shape],
            "data": _data(tensor),
        }
        for tensor in model.inputs
        if not tensor.optional
    ]
    return {"examples": {"zeros": {"summary": "Zeros", "value": {"inputs": inputs}}}}


def _data(tensor: TensorSignature) -> list[Any]:
    """Return the example of a tensor in the protocol, where bytes are texts."""
    row = example_row(tensor.datatype, tensor.shape, tensor.example)
    if isinstance(row, dict):
        row = "text"
    return [row] * max(1, tensor.shape[0] if tensor.shape else 1)


def _described(tensor: TensorSignature) -> str:
    labels = f" ({', '.join(tensor.labels[:20])})" if tensor.labels else ""
    optional = ", optional" if tensor.optional else ""
    return f"`{tensor.name}`: {tensor.datatype} {list(tensor.shape)}{labels}{optional} {tensor.description}".strip()
