"""Large models for `model_reload`. Each returns its own number, which identifies the version that answered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy

FLOAT_BYTES = 4


def write_python(folder: Path, number: int, size_bytes: int) -> None:
    """Write `number.json` and an array of random floats."""
    generator = numpy.random.default_rng(number)
    (folder / "number.json").write_text(json.dumps(number))
    numpy.save(folder / "weights.npy", generator.random(size_bytes // FLOAT_BYTES, numpy.float32))


def write_onnx(folder: Path, number: int, size_bytes: int) -> None:
    """Write `model.onnx`: y = x + number + weights[0·x], from which no optimizer can remove the weights."""
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy.random.default_rng(number).random(size_bytes // FLOAT_BYTES, numpy.float32)
    weights[0] = 0
    constants = [
        helper.make_tensor("number", TensorProto.FLOAT, [1], [number]),
        helper.make_tensor("none", TensorProto.FLOAT, [1], [0.0]),
        numpy_helper.from_array(weights, "weights"),
    ]
    nodes = [
        helper.make_node("Mul", ["x", "none"], ["zeros"]),
        helper.make_node("Cast", ["zeros"], ["indices"], to=TensorProto.INT64),
        helper.make_node("Gather", ["weights", "indices"], ["weight"]),
        helper.make_node("Add", ["x", "number"], ["sum"]),
        helper.make_node("Add", ["sum", "weight"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
    graph = helper.make_graph(nodes, "lookup", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


WRITERS = {"python": write_python, "onnx": write_onnx}

PREDICTORS = {
    "python": """
import json, pathlib
import numpy

class PythonPredictor:
    def __init__(self, config, python_client):
        self.client = python_client

    def load_model(self, model_path):
        folder = pathlib.Path(model_path)
        return json.loads((folder / "number.json").read_text()), numpy.load(folder / "weights.npy")

    def predict(self, payload):
        number, weights = self.client.get_model()
        return {"y": number, "weight": float(weights[payload["x"]])}
""",
    "onnx": """
class ONNXPredictor:
    def __init__(self, config, onnx_client):
        self.client = onnx_client

    def predict(self, payload):
        return {"y": round(float(self.client.predict([payload["x"] - 1])[0][0]))}
""",
}
