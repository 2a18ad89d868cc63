"""Drain of the gateway before it is stopped."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time

# Other tests start processes while channels are open; these processes never use them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import pytest

from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import ApiKey
from cortex.home import Home
from harness.servers.upstream import Answer, Client, ask, backend, eventually, table, world

pytestmark = pytest.mark.processes


async def test_open_requests_end_while_new_connections_are_refused(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a", 1))))
        idle, inside, queued = Client(w.port), Client(w.port), Client(w.port)
        assert (await idle.get("/iris")).headers.get("connection") != "close"
        requests = [asyncio.create_task(client.get("/iris?wait=1")) for client in (inside, queued)]

        async def is_queued() -> bool:
            return (await w.gateway.stats())["iris"].queued == 1

        await eventually(is_queued)
        draining = asyncio.create_task(w.gateway.drain(60))

        async def is_refused() -> bool:
            try:
                await ask(w.port, "/livez")
            except ConnectionRefusedError:
                return True
            except (ConnectionError, EOFError):  # it was not accepted yet when the listener was closed
                return False
            return False

        await eventually(is_refused)
        answer = await idle.get("/livez")  # on a connection that was accepted before
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert not draining.done()
        for _ in requests:

            async def is_waiting() -> bool:
                return len(w.upstreams["a"].waiting) == 1

            await eventually(is_waiting)
            w.upstreams["a"].release(1)
        answers = await asyncio.gather(*requests)
        assert [(answer.status, answer.headers["connection"]) for answer in answers] == [(200, "close")] * 2
        await draining


async def test_the_drain_time_is_limited(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        request = asyncio.create_task(ask(w.port, "/iris?wait=1"))

        async def is_waiting() -> bool:
            return len(w.upstreams["a"].waiting) == 1

        await eventually(is_waiting)
        began = time.monotonic()
        await w.gateway.drain(0.5)
        assert 0.5 <= time.monotonic() - began < 30
        await w.gateway.stop()
        with pytest.raises((OSError, EOFError)):
            await request


async def test_requests_that_wait_are_answered_when_the_drain_time_is_over(home: Home) -> None:
    async with world(home) as w:
        key = ApiKey("k", hashlib.sha256(b"secret").hexdigest())
        iris = backend("iris", await w.server("a", 1), needs_key=True)
        await w.gateway.startup(table(iris, backend("cold", holds=True), keys=(key,)))

        def send(path: str) -> asyncio.Task[Answer]:
            return asyncio.create_task(ask(w.port, path, "POST", b"{}", **{"x-api-key": "secret"}))

        async def is_inside() -> bool:
            return len(w.upstreams["a"].waiting) == 1

        async def all_wait() -> bool:
            stats = await w.gateway.stats()
            return (stats["iris"].queued, stats["cold"].requests) == (1, 1)

        inside = send("/iris?wait=1")
        await eventually(is_inside)
        queued, held = send("/iris"), send("/cold")
        await eventually(all_wait)
        await w.gateway.drain(0.1)
        for each in (queued, held):
            answer = await each
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"] == "the service stopped before this request could run"
            assert answer.json()["request_id"] == answer.headers["x-cortex-request-id"]
        await w.gateway.drain(0.1)
        assert "Already exists" not in (home.logs_dir / "gateway.log").read_text()
        w.upstreams["a"].release(1)
        assert (await inside).status == 200
        second = w.another_gateway()
        await second.startup(table(iris, keys=(key,)))  # of the next operator, if this one was killed here
        assert (await ask(w.port, "/iris", "POST", b"{}", **{"x-api-key": "secret"})).status == 200


async def test_calls_that_wait_are_unavailable_when_the_drain_time_is_over(home: Home) -> None:
    async with world(home) as w, grpc.aio.insecure_channel(f"127.0.0.1:{w.port}") as channel:
        form = {"subpaths": ("/",), "replica_protocol": Protocol.GRPC}
        iris = backend("iris", await w.server("a", 1), endpoint="/iris.Iris", **form)
        await w.gateway.startup(table(iris, backend("cold", endpoint="/cold.Cold", holds=True, **form)))
        w.upstreams["a"].mute = True
        predict = channel.unary_unary("/iris.Iris/Predict")
        inside = predict(b"")

        async def is_inside() -> bool:
            return w.upstreams["a"].live == 1

        async def all_wait() -> bool:
            stats = await w.gateway.stats()
            return (stats["iris"].queued, stats["cold"].requests) == (1, 1)

        await eventually(is_inside)
        waiting = [predict(b""), channel.unary_unary("/cold.Cold/Predict")(b"")]
        await eventually(all_wait)
        await w.gateway.drain(0.1)
        for call in waiting:
            answer = (await call.code(), await call.details())
            assert answer == (grpc.StatusCode.UNAVAILABLE, "the service stopped before this request could run")
        assert not inside.done()


async def test_the_next_operator_accepts_connections_again(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        await w.gateway.drain(60)
        await w.gateway.shutdown()  # as if the operator had been killed here
        second = w.another_gateway()
        await second.startup(table(backend("iris", await w.server("a"))))
        assert second.pid == w.gateway.pid
        answer = await ask(w.port, "/iris")
        assert (answer.status, answer.headers.get("connection")) == (200, None)
