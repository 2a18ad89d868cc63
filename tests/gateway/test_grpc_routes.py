"""gRPC calls in a real HAProxy: routes, errors as trailers, and HTTP/1.1 for other APIs at the same port."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

# Other tests start processes while channels are open; these processes never use them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import pytest

from cortex.gateway.backends import GatewaySockets
from cortex.gateway.config import GatewaySettings, render
from cortex.gateway.maps import fixed_maps
from cortex.gateway.protocols import GRPC_STATUSES, OPENAI_MAP, Protocol
from cortex.gateway.routes import ApiBackend, ApiKey, RoutingTable, Server, Share, Split, table_from_json, table_to_json
from cortex.home import Home
from harness.servers.upstream import ask, backend, run, table, world

pytestmark = pytest.mark.processes

Code = grpc.StatusCode


def service(name: str = "iris", package: str = "iris", *servers: Server, **settings: Any) -> ApiBackend:
    endpoint = f"/{package}.Handler"
    return backend(
        name,
        *servers,
        endpoint=endpoint,
        subpaths=("/",),
        replica_protocol=Protocol.GRPC,
        **{"unavailable": "it starts"} | settings,
    )


async def status_of(port: int, path: str, **options: Any) -> tuple[grpc.StatusCode, str]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await channel.unary_unary(path)(b"", **options)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    raise AssertionError("the call succeeded")


def test_errors_of_services_never_have_the_form_of_openai() -> None:
    command = backend("llm", endpoint="/llm", subpaths=("/",), replica_protocol=Protocol.COMMAND)
    assert fixed_maps(table(service(), command))[OPENAI_MAP] == {"/llm/v1/": "1"}


async def test_errors_of_the_gateway_are_statuses(home: Home) -> None:
    async with world(home) as w:
        keyed = service("keyed", "keyed", needs_key=True)
        await w.gateway.startup(table(service(), keyed, backend("plain", await w.server("p"))))
        assert await status_of(w.port, "/iris.Handler/Predict") == (
            Code.UNAVAILABLE,
            "no replica is ready: it starts",
        )
        code, details = await status_of(w.port, "/keyed.Handler/Predict")
        assert (code, "this API needs a key" in details) == (Code.UNAUTHENTICATED, True)
        code, _ = await status_of(w.port, "/keyed.Handler/Predict", metadata=[("x-api-key", "wrong")])
        assert code is Code.UNAUTHENTICATED
        assert await status_of(w.port, "/other.Handler/Predict") == (
            Code.UNIMPLEMENTED,
            "no API has the path /other.Handler/Predict",
        )
        assert (await status_of(w.port, "/kg%2eS/P%25"))[1] == "no API has the path /kg%2eS/P%25"
        assert (await status_of(w.port, "/grpc.health.v1.Health/Check"))[0] is Code.UNAVAILABLE
        # In JSON, the same errors have their HTTP status.
        answer = await ask(w.port, "/iris.Handler/Predict", "POST", b"{}")
        assert (answer.status, answer.headers["grpc-message"]) == (503, "no replica is ready: it starts")
        assert (await ask(w.port, "/plain", "POST", b"{}")).json()["server"] == "p"


async def test_calls_above_the_limit_of_one_address_are_refused_and_counted(home: Home) -> None:
    async with world(home) as w, grpc.aio.insecure_channel(f"127.0.0.1:{w.port}") as channel:
        await w.gateway.startup(table(service(holds=True), connections_per_address=2))
        await w.gateway.ensure_running()
        calls = [asyncio.ensure_future(channel.unary_unary("/iris.Handler/Predict")(b"").code()) for _ in range(3)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert [await each for each in done] == [Code.UNAVAILABLE]
        await w.gateway.ensure_running()
        assert w.gateway.refused_connections == 1


async def test_a_service_without_keys_receives_none(home: Home) -> None:
    key = "ck_0123456789_" + "k" * 43
    async with world(home) as w:
        await w.gateway.startup(table(service("iris", "iris", await w.server("p"))))
        for name, value in (("x-api-key", key), ("authorization", f"Bearer {key}")):
            await status_of(w.port, "/iris.Handler/Predict", metadata=[(name, value), ("own", "1")])
            seen = w.upstreams["p"].seen[-1]["headers"]
            assert (seen["own"], name in seen) == ("1", False)


def test_a_watch_of_the_health_sends_later_statuses_and_ends_with_its_worker(home: Home) -> None:
    def request(service: bytes) -> bytes:
        return bytes((0x0A, len(service))) + service if service else b""

    async def scenario() -> None:
        async with world(home) as w, grpc.aio.insecure_channel(f"127.0.0.1:{w.port}") as channel:
            await w.gateway.startup(table(service(), service("other", "other")))
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            named, every, unknown = (watch(request(name)) for name in (b"iris.Handler", b"", b"x" * 200))
            assert [await each.read() for each in (named, every, unknown)] == [b"\x08\x02", b"\x08\x02", b"\x08\x03"]
            await w.gateway.apply(table(service("iris", "iris", await w.server("p")), service("other", "other")))
            assert [await each.read() for each in (named, every)] == [b"\x08\x01"] * 2
            await w.gateway.apply(table(service(), service("other", "other"), backend("new")))  # a reload
            assert isinstance(await failure_of(named), grpc.RpcError)
            again = watch(request(b"iris.Handler"))
            assert await again.read() == b"\x08\x02"
            again.cancel()
            unknown.cancel()

    async def failure_of(call: Any) -> Exception | None:
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.RpcError as error:
            return error
        return None

    run(scenario())


async def test_the_metadata_of_a_call_selects_one_of_the_apis_of_a_service(home: Home) -> None:
    async with world(home) as w:
        one, two = (service(name, unavailable=f"{name} starts") for name in ("one", "two"))
        split = Split("both", "/iris.Handler", (Share("two", 100),))
        await w.gateway.startup(RoutingTable((one, two), (split,)))
        assert "two starts" in (await status_of(w.port, "/iris.Handler/Predict"))[1]
        metadata = [("x-cortex-api", "one")]
        assert "one starts" in (await status_of(w.port, "/iris.Handler/Predict", metadata=metadata))[1]
        # A key for the splitter does not open an API of which it is not told.
        digest = hashlib.sha256(b"key").hexdigest()
        keys = (ApiKey("k", digest, ("both",)),)
        closed = replace(one, needs_key=True)
        await w.gateway.apply(RoutingTable((closed, two), (split,), keys))
        both = [*metadata, ("x-api-key", "key")]
        code, _ = await status_of(w.port, "/iris.Handler/Predict", metadata=both)
        assert code is Code.PERMISSION_DENIED


@pytest.mark.parametrize(("certificate", "bind"), [("", "8888\n"), ("PEM", " alpn h2,http/1.1\n")])
def test_only_a_gateway_with_grpc_apis_serves_http_2(certificate: str, bind: str) -> None:
    sockets = GatewaySockets("/s", "/n", "/i", "/r")
    settings = GatewaySettings(certificate=certificate)
    first = next(line for line in _lines(table(service()), settings, sockets) if "bind 127" in line)
    assert f"{first}\n".endswith(bind)
    plain = next(line for line in _lines(table(backend("plain")), settings, sockets) if "bind 127" in line)
    assert "h2" not in plain
    assert plain.endswith(("proto h1", "alpn http/1.1"))


def test_clients_of_streams_may_be_silent_as_long_as_their_api_allows() -> None:
    sockets = GatewaySockets("/s", "/n", "/i", "/r")
    for routes, expected in (
        (table(service(timeout_s=300), backend("plain")), "  timeout client 301000ms"),
        (table(service(timeout_s=5), backend("plain", timeout_s=300)), "  timeout client 60000ms"),
    ):
        assert expected in _lines(routes, GatewaySettings(), sockets)


def _lines(routes: RoutingTable, settings: GatewaySettings, sockets: Any) -> list[str]:
    return render(routes, settings, sockets).config.splitlines()


def test_every_error_of_the_gateway_has_a_status() -> None:
    assert {401, 403, 413, 502, 503, 504} <= set(GRPC_STATUSES)


def test_a_table_with_grpc_apis_survives_its_json_form() -> None:
    routes = RoutingTable((service(),), keys=(ApiKey("k", "0" * 64),))
    assert table_from_json(table_to_json(routes)) == routes


def test_grpcio_is_not_imported_by_the_gateway() -> None:
    code = "import sys, cortex.gateway.config, cortex.supervisor.supervisor; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
