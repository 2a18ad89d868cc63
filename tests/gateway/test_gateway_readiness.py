"""What the gateway answers to those who ask whether it lives and whether APIs are ready."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from urllib.parse import unquote_to_bytes

import pytest

from cortex.gateway.maps import READY_MAP, ROUTES_MAP, fixed_maps, live_maps
from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import ApiKey, RoutingTable, Share, Split
from cortex.home import Home
from harness.servers.upstream import Client, World, ask, backend, eventually, table, world

pytestmark = pytest.mark.processes

LIVE = {"/livez": {"ok": True}, "/healthz": {"ok": True}, "/v2/health/live": {"live": True}}


async def answers(w: World, *paths: str) -> list[int]:
    return [(await ask(w.port, path)).status for path in paths]


async def test_the_root_is_ready_once_every_api_can_answer(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(RoutingTable(v2_at_root=True))
        for path in ("/readyz", "/v2/health/ready"):
            answer = await ask(w.port, path)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.json() == {"ready": False, "not_ready": [], "error": "no API is deployed"}
        a, b = backend("a", await w.server("a")), backend("b", unavailable="ValueError: secret")
        await w.gateway.apply(table(a, b, v2_at_root=True))
        for path in ("/readyz", "/v2/health/ready", "/readyz?x=1", "/readyz?api=a&api=b"):
            answer = await ask(w.port, path)
            assert (answer.status, answer.json()) == (503, {"ready": False, "not_ready": ["b"]})
        assert await answers(w, "/readyz?api=a", "/readyz?api=b", "/a/readyz", "/b/readyz") == [200, 503, 200, 503]
        assert (await ask(w.port, "/readyz?api=a")).json() == {"ready": True}
        assert await answers(w, "/readyz?api=%61", "/readyz?api=%61&api=%62") == [200, 503]
        unknowns = ("", "x" * 200, "c", "*", "/a/readyz", "a+", "c%6cs", "%22", "a%00", "%0a%5c", "%FF", "%")
        for unknown in unknowns:
            answer = await ask(w.port, f"/readyz?api=a&api={unknown}")
            name = unquote_to_bytes(unknown.replace("+", " ")).decode(errors="ignore")
            assert (answer.status, answer.json()["error"]) == (404, f"no API has the name '{name}' in ?api=")
        await w.gateway.apply(table(a, replace(b, servers=(await w.server("b"),)), v2_at_root=True))
        assert await answers(w, "/readyz", "/v2/health/ready", "/b/readyz", "/readyz?api=b") == [200] * 4
        head = await ask(w.port, "/readyz", "HEAD")
        assert (head.status, head.body) == (200, b"")
        for path, expected in LIVE.items():
            assert (await ask(w.port, path)).json() == expected


async def test_an_api_whose_replica_died_is_not_ready_before_the_operator_knows(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        assert await answers(w, "/readyz", "/iris/readyz", "/iris/v2/health/ready") == [200] * 3
        await w.upstreams["a"].stop()

        async def is_noticed() -> bool:
            return await answers(w, "/readyz", "/iris/readyz", "/iris/v2/health/ready") == [503] * 3

        await eventually(is_noticed, 20)


async def test_probes_need_no_key_and_say_nothing_but_yes_or_no(home: Home) -> None:
    async with world(home) as w:
        key = ApiKey("k", hashlib.sha256(b"secret").hexdigest())
        ready = backend("ready", await w.server("a"), needs_key=True)
        broken = backend("broken", needs_key=True, unavailable="ValueError: secret")
        await w.gateway.startup(table(ready, broken, keys=(key,)))
        assert (await ask(w.port, "/ready/readyz")).json() == {"ready": True}
        answer = await ask(w.port, "/broken/readyz")
        assert (answer.status, answer.json()) == (503, {"ready": False})
        assert await answers(w, "/ready", "/ready/v2/models/m/ready", "/ready/readyz/x") == [401, 401, 404]


async def test_probes_count_for_no_api_and_wake_none(home: Home) -> None:
    async with world(home) as w:
        cold = backend("cold", holds=True, unavailable="")
        first = backend("first", holds=True)  # it has never been ready: whether it will be is not known
        await w.gateway.startup(table(cold, first, backend("iris", await w.server("a"))))
        paths = ("/readyz", "/cold/readyz", "/iris/readyz", "/iris/v2/health/ready", "/iris/v2/health/live")
        assert await answers(w, *paths) == [503, 200, 200, 200, 200]
        assert await answers(w, "/first/readyz", "/cold/v2/health/ready", "/cold/v2/health/live") == [503, 200, 200]
        assert (await ask(w.port, "/readyz")).json()["not_ready"] == ["first"]
        assert (await ask(w.port, "/iris")).status == 200  # counted after the probes

        async def counted() -> bool:
            return sum((await w.gateway.stats())["iris"].responses.values()) > 0

        await eventually(counted)
        stats = await w.gateway.stats()
        assert {api: sum(each.responses.values()) for api, each in stats.items()} == {"cold": 0, "first": 0, "iris": 1}
        assert not any(each.requests for each in stats.values())
        assert w.upstreams["a"].served == 1


async def test_a_splitter_is_ready_if_each_api_with_weight_is(home: Home) -> None:
    async with world(home) as w:
        shares = (Share("a", 50), Share("b", 50), Share("c", 0))
        split = Split("both", "/both", shares, Share("c", 10))
        none = Split("none", "/none", (Share("a", 0),))
        ready = backend("a", await w.server("a")), backend("b", await w.server("b"))
        await w.gateway.startup(RoutingTable((*ready, backend("c")), (split, none)))
        assert await answers(w, "/both/readyz", "/both/v2/health/ready", "/readyz?api=both") == [200] * 3
        assert await answers(w, "/none/readyz", "/none") == [503, 404]
        await w.gateway.apply(RoutingTable((ready[0], backend("b"), backend("c")), (split, none)))
        assert await answers(w, "/both/readyz", "/both/v2/health/ready", "/readyz?api=both") == [503] * 3
        assert (await ask(w.port, "/readyz")).json()["not_ready"] == ["b", "both", "c", "none"]


async def test_an_api_that_runs_jobs_is_ready_while_the_operator_is_there(home: Home) -> None:
    async with world(home) as w:
        operator = await w.server("operator")
        jobs = backend("sum", jobs_socket=operator.socket, unavailable="")
        broken = backend("broken", jobs_socket=operator.socket)
        await w.gateway.startup(table(jobs, broken))
        assert await answers(w, "/sum/readyz", "/broken/readyz") == [200, 503]
        await w.gateway.apply(table(jobs, replace(broken, unavailable="")))
        assert await answers(w, "/sum/readyz", "/broken/readyz", "/readyz") == [200] * 3
        await w.upstreams["operator"].stop()

        async def is_away() -> bool:
            return await answers(w, "/sum/readyz", "/readyz") == [503, 503]

        await eventually(is_away, 20)


async def test_the_gateway_is_alive_but_not_ready_while_it_drains(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        client = Client(w.port)
        assert (await client.get("/readyz")).status == 200
        await w.gateway.drain(60)
        answer = await client.get("/readyz")
        assert answer.json() == {"ready": False, "not_ready": [], "error": "the gateway is stopping"}


@pytest.mark.parametrize("protocol", [Protocol.APPLICATION, Protocol.COMMAND])
async def test_applications_and_commands_keep_their_own_paths(home: Home, protocol: Protocol) -> None:
    async with world(home) as w:
        own = backend("app", await w.server("a"), replica_protocol=protocol, subpaths=("/",))
        split = Split("both", "/both", (Share("app", 100),))
        await w.gateway.startup(RoutingTable((own,), (split,)))
        for path in ("/app/readyz", "/app/v2/health/ready", "/app/v2/health/live", "/both/readyz"):
            assert (await ask(w.port, path)).json()["url"] == path
        assert await answers(w, "/readyz?api=app", "/readyz?api=both", "/readyz") == [200] * 3


def test_an_endpoint_precedes_the_readiness_of_another_and_the_root_is_the_gateways() -> None:
    made = table(*(backend(name, endpoint=path) for name, path in (("a", "/a"), ("b", "/a/readyz"), ("c", "/"))))
    routes = fixed_maps(made)[ROUTES_MAP]
    assert (routes["/a/readyz"], routes["/a/readyz/readyz"]) == ("api:b", "cortex-health")
    assert routes["/readyz"] == "cortex-health"
    assert "/readyz" not in live_maps(made)[READY_MAP]
