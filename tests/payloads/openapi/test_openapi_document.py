"""OpenAPI documents of all kinds of APIs: valid, and honest about what is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest
from openapi_python_client.config import Config, ConfigFile, MetaType
from openapi_python_client.parser.openapi import GeneratorData
from pydantic import BaseModel, Field, TypeAdapter

from cortex.lifecycle import ApiKind
from cortex.payloads.annotations import result_signature
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
from harness.documents.openapi_documents import openapi_problems

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


class Price(BaseModel):
    amount: Decimal


class Order(BaseModel):
    price: Price
    cat: Cat


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
    assert openapi_problems(document) == []
    return document


def generator_problems(document: dict[str, Any]) -> list[str]:
    """Return what a generator of clients warns of."""
    config = Config.from_sources(ConfigFile(), MetaType.NONE, Path("document.json"), "utf-8", False, None)
    found = GeneratorData.from_dict(document, config=config)
    assert isinstance(found, GeneratorData)
    problems = [
        *found.errors,
        *(each for part in found.endpoint_collections_by_tag.values() for each in part.parse_errors),
    ]
    return [str(each.detail) for each in problems]


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
    refusals = {"400", "404", "408", "413", "415", "422", "431"}
    assert {*responses} == {"200", *refusals, "500", "502", "503", "504", "default"}
    invalid = responses["422"]["content"]["application/json"]["schema"]["anyOf"]
    assert [each["$ref"].rpartition("/")[2] for each in invalid] == ["ValidationErrorResponse", "ErrorResponse"]
    assert "detail" in document["components"]["schemas"]["ErrorResponse"]["properties"]
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


def test_a_model_whose_results_differ_from_its_payloads_is_two_components_with_titles_of_their_own() -> None:
    result = BodySignature(TypeAdapter(list[Order]).json_schema(mode="serialization"), is_typed=True)
    document = valid(api_document(api(MethodSignature("POST", "predict", typed(Order), result))))
    operation = of(document, "/iris")
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Order-Input")
    items = operation["responses"]["200"]["content"]["application/json"]["schema"]["items"]
    assert items == {"$ref": "#/components/schemas/Order-Output"}
    schemas = document["components"]["schemas"]
    assert schemas["Order-Output"]["properties"]["price"] == {"$ref": "#/components/schemas/Price-Output"}
    assert {schemas[name]["title"] for name in schemas if "-" in name} == {
        "OrderInput", "OrderOutput", "PriceInput", "PriceOutput"
    }  # fmt: skip
    assert schemas["Cat"]["title"] == "Cat"  # it does not differ


def test_titles_are_unique_because_clients_name_their_classes_after_them() -> None:
    bodies = [
        BodySignature({"title": title, "properties": {name: {}}}, is_typed=True)
        for title, name in (("Iris", "a"), ("Iris", "b"), ("iris_2", "c"), ("ErrorResponse", "d"), ("Tensor", "e"))
    ]
    verbs = ("POST", "PUT", "PATCH", "GET", "DELETE")
    methods = [MethodSignature(verb, verb, body, BodySignature()) for verb, body in zip(verbs, bodies, strict=True)]
    schemas = valid(api_document(api(*methods)))["components"]["schemas"]
    titles = {name: schema["title"] for name, schema in schemas.items() if "title" in schema}
    assert titles == {
        "Iris": "Iris",
        "Iris_2": "Iris2",
        "iris_2": "iris_22",
        "ErrorResponse_2": "ErrorResponse2",
        "Tensor": "Tensor",  # the document has no model that uses that of cortex
    }


def test_a_generator_of_clients_reads_models_that_differ_between_payloads_and_results() -> None:
    result = BodySignature(TypeAdapter(Order).json_schema(mode="serialization"), is_typed=True)
    assert generator_problems(api_document(api(MethodSignature("POST", "predict", typed(Order), result)))) == []


@pytest.mark.parametrize(
    ("schema", "value", "is_shown"),
    [
        ({"type": "number"}, 1, True),
        ({"type": "number"}, None, False),  # NaN in JSON
        ({"type": "string"}, 4, False),
        ({"type": "integer"}, True, False),
        ({"type": "boolean"}, True, True),
        ({"type": ["string", "null"]}, None, True),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, True),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x", False),
        ({"type": "array", "items": {"type": "number"}}, [1.5, None], False),
        ({"type": "array"}, [1.5, None], True),
        ({"$ref": "#/$defs/Color", "$defs": {"Color": {"enum": ["red"]}}}, "red", True),
    ],
)
def test_a_default_is_shown_only_if_it_has_the_type_of_its_schema(schema: Any, value: Any, is_shown: bool) -> None:
    parameter = ParameterSignature("limit", {**schema, "default": value}, "query")
    document = api_document(api(signature=ApiSignature((), (), (RouteSignature("/a", (parameter,), method("GET")),))))
    (found,) = of(document, "/iris/a", "get")["parameters"]
    assert ("default" in found["schema"]) is is_shown


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


def test_a_body_is_described_by_each_of_its_media_types_and_is_required_unless_it_has_a_default() -> None:
    rows = {"type": "array", "items": {}}
    csv = BodySignature({"type": "string"}, "text/csv", is_typed=True)
    form = BodySignature(
        {"type": "object"},
        "multipart/form-data",
        alternatives=(BodySignature({"type": "object"}, "application/x-www-form-urlencoded"),),
    )
    bodies = {
        "POST": BodySignature(rows, is_typed=True, alternatives=(csv,)),
        "PUT": BodySignature(rows, is_typed=True, is_required=False),
        "PATCH": form,
    }
    methods = [MethodSignature(verb, verb, body, BodySignature()) for verb, body in bodies.items()]
    document = valid(api_document(api(*methods)))
    found = {verb: of(document, "/iris", verb.lower()) for verb in bodies}
    assert found["POST"]["requestBody"] == {
        "content": {"application/json": {"schema": rows}, "text/csv": {"schema": {"type": "string"}}},
        "required": True,
    }
    assert found["PUT"]["requestBody"] == {"content": {"application/json": {"schema": rows}}, "required": False}
    assert {*found["PATCH"]["requestBody"]["content"]} == {"multipart/form-data", "application/x-www-form-urlencoded"}
    assert "422" not in found["PATCH"]["responses"]
    workload = api_document(api(methods[0], kind=ApiKind.ASYNC))
    assert {*of(workload, "/iris")["requestBody"]["content"]} == {"application/json", "text/csv"}


def test_a_generator_is_described_as_a_stream() -> None:
    for result in (BodySignature(), result_signature(Iterator[Any])):
        stream = MethodSignature("GET", "handle_get", None, result, streams=True)
        operation = of(api_document(api(stream)), "/iris", "get")
        assert {*operation["responses"]["200"]["content"]} == {
            "application/x-ndjson", "text/plain", "application/octet-stream"
        }  # fmt: skip


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


def test_the_example_of_a_submission_has_one_source_of_items_and_an_item_of_the_type() -> None:
    document = api_document(api(method(payload=Iris), kind=ApiKind.BATCH))
    (example,) = of(document, "/iris")["requestBody"]["content"]["application/json"]["examples"].values()
    assert example["value"] == {"workers": 1, "item_list": {"items": [{"sepal": 1.0}], "batch_size": 1}}
    files = document["components"]["schemas"]["FileItems"]["properties"]
    assert files["s3_paths"]["deprecated"] and files["paths"]["minItems"] == 1


def test_a_dry_run_of_a_job_is_an_operation_of_its_own_because_it_is_answered_with_text() -> None:
    document = valid(api_document(api(kind=ApiKind.TASK)))
    submit, dry_run = of(document, "/iris"), of(document, "/iris/")
    assert submit["requestBody"] == dry_run["requestBody"]
    assert [*submit["responses"]["200"]["content"]] == [*submit["responses"]["400"]["content"]] == ["application/json"]
    assert [*dry_run["responses"]["200"]["content"]] == ["text/plain"]
    assert [*dry_run["responses"]["400"]["content"]] == ["text/plain", "application/json"]
    (parameter,) = dry_run["parameters"]
    assert (parameter["name"], parameter["required"], parameter["schema"]["const"]) == ("dryRun", True, True)
    assert submit["parameters"] == []
    assert generator_problems(document) == []
    at_root = api_document(api(kind=ApiKind.TASK, endpoint="/"))
    assert of(at_root, "/")["operationId"] == "iris_submit_job"


def test_the_result_of_an_async_api_is_that_of_its_workloads() -> None:
    document = api_document(api(method(payload=Iris, result=Cat), kind=ApiKind.ASYNC))
    get = of(document, "/iris/{id}", "get")
    assert get["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/IrisWorkload"
    }
    assert document["components"]["schemas"]["IrisWorkload"]["properties"]["result"] == {
        "$ref": "#/components/schemas/Cat"
    }
    send = of(document, "/iris")["responses"]
    assert "200" not in send and send["202"]["headers"].keys() >= {"Location", "Retry-After"}
    assert "422" not in send  # a payload that the class refuses fails its workload
    older = of(api_document(api(method(), kind=ApiKind.ASYNC, is_of_older_file=True)), "/iris")["responses"]
    assert older["400"]["content"].keys() >= {"text/plain"} and "200" in older
    assert send["415"]["content"].keys() == {"application/json"} and "Accept-Encoding" in send["415"]["headers"]
    assert "415" not in get["responses"] and "431" in get["responses"]


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


def test_the_only_model_of_each_api_has_the_name_of_their_splitter() -> None:
    def target(name: str, *models: str, datatype: str = "FP32") -> DocumentedApi:
        tensors = (TensorSignature("x", datatype, (-1,)),)
        found = tuple(ModelSignature(each, "python", tensors, ()) for each in models)
        return api(name=name, signature=ApiSignature((method(),), found))

    def split(*targets: DocumentedApi) -> tuple[list[str], dict[str, Any]]:
        document = valid(api_document(api(kind=ApiKind.SPLITTER, name="mix", targets=targets)))
        paths = [path for path in document["paths"] if path.startswith("/mix/v2") and "infer" not in path]
        return paths, document["components"]["schemas"]

    paths, schemas = split(target("a", "a"), target("b", "b"))
    assert paths == ["/mix/v2/models/mix"]
    assert schemas["MixRequest"]["properties"]["inputs"]["description"] == "- `x`: FP32 [-1]"
    paths, schemas = split(target("a", "a"), target("b", "b", datatype="INT8"))
    assert paths == ["/mix/v2/models/mix"]
    assert "description" not in schemas["MixRequest"]["properties"]["inputs"]
    assert split(target("a", "m", "n"), target("b", "n", "o"))[0] == ["/mix/v2/models/n"]
    assert split(target("a", "a"), target("b"))[0] == []


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


def test_a_class_that_answers_only_by_models_has_no_method_at_its_endpoint() -> None:
    for models in ((ModelSignature("iris", "python", (), ()),), ()):  # models that are loaded on demand are not known
        document = api_document(api(signature=ApiSignature((), models)))
        assert "/iris" not in document["paths"]
    assert "/iris" in api_document(api(signature=ApiSignature(), kind=ApiKind.TASK))["paths"]


def test_a_grpc_api_has_one_operation_for_each_call_in_json() -> None:
    body = dataclasses.replace(typed(list[dict[str, Any]]), is_required=False)
    lines = dataclasses.replace(typed(dict[str, Any]), media_type="application/x-ndjson")
    call = RouteSignature("/Count", (), MethodSignature("POST", "Count", body, lines, streams=True))
    numbers = api(signature=ApiSignature(routes=(call,)), name="numbers", endpoint="/pkg.Numbers", is_grpc=True)
    mix = dataclasses.replace(numbers, name="mix", kind=ApiKind.SPLITTER, targets=(numbers,), signature=None)
    for each in (numbers, mix):
        document = valid(api_document(each))
        assert [(path, *verbs) for path, verbs in document["paths"].items()] == [("/pkg.Numbers/Count", "post")]
        operation = of(document, "/pkg.Numbers/Count")
        content = operation["requestBody"]["content"]["application/json"]
        assert (content["schema"]["type"], operation["requestBody"]["required"]) == ("array", False)
        assert {*operation["responses"]["200"]["content"]} == {"application/x-ndjson"}
        assert "422" not in operation["responses"]
    assert api_document(dataclasses.replace(numbers, signature=None))["paths"] == {}


def test_an_application_decides_for_itself_which_paths_it_answers() -> None:
    shop = DocumentedApi("shop", ApiKind.REALTIME, "/shop", "1", is_application=True)
    mix = DocumentedApi("mix", ApiKind.SPLITTER, "/mix", "1", targets=(shop,))
    assert api_document(shop)["paths"] == {}
    assert "decides which paths it answers" in api_document(shop)["info"]["description"]
    assert [*api_document(mix)["paths"]] == ["/mix/info"]
