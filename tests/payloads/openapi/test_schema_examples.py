"""Examples of JSON Schemas are accepted by the types that the schemas come from."""

from __future__ import annotations

from datetime import date, datetime
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from cortex.payloads.openapi.schemas import NoExampleError, example_of, example_with_keys


class Address(BaseModel):
    street: str
    number: int = Field(gt=9, lt=100)


class Person(BaseModel):
    name: str = Field(min_length=6, max_length=8)
    born: date
    address: Address
    kind: Literal["a"]
    tags: list[Address] = Field(min_length=2)
    nick: str | None
    friends: list[Person] = []


@pytest.mark.parametrize(
    "annotation",
    [
        Person,
        list[Person],
        dict[str, Any],
        dict[str, int],
        int | str,
        bool,
        datetime,
        UUID,
        Annotated[str, Field(max_length=2)],
        Annotated[int, Field(ge=7)],
        Annotated[int, Field(gt=7, multiple_of=5)],
        Annotated[str, Field(pattern="^t")],
        IPv4Address,
        IPv6Address,
        Annotated[int, Field(le=-3)],
        Annotated[float, Field(gt=0, lt=1)],
        Annotated[float, Field(gt=1)],
        Annotated[float, Field(le=-2.5)],
        Annotated[float, Field(ge=0, le=1)],
        tuple[int, str],
        list[Annotated[int, Field(gt=7)] | None],
        Annotated[list[int], Field(max_length=0)],
        Annotated[list[list[float]], Field(min_length=3)],
    ],
    ids=str,
)
def test_an_example_is_of_the_type(annotation: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    schema = adapter.json_schema()
    adapter.validate_python(example_of(schema, schema.get("$defs", {})))


class Plate(BaseModel):
    number: str = Field(pattern="^[A-Z]{2}-[0-9]+$")


@pytest.mark.parametrize("annotation", [Plate, list[Plate], Plate | None])
def test_a_type_whose_pattern_no_example_matches_has_no_exact_one(annotation: Any) -> None:
    schema = TypeAdapter(annotation).json_schema()
    with pytest.raises(NoExampleError):
        example_with_keys(schema, schema.get("$defs", {}), ())
    assert "text" in str(example_of(schema, schema.get("$defs", {})))  # where it can be corrected


@pytest.mark.parametrize(
    ("schema", "example"),
    [
        ({"type": ["null", "integer"]}, 1),
        ({"type": "null"}, None),
        ({"enum": ["a", "b"]}, "a"),
        ({"examples": [7], "default": 1}, 1),
        ({"type": "array"}, []),
        ({"type": "array", "items": {"type": "number"}}, [1.0]),
        ({"type": "array", "items": {"type": "number"}, "minItems": 10**9}, []),
        ({"oneOf": [{"type": "null"}, {"$ref": "#/components/schemas/Row"}]}, {"x": 2}),
        ({"allOf": [{"type": "object", "properties": {"y": True}, "required": ["y", "z"]}]}, {"y": None, "z": None}),
    ],
)
def test_an_example_follows_the_keywords(schema: Any, example: Any) -> None:
    assert example_of(schema, {"Row": {"properties": {"x": {"type": "integer", "minimum": 2}}}}) == example


@pytest.mark.parametrize(
    ("annotation", "example"),
    [(dict[str, str], {"a": "text", "b": "text"}), (dict, {"a": 1, "b": 1}), (int, 1), (Any, None)],
    ids=str,
)
def test_an_example_of_a_map_has_the_keys_that_are_read(annotation: Any, example: Any) -> None:
    schema = TypeAdapter(annotation).json_schema()
    assert example_with_keys(schema, {}, ["a", "b"]) == example


@pytest.mark.parametrize(
    "schema", [{}, True, None, {"$ref": "#/components/schemas/Missing"}, {"$ref": "https://example.org/schema"}]
)
def test_a_schema_of_any_value_has_no_example(schema: Any) -> None:
    assert example_of(schema, {}) is None


def test_a_schema_that_contains_itself_has_an_example() -> None:
    definitions = {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
    }
    assert "next" in example_of({"$ref": "#/$defs/node"}, definitions)
    assert example_of({"$ref": "#/$defs/loop"}, definitions) is None
