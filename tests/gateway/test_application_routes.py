"""Requests to applications in a real HAProxy: every path below the endpoint, and the client's address."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import ApiBackend, RoutingTable, Server, Share, Split
from cortex.home import Home
from harness.servers.upstream import Answer, Client, ask, backend, table, world

pytestmark = pytest.mark.processes

FORGED = {"x-forwarded-for": "203.0.113.9", "x-forwarded-prefix": "/forged", "forwarded": "for=203.0.113.9"}


def application(*servers: Server, **settings: Any) -> ApiBackend:
    return backend("app", *servers, subpaths=("/",), replica_protocol=Protocol.APPLICATION, **settings)


def forwarded(answer: Answer) -> dict[str, str]:
    assert answer.status == 200, answer.body
    headers = answer.json()["headers"]
    return {name: value for name, value in headers.items() if "forwarded" in name}


async def test_every_path_below_the_endpoint_leads_to_the_application(home: Home) -> None:
    async with world(home) as w:
        other = backend("other", await w.server("o"), endpoint="/app/other")
        await w.gateway.startup(table(application(await w.server("a")), other))
        for path in ("/app/info", "/app/docs", "/app/v2/models", "/app/a/b?c=d", "/app/other/x"):
            answer = await ask(w.port, path, "PATCH", b"{}")
            assert (answer.json()["server"], answer.json()["url"]) == ("a", path)
            assert answer.json()["headers"]["x-cortex-endpoint"] == "/app"
        for path in ("/app", "/app/"):
            assert "x-cortex-endpoint" not in (await ask(w.port, path)).json()["headers"]
        assert (await ask(w.port, "/app/other")).json()["server"] == "o"
        assert (await ask(w.port, "/apple")).status == 404


async def test_only_applications_get_the_gateways_own_forwarded_headers(home: Home) -> None:
    async with world(home) as w:
        plain = backend("plain", await w.server("p"))
        split = Split("split", "/split", (Share("app", 100),))
        await w.gateway.startup(RoutingTable((application(await w.server("a")), plain), (split,)))
        own = {
            "x-forwarded-for": "127.0.0.1",
            "x-forwarded-proto": "http",
            "x-forwarded-host": f"127.0.0.1:{w.port}",
        }
        answer = await ask(w.port, "/app/x", **FORGED)
        assert forwarded(answer) == own | {"x-forwarded-host": answer.json()["headers"]["host"]}
        answer = await ask(w.port, "/split/x", **FORGED)
        assert answer.json()["headers"]["x-cortex-endpoint"] == "/split"
        assert forwarded(answer)["x-forwarded-for"] == "127.0.0.1"
        assert forwarded(await ask(w.port, "/plain", **FORGED)) == FORGED


async def test_a_request_after_a_reload_has_the_address_of_its_client(home: Home) -> None:
    async with world(home) as w:
        app = application(await w.server("a"))
        await w.gateway.startup(table(app))
        client = Client(w.port)
        assert (await client.get("/app/x")).status == 200
        await w.gateway.apply(table(app, backend("other")))
        answer = await client.get("/app/x")
        assert forwarded(answer)["x-forwarded-for"] == "127.0.0.1"
        assert forwarded(answer)["x-forwarded-proto"] == "http"
        assert not [name for name in answer.json()["headers"] if name in ("x-cortex-client", "x-cortex-scheme")]


async def test_a_cookie_sends_a_client_to_the_same_process(home: Home) -> None:
    async with world(home) as w:
        first = application(await w.server("a"), sticky=True)
        await w.gateway.startup(table(first))
        both = application(await w.server("a"), await w.server("b"), sticky=True)
        await w.gateway.apply(table(both))  # the second server is added by command
        cookies = {}
        for _ in range(20):
            answer = await ask(w.port, "/app/x")
            assert "cookie" not in answer.json()["headers"]
            cookies[answer.json()["server"]] = answer.headers["set-cookie"]
        assert sorted(cookies) == ["a", "b"]
        assert cookies["a"].startswith("cortex-app=")
        assert cookies["a"].endswith("; path=/; HttpOnly; SameSite=Lax")
        for server, cookie in cookies.items():
            for _ in range(5):
                answer = await ask(w.port, "/app/x", cookie=f"own=1; {cookie.partition(';')[0]}")
                assert answer.json()["server"] == server
                assert answer.json()["headers"]["cookie"] == "own=1"
        await w.gateway.apply(table(first))
        answer = await ask(w.port, "/app/x", cookie=cookies["b"].partition(";")[0])
        assert answer.json()["server"] == "a"


async def test_only_websockets_of_applications_are_upgraded(home: Home) -> None:
    async with world(home) as w:
        plain = backend("plain", await w.server("p"))
        await w.gateway.startup(table(application(await w.server("a")), plain))
        for path, method, protocol, body, passes in (
            ("/app/x", "GET", "WebSocket", b"", True),
            ("/app/x", "GET", "websocket", b"body", False),
            ("/app/x", "POST", "websocket", b"", False),
            ("/app/x", "GET", "h2c", b"", False),
            ("/plain", "GET", "websocket", b"", False),
            ("/plain", "GET", "h2c", b"", False),
        ):
            key = {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version": "13"}
            answer = await ask(w.port, path, method, body, upgrade=protocol, connection="upgrade", **key)
            assert ("upgrade" in answer.json()["headers"]) is passes, (path, method, protocol, body)
