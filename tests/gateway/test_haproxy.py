"""The gateway with a real HAProxy: what callers get, and that they notice nothing of changes behind it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
from functools import partial

import psutil
import pytest

from cortex.errors import GatewayError
from cortex.gateway.config import CONFIG_FILE, ROUTES_MAP
from cortex.gateway.haproxy import HUNG_AFTER_PROBES, Gateway, GatewaySettings
from cortex.gateway.process import TRIM_ABOVE_BYTES
from cortex.gateway.runtime import Runtime
from cortex.home import Home
from gateway.upstream import Client, Load, ask, backend, eventually, run, table, world

REQUEST_ID = re.compile(r"\d{13}-\d+-\d+")


def test_requests_reach_the_server_of_their_path(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(
                table(backend("iris", await w.server("a")), backend("mnist", await w.server("b"), endpoint="/v1/m"))
            )
            for target, name in [
                ("/iris", "a"), ("/iris/", "a"), ("/iris/info", "a"), ("/iris?x=%20y&z", "a"), ("/v1/m", "b"),
            ]:  # fmt: skip
                answer = await ask(w.port, target)
                assert (answer.status, answer.json()["server"], answer.json()["url"]) == (200, name, target)
            absolute = await ask(w.port, "http://gateway/iris?q=1")
            assert absolute.json()["server"] == "a"

    run(scenario())


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/unknown",
        "//iris",
        "/%69ris",
        "/iris/x",
        "/x/../iris",
        "/iris//",
        "/iris%2f",
        "/IRIS",
        '/"\\%0a',
        "/iris;x",
    ],
)
def test_any_other_path_is_a_404_in_json(home: Home, target: str) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            answer = await ask(w.port, target)
            assert answer.status == 404
            assert answer.json() == {
                "error": f"no API has the path {target}", "request_id": answer.headers["x-cortex-request-id"]
            }  # fmt: skip
            assert w.upstreams["a"].served == 0

    run(scenario())


def test_every_answer_has_a_request_id_that_the_replica_was_given_too(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a")), backend("none")))
            forged = {"X-Cortex-Request-Id": "forged", "x-cortex-anything": "forged"}
            answer = await ask(w.port, "/iris", **forged)
            identity = answer.headers["x-cortex-request-id"]
            assert REQUEST_ID.fullmatch(identity)
            seen = answer.json()["headers"]
            assert {name: value for name, value in seen.items() if name.startswith("x-cortex")} == {
                "x-cortex-request-id": identity
            }
            others = [await ask(w.port, path) for path in ("/iris", "/none", "/nowhere", "/livez")]
            identities = {each.headers["x-cortex-request-id"] for each in [answer, *others]}
            assert len(identities) == 5 and all(REQUEST_ID.fullmatch(each) for each in identities)
            assert all(each.headers["access-control-allow-origin"] == "*" for each in [answer, *others])

    run(scenario())


def test_health_and_preflight_are_answered_by_the_gateway_itself(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("own", await w.server("a"), endpoint="/readyz")))
            assert (await ask(w.port, "/livez")).json() == {"ok": True}
            assert (await ask(w.port, "/readyz")).json()["server"] == "a"
            preflight = await ask(w.port, "/readyz", "OPTIONS", origin="http://page")
            assert preflight.status == 204
            assert "POST" in preflight.headers["access-control-allow-methods"]
            assert preflight.headers["access-control-allow-headers"] == "*, Authorization"

    run(scenario())


def test_a_body_over_the_limit_is_refused_before_it_is_sent(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"), max_body_bytes=1000)))
            assert (await ask(w.port, "/iris", "POST", b"x" * 1000)).json()["body"] == 1000
            client = Client(w.port)
            (await client.connect()).write(b"POST /iris HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
            answer = await client.answer()
            assert (answer.status, answer.json()["error"]) == (413, "the body is larger than 1000 bytes")
            client.close()

    run(scenario())


def test_oversized_headers_are_refused(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            assert (await ask(w.port, "/iris", long="x" * 60_000)).status == 200
            answer = await ask(w.port, "/iris", long="x" * 70_000)
            assert (answer.status, answer.json()["error"]) == (400, "bad request")

    run(scenario())


def test_503_without_a_replica_says_why_in_the_users_words(home: Home) -> None:
    reasons = ["starting", 'ValueError: "x" \\ %[pid] # é\n  next; line', "", "\\\\ '$HOME' \x7f <<\n"]

    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris")))
            before = await Runtime(home.sockets_dir / "gateway-master.sock").workers()
            for reason in reasons:
                await w.gateway.apply(table(backend("iris", unavailable=reason)))
                answer = await ask(w.port, "/iris")
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                expected = reason.strip() or "no reason is known"
                assert answer.json()["error"] == f"no replica is ready: {expected}"
            assert await Runtime(home.sockets_dir / "gateway-master.sock").workers() == before

    run(scenario())


@pytest.mark.parametrize("max_queue", [0, 1, 3])
def test_a_full_queue_is_a_503(home: Home, max_queue: int) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            servers = [await w.server("a", 2), await w.server("b", 2)]
            await w.gateway.startup(table(backend("iris", *servers, max_queue=max_queue)))
            fits = 4 + 2 * max_queue
            sent = [asyncio.create_task(ask(w.port, "/iris?sleep=0.5")) for _ in range(fits)]

            async def full() -> bool:
                stats = (await w.gateway.stats())["iris"]
                return (stats.in_flight, stats.queued) == (4, 2 * max_queue)

            await eventually(full)
            refused = await ask(w.port, "/iris")
            assert (refused.status, refused.json()["error"]) == (503, "the queue is full")
            assert refused.headers["retry-after"] == "1"
            assert [each.status for each in await asyncio.gather(*sent)] == [200] * fits
            assert max(upstream.most_live for upstream in w.upstreams.values()) == 2
            assert (await ask(w.port, "/iris")).status == 200

    run(scenario())


def test_time_outs_in_the_queue_and_in_the_replica_are_504(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a", 1), timeout_s=0.5)))
            inside = asyncio.create_task(ask(w.port, "/iris?sleep=20"))

            async def is_inside() -> bool:
                return w.upstreams["a"].live == 1

            await eventually(is_inside)
            queued = await ask(w.port, "/iris")
            assert (queued.status, queued.json()["error"]) == (504, "timed out after 0.5 s in the queue")
            assert "retry-after" not in queued.headers
            answer = await inside
            assert (answer.status, answer.json()["error"]) == (504, "timed out after 0.5 s")

    run(scenario())


def test_a_replica_that_hangs_up_is_a_502_and_is_not_asked_again(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"), await w.server("b"))))
            answer = await ask(w.port, "/iris?close=1", "POST", b"{}")
            assert answer.status == 502
            assert answer.json()["error"] == "the replica closed the connection before it answered"
            assert sum(upstream.served for upstream in w.upstreams.values()) == 1

    run(scenario())


def test_a_server_that_refuses_connections_costs_no_request(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            servers = [await w.server("a"), await w.server("b")]
            await w.gateway.startup(table(backend("iris", *servers)))
            await w.upstreams["a"].stop()
            assert [(await ask(w.port, "/iris")).status for _ in range(10)] == [200] * 10
            await w.gateway.apply(table(backend("iris", servers[0])))
            answer = await ask(w.port, "/iris")
            assert (answer.status, answer.json()["error"]) == (503, "no replica is ready: starting")

    run(scenario())


def test_a_caller_that_hangs_up_while_queued_is_dropped_and_one_inside_is_cancelled(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a", 1))))
            clients = [Client(w.port), Client(w.port)]
            for client in clients:
                (await client.connect()).write(b"GET /iris?sleep=30 HTTP/1.1\r\nhost: x\r\n\r\n")

            async def queued(number: int) -> bool:
                return (await w.gateway.stats())["iris"].queued == number

            await eventually(lambda: queued(1))
            clients[1].close()
            await eventually(lambda: queued(0))
            clients[0].close()

            async def cancelled() -> bool:
                return w.upstreams["a"].aborted == 1

            await eventually(cancelled)
            assert w.upstreams["a"].served == 0

    run(scenario())


def test_each_chunk_of_a_streaming_answer_is_passed_on_at_once(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            client = Client(w.port)
            (await client.connect()).write(b"GET /iris?chunks=1 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.reader
            await client.reader.readuntil(b"\r\n\r\n")
            assert (await client.reader.readuntil(b"x\r\n")).endswith(b"1\r\nx\r\n")
            stream = w.upstreams["a"].open_streams[0]
            for data in (b"y", b"z"):
                stream.write(b"1\r\n" + data + b"\r\n")
                assert (await client.reader.readuntil(data + b"\r\n")).endswith(b"1\r\n" + data + b"\r\n")
            stream.write(b"0\r\n\r\n")
            await client.reader.readuntil(b"0\r\n\r\n")
            client.close()

    run(scenario())


def test_a_chunked_body_is_passed_on_and_a_waiting_client_is_told_to_continue(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            client = Client(w.port)
            head = b"POST /iris HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
            (await client.connect()).write(head)
            assert client.reader and client.writer
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            client.writer.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
            assert (await client.answer()).json()["body"] == 5
            client.close()

    run(scenario())


def test_slow_uploads_hold_no_replica(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a", 1))))
            slow = [Client(w.port) for _ in range(20)]
            for client in slow:
                (await client.connect()).write(
                    b"POST /iris HTTP/1.1\r\nhost: x\r\ncontent-length: 1048576\r\n\r\n" + b"x" * 1_000_000
                )
            for _ in range(20):
                assert (await ask(w.port, "/iris")).status == 200
            assert w.upstreams["a"].served == 20
            slow[0].writer.write(b"x" * 48_576)  # type: ignore[union-attr]
            assert (await slow[0].answer()).json()["body"] == 1_048_576
            for client in slow:
                client.close()

    run(scenario())


def test_the_memory_of_a_flood_of_slow_uploads_is_given_back(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            worker = (await Runtime(home.sockets_dir / "gateway-master.sock").workers()).current
            slow = [Client(w.port) for _ in range(120)]
            for client in slow:
                (await client.connect()).write(
                    b"POST /iris HTTP/1.1\r\nhost: x\r\ncontent-length: 1048576\r\n\r\n" + b"x" * 1_000_000
                )

            async def is_big() -> bool:
                return psutil.Process(worker).memory_info().rss > 100_000_000

            await eventually(is_big)
            for client in slow:
                client.close()

            async def none_left() -> bool:
                fetched = await Runtime(home.sockets_dir / "gateway-master.sock").backends(worker or 0)
                return fetched["api:iris"].requests == 0

            await eventually(none_left)
            await w.gateway.ensure_running()

            async def is_small() -> bool:
                return psutil.Process(worker).memory_info().rss < TRIM_ABOVE_BYTES

            await eventually(is_small)
            assert (await ask(w.port, "/iris")).status == 200

    run(scenario())


def test_slow_readers_hold_no_replica(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a", 1))))
            loop = asyncio.get_running_loop()
            slow = []
            for _ in range(20):
                reader = socket.socket()
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.setblocking(False)
                await loop.sock_connect(reader, ("127.0.0.1", w.port))
                await loop.sock_sendall(reader, b"GET /iris?size=1000000 HTTP/1.1\r\nhost: x\r\n\r\n")
                slow.append(reader)

            async def free() -> bool:
                return w.upstreams["a"].served == 20 and (await w.gateway.stats())["iris"].in_flight == 0

            await eventually(free)
            assert (await ask(w.port, "/iris")).status == 200
            for reader in slow:
                reader.close()

    run(scenario())


def test_dribbled_headers_end_with_a_408(home: Home) -> None:
    async def scenario() -> None:
        async with world(home, header_timeout_s=0.3) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            client = Client(w.port)
            (await client.connect()).write(b"GET /iris HTTP/1.1\r\nhost")
            assert (await client.answer()).status == 408
            client.close()

    run(scenario())


def test_a_call_longer_than_the_clients_time_out_is_answered(home: Home) -> None:
    async def scenario() -> None:
        async with world(home, client_timeout_s=0.3) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            assert (await ask(w.port, "/iris?sleep=1", "POST", b"{}")).status == 200

    run(scenario())


def test_servers_come_and_go_under_load_without_a_failed_request(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("r0"))))
            pid = w.gateway.pid
            runtime = Runtime(home.sockets_dir / "gateway-master.sock")
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

    run(scenario())


def test_a_server_with_a_request_inside_is_drained_only_after_it(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            old, new = await w.server("old"), await w.server("new")
            await w.gateway.startup(table(backend("iris", old)))
            inside = asyncio.create_task(ask(w.port, "/iris?sleep=0.5"))

            async def is_inside() -> bool:
                return (await w.gateway.in_flight()).get("old") == 1

            await eventually(is_inside)
            await w.gateway.apply(table(backend("iris", new)))
            assert await w.gateway.drained({"old"}) == set()
            assert (await ask(w.port, "/iris")).json()["server"] == "new"
            await w.gateway.apply(table(backend("iris", new, old)))  # called back while it drains
            assert await w.gateway.drained({"old"}) == set()
            await w.gateway.apply(table(backend("iris", new)))
            assert (await inside).status == 200
            assert await eventually(lambda: w.gateway.drained({"old"})) == {"old"}

    run(scenario())


def test_capacity_changes_at_once(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a", 1))))
            sent = [asyncio.create_task(ask(w.port, "/iris?sleep=1")) for _ in range(5)]

            async def queued() -> bool:
                return (await w.gateway.stats())["iris"].queued == 4

            await eventually(queued)
            await w.gateway.apply(table(backend("iris", await w.server("a", 4))))
            stats = (await w.gateway.stats())["iris"]
            assert (stats.in_flight, stats.queued) == (4, 1)
            assert [each.status for each in await asyncio.gather(*sent)] == [200] * 5

    run(scenario())


def test_new_apis_come_by_reload_under_load_without_a_failed_request(home: Home) -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_an_idle_connection_survives_a_reload_and_finds_the_new_servers(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("old"))))
            idle = Client(w.port)
            assert (await idle.get("/iris")).json()["server"] == "old"
            await w.gateway.apply(table(backend("iris", await w.server("new"), timeout_s=3)))
            await eventually(lambda: w.gateway.drained({"old"}))
            await w.upstreams["old"].stop()
            answer = await idle.get("/iris")
            assert (answer.status, answer.json()["server"], idle.connects) == (200, "new", 1)

    run(scenario())


def test_a_request_inside_a_removed_api_is_finished(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            inside = asyncio.create_task(ask(w.port, "/iris?sleep=0.5"))

            async def is_inside() -> bool:
                return (await w.gateway.in_flight()).get("a") == 1

            await eventually(is_inside)
            await w.gateway.apply(table())
            assert (await ask(w.port, "/iris")).status == 404
            assert await w.gateway.drained({"a"}) == set()
            assert (await inside).status == 200
            assert await eventually(lambda: w.gateway.drained({"a"})) == {"a"}

    run(scenario())


def test_answers_are_counted_by_class_across_reloads(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            iris = backend("iris", await w.server("a"))
            await w.gateway.startup(table(iris))
            for _ in range(3):
                await ask(w.port, "/iris")
            stats = await w.gateway.stats()
            assert stats["iris"].responses[2] == 3
            assert stats["iris"].average_ms is not None
            await w.gateway.apply(table(iris, backend("other")))
            await ask(w.port, "/iris")
            await ask(w.port, "/other")
            stats = await w.gateway.stats()
            assert stats["iris"].responses[2] == 4
            assert stats["other"].responses[5] == 1

    run(scenario())


def test_a_second_operator_adopts_the_running_gateway(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            first = table(backend("iris", await w.server("a")))
            await w.gateway.startup(first)
            workers = await Runtime(home.sockets_dir / "gateway-master.sock").workers()
            async with Load(w.port, "/iris") as load:
                await w.gateway.shutdown()
                second = Gateway(home, w.settings)
                await second.startup(table(backend("iris", await w.server("a"), await w.server("b"))))
                await load.more()
                assert load.failures == []
            assert second.pid == w.gateway.pid
            assert await Runtime(home.sockets_dir / "gateway-master.sock").workers() == workers
            assert w.upstreams["b"].served > 0
            await second.stop()

    run(scenario())


def test_an_identity_of_another_process_is_not_adopted(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            folder = home.run_dir / "gateway"
            folder.mkdir()
            created = psutil.Process().create_time()
            (folder / "identity.json").write_text(json.dumps({"pid": os.getpid(), "create_time": created}))
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            assert w.gateway.pid != os.getpid()
            assert (await ask(w.port, "/iris")).status == 200

    run(scenario())


@pytest.mark.parametrize("victim", ["master", "worker"])
def test_a_killed_gateway_is_back_at_once(home: Home, victim: str) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            await w.gateway.apply(table(backend("iris", await w.server("a"), await w.server("b"))))
            workers = await Runtime(home.sockets_dir / "gateway-master.sock").workers()
            master, worker = w.gateway.pid, workers.current
            assert master and worker
            os.kill(master if victim == "master" else worker, signal.SIGKILL)

            async def is_back() -> bool:
                return w.gateway.pid not in (None, master) and not psutil.pid_exists(worker)

            await eventually(is_back)
            await w.gateway.ensure_running()
            servers = {(await ask(w.port, "/iris")).json()["server"] for _ in range(4)}
            assert servers == {"a", "b"}

    run(scenario())


def test_a_gateway_killed_while_nobody_watched_is_started_with_the_table(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table())
            await w.gateway.shutdown()
            assert w.gateway.pid
            os.kill(w.gateway.pid, signal.SIGKILL)
            await w.gateway.apply(table(backend("iris", await w.server("a"))))
            assert (await ask(w.port, "/iris")).status == 200

    run(scenario())


def test_a_hung_worker_is_replaced(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            worker = (await Runtime(home.sockets_dir / "gateway-master.sock").workers()).current
            assert worker
            os.kill(worker, signal.SIGSTOP)

            async def replaced() -> bool:
                await w.gateway.ensure_running()
                return not psutil.pid_exists(worker)

            await eventually(replaced, timeout_s=20)
            assert (await ask(w.port, "/iris")).status == 200

    run(scenario())


def test_a_lack_of_our_own_descriptors_is_not_taken_for_a_hung_gateway(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            pid = w.gateway.pid
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                for _ in range(HUNG_AFTER_PROBES + 1):
                    with pytest.raises(GatewayError):
                        await w.gateway.ensure_running()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await w.gateway.ensure_running()
            assert w.gateway.pid == pid
            assert (await ask(w.port, "/iris")).status == 200

    run(scenario())


def test_a_full_disk_stops_reloads_with_a_clear_error_and_no_change_of_servers(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            blockers = [home.run_dir / "gateway" / f"{name}.new" for name in (CONFIG_FILE, ROUTES_MAP)]
            for blocker in blockers:
                blocker.mkdir()
            await w.gateway.apply(table(backend("iris", await w.server("b"))))
            await w.upstreams["a"].stop()
            assert (await ask(w.port, "/iris")).status == 200
            wanted = table(backend("iris", await w.server("b")), backend("rose", await w.server("c")))
            with pytest.raises(GatewayError, match="files can't be written"):
                await w.gateway.apply(wanted)
            assert (await ask(w.port, "/iris")).status == 200
            for blocker in blockers:
                blocker.rmdir()
            await w.gateway.apply(wanted)
            assert (await ask(w.port, "/rose")).status == 200

    run(scenario())


def test_a_taken_port_is_named_with_its_owner_and_the_flag_to_change(home: Home) -> None:
    async def scenario() -> None:
        with socket.socket() as owner:
            owner.bind(("127.0.0.1", 0))
            owner.listen()
            port = owner.getsockname()[1]
            gateway = Gateway(home, GatewaySettings(port=port))
            with pytest.raises(GatewayError) as caught:
                await gateway.startup(table())
            message = str(caught.value)
            assert f"127.0.0.1:{port}" in message and f"pid {os.getpid()}" in message and "--gateway-port" in message
            assert gateway.pid is None
            await gateway.stop()

    run(scenario())


def test_private_files_are_private_and_stop_leaves_no_process(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"))))
            private = [
                home.run_dir / "gateway" / "haproxy.cfg",
                home.run_dir / "gateway" / "unavailable.map",
                home.sockets_dir / "gateway.sock",
                home.sockets_dir / "gateway-master.sock",
            ]
            assert [oct(path.stat().st_mode & 0o777) for path in private] == ["0o600"] * 4
            assert w.gateway.pid
            family = [psutil.Process(w.gateway.pid), *psutil.Process(w.gateway.pid).children()]
            await w.gateway.stop()
            assert not any(process.is_running() for process in family)

    run(scenario())
