"""User code of the comparison of servers, the same for every system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

MEGABYTE = b"x" * 1_000_000
CHUNKS = tuple(b"chunk %03d of an answer\n" % index for index in range(100))


def noop(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the input."""
    return {"y": payload["x"]}


def upload(body: bytes) -> dict[str, Any]:
    """Return the size of the body."""
    return {"length": len(body)}


def download(payload: dict[str, Any]) -> bytes:
    """Return 1 MB."""
    return MEGABYTE


def stream(payload: dict[str, Any]) -> Iterator[bytes]:
    """Return 100 chunks."""
    yield from CHUNKS


class Iris:
    """Classifier of flowers: a small ONNX model on one thread."""

    LABELS = ("setosa", "versicolor", "virginica")
    FIELDS = ("sepal_length", "sepal_width", "petal_length", "petal_width")

    def __init__(self) -> None:
        import numpy
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        model = Path(__file__).with_name("iris.onnx")
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        self._array, self._float32 = numpy.array, numpy.float32

    def predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Classify one flower."""
        row = self._array([[payload[field] for field in self.FIELDS]], dtype=self._float32)
        (labels,) = self._session.run(["label"], {self._input: row})
        return {"label": self.LABELS[int(labels[0])]}
