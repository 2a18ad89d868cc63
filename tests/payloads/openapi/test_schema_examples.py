"""Examples of JSON Schemas are accepted by the types that the schemas come from."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from cortex.payloads.openapi.schemas import example_of


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
        Annotated[int, Field(le=-3)],
        Annotated[float, Field(gt=0, lt=1)],
        Annotated[float, Field(gt=1)],
        Annotated[float, Field(le=-2.5)],
        Annotated[float, Field(ge=0, le=1)],
    ],
    ids=str,
)
def test_an_example_is_of_the_type(annotation: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    schema = adapter.json_schema()
    adapter.validate_python(example_of(schema, schema.get("$defs", {})))


def test_a_schema_of_any_value_has_no_example() -> None:
    assert example_of({}, {}) is None
