"""Gateways on real node agents, with real HAProxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex.gateway.access_log import LocalAccess
from cortex.gateway.routes import Server
from cortex.home import Home
from cortex.operator.http.log_streams import stream_access_log
from cortex.processes.identity import Identity
from harness.cluster.fleets import Operator, Site, eventually, site, until
from harness.cluster.local_nodes import LocalNode, local_nodes
from harness.homes import temporary_home
from harness.ports import free_port
from harness.servers.certificates import write_pair
from harness.servers.upstream import Upstream, backend, table

pytestmark = [pytest.mark.processes, pytest.mark.long]

TIMEOUT_S = 150.0


@pytest.fixture
def nodes() -> Iterator[list[LocalNode]]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 2) as made:
        yield made


def haproxy(node: LocalNode) -> Identity:
    """Return the gateway of a node."""
    found = Identity.read(node.home.run_dir / "gateway" / "identity.json")
    assert found is not None
    return found


async def answers(made: Site, node: LocalNode | None, api: str) -> int:
    return (await made.ask(node, f"/{api}")).status


async def total(operator: Operator, api: str, kind: int = 2) -> int:
    return (await operator.fleet.stats())[api].responses.get(kind, 0)


async def test_all_gateways_serve_the_same_table(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made, made.operator() as operator:
        first = await made.server("s1")
        await operator.fleet.startup(table(backend("one", first)))
        await operator.all_serve()
        assert operator.fleet.size() == 3
        for node in (None, *nodes):
            assert (await made.ask(node, "/one")).json()["server"] == "s1"
        await operator.fleet.apply(table(backend("one", await made.server("s2")), backend("two", first)))
        for node in (None, *nodes):  # at once: that is what `apply` waited for
            assert (await made.ask(node, "/one")).json()["server"] == "s2"
            assert (await made.ask(node, "/two")).json()["server"] == "s1"


async def test_each_gateway_reaches_replicas_on_its_machine_by_unix_socket(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        near = await Upstream(nodes[0].home.sockets_dir / "near").start()
        made.upstreams["near"] = near
        # Nothing listens at the address: who answers was asked at the path.
        server = Server("s1", f"{nodes[0].host}:{free_port()}", 10, near=near.address)
        async with made.operator() as operator:
            await operator.fleet.startup(table(backend("one")))
            await operator.all_serve()
            await operator.fleet.apply(table(backend("one", server)))  # the nodes are known by now
            assert [await answers(made, node, "one") for node in (None, *nodes)] == [200, 200, 503]
            assert near.served == 2
        async with made.operator() as operator:  # adopts what the last one fed
            await operator.fleet.startup(table(backend("one", server)))
            await operator.all_serve()
            assert [await answers(made, node, "one") for node in (None, *nodes)] == [200, 200, 503]


async def test_gateways_serve_without_operator_and_agent(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        async with made.operator() as operator:
            await operator.fleet.startup(table(backend("one", await made.server("s1"))))
            await operator.all_serve()
        before = haproxy(nodes[0])
        assert await answers(made, nodes[0], "one") == 200
        await asyncio.to_thread(nodes[0].kill)
        assert await answers(made, nodes[0], "one") == 200
        await asyncio.to_thread(nodes[0].start)
        async with made.operator() as operator:
            assert operator.fleet.size() == 3
            await operator.fleet.startup(table(backend("one"), backend("two", await made.server("s1"))))
            await operator.all_serve()
            assert await answers(made, nodes[0], "two") == 200
            assert await answers(made, nodes[0], "one") == 503
        assert haproxy(nodes[0]).is_same(before)


async def test_an_agent_restarts_haproxy_while_the_operator_is_away(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        async with made.operator() as operator:
            await operator.fleet.startup(table(backend("one", await made.server("s1"))))
            await operator.all_serve()
        before = haproxy(nodes[0])
        await asyncio.to_thread(nodes[0].kill)
        os.killpg(before.pid, signal.SIGKILL)
        await asyncio.to_thread(nodes[0].start)

        async def is_served() -> bool:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                return await answers(made, nodes[0], "one") == 200
            return False

        await eventually(is_served)
        assert not haproxy(nodes[0]).is_same(before)


async def test_a_silent_node_blocks_nothing_and_gets_the_newest_table_when_it_is_back(
    home: Home, nodes: list[LocalNode]
) -> None:
    async with site(home, nodes) as made, made.operator() as operator:
        server = await made.server("s1")
        await operator.fleet.startup(table(backend("one", server)))
        await operator.all_serve()
        silent = nodes[0].process
        assert silent is not None
        os.kill(silent.pid, signal.SIGSTOP)
        try:
            await operator.fleet.apply(table(backend("two", server)))
            await operator.fleet.apply(table(backend("three", server)))
            assert [await answers(made, node, "three") for node in (None, nodes[1])] == [200, 200]
            assert [await answers(made, nodes[0], api) for api in ("one", "three")] == [200, 404]
            assert operator.reasons()[nodes[0].host]
            assert operator.reasons()[nodes[1].host] == ""
            assert await operator.fleet.drained({"s0"}) == {"s0"}
        finally:
            os.kill(silent.pid, signal.SIGCONT)
        await operator.all_serve()
        assert [await answers(made, nodes[0], api) for api in ("one", "three")] == [404, 200]


async def test_a_server_with_a_request_from_a_nodes_gateway_is_not_drained(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made, made.operator() as operator:
        server = await made.server("s1")
        await operator.fleet.startup(table(backend("one", server)))
        await operator.all_serve()
        slow = await made.client(nodes[0])
        await slow.get("/one?chunks=1")
        await operator.fleet.apply(table(backend("one")))
        assert await operator.fleet.drained({"s1"}) == set()

        async def counts() -> bool:
            return (await operator.fleet.stats())["one"].in_flight == 1

        await eventually(counts)
        made.upstreams["s1"].open_streams[0].write(b"0\r\n\r\n")

        async def is_drained() -> bool:
            return await operator.fleet.drained({"s1"}) == {"s1"}

        await eventually(is_drained)
        slow.close()


async def test_replacing_replicas_fails_no_request_through_the_gateway_of_a_node(
    home: Home, nodes: list[LocalNode]
) -> None:
    async with site(home, nodes) as made, made.operator() as operator:
        await operator.fleet.startup(table(backend("one", await made.server("s0"))))
        await operator.all_serve()
        seen: list[int] = []
        is_over = asyncio.Event()

        async def ask_on(node: LocalNode) -> None:
            client = await made.client(node)
            while not is_over.is_set():
                seen.append((await client.get("/one")).status)
            client.close()

        asking = [asyncio.create_task(ask_on(node)) for node in (*nodes, *nodes)]
        for number in range(1, 6):
            await operator.fleet.apply(table(backend("one", await made.server(f"s{number}"))))
            old = f"s{number - 1}"
            await eventually(lambda old=old: operator.fleet.drained({old}))
            await made.upstreams[old].stop()
            goal = len(seen) + 40
            await until(lambda goal=goal: len(seen) >= goal)
        is_over.set()
        await asyncio.gather(*asking)
        assert set(seen) == {200}


async def test_totals_never_decrease(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        routes = table(backend("one", await made.server("s1")))

        async def reaches(operator: Operator, wanted: int) -> None:
            async def is_there() -> bool:
                return await total(operator, "one") == wanted

            await eventually(is_there)

        async with made.operator() as operator:
            await operator.fleet.startup(routes)
            await operator.all_serve()
            for node in (None, nodes[0], nodes[0], nodes[1]):
                assert await answers(made, node, "one") == 200
            await reaches(operator, 4)
            await asyncio.to_thread(nodes[0].kill)
            await until(lambda: operator.reasons()[nodes[0].host])
            assert await total(operator, "one") == 4
            assert await answers(made, nodes[0], "one") == 200  # counted once its agent is back
            await asyncio.to_thread(nodes[0].start)
            await reaches(operator, 5)
            # A node that is set up anew begins to count anew.
            await asyncio.to_thread(nodes[1].stop_all)
            for name in ("counts-id", "counters.json"):
                (nodes[1].home.run_dir / "gateway" / name).unlink()
            await until(lambda: operator.reasons()[nodes[1].host])  # as long as no agent runs there
            await asyncio.to_thread(nodes[1].start)
            await operator.all_serve()
            assert await total(operator, "one") == 5
            assert await answers(made, nodes[1], "one") == 200
            await reaches(operator, 6)
        async with made.operator() as operator:
            await operator.fleet.startup(routes)
            assert await total(operator, "one") >= 6


async def test_jobs_reach_the_operator_through_the_gateway_of_a_node(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        jobs = await Upstream(home.jobs_socket).start()
        try:
            async with made.operator() as operator:
                await operator.fleet.startup(table(backend("batch", jobs_socket=str(home.jobs_socket))))
                await operator.all_serve()

                async def is_taken() -> bool:  # its agent may not know yet where the operator is
                    return (await made.ask(nodes[0], "/batch", "POST", b"{}")).status == 200

                await eventually(is_taken)
                assert jobs.seen[-1]["headers"]["x-cortex-api"] == "batch"
                await jobs.stop()  # as its process would
            for size in (0, 1, 3_000_000):
                away = await made.ask(nodes[0], "/batch", "POST", b"x" * size)
                assert (away.status, away.json()["kind"]) == (503, "operator_unavailable")
                assert away.headers["retry-after"] == "1"
        finally:
            await jobs.stop()


async def test_documentation_reaches_the_operator_through_the_gateway_of_a_node(
    home: Home, nodes: list[LocalNode]
) -> None:
    async with site(home, nodes) as made:
        jobs = await Upstream(home.jobs_socket).start()
        try:
            async with made.operator() as operator:
                one = backend("one", await made.server("s1"), has_docs=True)
                await operator.fleet.startup(table(one, operator_socket=str(home.jobs_socket)))
                await operator.all_serve()

                async def is_answered() -> bool:  # its agent may not know yet where the operator is
                    return (await made.ask(nodes[0], "/one/docs")).status == 200

                await eventually(is_answered)
                assert jobs.seen[-1]["headers"]["x-cortex-docs"] == "api:one"
                await jobs.stop()  # as its process would
            away = await made.ask(nodes[0], "/one/docs")
            assert away.status == 503
            assert "documentation are not available" in away.json()["error"]
            assert (await made.ask(nodes[0], "/one")).status == 200
        finally:
            await jobs.stop()


async def test_access_logs_of_all_gateways_are_merged(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made, made.operator() as operator:
        await operator.fleet.startup(table(backend("one", await made.server("s1"), access_log=True)))
        await operator.all_serve()
        await until(lambda: all(link.is_up for link in operator.engine.nodes.values()))
        sources = [LocalAccess(home.logs_dir), *operator.engine.nodes.values()]
        for node in (None, *nodes):
            assert await answers(made, node, "one") == 200

        async def lines(follow: bool, tail: int = 1000) -> AsyncIterator[dict[str, Any]]:
            async for text in stream_access_log(sources, "one", None, follow, tail, True).body_iterator:
                yield json.loads(str(text))

        async def are_there() -> bool:
            return len([line async for line in lines(False)]) == 3

        await eventually(are_there)
        found = [line async for line in lines(False)]
        assert {line.get("gateway") for line in found} == {None, *(node.host for node in nodes)}
        assert [line async for line in lines(False, tail=1)] == found[-1:]
        following = lines(True, tail=1)
        assert await anext(following) == found[-1]
        assert (await made.ask(nodes[0], "/one?again")).status == 200
        assert (await anext(following))["gateway"] == nodes[0].host
        await following.aclose()  # type: ignore[attr-defined]


async def test_a_gateway_that_can_not_listen_is_reported_and_blocks_nothing(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made, made.operator() as operator:
        with socket.create_server((nodes[0].host, made.port)):
            await operator.fleet.startup(table(backend("one", await made.server("s1"))))
            await until(lambda: "can't listen" in operator.reasons().get(nodes[0].host, ""))
            await operator.fleet.apply(table(backend("two", await made.server("s1"))))
            assert await answers(made, None, "two") == 200
        await operator.all_serve()
        assert await answers(made, nodes[0], "two") == 200


async def test_the_next_operator_ends_unwanted_gateways(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        routes = table(backend("one", await made.server("s1")))
        async with made.operator() as operator:
            await operator.fleet.startup(routes)
            await operator.all_serve()
        left = [haproxy(node) for node in nodes]
        async with made.operator("group:edge") as operator:
            await operator.fleet.startup(routes)
            await until(lambda: not any(each.is_alive() for each in left))
            assert operator.fleet.describe() == []
            assert await answers(made, None, "one") == 200


async def test_only_a_changed_setting_ends_gateways_while_ray_is_away(home: Home, nodes: list[LocalNode]) -> None:
    with temporary_home() as other:
        async with site(home, nodes) as made:
            server = await made.server("s1")
            async with made.operator(epoch=1) as first:
                await first.fleet.startup(table(backend("one", server)))
                await first.all_serve()
                await until(lambda: json.loads(made.facts.get("gateways") or "{}").keys() == {n.host for n in nodes})
            before = [haproxy(node) for node in nodes]
            async with made.operator(epoch=2, home=other, is_available=False) as second:
                second.fleet._own = first.own  # of one machine there is one
                await second.fleet.startup(table(backend("two", server)))
                await second.all_serve()
                await until(lambda: all(link.is_up for link in second.engine.nodes.values()))
                await second.fleet._check_once()
                await second.all_serve()
                assert [await answers(made, node, "two") for node in (None, *nodes)] == [200] * 3
            assert all(haproxy(node).is_same(was) for node, was in zip(nodes, before, strict=True))
            async with made.operator("operator", epoch=3, home=other, is_available=False) as third:
                third.fleet._own = first.own
                await third.fleet.startup(table(backend("two", server)))
                await until(lambda: not any(each.is_alive() for each in before))


async def test_a_standby_on_a_node_leads_with_the_gateway_that_its_node_has(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        server = await made.server("s1")
        async with made.operator(epoch=1) as first:
            await first.fleet.startup(table(backend("one", server)))
            await first.all_serve()
        before = haproxy(nodes[1])
        with temporary_home() as other:
            async with made.operator(epoch=2, home=other, at=nodes[1], is_available=False) as second:
                await second.fleet.startup(table(backend("two", server)))
                await second.all_serve()
                assert await answers(made, nodes[1], "two") == 200
                assert second.fleet.size() == 2
                assert haproxy(nodes[1]).is_same(before)


async def test_the_gateway_of_a_former_leader_follows_the_next_one(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        server = await made.server("s1")
        async with made.operator(epoch=1, at=nodes[0]) as first:
            await first.fleet.startup(table(backend("one", server)))
            await first.all_serve()
            assert [await answers(made, node, "one") for node in nodes] == [200, 200]
        before = haproxy(nodes[0])
        with temporary_home() as other:
            async with made.operator(epoch=2, home=other) as second:
                await second.fleet.startup(table(backend("two", server)))
                await second.all_serve()
                assert [await answers(made, node, "two") for node in (None, *nodes)] == [200] * 3
                assert await answers(made, nodes[0], "one") == 404
                await second.own.stop()
        assert haproxy(nodes[0]).is_same(before)


async def test_a_node_takes_over_the_gateway_of_its_operator_and_back(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made:
        routes = table(backend("one", await made.server("s1")))
        async with made.operator(epoch=1, at=nodes[0], is_available=False) as first:
            await first.fleet.startup(routes)  # nothing is known of nodes yet
            assert first.fleet.pid is not None
            assert await answers(made, nodes[0], "one") == 200
            first.placer.is_available = True
            await first.all_serve()
            assert first.fleet.pid is None
            assert await answers(made, nodes[0], "one") == 200
        async with made.operator("operator", epoch=2, at=nodes[0]) as second:
            await until(lambda: all(link.is_up for link in second.engine.nodes.values()))
            await second.fleet.startup(routes)
            assert second.fleet.pid is not None
            assert await answers(made, nodes[0], "one") == 200


async def test_a_gateway_that_was_away_for_long_serves_again_without_ray(
    home: Home, nodes: list[LocalNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortex.cluster.gateways._GONE_S", 0.1)
    async with site(home, nodes) as made, made.operator() as operator:
        server = await made.server("s1")
        await operator.fleet.startup(table(backend("one", server)))
        await operator.all_serve()
        before = haproxy(nodes[0])
        operator.placer.lose(nodes[0].address)
        await asyncio.to_thread(nodes[0].kill)
        await until(lambda: operator.fleet.size() == 2)
        assert await answers(made, nodes[0], "one") == 200
        await asyncio.to_thread(nodes[0].start)
        await operator.fleet.apply(table(backend("two", server)))
        await until(lambda: operator.reasons().get(nodes[0].host) == "")
        assert await answers(made, nodes[0], "two") == 200
        assert haproxy(nodes[0]).is_same(before)


async def test_commands_of_an_earlier_leader_are_refused(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made, made.operator(epoch=1) as old:
        server = await made.server("s1")
        await old.fleet.startup(table(backend("one", server)))
        await old.all_serve()
        async with made.operator(epoch=2) as new:
            new.fleet._own = old.own  # of one home there is one
            await new.fleet.startup(table(backend("two", server)))
            await new.all_serve()
            await until(lambda: all("epoch 2 leads" in reason for reason in old.reasons().values()))
            await old.fleet.apply(table(backend("three", server)))
            assert [await answers(made, nodes[0], api) for api in ("two", "three")] == [200, 404]


async def test_gateways_of_nodes_serve_the_certificate_and_its_replacement(
    home: Home, nodes: list[LocalNode], tmp_path: Path
) -> None:
    certificates = [write_pair(tmp_path, nodes[0].host, stem=f"c{number}") for number in range(2)]

    async def serves(made: Site, certificate: Path) -> bool:
        context = ssl.create_default_context(cafile=certificate)
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(nodes[0].host, made.port, ssl=context)
            writer.close()
            return True
        return False

    async with site(home, nodes) as made, made.operator() as operator:
        await operator.fleet.startup(table(backend("one", await made.server("s1"))))
        for certificate, key in certificates:
            operator.fleet.use_certificate(certificate.read_text() + key.read_text())
            await eventually(lambda certificate=certificate: serves(made, certificate))
            assert operator.fleet.describe()[0]["url"] == f"https://{nodes[0].host}:{made.port}"


async def test_saved_settings_of_a_node_are_readable_by_their_owner_only(home: Home, nodes: list[LocalNode]) -> None:
    async with site(home, nodes) as made, made.operator() as operator:
        await operator.fleet.startup(table(backend("one"), gateway_secret="5ec2e7"))
        await operator.all_serve()
        file = nodes[0].home.run_dir / "node-gateway.json"
        assert json.loads(file.read_text())["settings"]["port"] == made.port
        assert file.stat().st_mode & 0o777 == 0o600
