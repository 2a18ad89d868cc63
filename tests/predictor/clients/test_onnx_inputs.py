from __future__ import annotations

import contextlib
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cortex.errors import ModelError
from cortex.predictor.clients.onnx import OnnxInputs


@dataclass(frozen=True)
class Arg:
    name: str
    type: str
    shape: list[Any]


def one(type_: str = "float", *shape: Any) -> OnnxInputs:
    return OnnxInputs([Arg("x", f"tensor({type_})", list(shape))], [], "model 'm'")


TWO = OnnxInputs([Arg("a", "tensor(float)", [None]), Arg("b", "tensor(int64)", ["n", 2])], [], "model 'm'")


@pytest.mark.parametrize(
    ("inputs", "value", "expected"),
    [
        (one("float", None, 4), [[1, 2, 3, 4]], np.array([[1, 2, 3, 4]], np.float32)),
        (one("float", None, 4), [1, 2, 3, 4.5], np.array([[1, 2, 3, 4.5]], np.float32)),
        (one("float", None, 4), np.zeros((2, 4)), np.zeros((2, 4), np.float32)),
        (one("float", 1, 2, 2), [1, 2, 3, 4], np.array([[[1, 2], [3, 4]]], np.float32)),
        (one("float", None, 2, 2), [1, 2, 3, 4] * 3, np.array([[[1, 2], [3, 4]]] * 3, np.float32)),
        (one("float", None, None, 2), [[1, 2]], np.array([[[1, 2]]], np.float32)),
        (one("float", 1, 3), [[1], [2], [3]], np.array([[1, 2, 3]], np.float32)),
        (one("float", None), 7, np.array([7], np.float32)),
        (one("float"), 7, np.array(7, np.float32)),
        (one("float"), [[7]], np.array([[7]], np.float32)),
        (one("float", None, 4), [], np.zeros((0, 4), np.float32)),
        (one("float", None, 4), np.zeros((0, 4)), np.zeros((0, 4), np.float32)),
        (one("int64", None), [1.0, 2], np.array([1, 2], np.int64)),
        (one("int64", None), [2**62], np.array([2**62], np.int64)),
        (one("int64", None), np.array([1, 2], np.uint8), np.array([1, 2], np.int64)),
        (one("bool", None), [True, 0], np.array([True, False])),
        (one("float16", None), [1.5], np.array([1.5], np.float16)),
        (one("float16", None), np.array([1.5], ">f4"), np.array([1.5], np.float16)),
        (one("double", None), (1, 2), np.array([1.0, 2.0])),
        (one("float", None), ["1.5", True, 2**70], np.array([1.5, 1, 2**70], np.float32)),
        (one("int64", None, 2), [[1, 2.0], [True, 4]], np.array([[1, 2], [1, 4]])),
        (one("string", None), ["a", "é"], np.array(["a", "é"], object)),
        (one("string", None), "a", np.array(["a"], object)),
        (one("string", None, 2), [["a", b"b"]], np.array([["a", "b"]], object)),
        (one("string", None), np.array(["a"]), np.array(["a"])),
    ],
)
def test_a_value_becomes_the_array_that_the_model_takes(inputs, value, expected):
    for model_input in (value, {"x": value}):
        (array,) = inputs.feed(model_input).values()
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert (array == expected).all()


def test_one_long_string_among_many_values_takes_no_room_for_each():
    values = ["1"] * 1_000 + ["9" * 1_000_000]
    for type_ in ("float", "int64"):
        tracemalloc.start()
        try:
            with contextlib.suppress(ModelError):
                one(type_, None).feed(values)
            assert tracemalloc.get_traced_memory()[1] < 100e6
        finally:
            tracemalloc.stop()


def test_null_in_a_list_is_not_a_number():
    assert np.isnan(one("float", None, 2).feed([1, None])["x"][0, 1])


def test_an_array_that_fits_is_not_copied():
    array = np.zeros((3, 4), np.float32)
    assert one("float", None, 4).feed(array)["x"] is array


@pytest.mark.parametrize(
    ("inputs", "value", "message"),
    [
        (one("float", None, 4), [1, 2, 3], "must be float32 of shape [?, 4], but the value has shape [3]"),
        (one("float", None, 4), np.zeros((4, 2)), "must be float32 of shape [?, 4], but the value has shape [4, 2]"),
        (one("float", 2, 4), [], "but the value has shape [0]"),
        (one("float", 2), 3, "but the value is a scalar"),
        (one("float", None, None), [1, 2, 3, 4], None),
        (one("float", None, None, None), [1, 2, 3, 4], "but the value has shape [4]"),
        (one("float", None, 2), [[1, 2], [3]], "ragged: [0] has 2 values, but [1] has 1 values"),
        (one("string", None, 2), [["a", "b"], ["c"]], "ragged"),
        (one("string", None, 2, 1), [[["a"], ["b"]], [["c"], "d"]], "ragged"),
        (one("float", None), ["a"], "[0] is 'a', not a number"),
        (one("float", None), None, "not a number"),
        (one("int64", None), [1.5], "[0] is 1.5, not a whole number"),
        (one("int8", None), [300], "out of the range of int8"),
        (one("int8", None), np.array([300]), "out of the range of int8"),
        (one("string", None), ["a", 1], "value 1 is of type int, not a string"),
        (one("string", None), [b"\xff"], "can't decode"),
        (TWO, [1], "input for model 'm' is a list, not a dictionary; expected: 'a' (float32 of shape [?]), 'b' (int64"),
        (TWO, {"a": 1}, "missing key 'b' for model 'm'; expected: 'a'"),
        (TWO, {"a": 1, "b": [1, 2], "c": 3}, "unknown key 'c' for model 'm'; expected: 'a'"),
        (one("float", None), {"y": 1}, "missing key 'x' for model 'm'"),
        (one("float", None), {"x": 1, "y": 1}, "unknown key 'y'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_is_expected_and_given(inputs, value, message):
    if message is None:
        assert inputs.feed(value)["x"].shape == (1, 4)
        return
    with pytest.raises(ModelError) as raised:
        inputs.feed(value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_input_with_a_default_may_be_given_or_not():
    inputs = OnnxInputs([Arg("x", "tensor(float)", [None])], [Arg("scale", "tensor(float)", [1])], "model 'm'")
    assert set(inputs.feed({"x": 1})) == {"x"}
    assert inputs.feed({"x": 1, "scale": 2})["scale"].dtype == np.float32


def test_what_is_no_tensor_is_passed_on():
    inputs = OnnxInputs([Arg("x", "map(string,tensor(float))", [])], [], "model 'm'")
    assert inputs.feed({"a": 1.0}) == {"x": {"a": 1.0}}
    assert inputs.feed({"x": {"a": 1.0}}) == {"x": {"a": 1.0}}


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)))
def test_lists_and_arrays_of_a_rank_that_fits_mean_the_same(array):
    inputs = one("float", *[None] * array.ndim)
    if array.size:
        assert np.array_equal(inputs.feed(array.tolist())["x"], array, equal_nan=True)
    assert inputs.feed(array)["x"] is array


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=2)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=8,
    ),
    st.sampled_from(["float", "int64", "bool", "string", "float16", "uint8"]),
    st.lists(st.sampled_from([None, "n", 1, 2]), max_size=3),
)
def test_any_value_is_converted_or_refused_in_one_line(value, type_, shape):
    try:
        feed = one(type_, *shape).feed(value)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        array = feed["x"]
        assert all(size in (have, None, "n") for size, have in zip(shape, array.shape, strict=False))
        assert not shape or array.ndim == len(shape)
