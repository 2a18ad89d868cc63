"""Documentation of APIs: the gateway sends its paths to the operator, whatever the kind of the API."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cortex.gateway.backends import GatewaySockets
from cortex.gateway.config import GatewaySettings, render
from cortex.gateway.maps import DOCS_ASSETS, DOCS_MAP, ROUTES_MAP, fixed_maps
from cortex.gateway.routes import ApiBackend, Cors, RoutingTable, Share, Split, table_from_json, table_to_json
from cortex.home import Home
from harness.servers.upstream import ask, backend, table, world

pytestmark = pytest.mark.processes

SOCKETS = GatewaySockets("/s/stats", "/s/successor", "/s/inside", "/s/refusals")
PATHS = ("/openapi.json", "/docs", "/docs/", *(f"/docs/{name}" for name in DOCS_ASSETS))
SPLIT = Split("mix", "/mix", (Share("iris", 100),), has_docs=True)
PAGE = "https://page.example"


def documented(*backends: ApiBackend, **fields: object) -> RoutingTable:
    return table(*(replace(each, has_docs=True) for each in backends), **{"operator_socket": "/s/jobs", **fields})


def routes(made: RoutingTable) -> dict[str, str]:
    return fixed_maps(made)[ROUTES_MAP]


def test_every_kind_of_api_has_documentation_below_its_endpoint() -> None:
    made = documented(backend("iris"), backend("sum", jobs_socket="/s/jobs"), splits=(SPLIT,))
    maps = fixed_maps(made)
    for endpoint, key in (("/iris", "api:iris"), ("/sum", "jobs:sum"), ("/mix", "mix")):
        for path in PATHS:
            assert maps[ROUTES_MAP][endpoint + path] == "cortex-docs"
            assert maps[DOCS_MAP][endpoint + path] == key


def test_an_endpoint_precedes_documentation_of_another_api() -> None:
    own = backend("own", endpoint="/iris/docs")
    split = replace(SPLIT, endpoint="/iris/openapi.json")
    made = routes(documented(backend("iris"), own, splits=(split,)))
    assert made["/iris/docs"] == "api:own"
    assert "/iris/openapi.json" not in made
    assert made["/iris/docs/openapi.json"] == made["/iris/openapi.json/docs"] == "cortex-docs"


def test_an_api_without_documentation_has_no_such_paths() -> None:
    hidden = table(backend("iris"), operator_socket="/s/jobs")
    assert "/iris/docs" not in routes(hidden)
    assert "cortex-docs" not in render(hidden, GatewaySettings(), SOCKETS).config
    assert "/iris/docs" not in routes(documented(backend("iris"), operator_socket=""))


def test_the_json_form_lacks_the_fields_without_documentation_for_older_nodes() -> None:
    plain = table(backend("iris"), splits=(replace(SPLIT, has_docs=False),))
    text = json.dumps(table_to_json(plain))
    assert '"has_docs"' not in text
    assert '"operator_socket"' not in text
    made = documented(backend("iris"), splits=(SPLIT,))
    assert table_from_json(json.loads(json.dumps(table_to_json(made)))) == made


async def test_the_operator_receives_the_api_of_the_path_without_a_key(home: Home) -> None:
    async with world(home) as w:
        await w.server("jobs")
        iris = backend("iris", await w.server("a"), needs_key=True, max_body_bytes=0)
        await w.gateway.startup(documented(iris, splits=(SPLIT,), operator_socket=str(home.jobs_socket)))
        for path, key in (("/iris/openapi.json", "api:iris"), ("/mix/docs/docs.js?x=1", "mix")):
            seen = (await ask(w.port, path, **{"x-cortex-docs": "forged"})).json()
            assert (seen["server"], seen["url"], seen["headers"]["x-cortex-docs"]) == ("jobs", path, key)
            assert "x-cortex-api" not in seen["headers"]
        assert (await ask(w.port, "/iris")).status == 401
        assert (await ask(w.port, "/iris/docs/other.js")).status == 404
        assert "iris" in await w.gateway.stats()


async def test_without_the_operator_documentation_is_unavailable_and_the_api_serves(home: Home) -> None:
    async with world(home) as w:
        await w.server("jobs")
        iris = backend("iris", await w.server("a"))
        await w.gateway.startup(documented(iris, operator_socket=str(home.jobs_socket)))
        await w.upstreams["jobs"].stop()
        answer = await ask(w.port, "/iris/docs")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"].startswith("the operator is not running, so the documentation")
        assert (await ask(w.port, "/iris")).status == 200


async def test_documentation_has_the_cors_rules_of_its_api(home: Home) -> None:
    async with world(home) as w:
        await w.server("jobs")
        iris = backend("iris", await w.server("a"), cors=Cors((PAGE,)))
        made = documented(iris, backend("open"), operator_socket=str(home.jobs_socket))
        await w.gateway.startup(made)
        for path, origin, allowed in (
            ("/iris/openapi.json", PAGE, PAGE),
            ("/iris/openapi.json", "https://other.example", None),
            ("/open/openapi.json", "https://other.example", "*"),
        ):
            answer = await ask(w.port, path, origin=origin)
            assert answer.status == 200
            assert answer.headers.get("access-control-allow-origin") == allowed
