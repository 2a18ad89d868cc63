"""A model of a given size in three libraries: its answer to `i` is the rounded sum over 128 rows of its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS, ROWS = 1024, 128
_NAMES = {"numpy": "weights.npy", "torch": "weights.pt", "onnxruntime": "weights.onnx"}
_MAPPED = "mapped.onnx"


def write(library: str, folder: Path, size_mb: int) -> None:
    """Write the model of a library."""
    import numpy

    count = size_mb * 1_000_000 // (4 * COLUMNS)
    weights = (numpy.arange(count, dtype="float32") % 977 / 977)[:, None] * numpy.ones(COLUMNS, "float32")
    if library == "numpy":
        numpy.save(folder / _NAMES[library], weights)
    elif library == "torch":
        import torch

        torch.save({"weights": torch.from_numpy(weights)}, folder / _NAMES[library])
    else:
        _write_onnx(folder, weights, library == "onnxruntime-mapped")


def _write_onnx(folder: Path, weights: Any, is_external: bool) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    ones = numpy_helper.from_array(weights[:1].T * 0 + 1, "ones")
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["weights", "rows"], ["block"]),
            helper.make_node("MatMul", ["block", "ones"], ["products"]),
            helper.make_node("ReduceSum", ["products"], ["sum"], keepdims=0),
        ],
        "weights",
        [helper.make_tensor_value_info("rows", TensorProto.INT64, [ROWS])],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(weights, "weights"), ones],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if is_external:
        onnx.save(model, str(folder / _MAPPED), save_as_external_data=True, location="mapped.weights")
    else:
        onnx.save(model, str(folder / _NAMES["onnxruntime"]))


def load(library: str, folder: Path, threads: int = 1) -> Callable[[int], int]:
    """Load the model; return the function of a request."""
    if library == "numpy":
        return _load_numpy(folder)
    if library == "torch":
        return _load_torch(folder)
    return _load_onnx(folder / (_MAPPED if library == "onnxruntime-mapped" else _NAMES[library]), threads)


def _load_numpy(folder: Path) -> Callable[[int], int]:
    import numpy

    weights = numpy.load(folder / _NAMES["numpy"])
    ones = numpy.ones(COLUMNS, "float32")

    def predict(i: int) -> int:
        at = i * ROWS % (len(weights) - ROWS)
        return round(float((weights[at : at + ROWS] @ ones).sum()))

    return predict


def _load_torch(folder: Path) -> Callable[[int], int]:
    import torch

    weights = torch.load(folder / _NAMES["torch"])["weights"]
    ones = torch.ones(COLUMNS)

    def predict(i: int) -> int:
        at = i * ROWS % (len(weights) - ROWS)
        with torch.inference_mode():
            return round(float((weights[at : at + ROWS] @ ones).sum()))

    return predict


def _load_onnx(path: Path, threads: int) -> Callable[[int], int]:
    import numpy
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    count = (path.stat().st_size if path.name != _MAPPED else path.with_name("mapped.weights").stat().st_size) // (
        4 * COLUMNS
    )

    def predict(i: int) -> int:
        at = i * ROWS % (count - 2 * ROWS)
        return round(float(session.run(None, {"rows": numpy.arange(at, at + ROWS)})[0]))

    return predict
