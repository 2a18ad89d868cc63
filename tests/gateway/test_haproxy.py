"""Responses of the gateway with a real HAProxy."""

from __future__ import annotations

import asyncio
import re

import pytest

from cortex.gateway.runtime_api import RuntimeApi
from cortex.home import Home
from cortex.worker.http.responses import MAX_RESPONSE_HEADERS
from harness.servers.upstream import Client, ask, backend, eventually, release, table, world
from harness.wait import PATIENCE_S

pytestmark = pytest.mark.processes

REQUEST_ID = re.compile(r"\d{13}-\d+-\d+")


async def test_requests_reach_the_server_of_their_path(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(
            table(
                backend("iris", await w.server("a")),
                backend("mnist", await w.server("b"), endpoint="/v1/m"),
                backend("root", await w.server("c"), endpoint="/"),
            )
        )
        for target, name in [
            ("/iris", "a"), ("/iris/", "a"), ("/iris/info", "a"), ("/iris?x=%20y&z", "a"), ("/v1/m", "b"),
            ("/", "c"), ("/info", "c"),
        ]:  # fmt: skip
            answer = await ask(w.port, target)
            assert (answer.status, answer.json()["server"], answer.json()["url"]) == (200, name, target)
        absolute = await ask(w.port, "http://gateway/iris?q=1")
        assert absolute.json()["server"] == "a"


#: Paths that lead nowhere, beside the API at `/iris`.
UNKNOWN = (
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
)


async def test_other_paths_are_refused_with_404(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        for target in UNKNOWN:
            answer = await ask(w.port, target)
            assert answer.status == 404, target
            assert answer.json() == {
                "error": f"no API has the path {target}", "request_id": answer.headers["x-cortex-request-id"]
            }  # fmt: skip
        assert w.upstreams["a"].served == 0


async def test_every_response_has_the_request_id_that_the_replica_received(home: Home) -> None:
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


async def test_the_gateway_answers_health_checks_and_preflight_requests(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("own", await w.server("a"), endpoint="/readyz")))
        assert (await ask(w.port, "/livez")).json() == {"ok": True}
        assert (await ask(w.port, "/readyz")).json()["server"] == "a"
        preflight = await ask(w.port, "/readyz", "OPTIONS", origin="http://page")
        assert preflight.status == 204
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "*, Authorization"


async def test_a_body_over_the_limit_is_refused_before_it_is_received(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"), max_body_bytes=1000)))
        assert (await ask(w.port, "/iris", "POST", b"x" * 1000)).json()["body"] == 1000
        client = Client(w.port)
        (await client.connect()).write(b"POST /iris HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.json()["error"]) == (413, "the body is larger than 1000 bytes")
        client.close()


async def test_a_head_above_the_limit_is_refused_with_431_wherever_its_bytes_are(home: Home) -> None:
    too_large = "the URL and the headers are larger than 65536 bytes"
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        for size in (66_000, 200_000, 500_000, 540_000, 1_000_000):
            many = {f"x-{number}": "x" * 2000 for number in range(size // 2000)}
            half = "x" * (size // 2)
            for target, headers in [
                ("/iris", {"long": "x" * size}),
                ("/iris", many),
                (f"/iris?{half}", {"long": half}),
            ]:
                answer = await ask(w.port, target, "POST", b"{}", **headers)
                assert (answer.status, answer.json()["error"]) == (431, too_large)
                assert answer.json()["request_id"] == answer.headers["x-cortex-request-id"]
        assert w.upstreams["a"].served == 0


async def test_a_head_below_the_limit_is_accepted_with_a_large_body(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        for target, headers in [("/iris", {"long": "x" * 60_000}), (f"/iris?{'x' * 30_000}", {"long": "x" * 30_000})]:
            assert (await ask(w.port, target, "POST", b"x" * 3_000_000, **headers)).status == 200


async def test_more_headers_than_the_limit_are_refused_with_431(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        for count in (1001, 1030, 4000):
            answer = await ask(w.port, "/iris", **{f"x{number}": "" for number in range(count)})
            assert (answer.status, answer.json()["error"]) == (431, "the request has more than 1000 headers")


async def test_requests_and_responses_may_have_a_thousand_headers(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        many = "&".join(f"header=x-{number}:1" for number in range(MAX_RESPONSE_HEADERS))
        answer = await ask(w.port, f"/iris?{many}", **{f"x-{number}": "1" for number in range(900)})
        assert (answer.status, len(answer.headers) > MAX_RESPONSE_HEADERS) == (200, True)
        assert "x-899" in answer.json()["headers"]


async def test_503_without_a_replica_contains_the_reason(home: Home) -> None:
    reasons = ["starting", 'ValueError: "x" \\ %[pid] # é\n  next; line', "", "\\\\ '$HOME' \x7f <<\n"]
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris")))
        before = await RuntimeApi(home.sockets_dir / "gateway-master.sock").workers()
        for reason in reasons:
            await w.gateway.apply(table(backend("iris", unavailable=reason)))
            answer = await ask(w.port, "/iris")
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            expected = reason.strip() or "starting"
            assert answer.json()["error"] == f"no replica is ready: {expected}"
        assert await RuntimeApi(home.sockets_dir / "gateway-master.sock").workers() == before


@pytest.mark.parametrize("max_queue", [0, 1, 3])
async def test_requests_beyond_the_queue_limit_are_refused_with_503(home: Home, max_queue: int) -> None:
    async with world(home) as w:
        servers = [await w.server("a", 2), await w.server("b", 2)]
        await w.gateway.startup(table(backend("iris", *servers, max_queue=max_queue, timeout_s=PATIENCE_S)))
        fits = 4 + 2 * max_queue
        sent = [asyncio.create_task(ask(w.port, "/iris?wait=1")) for _ in range(fits)]

        async def full() -> bool:
            stats = (await w.gateway.stats())["iris"]
            return (stats.in_flight, stats.queued) == (4, 2 * max_queue)

        await eventually(full)
        refused = await ask(w.port, "/iris")
        assert (refused.status, refused.json()["error"]) == (503, "the queue is full")
        assert refused.headers["retry-after"] == "1"
        await release(w, fits)
        assert [each.status for each in await asyncio.gather(*sent)] == [200] * fits
        assert max(upstream.most_live for upstream in w.upstreams.values()) == 2
        assert (await ask(w.port, "/iris")).status == 200


async def test_timeouts_in_the_queue_and_in_the_replica_are_504(home: Home) -> None:
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


async def test_a_closed_connection_of_the_replica_is_a_502_without_a_retry(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"), await w.server("b"))))
        answer = await ask(w.port, "/iris?close=1", "POST", b"{}")
        assert answer.status == 502
        assert answer.json()["error"] == "the replica closed the connection before it answered"
        assert sum(upstream.served for upstream in w.upstreams.values()) == 1


async def test_refused_connections_are_retried_at_another_server(home: Home) -> None:
    async with world(home) as w:
        servers = [await w.server("a"), await w.server("b")]
        await w.gateway.startup(table(backend("iris", *servers)))
        await w.upstreams["a"].stop()
        assert [(await ask(w.port, "/iris")).status for _ in range(10)] == [200] * 10
        await w.gateway.apply(table(backend("iris", servers[0])))
        answer = await ask(w.port, "/iris")
        assert (answer.status, answer.json()["error"]) == (503, "no replica is ready: starting")


async def test_requests_of_disconnected_clients_leave_queue_and_replica(home: Home) -> None:
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
