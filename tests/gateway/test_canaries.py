"""Canaries: the newest revision of an API gets a share of its requests from a backend of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cortex.gateway.maps import CANARIES_MAP, fixed_maps, live_maps
from cortex.gateway.routes import (
    ApiBackend,
    ApiKey,
    Canary,
    RoutingTable,
    Server,
    Share,
    Split,
    table_from_json,
    table_to_json,
)
from cortex.gateway.runtime_api import RuntimeApi
from cortex.home import Home
from harness.servers.upstream import World, ask, backend, eventually, world

pytestmark = pytest.mark.processes

SPLIT = Split("ab", "/ab", (Share("a", 50), Share("b", 50)))


async def canary_of(w: World, percent: int, **options: object) -> ApiBackend:
    """Return the backend of the API `a`, whose servers are `old` and, of the canary, `new`."""
    api = backend("a", await w.server("old"), **options)
    return replace(api, canary=Canary(percent, (await w.server("new"),)))


async def servers_of(w: World, count: int, path: str = "/a", **headers: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    for _ in range(count):
        answer = await ask(w.port, path, "POST", b"{}", **headers)
        assert answer.status == 200, answer.body
        seen[answer.json()["server"]] += 1
    return seen


async def test_a_canary_gets_its_share_which_changes_without_a_reload(home: Home) -> None:
    async with world(home) as w:
        api = await canary_of(w, 20)
        await w.gateway.startup(RoutingTable((api,)))
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        workers = await runtime.workers()
        seen = await servers_of(w, 600)
        assert abs(seen["new"] - 120) < 6 * (600 * 0.2 * 0.8) ** 0.5
        stats = (await w.gateway.stats())["a"]
        assert stats.responses[2] == 600
        assert len(stats.servers) == 2
        for percent, expected in ((100, "new"), (0, "old")):
            await w.gateway.apply(RoutingTable((replace(api, canary=replace(api.canary, percent=percent)),)))
            assert await servers_of(w, 50) == {expected: 50}
        assert await runtime.workers() == workers


async def test_requests_by_all_ways_to_an_api_are_drawn(home: Home) -> None:
    async with world(home) as w:
        api = await canary_of(w, 100, subpaths=("/v2", "/"))
        other = backend("b", await w.server("b"))
        await w.gateway.startup(RoutingTable((api, other), (SPLIT,), v2_at_root=True))
        for path in ("/a", "/a/", "/a/info", "/a/below", "/a/v2/models/a", "/v2/models/a/infer"):
            assert await servers_of(w, 3, path) == {"new": 3}, path
        assert set(await servers_of(w, 40, "/ab")) == {"new", "b"}
        assert await servers_of(w, 3, "/b") == {"b": 3}


async def test_a_canary_has_the_rules_of_its_api(home: Home) -> None:
    async with world(home) as w:
        api = await canary_of(w, 100, needs_key=True, max_body_bytes=10)
        key = ApiKey("k1", hashlib.sha256(b"secret").hexdigest(), ("a",))
        await w.gateway.startup(RoutingTable((api,), keys=(key,)))
        assert (await ask(w.port, "/a")).status == 401
        assert await servers_of(w, 3, **{"x-api-key": "secret"}) == {"new": 3}
        assert (await ask(w.port, "/a", "POST", b"x" * 11, **{"x-api-key": "secret"})).status == 413
        assert (await w.gateway.stats())["a"].responses == {1: 0, 2: 3, 3: 0, 4: 2, 5: 0, 0: 0}


async def test_a_canary_that_begins_and_ends_under_way_loses_no_request(home: Home) -> None:
    async with world(home) as w:
        api = await canary_of(w, 50)
        alone = replace(api, canary=None)
        await w.gateway.startup(RoutingTable((alone,)))
        for table in (api, alone, api):
            await w.gateway.apply(RoutingTable((table,)))
            seen = await servers_of(w, 60)
            assert set(seen) == ({"old", "new"} if table.canary else {"old"})
        assert (await w.gateway.stats())["a"].responses[2] == 180


async def test_a_canary_without_a_replica_gets_no_request(home: Home) -> None:
    """Its last server leaves before its share does: in between, too, a request must find a server."""
    async with world(home) as w:
        api = await canary_of(w, 100)
        assert api.canary is not None
        await w.gateway.startup(RoutingTable((api,)))
        assert await servers_of(w, 5) == {"new": 5}
        await w.gateway.apply(RoutingTable((replace(api, canary=replace(api.canary, servers=())),)))
        assert await servers_of(w, 20) == {"old": 20}


async def test_requests_that_wait_for_a_canary_are_answered_by_it_although_it_leaves(home: Home) -> None:
    async with world(home) as w:
        api = replace(backend("a", await w.server("old")), canary=Canary(100, (await w.server("new", capacity=1),)))
        assert api.canary is not None
        await w.gateway.startup(RoutingTable((api,)))
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        asked = [asyncio.create_task(ask(w.port, "/a?wait=1")) for _ in range(4)]

        async def wait_in_the_queue() -> bool:
            states = await runtime.backends((await runtime.workers()).current or 0)
            return states["api:a.canary"].queued == 3

        await eventually(wait_in_the_queue)
        await w.gateway.apply(RoutingTable((replace(api, canary=Canary(0)),)))
        assert await servers_of(w, 5) == {"old": 5}
        new = w.upstreams["new"]
        for number in range(4):

            async def has_arrived() -> bool:
                return bool(new.waiting)

            await eventually(has_arrived)
            if number < 2:
                assert await w.gateway.drained(["new"]) == set()
            new.release(1)
        answers = [(answer.status, answer.json()["server"]) for answer in await asyncio.gather(*asked)]
        assert answers == [(200, "new")] * 4

        async def has_left() -> bool:
            return await w.gateway.drained(["new"]) == {"new"}

        await eventually(has_left)


def test_the_table_has_a_json_form_that_older_nodes_read_without_a_canary() -> None:
    api = backend("a", Server("x", "/run/x.sock", 1))
    table = RoutingTable((replace(api, canary=Canary(5, (Server("y", "/run/y.sock", 1),))),))
    assert table_from_json(table_to_json(table)) == table
    assert "canary" not in table_to_json(RoutingTable((api,)))["backends"][0]


def test_slots_of_a_canary_are_its_percentage() -> None:
    table = RoutingTable((replace(backend("a"), canary=Canary(7)),))
    values = Counter(live_maps(table)[CANARIES_MAP].values())
    assert values == {"api:a.canary": 7, "api:a": 93}
    assert not any("canary" in value for entries in fixed_maps(table).values() for value in entries.values())


async def copies_of(w: World, count: int) -> list[dict[str, Any]]:
    """Wait until the canary has received `count` requests, and return them."""

    async def reached() -> bool:
        return len(w.upstreams["new"].seen) == count

    await eventually(reached, 30)
    return w.upstreams["new"].seen


async def test_a_canary_that_gets_copies_responds_to_no_client(home: Home) -> None:
    async with world(home) as w:
        api = await canary_of(w, 0, subpaths=("/v2", "/"))
        other = backend("b", await w.server("b"))
        assert api.canary is not None
        copied = replace(api, canary=replace(api.canary, gets_copies=True))
        await w.gateway.startup(RoutingTable((copied, other), (SPLIT,)))
        assert await servers_of(w, 5) == {"old": 5}
        (copy, *_) = await copies_of(w, 5)
        assert (copy["method"], copy["url"], copy["body"]) == ("POST", "/a", 2)
        ids = {each["headers"]["x-cortex-request-id"] for each in w.upstreams["old"].seen}
        compared = [w.upstreams[name].seen[0]["headers"].get("x-cortex-compared") for name in ("old", "new")]
        assert compared == ["original", "copy"]
        assert copy["headers"]["x-cortex-shadow"] == "1" and copy["headers"]["x-cortex-request-id"] in ids
        assert await servers_of(w, 2, "/a/below?x=1") == {"old": 2}
        assert (await copies_of(w, 7))[-1]["url"] == "/a/below?x=1"
        # Without a reload: the first step of the trial. Requests to splitters are not copied.
        assert set(await servers_of(w, 20, "/ab")) <= {"old", "b"}
        await w.gateway.apply(RoutingTable((api, other), (SPLIT,)))
        assert await servers_of(w, 20) == {"old": 20}
        assert len(w.upstreams["new"].seen) == 7
        assert "x-cortex-compared" not in w.upstreams["old"].seen[-1]["headers"]


async def test_copies_are_no_load_of_the_api(home: Home) -> None:
    """Its replicas would be doubled otherwise."""
    async with world(home) as w:
        api = await canary_of(w, 0)
        assert api.canary is not None
        await w.gateway.startup(RoutingTable((replace(api, canary=replace(api.canary, gets_copies=True)),)))
        asked = [asyncio.create_task(ask(w.port, "/a?wait=1", "POST", b"{}")) for _ in range(3)]

        async def are_inside() -> bool:
            return all(len(w.upstreams[name].waiting) == 3 for name in ("old", "new"))

        await eventually(are_inside, 30)
        stats = (await w.gateway.stats())["a"]
        assert (stats.in_flight, stats.queued, stats.requests) == (3, 0, 3)
        assert list((await w.gateway.in_flight()).values()).count(3) == 2
        for name in ("old", "new"):
            w.upstreams[name].release(3)
        assert [(await each).status for each in asked] == [200] * 3


async def test_only_requests_with_a_key_of_the_api_are_copied(home: Home) -> None:
    async with world(home) as w:
        api = await canary_of(w, 0, needs_key=True)
        assert api.canary is not None
        keys = [ApiKey(name, hashlib.sha256(name.encode()).hexdigest(), (name,)) for name in ("a", "b")]
        table = RoutingTable((replace(api, canary=replace(api.canary, gets_copies=True)),), keys=tuple(keys))
        await w.gateway.startup(table)
        assert [(await ask(w.port, "/a", **{"x-api-key": key})).status for key in ("b", "c")] == [403, 401]
        assert (await ask(w.port, "/a")).status == 401
        assert await servers_of(w, 2, **{"x-api-key": "a"}) == {"old": 2}
        assert await servers_of(w, 2, authorization="Bearer a") == {"old": 2}
        copies = await copies_of(w, 4)
        assert not any({"x-api-key", "authorization"} & set(copy["headers"]) for copy in copies)
