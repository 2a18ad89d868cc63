"""Splitters: the distribution of requests by weight, and copies for a shadow."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from cortex.gateway.maps import SLOTS_MAP, fixed_maps, live_maps
from cortex.gateway.routes import ApiBackend, RoutingTable, Share, Split
from cortex.gateway.runtime_api import RuntimeApi
from cortex.home import Home
from harness.homes import temporary_home
from harness.servers.upstream import Client, World, ask, backend, eventually, run, world

pytestmark = pytest.mark.processes

SPLIT = Split("ab", "/ab", (Share("a", 30), Share("b", 70)))


def split_table(*splits: Split, backends: tuple[ApiBackend, ...]) -> RoutingTable:
    return RoutingTable(backends, splits)


async def started(w: World, split: Split = SPLIT, **shadow: object) -> tuple[ApiBackend, ...]:
    """Start a gateway with the APIs `a` and `b`, and the shadow `s`."""
    backends = (
        backend("a", await w.server("a")),
        backend("b", await w.server("b")),
        backend("s", await w.server("s"), **shadow),
    )
    await w.gateway.startup(split_table(split, backends=backends))
    return backends


async def send(w: World, count: int, path: str = "/ab") -> Counter[str]:
    """Send requests in sequence on a few connections, and count responses by server."""
    seen: Counter[str] = Counter()

    async def some(client: Client) -> None:
        for _ in range(count // 4):
            answer = await client.request("POST", path, b"{}", {})
            assert answer.status == 200
            seen[answer.json()["server"]] += 1
        client.close()

    await asyncio.gather(*(some(Client(w.port)) for _ in range(4)))
    return seen


async def copies(w: World, number: int) -> None:
    async def reached() -> bool:
        return w.upstreams["s"].served == number

    await eventually(reached)


async def test_requests_are_split_by_weight_and_weights_change_without_a_reload(home: Home) -> None:
    async with world(home) as w:
        backends = await started(w)
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        workers = await runtime.workers()
        seen = await send(w, 2000)
        assert abs(seen["a"] - 600) < 6 * (2000 * 0.3 * 0.7) ** 0.5
        stats = await w.gateway.stats()
        assert (stats["a"].responses[2], stats["b"].responses[2]) == (seen["a"], seen["b"])
        for shares, expected in (
            ((Share("a", 100), Share("b", 0)), {"a": 100}),
            ((Share("s", 100),), {"s": 100}),
        ):
            await w.gateway.apply(split_table(replace(SPLIT, shares=shares), backends=backends))
            assert await send(w, 100) == expected
        assert await runtime.workers() == workers


async def test_a_split_request_is_treated_like_a_request_to_its_api(home: Home) -> None:
    async with world(home) as w:
        split = replace(SPLIT, shares=(Share("a", 100),))
        await w.gateway.startup(split_table(split, backends=(backend("a", await w.server("a"), max_body_bytes=10),)))
        for path in ("/ab", "/ab/", "/ab?x=1", "/ab/info?x=/y"):
            answer = await ask(w.port, path, x_cortex_shadow="1")
            assert (answer.status, answer.json()["url"]) == (200, path)
            assert answer.json()["headers"].get("x-cortex-info") == ("1" if "info" in path else None)
        assert (await ask(w.port, "/ab", "POST", b"x" * 11)).status == 413
        assert (await ask(w.port, "/ab/x")).status == 404
        assert (await ask(w.port, "/a")).json()["server"] == "a"
        assert (await w.gateway.stats())["a"].responses[4] == 1


async def test_a_shadow_receives_copies_by_weight_and_its_responses_are_dropped(home: Home) -> None:
    async with world(home) as w:
        backends = await started(w, replace(SPLIT, shadow=Share("s", 100)))
        answer = await ask(w.port, "/ab?x=%20&y", "POST", b"x" * 300_000, **{"content-type": "a/b", "own": "1"})
        assert answer.json()["server"] in "ab"
        await copies(w, 1)
        copy = w.upstreams["s"].seen[-1]
        assert (copy["method"], copy["url"], copy["body"]) == ("POST", "/ab?x=%20&y", 300_000)
        headers = copy["headers"]
        assert (headers["content-type"], headers["own"], headers["x-cortex-shadow"]) == ("a/b", "1", "1")
        assert headers["x-cortex-request-id"] == answer.headers["x-cortex-request-id"]
        assert "x-cortex-shadow" not in answer.json()["headers"]
        await ask(w.port, "/ab/info")
        await send(w, 100)
        await copies(w, 101)

        async def counted() -> bool:  # once the gateway has the responses, too
            return (await w.gateway.stats())["s"].responses[2] == 101

        await eventually(counted)
        half = replace(SPLIT, shadow=Share("s", 50))
        await w.gateway.apply(split_table(half, backends=backends))
        await send(w, 400)
        await w.gateway.apply(split_table(SPLIT, backends=backends))
        await send(w, 100)
        assert abs(w.upstreams["s"].served - 301) < 6 * (400 * 0.25) ** 0.5


@pytest.mark.parametrize("body", [1_000_001, 3_000_000])
async def test_a_body_larger_than_the_buffer_is_not_copied(home: Home, body: int) -> None:
    async with world(home) as w:
        await started(w, replace(SPLIT, shadow=Share("s", 100)))
        assert (await ask(w.port, "/ab", "POST", b"x" * body)).json()["body"] == body
        head = b"POST /ab HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        client = Client(w.port)
        (await client.connect()).write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (body, b"x" * body))
        assert (await client.answer()).json()["body"] == body
        client.close()
        await ask(w.port, "/ab", "POST", b"small")
        await copies(w, 1)


async def test_a_copy_keeps_the_order_of_repeated_headers(home: Home) -> None:
    async with world(home) as w:
        await started(w, replace(SPLIT, shadow=Share("s", 100)))
        client = Client(w.port)
        writer = await client.connect()
        writer.write(b"GET /ab HTTP/1.1\r\nhost: x\r\nvia: 1\r\nvia: 2\r\nempty:\r\nvia: 3\r\n\r\n")
        assert (await client.answer()).status == 200
        client.close()
        await copies(w, 1)
        copy = w.upstreams["s"].seen[-1]
        assert [value for name, value in copy["all_headers"] if name == "via"] == ["1", "2", "3"]
        assert copy["headers"]["empty"] == ""


def test_copies_are_made_in_a_home_with_a_space_in_its_path() -> None:
    async def scenario(home: Home) -> None:
        async with world(home) as w:
            await started(w, replace(SPLIT, shadow=Share("s", 100)))
            assert (await ask(w.port, "/ab", "POST", b"{}")).status == 200
            await copies(w, 1)

    with temporary_home(prefix="cortex ") as home:
        run(scenario(home))


async def test_an_unreachable_shadow_affects_no_request(home: Home) -> None:
    async with world(home) as w:
        backends = await started(w, replace(SPLIT, shadow=Share("s", 100)))
        await w.upstreams["s"].stop()
        assert sum((await send(w, 100)).values()) == 100
        without = (backends[0], backends[1], replace(backends[2], servers=()))
        await w.gateway.apply(split_table(replace(SPLIT, shadow=Share("s", 100)), backends=without))
        assert sum((await send(w, 100)).values()) == 100
        gone = split_table(replace(SPLIT, shadow=Share("s", 100)), backends=backends[:2])
        await w.gateway.apply(gone)
        assert sum((await send(w, 100)).values()) == 100


async def test_a_slow_shadow_delays_no_request_and_copies_are_bounded(home: Home) -> None:
    async with world(home) as w:
        split = Split("ab", "/ab", (Share("a", 100),), Share("s", 100))
        slow = await w.server("s", 1)
        w.upstreams["s"].mute = True
        await w.gateway.startup(split_table(
            split, backends=(backend("a", await w.server("a")), backend("s", slow, max_queue=10_000))
        ))  # fmt: skip
        assert (await send(w, 400)) == {"a": 400}
        stats = (await w.gateway.stats())["s"]
        assert 200 <= stats.requests <= 256


def test_the_share_of_a_missing_api_is_a_404() -> None:
    table = split_table(SPLIT, backends=(backend("a"), backend("b", jobs_socket="/s")))
    values = Counter(live_maps(table)[SLOTS_MAP].values())
    assert values == {"api:a": 30, "cortex-unknown": 70}


def test_an_own_endpoint_precedes_derived_paths_of_a_splitter() -> None:
    inner = backend("inner", endpoint="/ab/info")
    maps = fixed_maps(split_table(SPLIT, backends=(inner, backend("a"), backend("b"))))
    assert maps["routes.map"]["/ab/info"] == "api:inner"
    assert set(maps["splits.map"]) == {"/ab", "/ab/"}
