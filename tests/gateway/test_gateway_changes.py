"""Servers and APIs are added and removed without failed requests."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from cortex.gateway.runtime_api import RuntimeApi
from cortex.home import Home
from harness.servers.upstream import Client, Load, ask, backend, eventually, release, table, world
from harness.wait import PATIENCE_S

pytestmark = pytest.mark.processes


async def test_servers_are_added_and_removed_under_load_without_a_failed_request(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("r0"))))
        pid = w.gateway.pid
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        worker = await runtime.workers()
        async with Load(w.port, "/iris?sleep=0.005") as load:
            for number in range(1, 9):
                await w.gateway.apply(
                    table(backend("iris", await w.server(f"r{number - 1}"), await w.server(f"r{number}", 5)))
                )
                await load.more()
                await w.gateway.apply(table(backend("iris", await w.server(f"r{number}", 7))))
                gone, stays = f"r{number - 1}", f"r{number}"
                assert await eventually(partial(w.gateway.drained, {gone, stays})) == {gone}
                await w.upstreams[gone].stop()
                await load.more()
            assert load.failures == []
            assert [client.connects for client in load.clients] == [1] * len(load.clients)
        assert all(w.upstreams[f"r{number}"].served > 0 for number in range(9))
        assert (await runtime.workers(), w.gateway.pid) == (worker, pid)
        assert (await w.gateway.stats())["iris"].servers.keys() == {"r8"}


async def test_a_server_with_a_request_inside_is_drained_only_after_it(home: Home) -> None:
    iris = partial(backend, "iris", timeout_s=PATIENCE_S)
    async with world(home) as w:
        old, new = await w.server("old"), await w.server("new")
        await w.gateway.startup(table(iris(old)))
        inside = asyncio.create_task(ask(w.port, "/iris?wait=1"))

        async def is_inside() -> bool:
            return bool(w.upstreams["old"].waiting) and (await w.gateway.in_flight()).get("old") == 1

        await eventually(is_inside)
        await w.gateway.apply(table(iris(new)))
        assert await w.gateway.drained({"old"}) == set()
        assert (await ask(w.port, "/iris")).json()["server"] == "new"
        await w.gateway.apply(table(iris(new, old)))  # added again while it drains
        assert await w.gateway.drained({"old"}) == set()
        await w.gateway.apply(table(iris(new)))
        w.upstreams["old"].release(1)
        assert (await inside).status == 200
        assert await eventually(lambda: w.gateway.drained({"old"})) == {"old"}


async def test_capacity_changes_at_once(home: Home) -> None:
    async with world(home) as w:
        iris = partial(backend, "iris", timeout_s=PATIENCE_S)
        await w.gateway.startup(table(iris(await w.server("a", 1))))
        sent = [asyncio.create_task(ask(w.port, "/iris?wait=1")) for _ in range(5)]

        async def queued() -> bool:
            return (await w.gateway.stats())["iris"].queued == 4

        await eventually(queued)
        await w.gateway.apply(table(iris(await w.server("a", 4))))
        stats = (await w.gateway.stats())["iris"]
        assert (stats.in_flight, stats.queued) == (4, 1)
        await release(w, 5)
        assert [each.status for each in await asyncio.gather(*sent)] == [200] * 5


async def test_new_apis_cause_reloads_under_load_without_a_failed_request(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"))
        await w.gateway.startup(table(iris))
        pid = w.gateway.pid
        async with Load(w.port, "/iris?sleep=0.005") as load:
            for number in range(5):
                more = backend(f"more{number}", await w.server(f"m{number}"), timeout_s=1 + number)
                await w.gateway.apply(table(iris, more))
                assert (await ask(w.port, f"/more{number}")).status == 200
                await load.more()
            assert load.failures == []
        assert (await ask(w.port, "/more0")).status == 404
        assert w.gateway.pid == pid


async def test_an_idle_connection_survives_a_reload_and_finds_the_new_servers(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("old"))))
        idle = Client(w.port)
        assert (await idle.get("/iris")).json()["server"] == "old"
        await w.gateway.apply(table(backend("iris", await w.server("new"), timeout_s=3)))
        await eventually(lambda: w.gateway.drained({"old"}))
        await w.upstreams["old"].stop()
        answer = await idle.get("/iris")
        assert (answer.status, answer.json()["server"], idle.connects) == (200, "new", 1)


async def test_a_request_inside_a_removed_api_is_finished(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"), timeout_s=PATIENCE_S)))
        inside = asyncio.create_task(ask(w.port, "/iris?wait=1"))

        async def is_inside() -> bool:
            return bool(w.upstreams["a"].waiting) and (await w.gateway.in_flight()).get("a") == 1

        await eventually(is_inside)
        await w.gateway.apply(table())
        assert (await ask(w.port, "/iris")).status == 404
        assert await w.gateway.drained({"a"}) == set()
        w.upstreams["a"].release(1)
        assert (await inside).status == 200
        assert await eventually(lambda: w.gateway.drained({"a"})) == {"a"}
