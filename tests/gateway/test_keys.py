"""API keys in a real HAProxy: accepted and refused callers, changes of keys, and secrecy of keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from dataclasses import replace

import pytest

from cortex.gateway import haproxy
from cortex.gateway.maps import KEYS_MAP
from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import ApiBackend, ApiKey, RoutingTable, Share, Split
from cortex.gateway.runtime_api import RuntimeApi
from cortex.home import Home
from harness.replicas.replicas import complete_lines
from harness.servers.upstream import Client, Load, World, ask, backend, eventually, world

pytestmark = pytest.mark.processes

ONE, EVERY, OTHER = "ck_one_" + "a" * 43, "ck_every_" + "b-_" * 14, "ck_other_" + "c" * 43


def key(text: str, *apis: str) -> ApiKey:
    return ApiKey(text.split("_")[1], hashlib.sha256(text.encode()).hexdigest(), apis)


KEYS = (key(ONE, "iris"), key(EVERY), key(OTHER, "sum", "ab"))


async def started(w: World, *more: ApiBackend, **settings: object) -> RoutingTable:
    iris = backend("iris", await w.server("a"), needs_key=True, **settings)
    made = RoutingTable((iris, *more), (), KEYS)
    await w.gateway.startup(made)
    return made


async def status(w: World, text: str, path: str = "/iris") -> int:
    return (await ask(w.port, path, **{"x-api-key": text})).status


async def count_4xx(w: World, api: str, count: int) -> None:
    """Wait until this many requests are counted: the gateway counts one after its response."""

    async def are_counted() -> bool:
        return await requests_4xx(w, api) == count

    await eventually(are_counted)


async def requests_4xx(w: World, api: str) -> int:
    return (await w.gateway.stats())[api].responses[4]


async def test_a_valid_key_is_accepted_and_not_forwarded(home: Home) -> None:
    async with world(home) as w:
        await started(w)
        for headers in (
            {"authorization": f"Bearer {ONE}"}, {"authorization": f"bearer {ONE}"}, {"x-api-key": ONE},
            {"authorization": f"Bearer {EVERY}"}, {"x-api-key": EVERY, "authorization": "Basic YTpi"},
        ):  # fmt: skip
            for path in ("/iris", "/iris/", "/iris/info", "/iris?key=x"):
                answer = await ask(w.port, path, "POST", b"{}", **headers)
                assert answer.status == 200, headers
                assert not {"authorization", "x-api-key"} & answer.json()["headers"].keys()


#: What callers send, and the status and the reason that they receive.
REFUSED = [
    ({}, 401, "needs a key"),
    ({"authorization": "Basic YTpi"}, 401, "needs a key"),
    ({"authorization": f"Bearer {ONE}x"}, 401, "unknown or was revoked"),
    ({"x-api-key": ""}, 401, "unknown or was revoked"),
    ({"x-api-key": hashlib.sha256(ONE.encode()).hexdigest()}, 401, "unknown or was revoked"),
    ({"x-api-key": f"{ONE}, {EVERY}"}, 401, "unknown or was revoked"),
    ({"x-api-key": "wrong", "authorization": f"Bearer {ONE}"}, 401, "unknown or was revoked"),
    ({"authorization": f"Bearer {OTHER}"}, 403, "other APIs"),
]


async def test_callers_without_a_valid_key_are_refused_before_their_body_is_received(home: Home) -> None:
    async with world(home) as w:
        await started(w)
        for headers, expected, said in REFUSED:
            client = Client(w.port)
            writer = await client.connect()
            lines = ["POST /iris HTTP/1.1", "host: x", "content-length: 1000000"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", "{"]).encode())
            answer = await client.answer()
            client.close()
            challenge = "Bearer" if expected == 401 else None
            assert (answer.status, answer.headers.get("www-authenticate")) == (expected, challenge), headers
            assert said in answer.json()["error"]
            assert answer.json()["request_id"] == answer.headers["x-cortex-request-id"]
        assert w.upstreams["a"].served == 0
        await count_4xx(w, "iris", len(REFUSED))


async def test_keys_are_added_and_revoked_in_every_worker_without_a_reload(home: Home) -> None:
    async with world(home) as w:
        made = await started(w)
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        workers = await runtime.workers()
        new = "ck_new_" + "d" * 43
        assert await status(w, new) == 401
        await w.gateway.apply(replace(made, keys=(*KEYS[1:], key(new, "iris", "more"))))
        assert [await status(w, text) for text in (new, ONE, EVERY)] == [200, 401, 200]
        await w.gateway.apply(replace(made, keys=()))
        assert [await status(w, text) for text in (new, ONE, EVERY)] == [401, 401, 401]
        await w.gateway.apply(made)
        assert await runtime.workers() == workers
        idle = Client(w.port)  # keeps the old worker alive
        assert (await idle.get("/iris", **{"x-api-key": ONE})).status == 200
        await w.gateway.apply(replace(made, backends=(*made.backends, backend("new", await w.server("b")))))
        after = await runtime.workers()
        assert after.old == (workers.current,)
        await w.gateway.apply(replace(made, keys=KEYS[1:]))
        for pid in after.all:
            assert hashlib.sha256(ONE.encode()).hexdigest().upper() not in await runtime.map(pid, KEYS_MAP)
        assert (await idle.get("/iris", **{"x-api-key": ONE})).status == 401
        idle.close()


async def test_keys_are_valid_after_restarts_of_gateway_and_operator(home: Home) -> None:
    async with world(home) as w:
        made = await started(w)
        revoked = replace(made, keys=KEYS[1:])
        await w.gateway.apply(revoked)
        master = w.gateway.pid
        assert master is not None
        os.kill(master, signal.SIGKILL)

        async def is_back() -> bool:
            return w.gateway.pid not in (None, master)

        await eventually(is_back)
        await w.gateway.ensure_running()
        assert [await status(w, text) for text in (ONE, EVERY)] == [401, 200]
        await w.gateway.shutdown()
        w.gateway = w.another_gateway()
        await w.gateway.startup(made)
        assert [await status(w, text) for text in (ONE, EVERY)] == [200, 200]


async def test_only_requests_with_a_key_are_held(home: Home) -> None:
    async with world(home) as w:
        held = backend("iris", needs_key=True, holds=True)
        made = RoutingTable((held,), (), KEYS)
        await w.gateway.startup(made)
        assert await status(w, OTHER) == 403
        waiting = asyncio.create_task(ask(w.port, "/iris", "POST", b"{}", authorization=f"Bearer {ONE}"))

        async def is_held() -> bool:
            return (await w.gateway.stats())["iris"].requests == 1

        await eventually(is_held)
        await w.gateway.apply(replace(made, backends=(replace(held, servers=(await w.server("a"),)),), keys=()))
        answer = await waiting  # a held request is not checked again
        assert (answer.status, "authorization" in answer.json()["headers"]) == (200, False)
        assert (await w.gateway.stats())["iris"].responses[4] == 1


@pytest.mark.parametrize(("own", "behind"), [(True, False), (False, True), (True, True)])
async def test_a_splitter_checks_the_key_once_for_itself_and_its_apis(home: Home, own: bool, behind: bool) -> None:
    async with world(home) as w:
        apis = (backend("a", await w.server("a"), needs_key=behind), backend("s", await w.server("s")))
        split = Split("ab", "/ab", (Share("a", 100),), Share("s", 100), needs_key=own)
        await w.gateway.startup(RoutingTable(apis, (split,), KEYS))
        for headers, expected in (
            ({}, 401),
            ({"x-api-key": ONE}, 403),
            ({"authorization": f"Bearer {OTHER}"}, 200),
        ):
            answer = await ask(w.port, "/ab", "POST", b"{}", **headers)
            assert answer.status == expected
        assert "authorization" not in answer.json()["headers"]

        async def is_copied() -> bool:
            return w.upstreams["s"].served == 1

        await eventually(is_copied)
        assert not {"authorization", "x-api-key"} & w.upstreams["s"].seen[-1]["headers"].keys()
        assert w.upstreams["a"].served == 1
        await count_4xx(w, "a", 2)
        assert await status(w, OTHER, "/a") == (403 if behind else 200)
        assert await status(w, EVERY, "/a") == 200


OWN = "ck_0123456789_" + "aB-_9" * 8 + "xyz"


#: What callers send to an API without keys, and what it receives of that.
FORWARDED: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"x-api-key": OWN}, {}),
    ({"authorization": f"Bearer {OWN}"}, {}),
    ({"authorization": f"bearer  {OWN}"}, {}),
    ({"authorization": OWN}, {}),
    ({"api-key": OWN}, {}),
    ({"cookie": f"lang=de; key={OWN}; a=b"}, {"cookie": "lang=de; key=; a=b"}),
    ({"sec-websocket-protocol": f"chat, {OWN}"}, {"sec-websocket-protocol": "chat, "}),
    ({"x-api-key": "of the application"}, {"x-api-key": "of the application"}),
    ({"x-api-key": "ck_" + "0" * 40}, {"x-api-key": "ck_" + "0" * 40}),
    ({"authorization": f"Bearer x{OWN}"}, {"authorization": f"Bearer x{OWN}"}),
    ({"authorization": f"Bearer {OWN}x"}, {"authorization": f"Bearer {OWN}x"}),
    ({"authorization": "Basic YTpi", "x-api-key": OWN}, {"authorization": "Basic YTpi"}),
    ({"cookie": f"a=Bearer%20{OWN}"}, {"cookie": "a=Bearer%20"}),
]


async def test_an_api_without_keys_receives_no_key_but_its_own_headers(home: Home) -> None:
    async with world(home) as w:
        served = (backend("a", await w.server("a")), backend("s", await w.server("s")))
        split = Split("ab", "/ab", (Share("a", 100),), Share("s", 100))
        await w.gateway.startup(RoutingTable(served, (split,)))
        for number, (headers, forwarded) in enumerate(FORWARDED, start=1):
            expected = {**forwarded, "own": "1"}
            for path in ("/a", "/a/v2/models/a/infer", "/ab"):
                answer = (await ask(w.port, path, "POST", b"{}", own="1", **headers)).json()
                seen = answer["headers"]
                assert answer["url"] == path
                assert {name: seen[name] for name in {*headers, "own"} & seen.keys()} == expected

            async def is_copied(count: int = number) -> bool:
                return w.upstreams["s"].served == count

            await eventually(is_copied)
            seen = w.upstreams["s"].seen[-1]["headers"]
            assert {name: seen[name] for name in {*headers, "own"} & seen.keys()} == expected


async def test_a_request_with_many_keys_is_refused(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(RoutingTable((backend("a", await w.server("a")),)))
        answer = await ask(w.port, "/a", **{f"h{number}": OWN for number in range(17)})
        assert (answer.status, answer.json()["error"]) == (431, "the request has too many headers with an API key")
        assert w.upstreams["a"].served == 0


async def test_a_flood_of_requests_with_many_keys_delays_no_others(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(RoutingTable((backend("a", await w.server("a")), backend("b", await w.server("b")))))
        many = {f"h{number}": OWN for number in range(700)}
        async with Load(w.port, "/b") as others:
            flood = [asyncio.create_task(ask(w.port, f"/a?key={OWN}", **many)) for _ in range(100)]
            await others.more()
            assert {answer.status for answer in await asyncio.gather(*flood)} == {431}
        assert (others.failures, w.upstreams["a"].served) == ([], 0)


@pytest.mark.parametrize("needs_key", [True, False])
async def test_a_key_in_the_query_or_in_other_headers_reaches_no_api(home: Home, needs_key: bool) -> None:
    async with world(home) as w:
        made = backend("iris", await w.server("a"), needs_key=needs_key)
        await w.gateway.startup(RoutingTable((made,), (), (ApiKey("own", hashlib.sha256(OWN.encode()).hexdigest()),)))
        answer = await ask(w.port, f"/iris?a=1&key={OWN}&b={OWN}", **{"x-api-key": OWN, "cookie": f"a={OWN}"})
        assert answer.status == 200
        assert (answer.json()["url"], OWN in str(answer.json())) == ("/iris?a=1&key=&b=", False)


async def test_batch_apis_refuse_keys_in_their_own_error_format(home: Home) -> None:
    async with world(home) as w:
        server = await w.server("operator")
        await w.gateway.startup(RoutingTable((backend("sum", jobs_socket=server.socket, needs_key=True),), (), KEYS))
        for path in ("/sum", "/sum/69b183ed6bdf3e9b"):
            answer = await ask(w.port, path, "POST", b"{}")
            assert (answer.status, answer.json()["kind"]) == (401, "unauthorized")
            assert answer.json()["message"] == answer.json()["error"]
            assert await status(w, OTHER, path) == 200
            assert await status(w, ONE, path) == 403
        assert "x-api-key" not in w.upstreams["operator"].seen[-1]["headers"]


async def test_the_access_log_contains_the_id_of_the_key_and_not_the_key(home: Home) -> None:
    async with world(home) as w:
        await started(w, backend("open", await w.server("b"), access_log=True), access_log=True)
        await status(w, ONE)
        await status(w, OTHER)
        await status(w, "unknown")
        await status(w, ONE, "/open")

        async def lines() -> list[str]:
            found = complete_lines(home.logs_dir / "access.log").splitlines()
            return found if len(found) >= 4 else []

        found = await eventually(lines)
        told = [(each["status"], each["key"]) for each in map(json.loads, found)]
        assert told == [(200, "one"), (403, "other"), (401, "-"), (200, "-")]
        assert not any(ONE in line for line in found)
        assert (await ask(w.port, "/open", **{"x-api-key": "own"})).json()["headers"]["x-api-key"] == "own"


@pytest.mark.parametrize("protocol", [Protocol.CALLS, Protocol.APPLICATION, Protocol.COMMAND, Protocol.GRPC])
async def test_streams_end_when_their_key_is_revoked(
    home: Home, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "REVOKED_GRACE_S", 0.01)
    async with world(home) as w:
        made = await started(w, replica_protocol=protocol)
        streams = {}
        for text in (ONE, ONE, EVERY):
            client = Client(w.port)
            request = f"GET /iris?chunks=1 HTTP/1.1\r\nhost: x\r\nx-api-key: {text}\r\n\r\n"
            (await client.connect()).write(request.encode())
            assert client.reader
            await client.reader.readuntil(b"1\r\nx\r\n")
            streams[client] = text
            if len(streams) == 1:  # the first one belongs to an old worker of HAProxy
                made = RoutingTable((*made.backends, backend("other")), (), KEYS)
                await w.gateway.apply(made)
        await w.gateway.apply(replace(made, keys=KEYS[1:]))

        async def are_cut() -> bool:
            await w.gateway.ensure_running()
            readers = [client.reader for client, text in streams.items() if text == ONE]
            return all(reader and (reader.at_eof() or reader.exception()) for reader in readers)

        await eventually(are_cut)
        w.upstreams["a"].open_streams[-1].write(b"1\r\ny\r\n")
        for client, text in streams.items():
            assert client.reader
            if text == EVERY:
                assert await client.reader.readuntil(b"y\r\n") == b"1\r\ny\r\n"
            client.close()
        assert await status(w, ONE) == 401


async def test_a_request_that_streams_its_body_ends_when_its_key_is_revoked(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "REVOKED_GRACE_S", 0.01)
    async with world(home) as w:
        made = await started(w, replica_protocol=Protocol.APPLICATION)
        client = Client(w.port)
        request = f"POST /iris HTTP/1.1\r\nhost: x\r\nx-api-key: {ONE}\r\ncontent-length: 9\r\n\r\nx"
        (await client.connect()).write(request.encode())

        async def has_arrived() -> bool:
            return (await w.gateway.stats())["iris"].in_flight == 1

        await eventually(has_arrived)
        await w.gateway.apply(replace(made, keys=KEYS[1:]))

        async def is_cut() -> bool:
            await w.gateway.ensure_running()
            return (await w.gateway.stats())["iris"].in_flight == 0

        await eventually(is_cut)
        client.close()
