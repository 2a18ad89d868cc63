"""The form of the console: operations, bodies, paths that it accepts."""

from __future__ import annotations

import pytest

from cortex.operator.dashboard.pages.console import is_below, operations_of, readable

DOCUMENT = {
    "components": {"schemas": {"Row": {"type": "object", "properties": {"x": {"type": "number", "minimum": 1}}}}},
    "paths": {
        "/iris/info": {"get": {"summary": "Info"}},
        "/iris": {
            "post": {
                "summary": "Predict",
                "requestBody": {
                    "content": {
                        "text/csv": {"schema": {"type": "string"}},
                        "application/json": {"schema": {"$ref": "#/components/schemas/Row"}},
                    }
                },
            },
            "get": {},
        },
    },
}


def test_the_endpoint_with_a_body_comes_first() -> None:
    operations = operations_of(DOCUMENT, "/iris")
    assert [each.key for each in operations] == ["POST /iris", "GET /iris", "GET /iris/info"]
    assert (operations[0].media_type, operations[0].example) == ("application/json", '{\n  "x": 1.0\n}')
    assert operations[0].schema == DOCUMENT["components"]["schemas"]["Row"]  # type: ignore[index]
    assert (operations[1].media_type, operations[1].example) == ("", "")


def test_without_a_document_a_request_can_be_written() -> None:
    (operation,) = operations_of({}, "/iris")
    assert (operation.verb, operation.path, operation.media_type) == ("POST", "/iris", "application/json")


def test_an_application_decides_which_paths_it_answers_so_its_root_is_requested() -> None:
    (operation,) = operations_of({}, "/iris", is_application=True)
    assert (operation.verb, operation.path, operation.media_type) == ("GET", "/iris/", "")


def test_a_body_of_any_value_begins_as_an_object() -> None:
    body = {"content": {"application/json": {"schema": {}}}}
    (operation,) = operations_of({"paths": {"/iris": {"post": {"requestBody": body}}}}, "/iris")
    assert operation.example == "{}"


@pytest.mark.parametrize(
    ("path", "endpoint", "accepted"),
    [
        ("/iris", "/iris", True),
        ("/iris?x=1", "/iris", True),
        ("/iris/v2/models", "/iris", True),
        ("/anything", "/", True),
        ("/irises", "/iris", False),
        ("/other", "/iris", False),
        ("/iris/../other", "/iris", False),
        ("/iris/%2e%2E/other", "/iris", False),
        ("/iris\r\nhost: x", "/iris", False),
        ("http://example.org/iris", "/iris", False),
        ("iris", "/", False),
        ("", "/", False),
    ],
)
def test_paths_belong_to_the_endpoint(path: str, endpoint: str, accepted: bool) -> None:
    assert is_below(path, endpoint) is accepted


@pytest.mark.parametrize(
    ("content", "media_type", "text"),
    [
        (b'{"a":1}', "application/json", '{\n  "a": 1\n}'),
        (b'{"a":', "application/json", '{"a":'),
        (b"[" * 5000, "application/json", "[" * 5000),
        ("ü".encode(), "text/plain", "ü"),
        (b"\xff\x00", "text/plain", ""),
    ],
)
def test_bodies_are_shown_as_text_if_they_are(content: bytes, media_type: str, text: str) -> None:
    assert readable(content, media_type) == text
