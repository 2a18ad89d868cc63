"""Dense network for the comparison of server-side batching, the same for every system."""

from __future__ import annotations

from typing import Any

import numpy

#: Width of the hidden layer, by workload.
WIDTHS = {"light": 256, "heavy": 2048}


class Mlp:
    """Four numbers in, one of three classes out, through a square matrix of weights."""

    def __init__(self, width: int) -> None:
        random = numpy.random.default_rng(7)
        self._spread = random.standard_normal((4, width), numpy.float32)
        self._hidden = random.standard_normal((width, width), numpy.float32) / numpy.float32(width**0.5)
        self._out = random.standard_normal((width, 3), numpy.float32)

    def predict_one(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Classify one input."""
        return self.predict([payload])[0]

    def predict(self, payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Classify a batch."""
        rows = numpy.array([payload["x"] for payload in payloads], numpy.float32)
        hidden = numpy.maximum(numpy.maximum(rows @ self._spread, 0) @ self._hidden, 0)
        return [{"label": int(label)} for label in (hidden @ self._out).argmax(axis=1)]
