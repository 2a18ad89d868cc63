"""Routes of the user's class: found, checked and bound by the loader."""

from __future__ import annotations

from typing import Any

import pytest

import cortex
from cortex.errors import UserError
from cortex.payloads.path_template import RouteError
from cortex.payloads.validation import PayloadError

USERS = """
    import cortex

    class Base:
        @cortex.route("GET", "/users/{id}")
        def user(self, id: int, query_params):
            return {"id": id, "query": query_params}

        @cortex.route("GET", "/hidden")
        def hidden(self): ...

    class Handler(Base):
        def __init__(self, config):
            self.users = config

        @cortex.route("post", "/users/")
        @cortex.route("PUT", "/users/{id}/{kind}")
        def save(self, payload: dict, id=0, kind: "Missing" = None):
            '''Save a user.

            In memory.'''
            return payload, id, kind

        @cortex.route("DELETE", "/files/{name:path}")
        @staticmethod
        async def delete(name):
            return name

        def hidden(self): ...
"""


def routes(predictor: Any) -> dict[str, Any]:
    return {str(each.route): each for each in predictor.routes}


def test_methods_with_the_decorator_are_routes_also_inherited_ones(project: Any) -> None:
    predictor = project.load("handler", USERS)
    found = routes(predictor)
    assert set(found) == {"GET /users/{id}", "POST /users", "PUT /users/{id}/{kind}", "DELETE /files/{name:path}"}
    assert predictor.methods == {}
    user = found["GET /users/{id}"].with_values(("7",))
    assert user.name == "user"
    assert user.call(None, "q", None) == {"id": 7, "query": "q"}
    save = found["PUT /users/{id}/{kind}"].with_values(("7", "%C3%A4"))
    assert save.call({"a": 1}, None, None) == ({"a": 1}, "7", "ä")  # the annotation of kind can't be used
    assert found["POST /users"].with_values(()).call({}, None, None) == ({}, 0, None)
    assert found["DELETE /files/{name:path}"].with_values(("a/b",)).kind == "async"


def test_a_value_of_another_type_is_a_mistake_of_the_client(project: Any) -> None:
    user = routes(project.load("handler", USERS))["GET /users/{id}"]
    with pytest.raises(PayloadError, match="id: Input should be a valid integer") as caught:
        user.with_values(("x",)).call(None, {}, None)
    assert caught.value.detail[0]["loc"] == ["path", "id"]
    with pytest.raises(PayloadError, match="id: Input should be a text in UTF-8"):
        user.with_values(("%FF",)).call(None, {}, None)


def test_the_signature_and_the_description_have_the_routes(project: Any) -> None:
    predictor = project.load("handler", USERS)
    assert {"verb": "GET", "path": "/users/{id}", "name": "user", "arguments": ["id", "query_params"]} in (
        predictor.describe()["routes"]
    )
    signatures = {each.path: each for each in predictor.signature.routes}
    assert [(each.name, each.schema) for each in signatures["/users/{id}"].parameters] == [("id", {"type": "integer"})]
    assert signatures["/users"].method.summary == "Save a user."
    assert signatures["/users"].method.verb == "POST"
    assert "/files/{name}" in signatures


def test_a_predictor_may_have_routes_whose_calls_run_no_hooks(project: Any) -> None:
    text = """
        from cortex import route

        class PythonPredictor:
            def __init__(self, config): ...
            def predict(self, payload): ...
            def post_predict(self, response): ...

            @route("GET", "/models")
            def models(self): return ["a"]
    """
    (found,) = project.load("predictor", text).routes
    assert found.method.after is None
    assert found.with_values(()).call(None, None, None) == ["a"]


CLASS = "import cortex\nclass Handler:\n  def __init__(self, config): pass\n  "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('@cortex.route("GET", "/a/{id}")\n  def a(self): pass',
         ['predictor.py:4: class Handler: invalid signature for method "a(self)": "id" is a required argument']),
        ('@cortex.route("GET", "/a")\n  def a(self, id): pass', ['"id" is not a supported argument']),
        ('@cortex.route("GET", "/a/{x}")\n  def a(self, x): pass\n  @cortex.route("GET", "/a/{y}")\n'
         "  def b(self, y): pass", ["a() and b() have the same route, GET /a/{y}"]),
        ('@cortex.route("FETCH", "/a")\n  def a(self): pass', ['"FETCH" is not a verb of routes: GET, POST']),
        ('@cortex.route("GET", "/v2/a")\n  def a(self): pass', ["reserved for the Open Inference Protocol"]),
        ("@cortex.route\n  def a(self): pass", ["missing 1 required positional argument: 'path'"]),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_fix(project: Any, text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        project.load("handler", CLASS + text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("verb", "path", "message"),
    [
        ("HEAD", "/a", '"HEAD" is not a verb of routes: .*; HEAD is answered like GET'),
        ("OPTIONS", "/a", "the gateway answers OPTIONS of browsers"),
        (print, "/a", "the first argument is not a verb"),
        ("GET", 3, "the path is not a text"),
        ("GET", "/docs/x", "reserved for the documentation"),
        ("GET", "/openapi.json", "reserved for the OpenAPI document"),
        ("GET", "/info", "reserved for the description"),
        ("GET", "/a/{payload}", "the parameter payload, which has another meaning"),
    ],
)
def test_the_decorator_refuses_what_no_route_can_be(verb: Any, path: Any, message: str) -> None:
    with pytest.raises(RouteError, match=message):
        cortex.route(verb, path)


def test_a_decorated_method_is_unchanged() -> None:
    def method() -> int:
        return 3

    assert cortex.route("GET", "/ready")(method) is method
