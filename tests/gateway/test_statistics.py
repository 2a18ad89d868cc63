"""Statistics: sums over gateways, and response totals over reloads and kills of gateways and operators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import replace

import psutil
import pytest

from cortex.gateway.runtime_api import BackendState, RuntimeApi, Unresponsive
from cortex.gateway.statistics import BackendStats, RefusedConnections, ResponseCounters, average_ms, sum_stats
from cortex.home import Home
from cortex.processes.codec import decode, encode
from cortex.processes.identity import Identity
from harness.servers.upstream import Answer, Client, Load, World, ask, backend, eventually, table, world

pytestmark = pytest.mark.processes


def seen(count: int, name: str = "api:a") -> dict[str, BackendState]:
    return {name: BackendState(responses={2: count})}


BUSY = BackendStats(3, 2, 7, {"a-0": 1, "b-0": 2}, {2: 30, 5: 1}, 10.0)
IDLE = BackendStats(1, 0, 1, {"b-0": 1}, {2: 8, 4: 2}, 52.0)
PID = 2**22 + 1  # never a process
ONE, TWO, THREE = Identity(1, 1.0), Identity(2, 1.0), Identity(3, 1.0)


def test_totals_grow_while_workers_start_and_end() -> None:
    counters = ResponseCounters()
    for now, total in (
        ({ONE: seen(5)}, 5),
        ({ONE: seen(6), TWO: seen(1)}, 7),
        ({TWO: seen(3)}, 9),
        ({TWO: None}, 9),
        ({TWO: seen(4)}, 10),
        ({Identity(2, 1000.0): seen(1)}, 11),
        ({THREE: {}}, 11),
    ):
        counters.update(now)
        assert counters.totals()["a"][2] == total


def test_totals_survive_dump_and_load() -> None:
    before, after = ResponseCounters(), ResponseCounters()
    before.update({ONE: seen(5), TWO: seen(7)})
    before.update({TWO: seen(8)})
    after.load(json.loads(json.dumps(before.dump())))
    after.update({Identity(2, 1.004): seen(9), THREE: seen(1, "jobs:a")})
    assert after.totals() == {"a": {2: 15}}


def test_a_change_of_the_clock_does_not_count_a_worker_twice() -> None:
    counters = ResponseCounters()
    counters.update({Identity(2, 1.0, "boot", 100): seen(7)})
    counters.load(json.loads(json.dumps(counters.dump())))
    counters.update({Identity(2, 3601.0, "boot", 100): seen(8)})
    assert counters.totals() == {"a": {2: 8}}
    counters.update({Identity(2, 3601.0, "boot", 200): seen(1)})
    assert counters.totals() == {"a": {2: 9}}


def test_totals_do_not_decrease_when_a_response_changes_its_class() -> None:
    counters = ResponseCounters()
    counters.update({ONE: {"api:a": BackendState(responses={0: 1, 2: 5})}})
    assert counters.totals() == {"a": {0: 1, 2: 5}}
    counters.update({ONE: {"api:a": BackendState(responses={0: 0, 2: 6})}})
    assert counters.totals() == {"a": {0: 1, 2: 6}}


def test_an_old_worker_no_longer_counts_for_a_forgotten_api() -> None:
    counters = ResponseCounters()
    counters.update({ONE: seen(5) | seen(1, "api:b")})
    counters.update({TWO: seen(0, "api:b"), ONE: seen(6) | seen(2, "api:b")})
    counters.forget(["b"])
    assert counters.totals() == {"b": {2: 2}}
    counters.load(json.loads(json.dumps(counters.dump())))
    counters.update({THREE: seen(1), TWO: {}, ONE: seen(7) | seen(3, "api:b")})
    assert counters.totals() == {"a": {2: 1}, "b": {2: 3}}
    counters.update({THREE: seen(2)})
    assert counters.totals() == {"a": {2: 2}, "b": {2: 3}}


def test_a_worker_that_reports_no_apis_while_it_ends_keeps_its_counts() -> None:
    counters = ResponseCounters()
    for now in ({ONE: seen(5)}, {ONE: {}}, {ONE: None}, {}):
        counters.update(now)
        assert counters.totals() == {"a": {2: 5}}


def test_a_worker_that_answers_late_is_counted() -> None:
    counters = ResponseCounters()
    counters.update({ONE: None})
    counters.update({ONE: seen(5)})
    assert counters.totals() == {"a": {2: 5}}


@pytest.mark.parametrize("data", [None, [], {}, {"ended": 1}, {"ended": {}, "living": [{}]}])
def test_load_refuses_invalid_data(data: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        ResponseCounters().load(data)


def test_the_average_is_weighted_by_the_requests_of_each_worker() -> None:
    assert average_ms([BackendState(), BackendState(average_ms=5.0)]) is None
    few = BackendState(average_ms=100.0, responses={2: 255, 5: 1})
    many = BackendState(average_ms=0.0, responses={2: 1_000_000})
    assert average_ms([few]) == 100.0
    assert average_ms([few, many]) == 100.0 * 256 / (256 + 1024)


def test_sums_weight_durations_by_responses() -> None:
    both = sum_stats([BUSY, IDLE])
    assert both == BackendStats(4, 2, 8, {"a-0": 1, "b-0": 3}, {2: 38, 4: 2, 5: 1}, both.average_ms)
    assert both.average_ms == (31 * 10 + 10 * 52) / 41


def test_the_sum_of_none_is_zero_and_of_one_is_itself() -> None:
    assert sum_stats([]) == BackendStats(0, 0)
    assert sum_stats([BUSY]) == BUSY


def test_stats_survive_the_round_trip_through_json() -> None:
    for stats in (BUSY, BackendStats(0, 0)):
        assert decode(BackendStats, json.loads(json.dumps(encode(stats)))) == stats


async def counted(w: World, api: str = "iris") -> dict[int, int]:
    return {kind: count for kind, count in (await w.gateway.stats())[api].responses.items() if count}


async def test_the_last_responses_of_old_workers_are_counted(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"))
        await w.gateway.startup(table(iris))
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        upstream = w.upstreams["a"]
        inside: list[asyncio.Task[Answer]] = []
        for number in range(4):
            inside += [asyncio.create_task(ask(w.port, "/iris?wait=1")) for _ in range(2)]

            async def all_inside(count: int = len(inside)) -> bool:
                return len(upstream.waiting) == count

            await eventually(all_inside)
            await w.gateway.apply(table(iris, backend(f"other{number}")))
            assert (await ask(w.port, "/iris")).status == 200
            assert (await ask(w.port, f"/other{number}")).status == 503
            # The requests of this round stay inside during the next reload.
            done, inside = inside[:-2], inside[-2:]
            upstream.release(len(done))
            await asyncio.gather(*done)
        upstream.release(len(inside))

        async def only_one_left() -> bool:
            await w.gateway.ensure_running()
            return not (await runtime.workers()).old

        await asyncio.gather(*inside)
        await eventually(only_one_left)
        assert await counted(w) == {2: 12}
        assert await counted(w, "other3") == {5: 1}


async def test_a_worker_that_has_ended_does_not_answer_with_empty_statistics(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris")))
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        with pytest.raises(Unresponsive):
            await runtime.backends(PID)


async def test_all_responses_are_counted_under_load_with_reloads(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"))
        await w.gateway.startup(table(iris))

        async def read_statistics() -> None:
            while True:
                with contextlib.suppress(Unresponsive):  # the master starts anew
                    await w.gateway.stats()
                await asyncio.sleep(0.002)

        reading = asyncio.create_task(read_statistics())
        async with Load(w.port, "/iris?sleep=0.005", pause_s=0) as load:
            for number in range(6):
                await w.gateway.apply(table(iris, backend(f"other{number}")))
                await load.more(200)
                await w.gateway.ensure_running()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert load.failures == []

        async def exact() -> bool:
            return await counted(w) == {2: load.answers}

        await eventually(exact)


async def test_the_average_duration_survives_a_reload(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"))
        await w.gateway.startup(table(iris))
        assert (await w.gateway.stats())["iris"].average_ms is None
        assert (await ask(w.port, "/iris?sleep=0.05")).status == 200
        measured = (await w.gateway.stats())["iris"].average_ms
        assert measured is not None and measured >= 50
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")

        async def old_worker_has_exited() -> bool:
            await w.gateway.stats()
            return not (await runtime.workers()).old

        await w.gateway.apply(table(iris, backend("other")))
        await eventually(old_worker_has_exited)

        assert (await w.gateway.stats())["iris"].average_ms == measured


async def test_an_api_that_was_deleted_and_deployed_again_starts_at_zero(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"))
        await w.gateway.startup(table(iris))
        idle = Client(w.port)  # its connection keeps the first HAProxy worker alive
        for _ in range(5):
            assert (await idle.get("/iris")).status == 200
        assert await counted(w) == {2: 5}
        slow = asyncio.create_task(ask(w.port, "/iris?wait=1"))
        upstream = w.upstreams["a"]

        async def is_inside() -> bool:
            return len(upstream.waiting) == 1

        await eventually(is_inside)

        await w.gateway.apply(table())
        await w.gateway.apply(table(iris))

        upstream.release(1)
        assert (await slow).status == 200
        assert await counted(w) == {}
        assert (await ask(w.port, "/iris")).status == 200
        assert await counted(w) == {2: 1}
        idle.close()


async def test_clients_that_disconnect_are_counted(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a", 1))))
        clients = [Client(w.port) for _ in range(3)]
        for client in clients:
            (await client.connect()).write(b"GET /iris?sleep=30 HTTP/1.1\r\nhost: x\r\n\r\n")

        async def queued() -> bool:
            return (await w.gateway.stats())["iris"].queued == 2

        await eventually(queued)
        for client in clients:
            client.close()

        async def all_counted() -> bool:
            return sum((await counted(w)).values()) == 3

        await eventually(all_counted)


async def test_totals_survive_restarts_of_operator_and_gateway(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"))
        await w.gateway.startup(table(iris))
        await w.gateway.apply(table(iris, backend("other")))
        for _ in range(3):
            await ask(w.port, "/iris")
        await w.gateway.ensure_running()
        await ask(w.port, "/iris")  # after the first operator's last count
        first, w.gateway = w.gateway, w.another_gateway()
        first._unwatch()  # as if it were killed
        first._totals.close()
        await w.gateway.startup(table(iris, backend("other")))
        assert await counted(w) == {2: 4}
        assert w.gateway.pid
        os.kill(w.gateway.pid, signal.SIGKILL)

        async def is_back() -> bool:
            return w.gateway.pid is not None and psutil.pid_exists(w.gateway.pid) and w.gateway.pid != first.pid

        await eventually(is_back)
        await w.gateway.ensure_running()
        assert (await ask(w.port, "/iris")).status == 200
        assert await counted(w) == {2: 5}
        await w.gateway.stop()
        await w.gateway.startup(table(iris))
        assert await counted(w) == {2: 5}
        (home.run_dir / "gateway" / "counters.json").write_text("{")
        await w.gateway.shutdown()
        w.gateway = w.another_gateway()
        await w.gateway.startup(table(replace(iris, servers=())))
        assert (await counted(w)).get(2, 0) == 0


def test_refused_connections_are_reported_once_a_minute() -> None:
    refused = RefusedConnections()
    reported = [
        refused.add(worker, count, now)
        for worker, count, now in [
            (1, 500, 0),  # of a gateway that ran before the operator
            (1, 500, 1),
            (1, 502, 2),
            (1, 509, 3),
            (2, 1, 61),  # after a reload
            (2, 1, 63),
            (2, 1, 200),
        ]
    ]
    assert (reported, refused.total) == ([0, 0, 2, 0, 0, 8, 0], 10)
