from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import FormData

from cortex.errors import ModelInputError
from cortex.payloads.request_forms import read_request
from cortex.payloads.signature import ModelSignature, TensorSignature


def model(*inputs: TensorSignature, platform: str = "sklearn") -> ModelSignature:
    return ModelSignature("m", platform, inputs, ())


NAMED = model(TensorSignature("input", "FP64", (-1, 2), labels=("a", "b")))
UNNAMED = model(TensorSignature("input", "FP32", (-1, 2)))
COLUMNS = model(TensorSignature("age", "INT64", (-1, 1)), TensorSignature("city", "BYTES", (-1, 1)), platform="mlflow")
TEXTS = model(TensorSignature("input", "BYTES", (-1,)))
IMAGE = model(TensorSignature("image", "UINT8", (-1, 2, 2, 1)))
PAIR = model(TensorSignature("ids", "INT32", (-1, 3)), TensorSignature("mask", "BOOL", (-1, 3)))

SCALAR = model(TensorSignature("k", "FP32", ()), platform="onnxruntime_onnx")
SEQUENCE = model(TensorSignature("ids", "INT64", (-1, -1)), platform="onnxruntime_onnx")
ANY = model(TensorSignature("x", "FP32", (-1,), any_shape=True), platform="onnxruntime_onnx")
WEIGHTED = model(
    TensorSignature("x", "FP32", (-1, 2)),
    TensorSignature("scale", "FP32", (2,), optional=True),
    platform="onnxruntime_onnx",
)

ROWS = [[1.0, 2.0], [3.0, 4.0]]
LABELS = {"label": np.array(["x", "y"], object), "probabilities": np.array([[1, 0], [0.5, 0.5]])}
BOTH = [{"label": "x", "probabilities": [1, 0]}, {"label": "y", "probabilities": [0.5, 0.5]}]
ONE = {"prediction": np.array([1.5, 2.5])}


@pytest.mark.parametrize(
    ("body", "one", "both"),
    [
        ({"instances": ROWS}, {"predictions": [1.5, 2.5]}, {"predictions": BOTH}),
        ({"instances": [{"a": 1, "b": 2}, {"b": 4, "a": 3}]}, {"predictions": [1.5, 2.5]}, {"predictions": BOTH}),
        ({"instances": ROWS, "signature_name": "serving_default"}, {"predictions": [1.5, 2.5]}, {"predictions": BOTH}),
        (
            {"inputs": ROWS},
            {"outputs": [1.5, 2.5]},
            {"outputs": {"label": ["x", "y"], "probabilities": [[1, 0], [0.5, 0.5]]}},
        ),
        ({"inputs": {"input": ROWS}}, {"outputs": [1.5, 2.5]}, None),
        ({"inputs": {"b": [2, 4], "a": [1, 3]}}, {"outputs": [1.5, 2.5]}, None),
        ({"inputs": [{"a": 1, "b": 2}, {"a": 3, "b": 4}]}, {"outputs": [1.5, 2.5]}, None),
        (
            {"dataframe_split": {"columns": ["a", "b"], "data": ROWS}},
            {"predictions": [1.5, 2.5]},
            {"predictions": BOTH},
        ),
        (
            {"dataframe_split": {"columns": ["a", "b"], "index": [0, 1], "data": ROWS}, "params": {}},
            {"predictions": [1.5, 2.5]},
            None,
        ),
        ({"dataframe_split": {"data": ROWS}}, {"predictions": [1.5, 2.5]}, None),
        (
            {"dataframe_records": [{"a": 1, "b": 2}, {"a": 3, "b": 4}]},
            {"predictions": [1.5, 2.5]},
            {"predictions": BOTH},
        ),
        (ROWS, [1.5, 2.5], BOTH),
        ([{"a": 1, "b": 2}, {"a": 3, "b": 4}], [1.5, 2.5], BOTH),
        ({"input": ROWS}, {"prediction": [1.5, 2.5]}, {"label": ["x", "y"], "probabilities": [[1, 0], [0.5, 0.5]]}),
        ({"a": [1, 3], "b": [2, 4]}, {"prediction": [1.5, 2.5]}, None),
    ],
)
def test_each_form_of_a_request_is_answered_in_kind(body: Any, one: Any, both: Any) -> None:
    request = read_request(body, NAMED)
    assert request.inputs["input"].tolist() == ROWS and request.inputs["input"].dtype == np.float64
    assert request.answer(ONE) == one
    assert both is None or request.answer(LABELS) == both
    assert read_request(orjson.dumps(body), NAMED).answer(ONE) == one  # without a content type


@pytest.mark.parametrize("body", [[1, 2], {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"input": [1, 2]}])
def test_a_single_row_is_answered_with_a_single_row(body: Any) -> None:
    request = read_request(body, NAMED)
    assert request.inputs["input"].tolist() == [[1, 2]]
    assert request.answer({"prediction": np.array([7.0])}) == 7
    assert request.answer({"label": np.array([b"x"], object), "p": np.array([[1]])}) == {"label": "x", "p": [1]}


@pytest.mark.parametrize(
    "text",
    [b"a,b\n1,2\n3,4\n", "\ufeffa,b\r\n1.0, 2\r\n3,4e0".encode(), '"a","b"\n"1","2"\n\n3,4\n', b"a, b\n+1,2\n3,4"],
)
def test_csv_is_read_by_its_header(text: Any) -> None:
    request = read_request(text, NAMED, "text/csv; charset=utf-8")
    assert request.inputs["input"].tolist() == ROWS
    assert request.answer(ONE) == [1.5, 2.5]


def test_columns_of_several_types_are_read_by_name_from_all_forms() -> None:
    bodies: list[Any] = [
        {"dataframe_split": {"columns": ["city", "age"], "data": [["Oslo", 3], ["Rome", 4]]}},
        {"dataframe_records": [{"age": 3, "city": "Oslo"}, {"city": "Rome", "age": 4}]},
        {"instances": [[3, "Oslo"], [4.0, "Rome"]]},
        {"inputs": {"age": [3, 4], "city": ["Oslo", "Rome"]}},
        {"inputs": {"age": [[3], [4]], "city": [["Oslo"], ["Rome"]]}},
        [{"age": 3, "city": "Oslo"}, {"age": 4, "city": "Rome"}],
        {"age": [3, 4], "city": ["Oslo", "Rome"]},
    ]
    for request in (
        *(read_request(body, COLUMNS) for body in bodies),
        read_request("city,age\nOslo,3\nRome,4", COLUMNS, "text/csv"),
    ):
        assert {name: array.tolist() for name, array in request.inputs.items()} == {
            "age": [[3], [4]],
            "city": [["Oslo"], ["Rome"]],
        }
        assert request.inputs["age"].dtype == np.int64
    for row in ([3, "Oslo"], {"age": 3, "city": "Oslo"}):
        request = read_request(row, COLUMNS)
        assert request.inputs["city"].tolist() == [["Oslo"]] and request.answer({"y": np.array([1])}) == 1
    assert read_request(bodies[3], COLUMNS).answer(ONE) == {"predictions": [1.5, 2.5]}  # as MLflow does


OPTIONAL = model(
    TensorSignature("age", "INT64", (-1, 1)),
    TensorSignature("city", "BYTES", (-1, 1), optional=True),
    platform="mlflow",
)


@pytest.mark.parametrize(
    "body",
    [
        {"dataframe_records": [{"age": 1}, {"age": 2}]},
        {"dataframe_split": {"columns": ["age"], "data": [[1], [2]]}},
        {"inputs": {"age": [1, 2]}},
        {"age": [1, 2]},
        [{"age": 1}, {"age": 2}],
        b"age\n1\n2\n",
    ],
)
def test_an_optional_column_may_be_left_out(body: Any) -> None:
    request = read_request(body, OPTIONAL, "text/csv" if isinstance(body, bytes) else "")
    assert list(request.inputs) == ["age"]
    assert request.inputs["age"].reshape(-1).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"city": "a"}], "row 1 has no 'age'; the model has 'age', 'city'"),
        ([{"age": 1}, {"age": 1, "city": "a"}], "row 2 has 'age', 'city', but row 1 has 'age'"),
        ([{"age": 1, "city": "a"}, {"age": 1}], "row 2 has 'age', but row 1 has 'age', 'city'"),
    ],
)
def test_an_optional_column_is_in_all_records_or_in_none(rows: Any, words: str) -> None:
    with pytest.raises(ModelInputError) as caught:
        read_request(rows, OPTIONAL)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"inputs": {"k": 5}}, {"outputs": 1.5}),
        ({"inputs": 5}, {"outputs": 1.5}),
        ({"k": 5}, 1.5),
        ({"instances": [5]}, {"predictions": [1.5]}),
        ({"instances": [{"k": 5}]}, {"predictions": [1.5]}),
        ([5], [1.5]),
        (5, 1.5),
    ],
)
def test_a_model_of_a_scalar_has_one_row(body: Any, answer: Any) -> None:
    request = read_request(body, SCALAR)
    assert request.inputs["k"].shape == () and request.inputs["k"] == 5
    assert request.answer({"y": np.array(1.5)}) == answer
    with_column = model(*SCALAR.inputs, TensorSignature("x", "FP32", (-1,)))
    for form in ({"inputs": {"k": 5, "x": [1, 2]}}, {"k": 5, "x": [1, 2]}):
        assert read_request(form, with_column).inputs["x"].tolist() == [1, 2]


@pytest.mark.parametrize("value", [5, [1, 2], [[1, 2], [3, 4]], [[[1]]]])
def test_an_input_of_any_shape_takes_all(value: Any) -> None:
    for body in ({"inputs": value}, {"inputs": {"x": value}}, {"x": value}):
        found = read_request(body, ANY).inputs["x"]
        assert found.reshape(-1).tolist() == np.array(value).reshape(-1).tolist()
    assert read_request({"inputs": value}, ANY).inputs["x"].shape == np.array(value).shape


def test_an_input_with_a_default_may_be_left_out_and_rows_are_those_of_the_others() -> None:
    for body in ([[1, 2]], [1, 2], {"instances": [[1, 2]]}, {"inputs": {"x": [[1, 2]]}}, {"x": [[1, 2]]}):
        assert {name: each.tolist() for name, each in read_request(body, WEIGHTED).inputs.items()} == {"x": [[1, 2]]}
    for body in ({"inputs": {"x": [[1, 2]], "scale": [3, 4]}}, {"x": [[1, 2]], "scale": [3, 4]}):
        assert read_request(body, WEIGHTED).inputs["scale"].tolist() == [3, 4]


def test_a_model_without_inputs_can_be_called() -> None:
    for body in ({"inputs": {}}, {"instances": [{}]}):
        assert read_request(body, model(platform="onnxruntime_onnx")).inputs == {}


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("input\na\n\nc", ["a", "", "c"]),
        ("input\r\na\r\n\r\nc\r\n", ["a", "", "c"]),
        ("input\na\n\n", ["a", ""]),
        ("input\na\r\n\r\n\r\n", ["a", "", ""]),
        ("\n\ninput\n\n", [""]),
        ('input\n""\n', [""]),
    ],
)
def test_an_empty_line_of_csv_with_one_column_is_an_empty_cell(text: str, cells: list[str]) -> None:
    assert read_request(text, TEXTS, "text/csv").inputs["input"].tolist() == cells


def test_an_empty_line_of_csv_with_one_column_of_numbers_is_nan() -> None:
    number = model(TensorSignature("x", "FP64", (-1, 1)))
    assert np.isnan(read_request("x\n1\n\n3\n", number, "text/csv").inputs["x"][1, 0])


def test_tensors_are_read_as_tensorflow_serving_does() -> None:
    pixels = [[[0], [1]], [[2], [255]]]
    for body in (
        {"instances": [pixels, pixels]},
        {"inputs": [pixels, pixels]},
        {"inputs": {"image": [pixels, pixels]}},
    ):
        array = read_request(body, IMAGE).inputs["image"]
        assert array.shape == (2, 2, 2, 1) and array.dtype == np.uint8
    assert read_request({"instances": [{"image": pixels}]}, IMAGE).inputs["image"].shape == (1, 2, 2, 1)
    pair = {"instances": [{"ids": [1, 2, 3], "mask": [True, False, True]}, {"ids": [4, 5, 6], "mask": [True] * 3}]}
    assert read_request(pair, PAIR).inputs["ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    batch = {"ids": [[1, 2, 3]], "mask": [[True] * 3]}
    assert read_request({"inputs": batch}, PAIR).inputs["mask"].dtype == np.bool_
    assert read_request(batch, PAIR).form == "values"
    assert read_request({"ids": [1, 2, 3], "mask": [True] * 3}, PAIR).form == "row"


def test_binary_values_are_base64() -> None:
    request = read_request({"instances": [{"b64": "gIE="}, "text"]}, TEXTS)
    assert request.inputs["input"].tolist() == [b"\x80\x81", "text"]
    assert read_request({"inputs": {"b64": "AA=="}}, TEXTS).inputs["input"].tolist() == [b"\0"]
    outputs = {"image_bytes": np.array([b"a"], object)}
    assert request.answer(outputs) == {"predictions": [{"b64": "YQ=="}]}
    assert request.answer({"name": np.array([b"\x80"], object)}) == {"predictions": [{"b64": "gA=="}]}
    with pytest.raises(ModelInputError, match=r"row 2 is a map, which is not base64"):
        read_request({"instances": ["a", {"b64": "?"}]}, TEXTS)


def test_texts_and_numbers_alone_are_rows_of_models_with_one_value() -> None:
    assert read_request(["a", "b"], TEXTS).form == "rows"
    assert read_request(b'"a"', TEXTS).inputs["input"].tolist() == ["a"]
    request = read_request(5, model(TensorSignature("x", "FP32", (-1, 1))))
    assert request.inputs["x"].tolist() == [[5]] and request.form == "row"


def test_a_missing_value_is_nan() -> None:
    for body in ([[None, 2]], {"dataframe_split": {"columns": ["a", "b"], "data": [[None, 2]]}}):
        assert np.isnan(read_request(body, NAMED).inputs["input"][0, 0])
    assert np.isnan(read_request("a,b\n,2", NAMED, "text/csv").inputs["input"][0, 0])


@pytest.mark.parametrize(
    ("signature", "body", "words"),
    [
        (NAMED, [[1, "x"]], "row 1, column 2 ('b') is 'x'; it must be a number"),
        (NAMED, [[1, 2], [3, [4]]], "row 2, column 2 ('b') has 1 values, but row 1, column 1 ('a') is one value"),
        (NAMED, [[1, 2], [3, 4, 5]], "row 2 has 3 values, but row 1 has 2 values; the columns are 'a', 'b'"),
        (NAMED, {"instances": [1, 2]}, "row 1 is one value; a row of the model has the shape [2]"),
        (SEQUENCE, {"instances": [1, 2, 3]}, "row 1 is one value; a row of the model has the shape [?]"),
        (IMAGE, {"instances": [[[1], [2]]]}, "row 1 has the shape [2, 1]; a row of the model has the shape [2, 2, 1]"),
        (SEQUENCE, {"inputs": []}, "there are no rows"),
        (SEQUENCE, {"inputs": {"ids": []}}, "there are no rows"),
        (SCALAR, {"instances": [5, 6]}, "the value has the shape [2]; the model takes one value"),
        (model(TensorSignature("x", "FP32", (2, 3))), [[1, 2, 3]], "has the shape [1, 3]; the model takes [2, 3]"),
        (NAMED, [[1, 2, 3]], "rows have 3 values; the model takes 2: 'a', 'b'"),
        (UNNAMED, [1, 2, 3], "rows have 3 values; the model takes 2"),
        (UNNAMED, [[1, 2], [3, 1e39]], "row 2, column 2 is 1e+39, which is out of the range of FP32"),
        (NAMED, [[1, float("inf")]], "row 1, column 2 ('b') is inf, which is out of the range of FP64"),
        (NAMED, [[1, 10**400]], "row 1, column 2 ('b') is a huge number, which is out of the range of FP64"),
        (NAMED, b"[[1, 1e999]]", "the body is not JSON (number is infinity when parsed as double"),
        (NAMED, b"[[1, NaN]]", "the body is not JSON (unexpected character"),
        (NAMED, b"\xff", "the body is not JSON"),
        (NAMED, [], "there are no rows"),
        (NAMED, {"instances": []}, "there are no rows"),
        (NAMED, {"instances": 5}, "instances is a number; it must be a list of rows"),
        (NAMED, "text", "the body is not JSON"),
        (NAMED, None, "the body is null; send rows"),
        (NAMED, 5, "the body is a number; send rows"),
        (NAMED, {}, "the body is a map with no keys; the model has 'a', 'b'"),
        (NAMED, {"x": 1}, "the body is a map with the keys 'x'; the model has 'a', 'b'"),
        (NAMED, {"a": 1}, "the record has no 'b'; the model has 'a', 'b'"),
        (NAMED, [{"a": 1, "b": 2}, {"a": 1, "c": 2}], "row 2 has no 'b' and has 'c', which the model lacks"),
        (NAMED, [{"a": 1, "b": 2}, [1, 2]], "row 2 is a list, but row 1 is a map"),
        (NAMED, {"instances": [[1, 2]], "inputs": 1}, "the body has the keys 'instances', 'inputs'; send one of them"),
        (NAMED, {"instances": [[1, 2]], "x": 1}, "the body has the key 'x' besides 'instances'"),
        (NAMED, {"instances": [[1, 2]], "signature_name": "other"}, "the key 'signature_name' can't be used"),
        (NAMED, {"inputs": [[1, 2]], "params": {"t": 1}}, "the key 'params' can't be used"),
        (NAMED, {"inputs": {"a": [1, 2], "b": [1]}}, "column 'b' has 1 values, but column 'a' has 2"),
        (NAMED, {"inputs": {"z": [1]}}, "inputs has no 'a', 'b' and has 'z', which the model lacks"),
        (NAMED, {"dataframe_split": [1]}, "dataframe_split must be"),
        (
            NAMED,
            {"dataframe_split": {"columns": ["b", "a"], "data": ROWS}},
            "the columns are in another order than the model's: they are 'b', 'a'; the model has",
        ),
        (NAMED, {"dataframe_split": {"columns": ["a", "a"], "data": ROWS}}, "the column 'a' is there twice"),
        (NAMED, {"dataframe_split": {"columns": ["a"], "data": [[1]]}}, "the table has no 'b'"),
        (NAMED, {"dataframe_split": {"columns": ["a", "b"], "data": [[1]]}}, "rows have 1 values; the model takes 2"),
        (UNNAMED, {"dataframe_split": {"columns": ["a"], "data": [[1]]}}, "there are 1 columns; the model takes 2"),
        (UNNAMED, [{"a": 1, "b": 2}], "row 1 has no 'input' and has 'a', 'b', which the model lacks"),
        (COLUMNS, [[3, "Oslo"], [4]], "row 2 has 1 values; there are 2 columns: 'age', 'city'"),
        (COLUMNS, [[3.5, "Oslo"]], "row 1, column 'age' is 3.5; it must be a whole number"),
        (COLUMNS, [[2**63, "Oslo"]], "row 1, column 'age' is 9223372036854775808, which is out of the range of INT64"),
        (COLUMNS, [[None, "Oslo"]], "row 1, column 'age' is null; it must be a whole number"),
        (COLUMNS, [[3, 4]], "row 1, column 'city' is 4; it must be a text"),
        (COLUMNS, {"inputs": [1]}, "inputs must be a map by name: the model has the inputs 'age', 'city'"),
        (COLUMNS, {"inputs": {"age": [1, 2], "city": ["x"]}}, "column 'city' has 1 values, but column 'age' has 2"),
        (TEXTS, ["a", 5], "row 2 is 5; it must be a text"),
        (IMAGE, {"instances": [[[[0], [1]]]]}, "the value has the shape [1, 1, 2, 1]; the model takes [?, 2, 2, 1]"),
        (
            IMAGE,
            {"instances": [[[[0], [1]], [[2], [256]]]]},
            "row 1, column 2[1][0] is 256, which is out of the range of UINT8",
        ),
        (PAIR, [[1, 2, 3]], "the model has several inputs: send rows as maps by name ('ids', 'mask')"),
        (
            PAIR,
            {"inputs": {"ids": [[1, 2, 3]], "mask": [[1, 0, 1]]}},
            "row 1, column 'mask'[0] is 1; it must be true or false",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(signature: ModelSignature, body: Any, words: str) -> None:
    with pytest.raises(ModelInputError) as caught:
        read_request(body, signature)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("signature", "text", "words"),
    [
        (NAMED, "a,b\n1,x", "row 1, column 2 ('b') is 'x'; it must be a number"),
        (NAMED, "a,b\n1,1_0", "row 1, column 2 ('b') is '1_0'; it must be a number"),
        (NAMED, "a,b\n1,1e999", "row 1, column 2 ('b') is inf, which is out of the range of FP64"),
        (NAMED, "a,b\n1,2\n1", "row 2 has 1 cells, but the header has 2"),
        (NAMED, "b,a\n1,2", "the columns are in another order than the model's"),
        (NAMED, "1,2\n3,4", "the first line of CSV must be a header"),
        (NAMED, "a,b\n", "at least one row; with curl, use --data-binary"),
        (NAMED, 'a,b\n"1,2', "the body is not CSV"),
        (NAMED, b"\xff", "the body is not UTF-8"),
        (COLUMNS, "age,city\n3.5,Oslo", "row 1, column 'age' is 3.5; it must be a whole number"),
        (COLUMNS, "age\n3", "the table has no 'city'"),
        (IMAGE, "a\n1", "the model takes tensors, not columns"),
    ],
)
def test_a_mistake_in_csv_is_one_sentence_with_its_place(signature: ModelSignature, text: Any, words: str) -> None:
    with pytest.raises(ModelInputError) as caught:
        read_request(text, signature, "text/csv")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (
            FormData({"a,b\n1,2": ""}),
            "application/x-www-form-urlencoded",
            "send the header `content-type: application/",
        ),
        (
            FormData({"file": "a,b"}),
            "multipart/form-data; boundary=x",
            "the body was sent as a form (multipart/form-data)",
        ),
        ({}, "application/x-www-form-urlencoded", "the body is empty; send rows"),
        (b"", "", "the body is empty; send rows"),
        ("", "text/csv", "the body is empty; send rows"),
    ],
)
def test_a_body_that_curl_sends_by_mistake_is_told_what_to_change(body: Any, content_type: str, words: str) -> None:
    with pytest.raises(ModelInputError) as caught:
        read_request(body, NAMED, content_type)
    assert words in str(caught.value)


def test_a_json_object_that_curl_declares_as_a_form_gets_the_error_of_json() -> None:
    with pytest.raises(ModelInputError) as declared:
        read_request({"x": 1}, NAMED, "application/x-www-form-urlencoded")
    with pytest.raises(ModelInputError) as plain:
        read_request({"x": 1}, NAMED, "application/json")
    assert str(declared.value) == str(plain.value)


def test_a_form_with_the_names_of_the_columns_is_read_as_before() -> None:
    with pytest.raises(ModelInputError, match="row 1, column 1"):
        read_request({"a": "x", "b": "1"}, NAMED, "application/x-www-form-urlencoded")


def test_a_hostile_number_of_columns_is_refused_in_linear_time() -> None:
    names = [f"c{index}" for index in range(100_000)]
    for body in ({"dataframe_split": {"columns": names, "data": [[1]]}}, dict.fromkeys([*names, "a"], 1)):
        with pytest.raises(ModelInputError, match="which the model lacks") as caught:
            read_request(body, NAMED)
        assert len(str(caught.value)) < 1000


def test_outputs_without_rows_are_answered_by_name() -> None:
    request = read_request([[1, 2]], NAMED)
    assert request.answer({"a": np.array(1), "b": np.array([1, 2])}) == {"a": 1, "b": [1, 2]}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["a", "b", "age", "city", "input", "instances", "inputs", "b64", "columns", "data", "ids",
                         "dataframe_split", "dataframe_records", "x"]), inner, max_size=4
    ),
    max_leaves=12,
)  # fmt: skip


@given(VALUES, st.sampled_from([NAMED, UNNAMED, COLUMNS, TEXTS, IMAGE, PAIR, SCALAR, SEQUENCE, ANY, WEIGHTED]))
def test_any_value_is_read_or_refused(value: Any, signature: ModelSignature) -> None:
    try:
        request = read_request(value, signature)
    except ModelInputError:
        return
    wanted = {tensor.name: tensor for tensor in signature.inputs}
    assert set(request.inputs) | {name for name, each in wanted.items() if each.optional} == set(wanted)
    for name, array in request.inputs.items():
        if wanted[name].any_shape:
            continue
        shape = wanted[name].shape
        assert len(shape) == array.ndim
        assert all(want in (-1, have) for want, have in zip(shape, array.shape, strict=True))


@given(st.text(max_size=60), st.sampled_from([NAMED, COLUMNS, TEXTS]))
def test_any_csv_is_read_or_refused(text: str, signature: ModelSignature) -> None:
    with contextlib.suppress(ModelInputError):
        read_request(f"a,b\n{text}", signature, "text/csv")
