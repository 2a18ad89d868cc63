"""The inputs of a deployed model without code, and a request that works when it is pasted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from cortex.payloads.curl import FILE, curl
from cortex.payloads.json_object import Json
from cortex.payloads.signature import example_row

#: Values of a row that a request shows; longer rows, such as images, are described.
_MAX_VALUES = 50
_MAX_MODELS = 3


def model_lines(model: Json) -> list[str]:
    """Return lines that describe the inputs and outputs of a model."""
    return [f"{side}: {', '.join(map(_tensor, model[f'{side}s']))}" for side in ("input", "output")]


def model_requests(models: Sequence[Json], url: str, options: str = "") -> list[str]:
    """Return a command for curl for each model; if there are many, for the first ones, and how many others there are.

    `options` come before the URL.
    """
    lines = [model_request(model, url, options, has_others=len(models) > 1) for model in models[:_MAX_MODELS]]
    rest = len(models) - _MAX_MODELS
    return lines + ([f"and {rest} more model{'s' if rest > 1 else ''}, each with ?model=NAME"] if rest > 0 else [])


def model_request(model: Json, url: str, options: str = "", has_others: bool = False) -> str:
    """Return a command for curl that sends one valid row; it names the model if the API has others."""
    target = f"{url}?{urlencode({'model': model['name']}, quote_via=quote)}" if has_others else url
    inputs = [tensor for tensor in model["inputs"] if not tensor.get("parameters", {}).get("optional")]
    shapes = [tensor["shape"] for tensor in inputs]
    if sum(math.prod(map(abs, shape)) for shape in shapes) > _MAX_VALUES:
        wanted = ", ".join(map(_tensor, inputs))
        return f'{curl("POST", target, FILE, options)}  # {{"instances": [ROW]}}: {wanted}'
    rows = {
        tensor["name"]: example_row(tensor["datatype"], tensor["shape"], tensor.get("parameters", {}).get("example"))
        for tensor in inputs
    }
    row = next(iter(rows.values())) if len(rows) == 1 else rows
    count = max(1, shapes[0][0]) if shapes and shapes[0] else 1
    return curl("POST", target, json.dumps({"instances": [row] * count}), options)


def _tensor(tensor: Json) -> str:
    sizes = ", ".join("?" if size < 0 else str(size) for size in tensor["shape"])
    optional = " (optional)" if tensor.get("parameters", {}).get("optional") else ""
    return f"{tensor['name']} {tensor['datatype']} [{sizes}]{optional}"
