"""Conformance tests that every serving backend runs with models that TensorFlow made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cortex.models.loader import LoadRequest
from cortex.predictor.clients.tensorflow import TensorFlowBackend
from cortex.predictor.clients.tensors import to_array
from harness.models.tensorflow_models import Case, read_cases


def request(folder: Path, model: str, signature_key: str | None = None) -> LoadRequest:
    """Request one of the test's models."""
    return LoadRequest(model, "3", str(folder / model), f"digest-of-{model}", 1, signature_key)


def check_outputs_are_those_of_tensorflow(backend: TensorFlowBackend[Any], folder: Path) -> None:
    """Run every call that TensorFlow ran when the models were made."""
    cases = read_cases(folder)
    for model in sorted({case.model for case in cases}):
        servable = backend.load(request(folder, model))
        for case in cases:
            if case.model == model:
                _check(servable, case)
        backend.unload(servable)


def _check(servable: Any, case: Case) -> None:
    specs = servable.signatures[case.signature_key].inputs
    found = servable.run(case.signature_key, {name: to_array(v, specs[name]) for name, v in case.inputs.items()})
    assert found.keys() == case.outputs.keys(), case
    for name, expected in case.outputs.items():
        actual = found[name]
        where = f"{case.model}: {name}: {actual!r} for {expected!r}"
        assert actual.shape == expected.shape, where
        assert actual.dtype == expected.dtype, where
        if expected.dtype == object:
            assert actual.tolist() == expected.tolist(), where
        else:  # bitwise, as the signs of NaN and zero must be equal
            assert np.ascontiguousarray(actual).tobytes() == np.ascontiguousarray(expected).tobytes(), where
