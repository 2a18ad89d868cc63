"""APIs with routes in a real HAProxy: paths below the endpoint, and errors in OpenAI's form below `/v1`."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import ApiBackend, RoutingTable, Server, Share, Split
from cortex.home import Home
from harness.servers.upstream import ask, backend, table, world

pytestmark = pytest.mark.processes


def routed(*servers: Server, **settings: Any) -> ApiBackend:
    return backend("llm", *servers, subpaths=("/v2", "/"), replica_protocol=Protocol.ROUTES, **settings)


async def test_every_path_below_the_endpoint_leads_to_the_replicas_except_those_of_cortex(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(routed(await w.server("a"))))
        for path in ("/llm/v1/models", "/llm/a/b?c=d", "/llm/v2/models/llm/infer"):
            headers = (await ask(w.port, path, "PATCH", b"{}")).json()["headers"]
            assert headers["x-cortex-endpoint"] == "/llm"
        for path in ("/llm", "/llm/", "/llm/info"):
            headers = (await ask(w.port, path)).json()["headers"]
            assert "x-cortex-endpoint" not in headers
            assert ("x-cortex-info" in headers) is (path == "/llm/info")


async def test_errors_of_the_gateway_have_openais_form_below_v1_only(home: Home) -> None:
    async with world(home) as w:
        split = Split("split", "/split", (Share("llm", 100),))
        missing = routed(unavailable='ValueError: "quoted"', max_body_bytes=10)
        await w.gateway.startup(RoutingTable((missing,), (split,)))
        for path in ("/llm/v1/chat/completions", "/llm/v1", "/split/v1/models"):
            answer = await ask(w.port, path)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            body = answer.json()
            assert body.pop("request_id") == answer.headers["x-cortex-request-id"]
            message = 'no replica is ready: ValueError: "quoted"'
            assert body == {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
        for path in ("/llm", "/llm/x/v1/models", "/llm/v10", "/split"):
            assert (await ask(w.port, path)).json()["error"] == 'no replica is ready: ValueError: "quoted"'
        large = await ask(w.port, "/llm/v1/chat/completions", "POST", b"x" * 11)
        assert (large.status, large.json()["error"]["type"]) == (413, "invalid_request_error")


async def test_errors_of_a_command_have_openais_form_below_v1(home: Home) -> None:
    async with world(home) as w:
        command = backend("own", subpaths=("/",), replica_protocol=Protocol.COMMAND)
        await w.gateway.startup(table(command))
        assert (await ask(w.port, "/own/v1/models")).json()["error"]["type"] == "server_error"
        assert isinstance((await ask(w.port, "/own/models")).json()["error"], str)


async def test_a_replica_that_closes_its_connection_is_reported_in_the_form_of_the_path(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(routed(await w.server("a"))))
        message = "the replica closed the connection before it answered"
        answer = await ask(w.port, "/llm/v1/models?close=1")
        assert (answer.status, answer.json()["error"]["message"]) == (502, message)
        assert (await ask(w.port, "/llm/models?close=1")).json()["error"] == message


async def test_a_missing_key_is_an_authentication_error(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(routed(await w.server("a"), needs_key=True)))
        answer = await ask(w.port, "/llm/v1/models")
        assert (answer.status, answer.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_request_that_times_out_in_the_queue_or_the_replica_has_the_form_of_its_path(home: Home) -> None:
    async with world(home) as w:
        held = routed(holds=True, timeout_s=0.3)
        await w.gateway.startup(table(held))
        answer = await ask(w.port, "/llm/v1/models")  # held, so it passes through the gateway twice
        assert (answer.status, answer.json()["error"]["type"]) == (504, "server_error")
        assert isinstance((await ask(w.port, "/llm/models")).json()["error"], str)
