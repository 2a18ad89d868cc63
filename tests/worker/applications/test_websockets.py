"""WebSockets of ASGI applications, from real replicas."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from harness.replicas.applications import websocket
from harness.replicas.replicas import Replica, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    import ctypes, time
    from fastapi import FastAPI, WebSocket, WebSocketException

    app = FastAPI()

    @app.websocket("/echo")
    async def echo(socket: WebSocket):
        await socket.accept(subprotocol=(socket.scope["subprotocols"] or [None])[0])
        try:
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                if message.get("text") is not None:
                    await socket.send_text(message["text"])
                else:
                    await socket.send_bytes(message["bytes"])
        finally:
            print("ended with", message.get("code"), flush=True)

    @app.websocket("/url")
    async def url(socket: WebSocket):
        await socket.accept()
        await socket.send_text(f"{socket.url} {socket.client.host} {socket.scope['root_path']}")

    @app.websocket("/refuse")
    async def refuse(socket: WebSocket):
        await socket.close(1008)

    @app.websocket("/fail")
    async def fail(socket: WebSocket):
        await socket.accept()
        raise ValueError("bad")

    @app.websocket("/number")
    async def number(socket: WebSocket):
        await socket.accept()
        await socket.send_bytes(3)

    @app.websocket("/zero")
    async def zero(socket: WebSocket):
        await socket.accept()
        await socket.close(0)

    @app.websocket("/crash")
    async def crash(socket: WebSocket):
        await socket.accept()
        await socket.receive()
        ctypes.string_at(0)

    @app.websocket("/block")
    async def block(socket: WebSocket):
        await socket.accept()
        await socket.receive()
        time.sleep(1000)

    @app.websocket("/slow")
    async def slow(socket: WebSocket):
        while True:
            await __import__("asyncio").sleep(1)
"""


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with running_replica(SOURCE, type="asgi", app="app", max_body_bytes=1_000_000) as replica:
        replica.wait_ready()
        yield replica


def test_messages_travel_in_both_directions(replica: Replica) -> None:
    with websocket(replica, "/echo") as client:
        for message in ("text", b"bytes", "é" * 10_000, bytes(900_000)):
            client.send(message)
            assert client.receive() == message
        assert replica.status().processes[0].restarts == 0
        client.close(1001)
        assert client.closed() == (1001, "")
    wait_until(lambda: "ended with 1001" in replica.log())


def test_the_scope_is_that_of_http_requests(replica: Replica) -> None:
    with websocket(replica, "/url") as client:
        assert client.receive() == "wss://example.com/app/url 192.0.2.7 /app"
        assert client.closed() == (1000, "")


def test_an_application_can_refuse_a_websocket(replica: Replica) -> None:
    with websocket(replica, "/refuse") as client:
        assert client.refusal()[0] == 403
    with websocket(replica, "/none") as client:
        assert client.refusal()[0] == 403


def test_a_message_larger_than_the_limit_of_bodies_closes_the_websocket(replica: Replica) -> None:
    with websocket(replica, "/echo") as client:
        client.send(bytes(1_000_001))
        assert client.closed() == (1009, "the message is larger than 1000000 bytes")


@pytest.mark.parametrize(
    ("path", "reason", "logged"),
    [
        ("/fail", "internal server error: ValueError in the application", "ValueError: bad"),
        (
            "/zero",
            "internal server error: a WebSocket is closed with the code 0; use one from 1000 to 4999",
            "UserError",
        ),
        ("/number", "internal server error: a message is of the type int; use bytes", "UserError"),
    ],
)
def test_an_exception_closes_the_websocket_and_is_logged(replica: Replica, path: str, reason: str, logged: str) -> None:
    with websocket(replica, path) as client:
        code, sent = client.closed()
        assert code == 1011
        assert sent.startswith(reason)
    wait_until(lambda: logged in replica.log())


def test_a_client_that_vanishes_ends_the_call(replica: Replica) -> None:
    with websocket(replica, "/echo") as client:
        assert client.is_open
    wait_until(lambda: "ended with 1006" in replica.log())


def test_a_dead_process_closes_its_websockets_with_the_cause() -> None:
    with running_replica(SOURCE, type="asgi", app="app") as replica:
        replica.wait_ready()
        with websocket(replica, "/echo") as other, websocket(replica, "/crash") as client:
            client.send("now")
            for each in (client, other):
                assert each.closed() == (1011, "segmentation fault (SIGSEGV)")
        replica.wait_ready()


@pytest.mark.long  # a blocked event loop is noticed after up to 10 s
def test_a_process_whose_event_loop_is_blocked_closes_its_websockets_with_the_cause() -> None:
    with running_replica(SOURCE, type="asgi", app="app", timeout_s=0.5) as replica:
        replica.wait_ready()
        with websocket(replica, "/block") as client:
            client.send("now")
            assert client.closed() == (1011, "timed out after 0.5 s")
        replica.wait_ready()


def test_a_drained_replica_closes_its_websockets_with_1012_after_the_timeout() -> None:
    with running_replica(SOURCE, type="asgi", app="app") as replica:
        replica.wait_ready()
        with websocket(replica, "/echo") as client:
            replica.command(command="stop", drain_s=4.0)
            client.send("while it drains")
            assert client.receive() == "while it drains"
            assert client.closed() == (1012, "the service restarts")
        wait_until(lambda: "ended with 1012" in replica.log())


def test_a_websocket_is_closed_with_the_reason_if_the_supervisor_dies() -> None:
    with running_replica(SOURCE, type="asgi", app="app") as replica:
        replica.wait_ready()
        with websocket(replica, "/echo") as client:
            os.kill(replica.status().supervisor_pid, signal.SIGKILL)
            assert client.closed() == (1011, "the supervisor of its replica died")


def test_an_application_that_does_not_accept_in_time_is_timed_out() -> None:
    with running_replica(SOURCE, type="asgi", app="app", timeout_s=0.3) as replica:
        replica.wait_ready()
        with websocket(replica, "/slow") as client:
            status, body = client.refusal()
            assert status == 504
            assert b"timed out after 0.3 s" in body


def test_a_websocket_without_messages_is_closed_after_the_limit_in_force() -> None:
    with running_replica(SOURCE, type="asgi", app="app", websocket_idle_s=0.2) as replica:
        replica.wait_ready()
        with websocket(replica, "/echo") as client:
            assert client.closed() == (1001, "no message for 0.2 s")
        replica.command(command="configure", timeout_s=60, max_body_bytes=1000, websocket_idle_s=0.3)
        wait_until(lambda: _idle_reason(replica) == "no message for 0.3 s")


def _idle_reason(replica: Replica) -> str:
    with websocket(replica, "/echo") as client:
        return client.closed()[1]
