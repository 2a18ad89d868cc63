"""OpenAPI documents of all kinds of APIs: valid, and honest about what is known."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel, Field, TypeAdapter

from cortex.lifecycle import ApiKind
from cortex.payloads.openapi.api import DocumentedApi, Sample
from cortex.payloads.openapi.document import api_document, common_document
from cortex.payloads.signature import (
    ApiSignature,
    BodySignature,
    MethodSignature,
    ModelSignature,
    ParameterSignature,
    RouteSignature,
    TensorSignature,
)

T = TypeVar("T")


class Iris(BaseModel):
    sepal: float = Field(gt=0)
    labels: list[str] = []


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    friend: Cat | None = None


class Box(BaseModel, Generic[T]):
    content: T


class Größe(BaseModel):
    breite_in_mm: dict[str, tuple[int, float]] = Field(examples=[{"$ref": "#/$defs/Nothing"}])


def typed(annotation: Any) -> BodySignature:
    return BodySignature(TypeAdapter(annotation).json_schema(), is_typed=True)


def method(verb: str = "POST", payload: Any = None, result: Any = None, **fields: Any) -> MethodSignature:
    payload, result = (BodySignature() if each is None else typed(each) for each in (payload, result))
    return MethodSignature(verb, f"handle_{verb.lower()}", payload, result, **fields)


def api(
    *methods: MethodSignature, kind: ApiKind = ApiKind.REALTIME, name: str = "iris", **fields: Any
) -> DocumentedApi:
    fields.setdefault("signature", ApiSignature(methods) if methods else None)
    return DocumentedApi(name, kind, fields.pop("endpoint", f"/{name}"), "3", **fields)


def valid(document: dict[str, Any]) -> dict[str, Any]:
    errors = [
        f"{list(error.absolute_path)}: {error.message}" for error in OpenAPIV31SpecValidator(document).iter_errors()
    ]
    assert errors == []
    return document


def of(document: dict[str, Any], path: str, verb: str = "post") -> dict[str, Any]:
    found = document["paths"][path][verb]
    assert isinstance(found, dict)
    return found


HOSTILE = [
    typed(each)
    for each in (
        Node,
        list[Node] | None,
        Cat | Dog,
        Annotated[Cat | Dog, Field(discriminator="kind")],
        Box[Box[int]],
        dict[str, Box[str] | None],
        Größe,
        tuple[int, Literal["a"], None],
        bytes,
    )
]
SCHEMAS_OF_USERS = [
    BodySignature(schema, is_typed=True)
    for schema in (
        {"$ref": "https://example.com/other.json"},
        {"$ref": "#/$defs/Missing"},
        {"$ref": "#/components/schemas/ErrorResponse"},
        {"$defs": {"a/b~c%": {"type": "integer"}}, "items": {"$ref": "#/$defs/a~1b~0c%25"}},
        {"$defs": {"": {"type": "integer"}, "😀": True}, "anyOf": [{"$ref": "#/$defs/"}, {"$ref": "#/$defs/😀"}]},
        {"properties": {"$ref": {"type": "string"}, "$defs": {"type": "string"}, "default": {"$ref": "#/$defs/X"}}},
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
        {"$defs": {"ErrorResponse": {"type": "integer"}}, "$ref": "#/$defs/ErrorResponse"},
        {"discriminator": "kind", "oneOf": [{"type": "object"}]},
        {"$id": "https://example.com/", "$schema": "https://json-schema.org/draft-07/schema", "$anchor": "x"},
        {"default": {"$ref": "#/$defs/X"}, "const": {"$defs": 1}},
    )
]


# The validator takes a tenth of a second per operation, so each document has many schemas.


@pytest.mark.parametrize("kind", ApiKind)
@pytest.mark.parametrize("is_known", [True, False])
def test_documents_of_all_kinds_are_valid(kind: ApiKind, is_known: bool) -> None:
    post = method(payload=Node, result=Cat | Dog)
    signature = ApiSignature((post,)) if is_known else None
    targets = (api(signature=signature), api(method(payload=Iris), name="b")) if kind is ApiKind.SPLITTER else ()
    made = api(
        kind=kind,
        signature=signature,
        needs_key=is_known,
        sample=Sample("sample.json", {"a": None}),
        targets=targets,
    )
    document = valid(api_document(made))
    security = [operation.get("security") for path in document["paths"].values() for operation in path.values()]
    assert all(bool(each) == made.needs_key for each in security)
    assert ("securitySchemes" in document["components"]) == made.needs_key


@pytest.mark.parametrize("bodies", [HOSTILE, SCHEMAS_OF_USERS[:8], SCHEMAS_OF_USERS[8:]])
def test_a_document_is_valid_whatever_the_schemas_are(bodies: list[BodySignature]) -> None:
    verbs = ("POST", "PUT", "PATCH", "GET", "DELETE")
    pairs = list(zip(bodies, [*bodies[1:], bodies[0]], strict=True))[::2]
    methods = [MethodSignature(verb, verb.lower(), *pair) for verb, pair in zip(verbs, pairs, strict=False)]
    document = valid(api_document(api(*methods)))
    assert "example.com" not in str(document)


def test_the_common_document_of_all_apis_is_valid() -> None:
    bodies = zip(ApiKind, HOSTILE, strict=False)
    apis = [api(MethodSignature("POST", "x", body, body), kind=kind, name=f"a-{kind.lower()}") for kind, body in bodies]
    document = valid(common_document([*apis, api(name="other", needs_key=True)], "http://gateway:8888", "1"))
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    assert {tag["name"] for tag in document["tags"]} == {each.name for each in (*apis, api(name="other"))}
    valid(common_document([], "http://gateway:8888", "1"))


def test_an_annotated_method_is_described_by_its_models() -> None:
    post = method(payload=Iris, result=Iris, summary="Classify a flower", description="By its sepal.")
    sample = Sample("sample.json", {"sepal": 1.5})
    document = api_document(api(post, sample=sample, max_body_bytes=77, timeout_s=1.5))
    operation = of(document, "/iris")
    assert (operation["summary"], operation["description"]) == ("Classify a flower", "By its sepal.")
    body = operation["requestBody"]
    assert body["required"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Iris"}
    assert body["content"]["application/json"]["examples"]["sample"]["value"] == {"sepal": 1.5}
    assert document["components"]["schemas"]["Iris"] == TypeAdapter(Iris).json_schema()
    responses = operation["responses"]
    assert {*responses} == {"200", "400", "404", "408", "413", "422", "500", "502", "503", "504", "default"}
    assert "77 bytes" in responses["413"]["description"]
    assert "1.5 s" in responses["504"]["description"]
    assert all("X-Cortex-Request-ID" in each["headers"] for each in responses.values())
    assert document["servers"] == [{"url": ".."}]


def test_definitions_of_the_same_name_are_one_component_only_if_they_are_equal() -> None:
    def schema(item: str) -> BodySignature:
        defs = {"Item": {"properties": {"of": {"$ref": "#/$defs/Part"}}}, "Part": {"type": item}}
        return BodySignature({"$defs": defs, "items": {"$ref": "#/$defs/Item"}}, is_typed=True)

    methods = [
        MethodSignature(verb, verb, schema(item), BodySignature())
        for verb, item in (("POST", "string"), ("PUT", "integer"), ("PATCH", "string"))
    ]
    document = valid(api_document(api(*methods)))
    used = [
        of(document, "/iris", verb)["requestBody"]["content"]["application/json"]["schema"]["items"]["$ref"]
        for verb in ("post", "put", "patch")
    ]
    assert used[0] == used[2] == "#/components/schemas/Item"
    assert used[1] == "#/components/schemas/Item_2"
    schemas = document["components"]["schemas"]
    assert schemas["Item_2"]["properties"]["of"] == {"$ref": "#/components/schemas/Part_2"}
    assert (schemas["Part"], schemas["Part_2"]) == ({"type": "string"}, {"type": "integer"})


def test_data_that_looks_like_a_reference_is_left_alone() -> None:
    schema = {"$defs": {"X": {"type": "string"}}, "default": {"$ref": "#/$defs/X"}, "enum": [{"$ref": "#/$defs/X"}]}
    body = BodySignature(schema, is_typed=True)
    document = valid(api_document(api(MethodSignature("POST", "predict", body, BodySignature()))))
    found = of(document, "/iris")["requestBody"]["content"]["application/json"]["schema"]
    assert found == {key: value for key, value in schema.items() if key != "$defs"}


def test_a_method_without_annotations_accepts_and_returns_anything() -> None:
    operation = of(api_document(api(method(query_params=True), method("GET", streams=True))), "/iris")
    assert not operation["requestBody"]["required"]
    assert operation["requestBody"]["content"] == {"application/json": {"schema": {}}}
    assert "422" not in operation["responses"]
    assert set(operation["responses"]["200"]["content"]) == {
        "application/json", "text/plain", "application/octet-stream"
    }  # fmt: skip
    assert [each["name"] for each in operation["parameters"]] == ["query_params"]


def test_a_generator_is_described_as_a_stream() -> None:
    operation = of(api_document(api(method("GET", streams=True))), "/iris", "get")
    assert "application/x-ndjson" in operation["responses"]["200"]["content"]


def test_a_document_says_when_the_signature_is_not_known() -> None:
    assert "not known" in api_document(api())["info"]["description"]
    assert "not known" not in api_document(api(method()))["info"]["description"]
    splitter = api(kind=ApiKind.SPLITTER, targets=(api(method()), api(name="b")))
    assert "not known" in api_document(splitter)["info"]["description"]


def test_items_of_a_batch_api_are_described_in_its_submission() -> None:
    made = api(method(payload=Iris), kind=ApiKind.BATCH, sample=Sample("sample.json", [{"sepal": 1}]))
    document = api_document(made)
    content = of(document, "/iris")["requestBody"]["content"]
    submission = content["application/json"]
    schemas = document["components"]["schemas"]
    assert submission["schema"] == {"$ref": "#/components/schemas/IrisSubmission"}
    assert schemas["IrisSubmission"]["properties"]["item_list"] == {"$ref": "#/components/schemas/IrisItems"}
    assert schemas["IrisItems"]["properties"]["items"]["items"] == {"$ref": "#/components/schemas/Iris"}
    assert submission["examples"]["sample"]["value"]["item_list"]["items"] == [{"sepal": 1}]
    assert "application/x-ndjson" in content
    assert {*document["paths"]["/iris/{job_id}"]} == {"get", "delete"}


def test_the_result_of_an_async_api_is_that_of_its_workloads() -> None:
    document = api_document(api(method(payload=Iris, result=Cat), kind=ApiKind.ASYNC))
    get = of(document, "/iris/{id}", "get")
    assert get["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/IrisWorkload"
    }
    assert document["components"]["schemas"]["IrisWorkload"]["properties"]["result"] == {
        "$ref": "#/components/schemas/Cat"
    }
    assert of(document, "/iris")["responses"]["400"]["content"].keys() >= {"text/plain"}


def test_a_splitter_describes_the_methods_of_all_its_apis() -> None:
    targets = (
        api(method(payload=Cat), name="a", sample=Sample("sample.json", 1)),
        api(method(payload=Dog), method("GET"), name="b"),
        api(method(payload=Cat), name="c"),
    )
    document = valid(api_document(api(kind=ApiKind.SPLITTER, name="mix", targets=targets)))
    content = of(document, "/mix")["requestBody"]["content"]["application/json"]
    names = ("Cat", "Dog")
    assert content["schema"] == {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}
    assert content["examples"]["sample"]["value"] == 1
    assert "get" in document["paths"]["/mix"]


def test_an_own_endpoint_precedes_the_paths_of_other_apis() -> None:
    inside = dataclasses.replace(api(method(), name="z"), endpoint="/iris/info")
    document = valid(common_document([api(method()), inside], "http://g", "1"))
    assert of(document, "/iris/info")["tags"] == ["z"]


def test_models_are_described_by_the_routes_of_the_open_inference_protocol() -> None:
    tensors = (TensorSignature("x", "FP32", (-1, 4), labels=("a", "b")),)
    models = (ModelSignature("iris", "sklearn", tensors, ()), ModelSignature("a {b}/c", "python", (), ()))
    made = dataclasses.replace(api(method()), signature=ApiSignature((method(),), models))
    mix = api(kind=ApiKind.SPLITTER, name="mix", targets=(made,))
    for each in (made, mix):
        document = valid(api_document(each))
        operation = of(document, f"{each.endpoint}/v2/models/iris/infer")
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": "#/components/schemas/IrisRequest"}
        zeros = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [[0, 0, 0, 0]]}
        assert content["examples"]["zeros"]["value"] == {"inputs": [zeros]}
        request = document["components"]["schemas"]["IrisRequest"]
        assert request["properties"]["inputs"]["description"] == "- `x`: FP32 [-1, 4] (a, b)"
        assert of(document, f"{each.endpoint}/v2/models/a%20%7Bb%7D%2Fc", "get")


def test_routes_are_operations_at_paths_below_the_endpoint() -> None:
    number = ParameterSignature("number", {"type": "integer"})
    limit = ParameterSignature("limit", {"type": "integer", "default": 10}, "query")
    routes = (
        RouteSignature("/items/{number}", (number, limit), method("GET", query_params=True)),
        RouteSignature("/items/{number}", (number,), method("DELETE")),
        RouteSignature("/v1/chat", (), method(payload=Iris)),
    )
    document = valid(api_document(api(signature=ApiSignature((), (), routes))))
    get = of(document, "/iris/items/{number}", "get")
    assert [(each["name"], each["in"], each["required"]) for each in get["parameters"]] == [
        ("number", "path", True),
        ("limit", "query", False),
        ("query_params", "query", False),
    ]
    assert get["parameters"][0]["schema"] == {"type": "integer"}
    assert "delete" in document["paths"]["/iris/items/{number}"]
    assert "/iris" not in document["paths"]
    chat = of(document, "/iris/v1/chat")
    for status, named in (("422", "OpenAIErrorResponse"), ("503", "OpenAIErrorResponse")):
        content = chat["responses"][status]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{named}"}
