"""Paths below an endpoint, in a real HAProxy: the API that they lead to, and the endpoint that a replica is sent."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

import pytest

from cortex.gateway.maps import PREFIXES_MAP, fixed_maps
from cortex.gateway.routes import ApiBackend, ApiKey, Cors, RoutingTable, Share, Split, table_from_json, table_to_json
from cortex.home import Home
from harness.servers.upstream import Answer, ask, backend, eventually, world

pytestmark = pytest.mark.processes

OURS = ("x-cortex-endpoint", "x-cortex-splitter")


def seen(answer: Answer) -> tuple[Any, ...]:
    """Return the server that answered, and the headers that it was sent."""
    assert answer.status == 200, answer.body
    headers = answer.json()["headers"]
    return (answer.json()["server"], *(headers.get(name) for name in OURS))


async def test_paths_below_v2_lead_to_the_api_with_its_endpoint(home: Home) -> None:
    async with world(home) as w:
        root = backend("root", await w.server("r"), endpoint="/")
        deep = backend("deep", await w.server("d"), endpoint="/iris/v2/models/own")
        iris = backend("iris", await w.server("a"))
        odd = backend("odd", await w.server("o"), endpoint="/a|b")
        jobs = backend("jobs", jobs_socket=str(home.sockets_dir / "none"), endpoint="/iris/v2/jobs")
        await w.gateway.startup(RoutingTable((deep, iris, jobs, odd, root)))
        for path in (
            "/iris/v2",
            "/iris/v2/",
            "/iris/v2/models/m/infer",
            "/iris/v2/x/?a=1",
            "/iris/v2/models/own/x",
        ):
            answer = await ask(w.port, path, "POST", b"{}", **{"x-cortex-endpoint": "/forged"})
            assert seen(answer) == ("a", "/iris", None)
            assert answer.json()["url"] == path
        for path in ("/iris", "/iris/", "/iris/info"):
            assert seen(await ask(w.port, path, **{"x-cortex-endpoint": "/forged"})) == ("a", None, None)
        assert seen(await ask(w.port, "/iris/v2/models/own")) == ("d", None, None)
        assert seen(await ask(w.port, "/iris/v2/models/own/v2/models")) == ("d", "/iris/v2/models/own", None)
        assert seen(await ask(w.port, "/a|b/v2/models")) == ("o", "/a|b", None)
        assert seen(await ask(w.port, "/v2/models/m")) == ("r", "/", None)
        for unknown in ("/iris/v2x", "/iris/v3/models", "/iris/x", "/nowhere/v2"):
            assert (await ask(w.port, unknown)).status == 404
        assert (await ask(w.port, "/iris/v2/jobs/7")).status == 503  # a job: its operator is not running


async def test_keys_and_origins_of_an_api_hold_below_its_endpoint(home: Home) -> None:
    async with world(home) as w:
        page, key = "https://page.example", ApiKey("k", hashlib.sha256(b"secret").hexdigest(), ("iris",))
        iris = backend("iris", await w.server("a"), needs_key=True, cors=Cors((page,)))
        await w.gateway.startup(RoutingTable((iris,), keys=(key,)))
        path = "/iris/v2/models/iris"
        assert (await ask(w.port, path)).status == 401
        answer = await ask(w.port, path, **{"x-api-key": "secret", "origin": page})
        assert seen(answer) == ("a", "/iris", None)
        assert answer.headers["access-control-allow-origin"] == page
        refused = await ask(w.port, path, **{"x-api-key": "secret", "origin": "https://other.example"})
        assert "access-control-allow-origin" not in refused.headers


async def test_a_splitter_draws_and_copies_requests_below_its_endpoint(home: Home) -> None:
    async with world(home) as w:
        backends = tuple([backend(name, await w.server(name)) for name in ("a", "b", "s")])
        split = Split("ab", "/ab", (Share("a", 50), Share("b", 50)), Share("s", 100))
        await w.gateway.startup(RoutingTable(backends, (split,)))
        answers = [seen(await ask(w.port, "/ab/v2/models/ab/infer", "POST", b"{}")) for _ in range(40)]
        assert set(answers) == {("a", "/ab", "ab"), ("b", "/ab", "ab")}

        async def copied() -> bool:
            return w.upstreams["s"].served == 40

        await eventually(copied)
        headers = w.upstreams["s"].seen[-1]["headers"]
        assert (headers["x-cortex-endpoint"], headers["x-cortex-splitter"]) == ("/ab", "ab")
        assert seen(await ask(w.port, "/ab", "POST", b"{}"))[1:] == (None, None)


async def test_a_splitter_checks_keys_below_its_endpoint_and_at_the_root(home: Home) -> None:
    async with world(home) as w:
        key = ApiKey("k", hashlib.sha256(b"secret").hexdigest(), ("ab",))
        iris = backend("iris", await w.server("a"), needs_key=True)
        split = Split("ab", "/ab", (Share("iris", 100),))
        await w.gateway.startup(RoutingTable((iris,), (split,), (key,), v2_at_root=True))
        for path in ("/ab/v2/models/ab", "/v2/models/ab"):
            assert (await ask(w.port, path)).status == 401
            assert seen(await ask(w.port, path, **{"x-api-key": "secret"}))[0] == "a"
        assert (await ask(w.port, "/v2/models/iris", **{"x-api-key": "secret"})).status == 403


async def test_requests_below_an_endpoint_are_held_but_probes_are_answered(home: Home) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True)
        await w.gateway.startup(RoutingTable((cold,)))
        sent = asyncio.create_task(ask(w.port, "/iris/v2/models/iris/infer", "POST", b"{}"))

        async def held() -> bool:
            return (await w.gateway.stats())["iris"].requests == 1

        await eventually(held)
        answer = await ask(w.port, "/iris/v2/models/iris/ready")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (answer.json()["ready"], answer.json()["error"]) == (False, "no replica is ready: starting")
        await w.gateway.apply(RoutingTable((replace(cold, servers=(await w.server("a"),)),)))
        assert seen(await sent) == ("a", "/iris", None)


async def test_probes_of_an_api_that_is_not_ready_do_not_count_as_its_errors(home: Home) -> None:
    async with world(home) as w:
        split = Split("both", "/both", (Share("iris", 100),))
        await w.gateway.startup(RoutingTable((backend("iris"),), (split,), v2_at_root=True))
        for path in (
            "/iris/v2/health/ready",
            "/iris/v2/models/x/ready",
            "/both/v2/health/ready",
            "/v2/models/iris/ready",
        ):
            assert (await ask(w.port, path)).status == 503
        assert (await ask(w.port, "/iris")).status == 503

        async def counts() -> bool:
            return (await w.gateway.stats())["iris"].responses[5] > 0

        await eventually(counts)
        assert (await w.gateway.stats())["iris"].responses == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 1}


async def test_v2_at_the_root_serves_apis_by_name(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"), endpoint="/some/where")
        split = Split("both", "/both", (Share("iris", 100),))
        made = RoutingTable((iris,), (split,), v2_at_root=True)
        await w.gateway.startup(made)
        for path in ("/v2/models/iris", "/v2/models/iris/infer", "/v2/models/iris/versions/1/ready"):
            answer = await ask(w.port, path)
            assert (seen(answer), answer.json()["url"]) == (("a", "/", None), path)
        assert seen(await ask(w.port, "/v2/models/both/infer")) == ("a", "/", "both")
        assert seen(await ask(w.port, "/some/where/v2/models/iris")) == ("a", "/some/where", None)
        assert (await ask(w.port, "/v2/health/live")).json() == {"live": True}
        assert (await ask(w.port, "/v2/health/ready")).json() == {"ready": True}
        assert (await ask(w.port, "/v2/models")).json() == {"models": ["both", "iris"]}
        assert (await ask(w.port, "/v2")).json()["extensions"] == ["binary_tensor_data"]
        assert (await ask(w.port, "/v2", "POST")).status == 405
        assert (await ask(w.port, "/v2/models/nothing/infer")).status == 404
        await w.gateway.apply(replace(made, v2_at_root=False))
        for path in ("/v2", "/v2/models", "/v2/models/iris"):
            assert (await ask(w.port, path)).status == 404


def test_only_realtime_apis_have_prefixes_and_older_nodes_accept_the_table() -> None:
    made = RoutingTable((ApiBackend("a", "/a", 1.0, 1, 1, ""), ApiBackend("j", "/j", 1.0, 1, 1, "", jobs_socket="/s")))
    assert fixed_maps(made)[PREFIXES_MAP] == {"/a/v2/": "api:a|/a"}
    data = table_to_json(made)
    assert "v2_at_root" not in data
    assert all("subpaths" not in each for each in data["backends"])
    own = replace(made, backends=(replace(made.backends[0], subpaths=("/",)),), v2_at_root=True)
    assert fixed_maps(own)[PREFIXES_MAP] == {"/a/": "api:a|/a"}
    assert table_from_json(table_to_json(own)) == own
