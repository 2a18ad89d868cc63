"""Annotations of payloads: what is read, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import subprocess
import sys
import typing
import uuid
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import pandas as pd
import pydantic
import pydantic.v1.dataclasses
import pytest
import typing_extensions
from numpy.typing import NDArray
from PIL import Image
from starlette.datastructures import FormData, UploadFile

from cortex.payloads.annotated_arrays import Shape
from cortex.payloads.annotated_files import SMALLEST_GIF
from cortex.payloads.annotations import (
    LARGE_BYTES,
    AnnotationProblem,
    payload_type,
    resolve,
    result_signature,
    takes_list,
)
from cortex.payloads.openapi.schemas import example_of
from cortex.payloads.validation import MAX_PROBLEMS, PayloadError

pytestmark = pytest.mark.processes


class Iris(pydantic.BaseModel):
    sepal_length: float = pydantic.Field(gt=0)
    species: Literal["setosa", "virginica"] = "setosa"


class Tagged(pydantic.BaseModel):
    name: str
    tags: list[int] = []


class Direction(enum.StrEnum):
    UP = "up"
    DOWN = "down"


class Strict(pydantic.BaseModel, strict=True):
    day: datetime.date
    kind: int | bool


@dataclasses.dataclass
class Point:
    x: float
    tags: list[str] = dataclasses.field(default_factory=list)


class Options(typing.TypedDict):
    top: int
    labels: typing.NotRequired[list[str]]


class Node(pydantic.BaseModel):
    children: list[Node] = []


class Color(enum.Enum):
    RED = "red"


class Sample(pydantic.BaseModel):
    pixels: Annotated[np.ndarray, Shape(-1, 2, dtype="float32")]


RECORDS = {"type": "array", "items": {"type": "object"}}
FRAME = {
    "anyOf": [RECORDS, {"type": "object", "additionalProperties": {"type": "array", "items": {}}}],
}


def read(annotation: Any, body: str | bytes) -> Any:
    text = body.encode() if isinstance(body, str) else body
    kind = payload_type(annotation)
    assert kind is not None
    return kind.from_json(orjson.loads(text), text)


@pytest.mark.parametrize(
    ("annotation", "body", "expected"),
    [
        (Iris, '{"sepal_length": "5.5"}', Iris(sepal_length=5.5)),
        (Iris | None, "null", None),
        (Point, '{"x": 1, "tags": ["a"]}', Point(1.0, ["a"])),
        (Options, '{"top": 3}', {"top": 3}),
        (Options, '{"top": 3, "labels": ["a"]}', {"top": 3, "labels": ["a"]}),
        (list[Iris], '[{"sepal_length": 1}]', [Iris(sepal_length=1)]),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (int | str, '"a"', "a"),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (Color, '"red"', Color.RED),
        (datetime.date, '"2026-01-31"', datetime.date(2026, 1, 31)),
        (Strict, '{"day": "2026-01-31", "kind": 12345678901234567890123}', None),
        (float, "1", 1.0),
        (dict, '{"a": [1]}', {"a": [1]}),
        (dict[str, Any], '{"a": [1]}', {"a": [1]}),
        (list, '[1, "a"]', [1, "a"]),
        (str, '"text"', "text"),
        (Node, '{"children": [{"children": []}]}', Node(children=[Node()])),
        (Annotated[int, pydantic.Field(ge=1)], "3", 3),
        (Annotated[dict, "the flower"], '{"a": 1}', {"a": 1}),
        (typing.Iterable[int], '["1"]', [1]),
        (dict | bytes, '{"a": 1}', {"a": 1}),
    ],
)
def test_json_is_read_as_the_annotated_type(annotation: Any, body: str, expected: Any) -> None:
    value = read(annotation, body)
    if annotation is Strict:
        assert (value.day, value.kind) == (datetime.date(2026, 1, 31), 12345678901234567890123)
    else:
        assert value == expected
        assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "body", "message", "problem"),
    [
        (Iris, "{}", "payload.sepal_length: Field required", {"type": "missing", "loc": ["body", "sepal_length"]}),
        (
            Iris,
            '{"sepal_length": "long"}',
            "payload.sepal_length: Input should be a valid number, unable to parse string as a number",
            {"type": "float_parsing", "loc": ["body", "sepal_length"]},
        ),
        (
            Iris,
            '{"sepal_length": 0, "species": "rose"}',
            "payload.sepal_length: Input should be greater than 0 (and 1 more problem)",
            {"type": "greater_than", "loc": ["body", "sepal_length"], "ctx": {"gt": 0.0}},
        ),
        (
            list[Iris],
            '[{"sepal_length": 1}, {}]',
            "payload[1].sepal_length: Field required",
            {"type": "missing", "loc": ["body", 1, "sepal_length"]},
        ),
        (
            dict[str, int | bool],
            '{"a": "x"}',
            "payload.a: Input should be a valid integer, unable to parse string as an integer (and 1 more problem)",
            {"type": "int_parsing", "loc": ["body", "a", "int"]},
        ),
        (Options, '{"labels": []}', "payload.top: Field required", {"type": "missing", "loc": ["body", "top"]}),
        (dict, "[1]", "payload: Input should be a valid dictionary", {"type": "dict_type", "loc": ["body"]}),
        (list, "{}", "payload: Input should be a valid list", {"type": "list_type", "loc": ["body"]}),
        (str, "1", "payload: Input should be a valid string", {"type": "string_type", "loc": ["body"]}),
    ],
)
def test_wrong_json_is_refused_with_its_place(annotation: Any, body: str, message: str, problem: Any) -> None:
    with pytest.raises(PayloadError) as caught:
        read(annotation, body)
    assert str(caught.value) == message
    first = caught.value.detail[0]
    assert {key: first[key] for key in first if key != "msg"} == problem
    assert all("input" not in found and "url" not in found for found in caught.value.detail)


def test_what_was_sent_is_not_repeated() -> None:
    secret = "hunter2" * 10
    for annotation in (Iris, dict[str, int], list[int], Annotated[np.ndarray, Shape(-1, dtype="float32")]):
        with pytest.raises(PayloadError) as caught:
            read(annotation, orjson.dumps({"sepal_length": secret} if annotation is not list[int] else [secret]))
        assert "hunter" not in str(caught.value) + str(caught.value.detail)


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "annotation",
    [
        Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
        Cat | Dog,
        uuid.UUID,
        datetime.datetime,
        datetime.date,
        datetime.time,
        datetime.timedelta,
        decimal.Decimal,
        Color,
        bool,
        float,
        int | bool,
        pydantic.AnyUrl,
        pydantic.Json,
        pydantic.Base64Bytes,
        pydantic.ByteSize,
        pydantic.SecretStr,
        ipaddress.IPv4Address,
        Annotated[str, pydantic.Field(pattern="^x$")],
        Annotated[str, pydantic.Field(max_length=2)],
        Literal["a"],
    ],
    ids=str,
)
def test_the_value_that_was_sent_is_not_repeated(annotation: Any) -> None:
    for body in (b'"qqzzqq"', b'{"kind": "qqzzqq"}', b'["qqzzqq"]', b'{"kind": "qqzzqq", "other": "qqzzqq"}'):
        try:
            read(annotation, body)
        except PayloadError as error:
            assert "q" not in (str(error) + str(error.detail)).replace("required", "").replace("sequence", "")


def test_an_exception_of_a_validator_becomes_text() -> None:
    def refuse(value: Any) -> Any:
        raise ValueError("no such species")

    with pytest.raises(PayloadError, match=r"^payload: Value error, no such species$") as caught:
        read(Annotated[str, pydantic.AfterValidator(refuse)], '"rose"')
    assert caught.value.detail == [
        {
            "type": "value_error",
            "loc": ["body"],
            "msg": "Value error, no such species",
            "ctx": {"error": "no such species"},
        }
    ]


def test_the_list_of_problems_and_its_texts_are_bounded() -> None:
    with pytest.raises(PayloadError, match="more problems") as caught:
        read(dict[str, int], orjson.dumps({f"{'k' * 5000}{number}": None for number in range(300)}))
    assert len(caught.value.detail) == MAX_PROBLEMS
    assert len(str(caught.value)) < 400
    assert len(orjson.dumps(caught.value.detail)) < 40_000


@pytest.mark.parametrize("annotation", [list[float], list[Node], dict[str, list[float]]])
def test_a_large_list_is_read_up_to_its_first_mistake(annotation: Any) -> None:
    body = b"[" + b'"x",' * LARGE_BYTES + b"0]"
    if annotation == dict[str, list[float]]:
        body = b'{"a":' + body + b"}"
    with pytest.raises(PayloadError, match=r"payload.*\[0\]: Input") as caught:
        read(annotation, body)
    assert len(caught.value.detail) == 1


def test_defaults_of_a_large_body_are_unchanged() -> None:
    model = pydantic.create_model("Large", text=(str, ""), options=(dict, {"type": "list"}))
    value = read(model, orjson.dumps({"text": "x" * LARGE_BYTES}))
    assert value.options == {"type": "list"}


def test_deep_nesting_is_refused() -> None:
    depth = 500
    with pytest.raises(PayloadError, match="recursion limit"):
        read(Node, '{"children":[' * depth + "]}" * depth)


@pytest.mark.parametrize("annotation", [Any, object, typing.TypeVar("T"), FormData | Any])
def test_an_annotation_that_allows_anything_validates_nothing(annotation: Any) -> None:
    assert payload_type(annotation) is None


class Unknown:
    pass


class Old(pydantic.v1.BaseModel):
    x: int


@pydantic.v1.dataclasses.dataclass
class OldData:
    x: int


class OldType:
    @classmethod
    def __get_validators__(cls) -> Iterator[Any]:
        yield cls.validate

    @classmethod
    def validate(cls, value: Any) -> Any:
        return value


class NewType(OldType):
    @classmethod
    def validate(cls, value: Any, info: Any = None) -> Any:
        return value


@dataclasses.dataclass
class HoldsOldData:
    part: OldData


class HoldsOldType(typing_extensions.TypedDict):
    part: OldType


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    class HoldsOld(pydantic.BaseModel):
        part: Old | None


@pytest.mark.parametrize(
    "annotation",
    [Old, list[Old], OldData, list[OldData], dict[str, OldType] | None, HoldsOldData, HoldsOldType, HoldsOld],
)
def test_types_for_pydantic_v1_are_refused_at_any_depth(annotation: Any) -> None:
    with pytest.raises(AnnotationProblem, match=r"TypeError: Old\w* is a type for pydantic V1"):
        payload_type(annotation)


def test_validators_that_pydantic_can_call_are_accepted() -> None:
    assert read(NewType, "3") == 3


@pytest.mark.parametrize(
    "annotation",
    [Unknown, 3, {"x": int}, Annotated[np.ndarray, "no dtype"], list["Missing"]],  # noqa: F821
)
def test_an_annotation_that_nothing_can_read_has_a_reason(annotation: Any) -> None:
    with pytest.raises(AnnotationProblem, match=r"\w+: ."):
        payload_type(annotation)


def test_annotations_are_resolved_where_the_method_is_defined() -> None:
    class Handler:
        def good(self, payload: Iris) -> list[Iris]: ...

        def text(self, payload: Iris | None): ...

        def missing(self, payload: Irise): ...  # type: ignore[name-defined]  # noqa: F821

        def none(self, payload): ...

    handler = Handler()
    assert resolve(handler.good, "payload") is Iris
    assert resolve(handler.good, "return") == list[Iris]
    assert resolve(handler.text, "payload") == Iris | None
    assert resolve(handler.none, "payload") is resolve(handler.none, "return")
    with pytest.raises(AnnotationProblem, match="NameError: name 'Irise' is not defined"):
        resolve(handler.missing, "payload")


@pytest.mark.parametrize(
    ("annotation", "body", "dtype", "shape"),
    [
        (np.ndarray, "[[1, 2], [3, 4]]", "int64", (2, 2)),
        (np.ndarray, "[1, 2.5]", "float64", (2,)),
        (NDArray[Any], "[1]", "int64", (1,)),
        (NDArray[np.floating], "[1]", "float64", (1,)),
        (np.ndarray, '["a", "b"]', "object", (2,)),
        (NDArray[np.float32], "[[1], [2]]", "float32", (2, 1)),
        (Annotated[np.ndarray, Shape(-1, 2, dtype="float32")], "[[1, null]]", "float32", (1, 2)),
        (Annotated[NDArray[np.int8], Shape(2)], "[1, -128]", "int8", (2,)),
        (Annotated[np.ndarray, Shape(2), "uint8"], "[1, 2.0]", "uint8", (2,)),
        (Annotated[np.ndarray, Shape(2), np.bool_], "[true, false]", "bool", (2,)),
        (Annotated[np.ndarray, Shape(dtype="int32")], "7", "int32", ()),
        (Annotated[np.ndarray, Shape(0, 4, dtype="float64")] | None, "null", None, None),
    ],
)
def test_arrays_are_read_from_lists(annotation: Any, body: str, dtype: str | None, shape: Any) -> None:
    array = read(annotation, body)
    if dtype is None:
        assert array is None
    else:
        assert (array.dtype.name, array.shape) == (dtype, shape)


class Flower(pydantic.BaseModel):
    sepal: float


@dataclasses.dataclass
class FlowerDataclass:
    sepal: float


class FlowerTypedDict(typing.TypedDict):
    sepal: float


Images = list[Annotated[np.ndarray, Shape(-1, 2, dtype="float32")]]


class Flowers(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    items: list[Flower]
    pixels: Images = []


@dataclasses.dataclass
class FlowersOfDataclass:
    items: list[FlowerDataclass]
    pixels: Images = dataclasses.field(default_factory=list)


class FlowersOfTypedDict(typing.TypedDict):
    items: list[FlowerTypedDict]
    pixels: typing.NotRequired[Images]


@pytest.mark.parametrize(
    ("annotation", "body", "message"),
    [
        (
            Annotated[np.ndarray, Shape(-1, 4)],
            "[[1, 2]]",
            "payload: Input should have the shape [-1, 4], but has [1, 2]",
        ),
        (NDArray[np.float32], '[[1], ["a"]]', "payload[1][0]: Input should be a number"),
        (NDArray[np.float32], "[1e39]", "payload[0]: Input should be in the range of float32"),
        (NDArray[np.int8], "[1, 300]", "payload[1]: Input should be in the range of int8"),
        (NDArray[np.int64], "[1.5]", "payload[0]: Input should be a whole number"),
        (np.ndarray, '[1, "a"]', "payload[1]: Input should be a number, like the first value"),
        (np.ndarray, '["a", "b", null]', "payload[2]: Input should be a string, like the first value"),
        (np.ndarray, "{}", "payload: Input should be numbers only, or strings only"),
        (np.ndarray, "[[1, 2], [null, 3]]", "payload[1][0]: Input should be numbers only, or strings only"),
        (
            NDArray[np.float64],
            "[[1], [2, 3]]",
            "payload[1]: Input should be like [0], which has 1 values, but has 2 values",
        ),
        (list[NDArray[np.float32]], '[[1], ["a"]]', "payload[1][0]: Input should be a number"),
        (Sample, '{"pixels": [1, 2]}', "payload.pixels: Input should have the shape [-1, 2], but has [2]"),
    ],
)
def test_other_values_are_no_arrays(annotation: Any, body: str, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        read(annotation, body)
    assert str(caught.value).startswith(message)


def test_problems_of_parts_have_the_same_keys_as_those_of_whole_payloads() -> None:
    with pytest.raises(PayloadError) as caught:
        read(Sample, '{"pixels": [[1, "{x}"]]}')
    message = "Input should be a number"
    assert str(caught.value) == f"payload.pixels[0][1]: {message}"
    assert caught.value.detail == [{"type": "array_type", "loc": ["body", "pixels", 0, 1], "msg": message}]


@pytest.mark.parametrize("annotation", [Flowers, FlowersOfDataclass, FlowersOfTypedDict])
def test_the_place_within_lists_is_named(annotation: Any) -> None:
    with pytest.raises(PayloadError) as caught:
        read(annotation, '{"items": [{"sepal": 1}, {"sepal": "x"}]}')
    assert [problem["loc"] for problem in caught.value.detail] == [["body", "items", 1, "sepal"]]
    with pytest.raises(PayloadError) as caught:
        read(annotation, '{"items": [{"sepal": 1}], "pixels": [[[1, 2]], [[1, 2], [3, "x"]]]}')
    assert [problem["loc"] for problem in caught.value.detail] == [["body", "pixels", 1, 1, 1]]


def test_a_place_is_named_whatever_the_number_of_mistakes() -> None:
    with pytest.raises(PayloadError) as caught:
        read(list[int], f"[1{',[]' * 20_001}]")
    assert str(caught.value) == "payload[1]: Input should be a valid integer (and 20000 more problems)"
    assert [problem["loc"] for problem in caught.value.detail] == [["body", 1]]


def test_arrays_can_be_parts_of_other_types() -> None:
    (array,) = read(list[NDArray[np.float32]], "[[1, 2]]")
    assert array.dtype == np.float32
    assert read(Sample, '{"pixels": [[1, 2]]}').pixels.shape == (1, 2)
    assert read(dict[str, np.ndarray], '{"x": [1]}')["x"].tolist() == [1]


@pytest.mark.parametrize(
    ("annotation", "media_type", "body", "expected"),
    [
        (dict | bytes, "", b'{"a": 1}', {"a": 1}),
        (dict | bytes, "image/png", b"\x89PNG", b"\x89PNG"),
        (dict | bytes, "text/plain", b"[1]", b"[1]"),
        (str | bytes | None, "text/plain", b"some words", "some words"),
        (str | bytes | None, "", b"some words", b"some words"),
        (int | str, "text/plain", b"some words", "some words"),
        (int | str, "", b"7", 7),
    ],
)
def test_other_bodies_are_the_text_or_bytes_of_a_union(
    annotation: Any, media_type: str, body: bytes, expected: Any
) -> None:
    kind = payload_type(annotation)
    assert kind is not None
    assert kind.reads_bytes
    assert kind.from_bytes(body, media_type) == expected
    with pytest.raises(PayloadError):
        kind.from_json([1], b"[1]")


@pytest.mark.parametrize(
    ("annotation", "bodies"),
    [
        (dict, {"application/json": {"type": "object"}}),
        (list, {"application/json": {"type": "array", "items": {}}}),
        (str, {"text/plain": {"type": "string"}, "application/json": {"type": "string"}}),
        (np.ndarray, {"application/json": {"type": "array", "items": {}}}),
        (pd.DataFrame, {"application/json": FRAME, "text/csv": {"type": "string"}}),
        (
            Image.Image,
            {
                "application/json": {"type": "string", "contentEncoding": "base64", "examples": [SMALLEST_GIF]},
                "image/*": {"type": "string", "format": "binary"},
            },
        ),
        (
            dict | bytes,
            {
                "application/json": {"type": "object", "additionalProperties": True},
                "application/octet-stream": {"type": "string", "format": "binary"},
            },
        ),
        (
            int | str | bytes,
            {
                "application/json": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                "text/plain": {"type": "string"},
                "application/octet-stream": {"type": "string", "format": "binary"},
            },
        ),
    ],
)
def test_a_payload_is_described_in_all_media_types_that_it_is_read_from(
    annotation: Any, bodies: dict[str, Any]
) -> None:
    kind = payload_type(annotation)
    assert kind is not None
    found = kind.signature
    assert {each.media_type: each.schema for each in (found, *found.alternatives)} == bodies


def test_the_example_of_an_image_is_one() -> None:
    kind = payload_type(Image.Image)
    assert kind is not None
    assert read(Image.Image, orjson.dumps(example_of(kind.schema, {}))).size == (1, 1)


@pytest.mark.parametrize(
    ("annotation", "is_required"),
    [(int, True), (int | None, False), (str, False), (bytes, False), (dict | bytes, False)],
)
def test_a_payload_is_required_unless_an_empty_body_is_one(annotation: Any, is_required: bool) -> None:
    kind = payload_type(annotation)
    assert kind is not None
    assert kind.signature.is_required is is_required
    kind.set_default(7)
    assert not kind.signature.is_required


def test_schemas_describe_what_is_read() -> None:
    kind = payload_type(Node)
    assert kind is not None
    assert kind.schema["$ref"] == "#/$defs/Node"
    assert kind.schema["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    rows = payload_type(Annotated[np.ndarray, Shape(-1, 4, dtype="float32")])
    assert rows is not None
    assert rows.schema == {
        "type": "array",
        "items": {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4},
    }
    sample = payload_type(Sample)
    assert sample is not None
    assert sample.schema["properties"]["pixels"]["items"]["maxItems"] == 2
    assert sample.signature.is_typed


@pytest.mark.parametrize(
    ("annotation", "media_type", "schema"),
    [
        (Any, "application/json", {}),
        (None, "application/json", {}),
        (str, "text/plain", {"type": "string"}),
        (dict, "application/json", {"type": "object"}),
        (list[int], "application/json", {"items": {"type": "integer"}, "type": "array"}),
        (pd.DataFrame, "application/json", RECORDS),
        (
            dict[str, pd.DataFrame],
            "application/json",
            {"type": "object", "additionalProperties": RECORDS},
        ),
        (np.ndarray, "application/json", {"type": "array", "items": {}}),
        (Image.Image, "image/png", {"type": "string", "format": "binary"}),
        (tuple[dict, typing.Callable[[], None]], "application/json", {"type": "object"}),
        (typing.Iterator[str], "text/plain", {"type": "string"}),
        (typing.AsyncIterator[dict], "application/x-ndjson", {"type": "object"}),
        (Unknown, "application/json", {}),
        (Direction, "text/plain", {"enum": ["up", "down"], "title": "Direction", "type": "string"}),
        (Literal["a", "b"], "text/plain", {"enum": ["a", "b"], "type": "string"}),
        (Annotated[str, pydantic.Field(max_length=3)], "text/plain", {"maxLength": 3, "type": "string"}),
    ],
)
def test_results_have_a_schema_if_their_annotation_has_one(annotation: Any, media_type: str, schema: Any) -> None:
    found = result_signature(annotation)
    assert (found.media_type, found.schema) == (media_type, schema)


@pytest.mark.parametrize(
    ("annotation", "media_types"),
    [
        (str | None, ["text/plain", "application/json"]),
        (Iris | str, ["application/json", "text/plain"]),
        (Iris | None, ["application/json"]),
        (dict | bytes, ["application/json", "application/octet-stream"]),
        (Literal["a", 1, "b"], ["text/plain", "application/json"]),
        (typing.Iterator[Direction | int], ["text/plain", "application/x-ndjson"]),
    ],
)
def test_results_of_a_union_have_the_media_type_of_each_member(annotation: Any, media_types: list[str]) -> None:
    found = result_signature(annotation)
    assert [each.media_type for each in (found, *found.alternatives)] == media_types
    assert all(each.is_typed for each in (found, *found.alternatives))


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [(list[Iris], True), (list, True), (Any, True), (np.ndarray, True), (Iris, False), (dict, False), (str, False)],
)
def test_some_types_are_lists_of_items(annotation: Any, expected: bool) -> None:
    assert takes_list(annotation) is expected


def test_a_form_has_fields() -> None:
    kind = payload_type(Iris)
    assert kind is not None
    assert kind.from_form(FormData([("sepal_length", "5.5")])) == Iris(sepal_length=5.5)
    with pytest.raises(PayloadError, match=r"payload\.sepal_length: Input should be a valid number"):
        kind.from_form(FormData([("sepal_length", "1"), ("sepal_length", "2")]))
    tagged, counts = payload_type(Tagged), payload_type(dict[str, list[int]])
    assert tagged is not None
    assert counts is not None
    assert tagged.from_form(FormData([("name", "n"), ("tags", "7")])) == Tagged(name="n", tags=[7])
    assert counts.from_form(FormData([("a", "1"), ("b", "2"), ("b", "3")])) == {"a": [1], "b": [2, 3]}
    with pytest.raises(PayloadError, match=r"payload\.tags\[0\]: Input should be a valid integer"):
        tagged.from_form(FormData([("name", "n"), ("tags", "x")]))
    form = FormData([("a", "1")])
    plain, upload = payload_type(dict), payload_type(UploadFile)
    assert plain is not None
    assert upload is not None
    assert plain.from_form(form) == {"a": "1"}
    with pytest.raises(PayloadError, match="a form with one file, but has 0"):
        upload.from_form(form)


def test_nothing_is_imported_for_built_ins() -> None:
    code = (
        "import sys; from cortex.payloads.annotations import payload_type;"
        "assert all(map(payload_type, (dict, list, str, bytes, dict | None)));"
        "assert not {'numpy', 'pydantic', 'starlette', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
