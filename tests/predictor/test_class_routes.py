"""Routes of the user's class: found, checked and bound by the loader."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import QueryParams

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
    assert save.call({"a": 1}, {}, None) == ({"a": 1}, "7", "ä")  # the annotation of kind can't be used
    assert found["POST /users"].with_values(()).call({}, {}, None) == ({}, 0, None)
    assert found["DELETE /files/{name:path}"].with_values(("a/b",)).kind == "async"


def test_a_value_of_another_type_is_a_mistake_of_the_client(project: Any) -> None:
    user = routes(project.load("handler", USERS))["GET /users/{id}"]
    with pytest.raises(PayloadError, match="id: Input should be a valid integer") as caught:
        user.with_values(("x",)).call(None, {}, None)
    assert caught.value.detail[0]["loc"] == ["path", "id"]
    with pytest.raises(PayloadError, match="id: Input should be a text in UTF-8"):
        user.with_values(("%FF",)).call(None, {}, None)


SEARCH = """
    import datetime, enum
    import cortex

    class Order(enum.Enum):
        UP = "up"

    class Handler:
        def __init__(self, config): ...

        @cortex.route("GET", "/shops/{shop}")
        def search(self, shop, text="all", limit: int = 10, only: list[int] | None = None, *,
                   since: datetime.date = None, order: Order | None = None, is_open: bool = False, _cache={},
                   tags: set[str] = frozenset()):
            return [shop, text, limit, only, since and since.year, order and order.name, is_open, _cache, sorted(tags)]

        @cortex.route("POST", "/shops")
        def add(self, payload, where: dict[str, int] = None, query_params=None):
            return payload, where, dict(query_params)
"""


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", ["a", "all", 10, None, None, None, False, {}, []]),
        ("text=x%20y&limit=3", ["a", "x y", 3, None, None, None, False, {}, []]),
        ("only=1&only=2&tags=b&tags=a&limit=1&limit=2", ["a", "all", 2, [1, 2], None, None, False, {}, ["a", "b"]]),
        ("since=2026-01-02&order=up&is_open=true", ["a", "all", 10, None, 2026, "UP", True, {}, []]),
        ("_cache=x&unknown=1&shop=other", ["a", "all", 10, None, None, None, False, {}, []]),
    ],
)
def test_arguments_with_a_default_are_filled_from_the_query_string(
    project: Any, query: str, expected: list[Any]
) -> None:
    search = routes(project.load("handler", SEARCH))["GET /shops/{shop}"].with_values(("a",))
    assert search.needs_query_params
    assert search.call(None, QueryParams(query), None) == expected


@pytest.mark.parametrize(
    ("query", "place", "message"),
    [
        ("limit=many", ["query", "limit"], "limit: Input should be a valid integer"),
        ("only=1&only=x", ["query", "only", 1], r"only\[1\]: Input should be a valid integer"),
        ("order=down", ["query", "order"], "order: Input should be 'up'"),
    ],
)
def test_a_parameter_of_another_type_is_a_mistake_of_the_client(
    project: Any, query: str, place: list[Any], message: str
) -> None:
    search = routes(project.load("handler", SEARCH))["GET /shops/{shop}"].with_values(("a",))
    with pytest.raises(PayloadError, match=message) as caught:
        search.call(None, QueryParams(query), None)
    assert caught.value.detail[0]["loc"] == place


def test_an_argument_that_no_query_string_can_have_keeps_its_default(
    project: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    add = routes(project.load("handler", SEARCH))["POST /shops"].with_values(())
    assert "add(): the annotation of where can't be used, so it keeps its default: a value in a" in (
        capsys.readouterr().err
    )
    assert add.call({}, QueryParams("where=1"), None) == ({}, None, {"where": "1"})


def test_parameters_of_queries_are_in_the_signature(project: Any) -> None:
    (search,) = [each for each in project.load("handler", SEARCH).signature.routes if each.path == "/shops/{shop}"]
    assert [(each.name, each.location) for each in search.parameters][:3] == [
        ("shop", "path"),
        ("text", "query"),
        ("limit", "query"),
    ]
    assert search.parameters[2].schema == {"type": "integer", "default": 10}
    assert "_cache" not in [each.name for each in search.parameters]


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
