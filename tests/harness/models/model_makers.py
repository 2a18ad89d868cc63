"""Make the files of one model version, by name: tiny, or of a given size.

Every model returns its input plus a number of its own, so that a result identifies the version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import cache

import numpy

from harness import TESTS

Files = Mapping[str, bytes]

#: The number in the cached SavedModel; for other numbers, its bytes are replaced in a copy.
_PLACEHOLDER = 12345.678
_SAVED_MODEL = TESTS / "fixtures" / "saved_model_add"


def python_model(number: int) -> Files:
    """Return two matching files."""
    return {name: json.dumps({"number": number}).encode() for name in ("first.json", "second.json")}


def onnx_model(number: int, size_bytes: int = 0) -> Files:
    """Return `model.onnx`: y = x + number, both float32 [n]; with a size it holds that many bytes of weights."""
    from onnx import TensorProto, helper, numpy_helper

    def constant(name: str, value: float) -> TensorProto:
        return helper.make_tensor(name, TensorProto.FLOAT, [1], [value])

    constants = [constant("number", number)]
    nodes = [helper.make_node("Add", ["x", "number"], ["y" if not size_bytes else "sum"])]
    if size_bytes:
        # The input indexes the weights, so that no optimizer can remove them.
        constants += [
            constant("none", 0.0),
            numpy_helper.from_array(numpy.zeros(size_bytes // 4, numpy.float32), "weights"),
        ]
        nodes += [
            helper.make_node("Mul", ["x", "none"], ["zeros"]),
            helper.make_node("Cast", ["zeros"], ["indices"], to=TensorProto.INT64),
            helper.make_node("Gather", ["weights", "indices"], ["weight"]),
            helper.make_node("Add", ["sum", "weight"], ["y"]),
        ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
    graph = helper.make_graph(nodes, "add", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return {"model.onnx": model.SerializeToString()}


def tensorflow_model(number: int) -> Files:
    """Return a SavedModel with one signature, `serving_default`: y = x + number, both float32 [n]."""
    template = _saved_model()
    found = template["saved_model.pb"].count(_packed(_PLACEHOLDER))
    assert found, "the SavedModel holds its constant in a form that this test doesn't know"
    graph = template["saved_model.pb"].replace(_packed(_PLACEHOLDER), _packed(number))
    return {**template, "saved_model.pb": graph}


MAKERS = {"python": python_model, "onnx": onnx_model, "tensorflow": tensorflow_model}


@cache
def _saved_model() -> Files:
    files = (*_SAVED_MODEL.glob("*.pb"), *(_SAVED_MODEL / "variables").iterdir())
    return {str(path.relative_to(_SAVED_MODEL)): path.read_bytes() for path in files}


def _packed(number: float) -> bytes:
    return struct.pack("<f", number)
