"""Routes of the user's class: found, checked and bound by the loader."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import QueryParams

import cortex
from cortex.errors import UserError
from cortex.lifecycle import ApiKind
from cortex.payloads.openapi.api import DocumentedApi
from cortex.payloads.openapi.document import api_document
from cortex.payloads.path_template import RouteError
from cortex.payloads.signature import parse_signature
from cortex.payloads.validation import PayloadError
from cortex.predictor.checks.source_checks import check_source
from harness.documents.openapi_documents import openapi_problems

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
        def save(self, payload: dict, id=0, kind=None):
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
    assert save.call({"a": 1}, {}, None) == ({"a": 1}, "7", "ä")
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


FIELDS = """
    import fastapi
    from fastapi import Query
    from pydantic import Field
    import cortex

    class Handler:
        def __init__(self, config): ...

        @cortex.route("GET", "/pages/{number}")
        def page(self, number: int = fastapi.Path(ge=1), size: int = Query(20, ge=1, le=100), word: str = Query(),
                 order: str = Field("up", pattern="^(up|down)$"), only: list[int] = Field(default_factory=list),
                 since=Query(None, alias="from-day"), kind: str = Field("x", validation_alias="type")):
            return [number, size, word, order, only, since, kind]
"""


@pytest.mark.parametrize(
    ("number", "query", "expected"),
    [
        ("1", "word=a", [1, 20, "a", "up", [], None, "x"]),
        ("2", "word=a&size=5&order=down&only=1&only=2&from-day=1&type=y", [2, 5, "a", "down", [1, 2], "1", "y"]),
        ("0", "word=a", ["path", "number"]),
        ("1", "word=a&size=0", ["query", "size"]),
        ("1", "word=a&order=left", ["query", "order"]),
        ("1", "", ["query", "word"]),
    ],
)
def test_an_argument_has_the_default_and_the_limits_of_a_field(
    project: Any, number: str, query: str, expected: list[Any]
) -> None:
    route = routes(project.load("handler", FIELDS))["GET /pages/{number}"]
    page = route.with_values((number,))
    if isinstance(expected[0], int):
        assert page.call(None, QueryParams(query), None) == expected
    else:
        with pytest.raises(PayloadError) as caught:
            page.call(None, QueryParams(query), None)
        assert caught.value.detail[0]["loc"] == expected
    parameters = {each.name: each for each in route.signature.parameters}
    assert {name for name, each in parameters.items() if each.is_required} == {"word"}
    assert parameters["from-day"].location == "query"
    assert parameters["size"].schema == {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "self, user_agent=fastapi.Header()",
            '"user_agent" can\'t be filled by Header() of FastAPI; remove it, and read headers["user-agent"]',
        ),
        ("self, session=Session('')", '"session" can\'t be filled by Cookie() of FastAPI; remove it'),
        ("self, payload=Body()", '"payload" can\'t be filled by Body() of FastAPI; remove it, and annotate payload'),
        (
            "self, *, db=Depends(print)",
            '"db" can\'t be filled by Depends() of FastAPI; call the function in the method',
        ),
    ],
)
def test_what_fastapi_would_inject_is_refused_by_the_check_and_by_the_loader(
    project: Any, arguments: str, problem: str
) -> None:
    text = "import cortex, fastapi\nfrom fastapi import Body, Cookie as Session, Depends\n"
    text += (
        f"class Handler:\n  def __init__(self, config): pass\n  @cortex.route('GET', '/a')\n  def a({arguments}): pass"
    )
    with pytest.raises(UserError) as caught:
        project.load("handler", text)
    assert problem in str(caught.value)
    (found,) = check_source(text, "handler.py", "handler")
    assert (found.line, f"{found.message}; {found.fix}".endswith(str(caught.value).partition(': "')[2])) == (6, True)
    assert problem in f"{found.message}; {found.fix}"


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        (
            'x_user: Annotated[str, Header()] = ""',
            'Header() of FastAPI is not supported: remove it, and read headers["x-user"]',
        ),
        ("user: Annotated[str, Depends(print)] = None", "Depends() of FastAPI is not supported: call the function"),
        ("user: 'Missing' = None", "NameError: name 'Missing' is not defined"),
    ],
)
def test_an_annotation_of_a_query_that_cannot_be_used_is_refused(project: Any, argument: str, problem: str) -> None:
    text = f"""
        from typing import Annotated
        from fastapi import Depends, Header
        import cortex

        class Handler:
            def __init__(self, config): ...

            @cortex.route("GET", "/a")
            def a(self, {argument}): ...
    """
    with pytest.raises(UserError, match=r"a\(\): the annotation of \w+ can't be used: ") as caught:
        project.load("handler", text)
    assert problem in str(caught.value)


def test_an_annotation_of_a_path_that_cannot_be_used_is_refused(project: Any) -> None:
    text = USERS.replace("kind=None", 'kind: "Missing" = None')
    with pytest.raises(UserError, match=r"save\(\): the annotation of kind can't be used: NameError: name 'Missing'"):
        project.load("handler", text)


def test_a_field_of_a_type_that_no_query_string_can_have_is_refused(project: Any) -> None:
    text = "import cortex\nfrom pydantic import Field\nclass Handler:\n  def __init__(self, config): pass\n"
    text += "  @cortex.route('GET', '/a')\n  def a(self, where: dict[str, int] = Field()): pass"
    with pytest.raises(UserError, match=r"predictor.py:5: a\(\): the annotation of where can't be used: a value in a"):
        project.load("handler", text)


def test_a_method_without_a_route_has_no_query_parameters(project: Any) -> None:
    text = "from fastapi import Query\nclass Handler:\n  def __init__(self, config): pass\n"
    text += "  def handle_post(self, payload, limit: int = Query(5)): pass"
    with pytest.raises(UserError, match=r'"limit" can\'t be filled by Query\(\) of FastAPI; remove the default'):
        project.load("handler", text)


def test_parameters_of_queries_are_in_the_signature(project: Any) -> None:
    (search,) = [each for each in project.load("handler", SEARCH).signature.routes if each.path == "/shops/{shop}"]
    assert [(each.name, each.location) for each in search.parameters][:3] == [
        ("shop", "path"),
        ("text", "query"),
        ("limit", "query"),
    ]
    assert search.parameters[2].schema == {"type": "integer", "default": 10}
    assert "_cache" not in [each.name for each in search.parameters]


def test_defaults_that_no_query_string_can_have_and_hidden_parameters_are_not_documented(project: Any) -> None:
    text = """
        import enum
        from typing import Annotated, Any
        from fastapi import Query
        import cortex
        from pydantic import BaseModel

        class Model(BaseModel):
            rate: float = float("nan")

        class Handler:
            def __init__(self, config): ...

            @cortex.route("POST", "/a")
            def a(self, payload: Model, f: float = float("nan"), g: float = float("inf"), an: Any = 3, untyped=4,
                  since=Query(None), secret: str = Query("", include_in_schema=False), word="x", limit: int = 10,
                  hidden: Annotated[str, Query(include_in_schema=False)] = ""):
                return [secret, hidden]
    """
    bound = project.load("handler", text)
    signature = parse_signature(bound.signature.to_json())
    document = api_document(DocumentedApi("x", ApiKind.REALTIME, "/x", "1", signature))
    assert openapi_problems(document) == []
    parameters = {
        each["name"]: each["schema"].get("default") for each in document["paths"]["/x/a"]["post"]["parameters"]
    }
    assert parameters == {
        "f": None, "g": None, "an": None, "untyped": None, "since": None, "word": "x", "limit": 10
    }  # fmt: skip
    (found,) = bound.routes
    assert found.with_values(()).call(None, QueryParams("secret=a&hidden=b"), None) == ["a", "b"]


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
