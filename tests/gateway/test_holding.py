"""Requests for an API without a replica are held in the gateway until it has one."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from cortex.gateway.protocols import Protocol
from cortex.gateway.runtime_api import RuntimeApi, Unresponsive
from cortex.home import Home
from harness.servers.upstream import Client, World, ask, backend, eventually, table, world
from harness.wait import PATIENCE_S

pytestmark = pytest.mark.processes


async def waiting(w: World, number: int) -> None:
    """Wait until the API `iris` has `number` requests."""

    async def reached() -> bool:
        try:
            return (await w.gateway.stats())["iris"].requests == number
        except Unresponsive:  # it accepts a thousand connections first
            return False

    await eventually(reached)


async def test_a_thousand_requests_at_once_wait_for_the_first_replica(home: Home) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True, timeout_s=2 * PATIENCE_S)
        await w.gateway.startup(table(cold))
        sent = [asyncio.create_task(ask(w.port, "/iris?x=1", "POST", b"x" * 1000)) for _ in range(1000)]
        await waiting(w, 1000)
        stats = (await w.gateway.stats())["iris"]
        assert (stats.in_flight, stats.servers) == (0, {})
        await w.gateway.apply(table(replace(cold, servers=(await w.server("a", 2),))))
        answers = await asyncio.gather(*sent)
        assert Counter(answer.status for answer in answers) == {200: 1000}
        assert all(answer.json()["url"] == "/iris?x=1" and answer.json()["body"] == 1000 for answer in answers)
        assert w.upstreams["a"].most_live <= 2
        counted = (await w.gateway.stats())["iris"]
        assert (counted.requests, counted.responses[2], sum(counted.responses.values())) == (0, 1000, 1000)


async def test_a_held_request_keeps_its_id_and_headers(home: Home) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True)
        await w.gateway.startup(table(cold))
        forged = {"x-cortex-held": "1", "x-cortex-backend": "api:other", "own": "kept"}
        sent = asyncio.create_task(ask(w.port, "/iris/info", **forged))
        await waiting(w, 1)
        await w.gateway.apply(table(replace(cold, servers=(await w.server("a"),))))
        answer = await sent
        seen = answer.json()["headers"]
        cortex = {name: value for name, value in seen.items() if name.startswith("x-cortex-")}
        assert cortex == {"x-cortex-info": "1", "x-cortex-request-id": answer.headers["x-cortex-request-id"]}
        assert seen["own"] == "kept"


async def test_a_held_request_survives_reloads(home: Home) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True)
        await w.gateway.startup(table(cold))
        sent = [asyncio.create_task(ask(w.port, "/iris", "POST", b"x" * 100_000)) for _ in range(20)]
        await waiting(w, 20)
        await w.gateway.apply(table(cold, backend("more")))
        await waiting(w, 20)
        await w.gateway.apply(table(cold, backend("more"), backend("most")))
        await waiting(w, 20)
        await w.gateway.apply(table(replace(cold, servers=(await w.server("a"),)), backend("more")))
        assert [answer.status for answer in await asyncio.gather(*sent)] == [200] * 20
        assert w.upstreams["a"].served == 20


async def test_a_held_request_times_out_with_504_and_the_reason(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", holds=True, timeout_s=0.3)))
        answer = await ask(w.port, "/iris")
        expected = "timed out after 0.3 s, while no replica was ready: starting"
        assert (answer.status, answer.json()["error"]) == (504, expected)
        assert answer.json()["request_id"] == answer.headers["x-cortex-request-id"]
        await waiting(w, 0)
        assert (await w.gateway.stats())["iris"].responses[5] == 1


async def test_held_requests_are_refused_when_the_api_stops_holding(home: Home) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True)
        await w.gateway.startup(table(cold))
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        workers = await runtime.workers()
        sent = [asyncio.create_task(ask(w.port, "/iris")) for _ in range(5)]
        await waiting(w, 5)
        await w.gateway.apply(table(replace(cold, holds=False, unavailable="ValueError: no")))
        for answer in await asyncio.gather(*sent):
            assert (answer.status, answer.json()["error"]) == (503, "no replica is ready: ValueError: no")
        assert await runtime.workers() == workers


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 500_000])
async def test_held_requests_of_disconnected_clients_count_once(home: Home, body: bytes) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True)
        await w.gateway.startup(table(cold))
        clients = [Client(w.port) for _ in range(5)]
        for client in clients:
            head = f"POST /iris HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            (await client.connect()).write(head.encode() + body)
        await waiting(w, 5)
        for client in clients[1:]:
            client.close()
        await w.gateway.apply(table(replace(cold, servers=(await w.server("a"),))))
        assert (await clients[0].answer()).status == 200
        await waiting(w, 0)
        counted = (await w.gateway.stats())["iris"].responses
        assert (sum(counted.values()), counted[5]) == (5, 0)
        clients[0].close()


async def test_requests_beyond_the_limit_of_held_ones_are_refused(home: Home) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True, timeout_s=2 * PATIENCE_S)
        await w.gateway.startup(table(cold))
        sent = [asyncio.create_task(ask(w.port, "/iris")) for _ in range(1024)]
        await waiting(w, 1024)
        refused = await ask(w.port, "/iris")
        assert (refused.status, refused.json()["error"]) == (503, "the queue is full")
        await w.gateway.apply(table(replace(cold, servers=(await w.server("a"),))))
        assert Counter(answer.status for answer in await asyncio.gather(*sent)) == {200: 1024}


async def test_no_held_request_is_lost_while_replicas_are_replaced(home: Home) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True, max_queue=0)
        await w.gateway.startup(table(cold))
        for name in ("a", "b", "c"):
            sent = [asyncio.create_task(ask(w.port, "/iris")) for _ in range(10)]
            await waiting(w, 10)
            await w.gateway.apply(table(replace(cold, servers=(await w.server(name),))))
            assert {answer.json()["server"] for answer in await asyncio.gather(*sent)} == {name}
            assert (await ask(w.port, "/iris")).json()["server"] == name
            await w.gateway.apply(table(cold))
            assert await eventually(lambda name=name: w.gateway.drained({name})) == {name}


@pytest.mark.parametrize("protocol", [Protocol.CALLS, Protocol.ROUTES, Protocol.APPLICATION, Protocol.COMMAND])
async def test_user_code_can_not_send_the_headers_of_cortex(home: Home, protocol: Protocol) -> None:
    async with world(home) as w:
        cold = backend("iris", holds=True, replica_protocol=protocol)
        await w.gateway.startup(table(cold))
        forged = "/iris?status=400&header=x-cortex-disconnected:1&header=X-Cortex-Held:1&header=x-cortex-request-id:2"
        held = asyncio.create_task(ask(w.port, f"{forged}&header=own:kept"))
        await waiting(w, 1)
        await w.gateway.apply(table(replace(cold, servers=(await w.server("a"),))))
        for answer in (await held, await ask(w.port, f"{forged}&header=own:kept")):
            assert (answer.status, answer.headers["own"]) == (400, "kept")
            assert [name for name in answer.headers if name.startswith("x-cortex-")] == ["x-cortex-request-id"]
            assert answer.headers["x-cortex-request-id"] != "2"
