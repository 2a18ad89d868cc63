"""Calls of a model that are joined along the first axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cortex.payloads.signature import ModelSignature, TensorSignature
from cortex.predictor.inference.batching import join, joining_key, split

ANY = ModelSignature("m", "python", (), ())


def model(*shape: int, output: tuple[int, ...] = (-1,)) -> ModelSignature:
    return ModelSignature("m", "onnx", (TensorSignature("x", "FP32", shape),), (TensorSignature("y", "FP32", output),))


def x(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"x": np.ones(shape, dtype)}


@pytest.mark.parametrize(
    ("signature", "first", "second", "is_same"),
    [
        (ANY, x(1, 2), x(3, 2), True),
        (ANY, x(1, 2), x(1, 3), False),
        (ANY, x(1, 2), x(1, 2, dtype="float64"), False),
        (ANY, x(1, 2), {"z": np.ones((1, 2), "float32")}, False),
        (model(-1, 2), x(1, 2), x(3, 2), True),
    ],
)
def test_calls_with_the_same_key_differ_only_in_their_rows(
    signature: ModelSignature, first: dict[str, Any], second: dict[str, Any], is_same: bool
) -> None:
    keys = joining_key(signature, first), joining_key(signature, second)
    assert None not in keys
    assert (keys[0] == keys[1]) is is_same


@pytest.mark.parametrize(
    ("signature", "inputs"),
    [
        (model(1, 2), x(1, 2)),
        (model(-1, 2, output=(1, 2)), x(1, 2)),
        (ANY, {"x": np.array(1.0)}),
        (ANY, {**x(1), "y": np.ones(2)}),
        (ANY, x(0, 2)),
        (ModelSignature("m", "onnx", (TensorSignature("x", "FP32", (-1,), any_shape=True),), ()), x(1, 2)),
    ],
)
def test_calls_of_models_with_fixed_rows_are_not_joined(signature: ModelSignature, inputs: dict[str, Any]) -> None:
    assert joining_key(signature, inputs) is None


def test_each_call_gets_its_own_rows() -> None:
    calls = [x(1, 2), x(3, 2)]
    joined = join(calls)
    assert joined["x"].shape == (4, 2)
    parts = split({"y": joined["x"].sum(axis=1), "z": list("abcd")}, calls)
    assert parts is not None
    assert [part["y"].shape for part in parts] == [(1,), (3,)]
    assert [part["z"].tolist() for part in parts] == [["a"], ["b", "c", "d"]]


@pytest.mark.parametrize("outputs", [{}, {"y": np.ones(3)}, {"y": np.float32(1)}, {"y": np.ones(4), "z": np.ones(1)}])
def test_outputs_without_a_row_for_each_row_are_not_split(outputs: dict[str, Any]) -> None:
    assert split(outputs, [x(1, 2), x(3, 2)]) is None
