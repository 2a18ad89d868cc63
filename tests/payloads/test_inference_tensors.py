"""Tensors of the Open Inference Protocol: requests of a real client, round trips, hostile requests."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

from cortex.errors import UserError
from cortex.payloads.inference_protocol import V2Error
from cortex.payloads.inference_tensors import DTYPES, decode_request, encode_response
from cortex.payloads.signature import ModelSignature, TensorSignature

Array = NDArray[Any]

ANY = ModelSignature("any", "python", (), ())
IRIS = ModelSignature(
    "iris",
    "sklearn",
    (TensorSignature("x", "FP32", (-1, 2), labels=("width", "length")),),
    (TensorSignature("label", "INT64", (-1,)), TensorSignature("scores", "FP32", (-1, 2))),
)
NUMBERS = [name for name in DTYPES if name != "BYTES"]


def tensors(datatypes: list[str]) -> st.SearchStrategy[Array]:
    shapes = arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)
    of_numbers = st.sampled_from([DTYPES[name] for name in datatypes]).flatmap(lambda d: arrays.arrays(d, shapes))
    of_bytes = shapes.flatmap(
        lambda shape: st.lists(st.binary(max_size=8), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))).map(
            lambda values: _objects(values, shape)
        )
    )
    return st.one_of(of_numbers, of_bytes)


def _objects(values: list[bytes], shape: tuple[int, ...]) -> Array:
    array: Array = np.empty(len(values), np.object_)
    array[:] = values
    return array.reshape(shape)


def _datatype(array: Array) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)


def _request(inputs: dict[str, Array], binary: bool, **options: Any) -> tuple[bytes, int | None]:
    sent = []
    for name, array in inputs.items():
        tensor = InferInput(name, list(array.shape), _datatype(array))
        tensor.set_data_from_numpy(array, binary_data=binary)
        sent.append(tensor)
    return InferenceServerClient.generate_request_body(sent, **options)  # type: ignore[no-any-return]


def _same(a: Array, b: Array) -> bool:
    if a.dtype.kind == "O":
        return a.shape == b.shape and a.reshape(-1).tolist() == b.reshape(-1).tolist()
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(st.dictionaries(st.text(min_size=1, max_size=5), tensors(NUMBERS), min_size=1, max_size=3))
def test_binary_tensors_of_tritonclient_arrive_and_return_bit_by_bit(inputs: dict[str, Array]) -> None:
    body, length = _request(inputs, binary=True, request_id="7")
    header, decoded = decode_request(body, length, ANY)
    assert list(decoded) == list(inputs)
    assert all(_same(decoded[name], array) for name, array in inputs.items())
    answer, json_length = encode_response(header, decoded, ANY, "any", "2")
    result = InferenceServerClient.parse_response_body(answer, header_length=json_length)
    assert result.get_response()["id"] == "7"
    assert result.get_response()["model_version"] == "2"
    for name, array in inputs.items():
        returned = result.as_numpy(name)
        assert returned is not None or array.size == 0  # tritonclient returns None for an empty tensor in binary form
        assert returned is None or _same(returned.astype(array.dtype), array)


@given(tensors([name for name in NUMBERS if name not in ("FP16", "FP32", "FP64")]), st.booleans())
def test_json_tensors_arrive_flat_or_nested_and_return(array: Array, nested: bool) -> None:
    if array.dtype.kind == "O":
        array = _objects([value.hex().encode() for value in array.reshape(-1)], array.shape)
    values = array if nested else array.reshape(-1)
    data = np.vectorize(bytes.decode, otypes=[object])(values).tolist() if array.dtype.kind == "O" else values.tolist()
    tensor = {"name": "x", "shape": array.shape, "datatype": _datatype(array), "data": data}
    header, decoded = decode_request(orjson.dumps({"inputs": [tensor]}), None, ANY)
    assert _same(decoded["x"], array)
    answer, length = encode_response(header, decoded, ANY, "any", None)
    assert length is None
    output = orjson.loads(answer)["outputs"][0]
    assert (output["name"], output["datatype"]) == ("x", _datatype(array))
    _, again = decode_request(orjson.dumps({"inputs": [output]}), None, ANY)
    assert _same(again["x"], array)


@given(arrays.arrays(np.dtype("<f4"), (3,), elements={"allow_infinity": False, "allow_nan": False}))
def test_floats_survive_json_exactly_and_nan_is_null(array: Array) -> None:
    body, _ = _request({"x": array}, binary=False, outputs=[InferRequestedOutput("x", binary_data=False)])
    header, decoded = decode_request(body, None, ANY)
    assert _same(decoded["x"], array)
    with_nan = np.append(array, np.float32("nan"))
    answer, _ = encode_response(header, {"x": with_nan}, ANY, "any", None)
    output = orjson.loads(answer)["outputs"][0]
    assert output["data"][3] is None
    _, again = decode_request(orjson.dumps({"inputs": [output]}), None, ANY)
    assert np.array_equal(again["x"], with_nan, equal_nan=True)


def test_outputs_have_the_form_that_the_caller_asked_for() -> None:
    outputs = {"label": np.array([1]), "scores": np.array([[0.25, 0.75]], np.float32)}
    asked = [InferRequestedOutput("scores", binary_data=True), InferRequestedOutput("label", binary_data=False)]
    body, length = _request({"x": np.zeros((1, 2), np.float32)}, True, outputs=asked)
    header, _ = decode_request(body, length, IRIS)
    answer, json_length = encode_response(header, outputs, IRIS, "iris", None)
    assert json_length is not None
    assert orjson.loads(answer[:json_length]) == {
        "model_name": "iris",
        "outputs": [
            {"name": "scores", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
            {"name": "label", "shape": [1], "datatype": "INT64", "data": [1]},
        ],
    }
    assert answer[json_length:] == outputs["scores"].tobytes()


def test_one_request_may_mix_json_and_binary_inputs() -> None:
    inputs = [
        {"name": "a", "shape": [2], "datatype": "INT32", "parameters": {"binary_data_size": 8}},
        {"name": "b", "shape": [1], "datatype": "BYTES", "data": ["ä"]},
        {"name": "c", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
    ]
    text = orjson.dumps({"inputs": inputs})
    _, decoded = decode_request(text + struct.pack("<ii", 1, -1) + struct.pack("<I", 2) + b"\xff\0", len(text), ANY)
    assert {name: array.tolist() for name, array in decoded.items()} == {
        "a": [1, -1],
        "b": ["ä".encode()],
        "c": [b"\xff\0"],
    }


def test_a_raw_request_is_the_data_of_the_only_input() -> None:
    header, decoded = decode_request(struct.pack("<4f", 1, 2, 3, 4), 0, IRIS)
    assert decoded["x"].tolist() == [[1, 2], [3, 4]]
    _, length = encode_response(header, {"label": np.array([1, 2])}, IRIS, "iris", None)
    assert length is not None
    texts = ModelSignature("t", "python", (TensorSignature("text", "BYTES", (-1,)),), ())
    assert decode_request(b"hello", 0, texts)[1]["text"].tolist() == [b"hello"]


def test_columns_by_label_form_the_only_input_in_the_order_of_its_labels() -> None:
    columns = [
        {"name": "length", "shape": [2, 1], "datatype": "INT64", "data": [3, 4]},
        {"name": "width", "shape": [2], "datatype": "FP64", "data": [1.5, 2.5]},
    ]
    request = {"parameters": {"content_type": "pd"}, "inputs": columns}
    _, decoded = decode_request(orjson.dumps(request), None, IRIS)
    assert decoded["x"].tolist() == [[1.5, 3], [2.5, 4]]
    assert decoded["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("content_type", "sent", "expected"), [("str", "ä", "ä"), ("base64", "aGk=", b"hi"), ("np", "a", b"a")]
)
@pytest.mark.parametrize("of_request", [True, False])
def test_content_types_select_the_form_of_bytes(
    content_type: str, sent: str, expected: object, of_request: bool
) -> None:
    tensor: dict[str, Any] = {"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": [[sent]]}
    request: dict[str, Any] = {"inputs": [tensor]}
    (request if of_request else tensor)["parameters"] = {"content_type": content_type}
    _, decoded = decode_request(orjson.dumps(request), None, ANY)
    assert decoded["x"].tolist() == [[expected]]


def _x(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]} | changes
    return {key: value for key, value in tensor.items() if value is not ...}


def _sized(size: Any, **changes: Any) -> dict[str, Any]:
    return _x(data=..., parameters={"binary_data_size": size}, **changes)


MISTAKES: list[tuple[Any, str]] = [
    ([], "the request must be a JSON object with inputs, not a list"),
    ({}, "the request has no inputs; send inputs, a list of tensors"),
    ({"inputs": {}}, "inputs must be a list of tensors, not an object"),
    ({"inputs": [1]}, "inputs[0] must be an object, not a number"),
    ({"inputs": [{}]}, "inputs[0] has no name"),
    ({"id": 3, "inputs": [_x()]}, "id must be a string, not a number"),
    ({"inputs": [_x(), _x()]}, "input 'x' occurs twice"),
    ({"inputs": [_x(datatype="FLOAT")]}, "input 'x': the datatype is 'FLOAT'; use one of BOOL, INT8"),
    ({"inputs": [_x(shape=...)]}, "input 'x': shape must be a list of sizes, not missing"),
    ({"inputs": [_x(shape=[-1, 2])]}, "input 'x': -1 in its shape is not a size"),
    ({"inputs": [_x(shape=[1.5])]}, "input 'x': 1.5 in its shape is not a size"),
    ({"inputs": [_x(shape=[True])]}, "input 'x': true in its shape is not a size"),
    ({"inputs": [_x(shape=[2**62, 2**62, 0])]}, "input 'x': the shape [4611686018427387904"),
    ({"inputs": [_x(shape=[0, 2**61], data=[])]}, "input 'x': the shape [0, 2305843009213693952] is too large"),
    ({"inputs": [_x(shape=[1] * 65)]}, "input 'x': shape has 65 dimensions; at most 64 are possible"),
    ({"inputs": [_x(data=...)]}, "input 'x' has no data"),
    ({"inputs": [_x(data=1)]}, "input 'x': data must be a list, not a number"),
    ({"inputs": [_x(data=[1])]}, "input 'x': shape [1, 2] takes 2 elements, but data has 1"),
    ({"inputs": [_x(data=[[1, 2, 3]])]}, "takes a list of 2 on axis 1 of data, but found one of 3"),
    ({"inputs": [_x(data=[[1, 2], 3])]}, "takes a list of 1 on axis 0 of data, but found one of 2"),
    ({"inputs": [_x(data=[1, "2"])]}, "input 'x': FP32 takes numbers, but element 1 is \"2\""),
    ({"inputs": [_x(data=[1, True])]}, "input 'x': FP32 takes numbers, but element 1 is true"),
    ({"inputs": [_x(data=[1, 1e300])]}, "input 'x': 1e+300 is outside the range of FP32"),
    ({"inputs": [_x(datatype="FP64")]}, "input 'x' has the datatype FP64; the model expects FP32"),
    ({"inputs": [_x(shape=[2])]}, "input 'x' has the shape [2]; the model expects [-1, 2]"),
    ({"inputs": [_x(name="y")]}, "the model has no input 'y'; its inputs are x (FP32, shape [-1, 2])"),
    ({"inputs": [_x()], "outputs": [{"name": "z"}]}, "the model has no output 'z'; its outputs are label, scores"),
    ({"inputs": [_x(parameters={"content_type": "hg_json"})]}, 'the content_type "hg_json" is not supported; use one'),
    ({"inputs": [_x(parameters={"shared_memory_region": "r"})]}, "the parameter shared_memory_region is not supported"),
    ({"inputs": [_x()], "parameters": {"binary_data_output": 1}}, "binary_data_output must be true or false, not 1"),
    ({"inputs": [_sized(-8)]}, "binary_data_size must be a number of bytes, not -8"),
    ({"inputs": [_sized(2**64 + 1)]}, "but the body has only 8 bytes left"),
    ({"inputs": [_sized(4_000_000_000)]}, "binary_data_size is 4000000000, but the body has only 8 bytes left"),
    ({"inputs": [_sized(4)]}, "shape [1, 2] of FP32 takes 8 bytes, but 4 were sent"),
    ({"inputs": [_sized(8, shape=[2**20, 2])]}, "shape [1048576, 2] of FP32 takes 8388608 bytes, but 8 were sent"),
    ({"inputs": [_x()]}, "the body has 8 bytes more than the tensors that its JSON describes"),
]


@pytest.mark.parametrize(("request_", "message"), MISTAKES)
def test_a_wrong_request_is_refused_with_the_tensor_and_what_was_expected(request_: Any, message: str) -> None:
    text = _dump(request_)
    with pytest.raises(V2Error) as caught:
        decode_request(text + b"\0" * 8, len(text), IRIS)
    assert message in str(caught.value)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "takes at least 8 bytes, but 0 were sent"),
        (struct.pack("<II", 4, 4), "the data ends before element 1"),
        (struct.pack("<II", 0, 2**32 - 1), "element 1 has 4294967295 bytes, but only 0 are left"),
        (struct.pack("<II", 2**32 - 1, 0), "element 0 has 4294967295 bytes, but only 4 are left"),
        (struct.pack("<II", 0, 0) + b"x", "1 bytes follow the last element"),
        (struct.pack("<I", 3) + b"abcd", "the data ends before element 1"),
    ],
)
def test_bytes_with_wrong_lengths_are_refused(data: bytes, message: str) -> None:
    text = orjson.dumps({"inputs": [_sized(len(data), datatype="BYTES")]})
    with pytest.raises(V2Error, match=message):
        decode_request(text + data, len(text), ANY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the body is empty"),
        (b'{"inputs": [NaN]}', "JSON has no NaN or Infinity, so send the tensor in binary form"),
        (b"[1e999]", "number is infinity"),
        (b"[" * 5000 + b"]" * 5000, "depth limit exceeded"),
        (b'{"inputs": []}\x01\x02', "with binary tensors behind the JSON, send its size"),
    ],
)
def test_malformed_json_is_refused_with_its_position(text: bytes, message: str) -> None:
    with pytest.raises(V2Error, match=message):
        decode_request(text, None, ANY)


def test_integers_outside_of_the_range_of_their_datatype_are_refused() -> None:
    for datatype, value in (("UINT8", 256), ("INT8", -129), ("UINT64", -1), ("INT64", 2**63)):
        with pytest.raises(V2Error, match=f"{value} is outside the range of {datatype}"):
            decode_request(orjson.dumps({"inputs": [_x(datatype=datatype, data=[0, value])]}), None, ANY)


def test_fp16_has_no_json_form() -> None:
    with pytest.raises(V2Error, match="FP16 has no JSON form"):
        decode_request(orjson.dumps({"inputs": [_x(datatype="FP16")]}), None, ANY)
    header, _ = decode_request(orjson.dumps({"inputs": [_x()]}), None, ANY)
    with pytest.raises(V2Error, match="output 'y' is FP16, which has no JSON form; request it with binary_data: true"):
        encode_response(header, {"y": np.zeros(1, np.float16)}, ANY, "any", None)


def test_bytes_that_are_no_text_need_the_binary_form() -> None:
    header, _ = decode_request(orjson.dumps({"inputs": [_x()]}), None, ANY)
    with pytest.raises(V2Error, match="output 'y' is not UTF-8; request it with binary_data: true"):
        encode_response(header, {"y": np.array([b"\xff"], np.object_)}, ANY, "any", None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(1, complex), "output 'y' has the dtype complex128"),
        (np.zeros(1, "M8[s]"), "output 'y' has the dtype datetime64"),
        ([[1], [1, 2]], "output 'y' is not an array"),
        ([None], "output 'y' has an element of the type NoneType"),
        ([{}], "output 'y' has an element of the type dict"),
        (["\ud800"], "an output has text that is not valid Unicode"),
    ],
)
def test_results_that_are_no_tensors_are_errors_of_the_users_code(value: Any, message: str) -> None:
    header, _ = decode_request(orjson.dumps({"inputs": [_x()]}), None, ANY)
    with pytest.raises(UserError, match=message):
        encode_response(header, {"y": value}, ANY, "any", None)


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**65), 2**65), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=6,
)
SIZES = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64]), JSON_VALUES)
HOSTILE_TENSORS = st.fixed_dictionaries(
    {"name": st.sampled_from(["x", "y", "width", "length", ""])},
    optional={
        "shape": st.one_of(st.lists(SIZES, max_size=4), JSON_VALUES),
        "datatype": st.one_of(st.sampled_from(list(DTYPES)), JSON_VALUES),
        "data": st.one_of(
            st.lists(st.one_of(st.integers(-1, 300), st.floats(), st.text(max_size=2)), max_size=6), JSON_VALUES
        ),
        "parameters": st.one_of(
            st.fixed_dictionaries(
                {}, optional={"binary_data_size": SIZES, "content_type": st.sampled_from(["str", "base64", "pd", 1])}
            ),
            JSON_VALUES,
        ),
    },
)
HOSTILE = st.one_of(
    JSON_VALUES,
    st.fixed_dictionaries(
        {"inputs": st.lists(HOSTILE_TENSORS, max_size=3)},
        optional={"id": JSON_VALUES, "outputs": JSON_VALUES, "parameters": JSON_VALUES},
    ),
)


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()  # unlike orjson, also NaN and integers beyond 64 bits


@settings(max_examples=4 * settings().max_examples)
@given(HOSTILE, st.binary(max_size=40), st.sampled_from([ANY, IRIS]), st.sampled_from([None, 0, 1, "exact"]))
def test_any_request_is_decoded_or_refused(value: Any, rest: bytes, signature: ModelSignature, length: Any) -> None:
    text = _dump(value)
    try:
        header, decoded = decode_request(text + rest, len(text) if length == "exact" else length, signature)
    except V2Error as error:
        assert error.status == 400
        assert len(str(error)) < 1000
        return
    assert all(array.nbytes <= 16 * (len(text) + len(rest)) for array in decoded.values())
    assert len(decoded) >= 1
    assert header.inputs


def test_claims_of_gigabytes_allocate_nothing() -> None:
    claims = [
        _sized(4 * 2**30, shape=[2**30]),
        _x(shape=[2**30]),
        _x(shape=[2**31], datatype="BYTES"),
        _sized(8, shape=[2**61], datatype="BYTES"),
    ]
    tracemalloc.start()
    try:
        for claim in claims:
            text = orjson.dumps({"inputs": [claim]})
            with pytest.raises(V2Error):
                decode_request(text + b"\0" * 8, len(text), ANY)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_tritonclient_reads_a_json_answer_to_a_binary_question() -> None:
    header, _ = decode_request(orjson.dumps({"inputs": [_x()]}), None, ANY)
    answer, length = encode_response(header, {"y": np.array(["a", b"b"], np.object_)}, ANY, "any", None)
    result: InferResult = InferenceServerClient.parse_response_body(answer, header_length=length)
    assert result.as_numpy("y").tolist() == ["a", "b"]
