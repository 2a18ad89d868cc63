"""What users may pass for a tensor, and what they are given back."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cortex.payloads.arrays import TensorError
from cortex.predictor.clients.tensors import DTYPES, TensorSpec, to_array, to_flat

FLOAT, DOUBLE, INT32, UINT8, STRING, INT64, BOOL, BFLOAT16, HALF, UINT64 = 1, 2, 3, 4, 7, 9, 10, 14, 19, 23
ANY = None


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "expected"),
    [
        # the forms that a value may have
        (1.5, FLOAT, (), 1.5),
        (1.5, FLOAT, (None,), [1.5]),
        (1.5, FLOAT, (None, 1), [[1.5]]),
        ([1.5, 2], FLOAT, (None,), [1.5, 2.0]),
        ((1, (2)), FLOAT, (2,), [1.0, 2.0]),
        ([[1, 2], (3, 4)], FLOAT, (None, 2), [[1.0, 2.0], [3.0, 4.0]]),
        ([1, 2], FLOAT, (None, 2), [[1.0, 2.0]]),
        ([1, 2], FLOAT, (1, 2), [[1.0, 2.0]]),
        ([np.float64(1), np.array([2.0])[0]], FLOAT, (None,), [1.0, 2.0]),
        ([np.array([1, 2]), [3, 4]], INT64, (None, 2), [[1, 2], [3, 4]]),
        (np.array([[1, 2]], np.int8), DOUBLE, (None, None), [[1.0, 2.0]]),
        ([1, [2]][1], FLOAT, ANY, [2.0]),
        (3, INT32, ANY, 3),
        # casts that lose nothing but precision
        ([True, 2], FLOAT, (None,), [1.0, 2.0]),
        ([1.0, 2.0], INT32, (None,), [1, 2]),
        (np.array([3.0]), INT64, (None,), [3]),
        ([0, 1, 1.0, True], BOOL, (None,), [False, True, True, True]),
        ([2**24 + 1], FLOAT, (None,), [float(2**24)]),
        ([2**64 - 1, 0], UINT64, (None,), [2**64 - 1, 0]),
        ([2**53 + 1, 1.0], INT64, (None,), [2**53 + 1, 1]),
        ([2**70], DOUBLE, (None,), [float(2**70)]),
        # protobuf's JSON mapping
        (["9223372036854775807", -1], INT64, (None,), [2**63 - 1, -1]),
        ("18446744073709551615", UINT64, (None,), [2**64 - 1]),
        (["-Infinity", 1], FLOAT, (None,), [-math.inf, 1.0]),
        # strings
        ("ä", STRING, (), "ä".encode()),
        ("a", STRING, (None,), [b"a"]),
        ([["a", b"\0\xff"]], STRING, (None, 2), [[b"a", b"\0\xff"]]),
        ({"b64": "AAE="}, STRING, (None,), [b"\0\1"]),
        (np.array(["a", "bc"]), STRING, (None,), [b"a", b"bc"]),
        (np.array([b"a\0", "b"], object), STRING, (None,), [b"a\0", b"b"]),
        ([bytearray(b"x"), np.str_("y"), memoryview(b"z")], STRING, (None,), [b"x", b"y", b"z"]),
    ],
)
def test_values_are_accepted_in_many_forms(value: Any, dtype: int, shape: Any, expected: Any) -> None:
    array = to_array(value, TensorSpec(dtype, shape))
    assert array.dtype == DTYPES[dtype].numpy
    assert array.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("value", "shape", "expected"),
    [([], (None,), (0,)), ([], (None, 4), (0, 4)), ([[], []], (None, None, 3), (2, 0, 3)), ([], ANY, (0,))],
)
def test_empty_lists_have_the_type_and_shape_of_no_rows(value: Any, shape: Any, expected: Any, dtype: int) -> None:
    array = to_array(value, TensorSpec(dtype, shape))
    assert (array.shape, array.dtype) == (expected, DTYPES[dtype].numpy)


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "message"),
    [
        ([[1, 2], [3]], FLOAT, (None, 2), "the value is ragged: [0] has 2 values, but [1] has 1 values"),
        ([[[1], [2, 3]]], FLOAT, ANY, "the value is ragged: [0][0] has 1 values, but [0][1] has 2 values"),
        ([1, [2]], INT32, (None,), "the value is ragged: [0] is a single value, but [1] has 1 values"),
        ([["a"], "b"], STRING, (None,), "the value is ragged: [0] has 1 values, but [1] is a single value"),
        ([[[1, 2]], [[1], [2]]], INT32, ANY, "the value is ragged: [0] has shape [1, 2], but [1] has shape [2, 1]"),
        ([1, 2, 3], FLOAT, (None, 4), "the value has shape [3]"),
        ([[1, 2, 3]], FLOAT, (None, 4), "the value has shape [1, 3]"),
        ([[1], [2]], FLOAT, (None,), "the value has shape [2, 1]"),
        ([[[[1]]]], FLOAT, (None, 1), "the value has shape [1, 1, 1, 1]"),
        (1, FLOAT, (None, 4), "the value is a scalar"),
        ([], FLOAT, (3,), "the value has shape [0]"),
        ([1, "a"], FLOAT, (None,), "[1] is 'a', not a number"),
        ([[1], [None]], FLOAT, (None, 1), "[1][0] is None, not a number"),
        ("5", FLOAT, (None,), "the value is '5', not a number"),
        (["5"], INT32, (None,), "[0] is '5', not a whole number"),
        (["1.5"], INT64, (None,), "[0] is '1.5', not a whole number"),
        (b"5", FLOAT, (None,), "the value is b'5', not a number"),
        ({"a": 1}, FLOAT, (None,), "the value is {'a': 1}, not a number"),
        ([object()], FLOAT, (None,), "[0] is of type object, not a number"),
        (1.5, INT32, (None,), "the value is 1.5, not a whole number"),
        ([1, math.nan], INT32, (None,), "[1] is nan, not a whole number"),
        (np.array([1.0, np.inf]), INT64, (None,), "[1] is inf, not a whole number"),
        (300, UINT8, (None,), "the value is 300, which is out of the range of uint8"),
        ([1, -1], UINT64, (None,), "[1] is -1, which is out of the range of uint64"),
        (2**63, INT64, (None,), "the value is 9223372036854775808, which is out of the range of int64"),
        ("9" * 5000, INT64, (None,), "out of the range of int64"),
        (2, BOOL, (None,), "the value is 2, not a boolean"),
        (["yes"], BOOL, (None,), "[0] is 'yes', not a boolean"),
        (1j, FLOAT, (None,), "the value is 1j, not a number"),
        (10**400, DOUBLE, (None,), "the value is an integer of 1329 bits, not a number"),
        ([b"a", 1], STRING, (None,), "[1] is 1, not a string"),
        (None, STRING, (None,), "the value is None, not a string"),
        ({"b64": "?"}, STRING, (None,), "the value is {'b64': '?'}, which is not base64"),
        ("\ud800", STRING, (None,), r"the value is '\ud800', which can't be encoded as UTF-8"),
        (1, 21, (None,), "values of this type are not supported"),
    ],
)
def test_invalid_values_are_reported_with_their_place(value: Any, dtype: int, shape: Any, message: str) -> None:
    with pytest.raises(TensorError) as caught:
        to_array(value, TensorSpec(dtype, shape))
    assert message in str(caught.value)


def test_numbers_too_long_to_write_are_told() -> None:
    with pytest.raises(TensorError, match="an integer of 16610 bits, which is out of the range of int64"):
        to_array(10**5000, TensorSpec(INT64, ()))


def test_lists_nested_too_deep_are_told() -> None:
    value: Any = 1
    for _ in range(2000):
        value = [value]
    with pytest.raises(TensorError, match="nested more than 64 deep"):
        to_array(value, TensorSpec(FLOAT, None))


def test_an_array_of_the_right_type_and_shape_is_not_copied() -> None:
    array = np.zeros((3, 4), np.float32)
    assert to_array(array, TensorSpec(FLOAT, (None, 4))) is array


def test_a_spec_reads_as_a_signature() -> None:
    assert str(TensorSpec(FLOAT, (None, 4))) == "DT_FLOAT of shape [None, 4]"
    assert str(TensorSpec(STRING, None)) == "DT_STRING of any shape"
    assert str(TensorSpec(STRING, ())) == "DT_STRING of shape []"


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[1, 2], [3, 4]], np.int32), [1, 2, 3, 4]),
        (np.array([[1, -2]], np.int64), ["1", "-2"]),
        (np.array([2**64 - 1], np.uint64), ["18446744073709551615"]),
        (np.array([True, False]), [True, False]),
        (np.array(7, np.uint8), [7]),
        (np.array([0.1], np.float32), [0.10000000149011612]),
        (np.array([0.1], np.float16), [0.0999755859375]),
        (np.array([1 + 2j, 3], np.complex64), [1.0, 2.0, 3.0, 0.0]),
        (np.array([[b"a\0"], [b"\xff"]], object), ["YQA=", "/w=="]),
        (np.zeros((0, 3), np.float32), []),
        (np.arange(6, dtype=np.int16).reshape(2, 3).T, [0, 3, 1, 4, 2, 5]),
    ],
)
def test_outputs_are_flat_lists_of_what_protobufs_json_has(array: Any, expected: list[Any]) -> None:
    flat = to_flat(array)
    assert flat == expected
    assert list(map(type, flat)) == list(map(type, expected))


NUMBERS = [dtype.number for dtype in DTYPES.values() if dtype.numpy.kind in "iubf"]
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


@given(data=st.data(), dtype=st.sampled_from(NUMBERS))
def test_any_array_survives_the_way_through_lists(data: st.DataObject, dtype: int) -> None:
    array = data.draw(arrays.arrays(DTYPES[dtype].numpy, SHAPES))
    spec = TensorSpec(dtype, array.shape)
    found = to_array(array.tolist() if array.size else array, spec)
    np.testing.assert_array_equal(found, array)
    again = to_array(to_flat(array), TensorSpec(dtype, (None,)))
    np.testing.assert_array_equal(again.reshape(array.shape), array)


@given(st.lists(st.binary(), max_size=5))
def test_any_bytes_survive_the_way_out_and_in(values: list[bytes]) -> None:
    spec = TensorSpec(STRING, (None,))
    assert [base64.b64decode(text) for text in to_flat(to_array(values, spec))] == values
    assert to_array([{"b64": text} for text in to_flat(to_array(values, spec))], spec).tolist() == values


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2) | st.tuples(inner),
    max_leaves=12,
)


@given(
    value=NESTED,
    dtype=st.sampled_from([*DTYPES, 20, 21, 99]),
    shape=st.none() | st.lists(st.none() | st.integers(0, 3), max_size=3).map(tuple),
)
def test_whatever_is_passed_either_fits_or_is_refused(value: Any, dtype: int, shape: Any) -> None:
    try:
        array = to_array(value, TensorSpec(dtype, shape))
    except TensorError as error:
        assert str(error)
        assert len(str(error)) < 300
        return
    assert array.dtype == DTYPES[dtype].numpy
    if shape is not None:
        assert len(shape) == array.ndim
        assert all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
