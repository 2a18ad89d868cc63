"""Clients that disconnect or are cut off while their call runs: what becomes of it, of its process, of the counts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest

import cortex
from cortex.lifecycle import DeathCause
from cortex.worker.monitoring.metrics import SeriesKind, read_folder, series_key
from cortex.worker.requests.runner import QUICK_CALLS
from harness.replicas.replicas import Replica, new_request_id, running_replica
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

SYNC = """
    import cortex, os, pathlib, time

    class Handler:
        def __init__(self, config):
            self.end = pathlib.Path(os.environ["SHARED_FOLDER"], "end")

        def handle_post(self, payload):
            print("started", flush=True)
            while not cortex.cancelled() and not self.end.exists():
                time.sleep(0.01)
            print("cancelled" if cortex.cancelled() else "finished", flush=True)
            return {}

        def handle_get(self):
            return os.getpid()
"""
GENERATOR = """
    import os, pathlib, time

    class Handler:
        def __init__(self, config):
            self.end = pathlib.Path(os.environ["SHARED_FOLDER"], "end")

        def handle_post(self, payload):
            print("started", flush=True)
            try:
                while not self.end.exists():
                    yield "x"
                    time.sleep(0.01)
                print("finished", flush=True)
            except GeneratorExit:
                print("cancelled", flush=True)
                raise
"""
ASYNC_GENERATOR = (
    GENERATOR.replace("import os, pathlib, time", "import asyncio, os, pathlib")
    .replace("def handle_post", "async def handle_post")
    .replace("time.sleep", "await asyncio.sleep")
    .replace("except GeneratorExit", "except (GeneratorExit, asyncio.CancelledError)")
)
ASYNC = ASYNC_GENERATOR.replace('yield "x"', "pass")
BATCH = SYNC.replace('"started"', 'f"started {len(payload)}"').replace("return {}", "return payload")
STUCK = """
    import os, time

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            print("started", flush=True)
            time.sleep(payload["s"])
            return payload

        def handle_get(self):
            return os.getpid()
"""


@contextlib.contextmanager
def calling(replica: Replica, body: bytes = b"{}", path: str = "/") -> Iterator[socket.socket]:
    """Call the API until the block ends; then disconnect."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(replica.spec.sockets[0])
        head = f"POST {path} HTTP/1.1\r\nx-cortex-request-id: {new_request_id()}\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield client


def end(replica: Replica) -> None:
    (Path(replica.spec.run_dir) / "end").touch()


def disconnected(folder: Path) -> float:
    return read_folder(folder).get(series_key(SeriesKind.COUNTER, "cortex_replica_requests_total", {"code": "499"}), 0)


@pytest.mark.parametrize("source", [SYNC, ASYNC, GENERATOR, ASYNC_GENERATOR])
def test_a_call_is_cancelled_when_its_client_disconnects(source: str) -> None:
    with running_replica(source) as replica:
        replica.wait_ready()
        with calling(replica):
            wait_until(lambda: "started" in replica.log())
        wait_until(lambda: "cancelled" in replica.log())
        end(replica)
        assert replica.request({}).status == 200


def test_a_call_on_the_event_loop_is_cancelled_too() -> None:
    with running_replica(SYNC) as replica:
        replica.wait_ready()
        connection = replica.connection()
        for _ in range(3 * QUICK_CALLS):
            connection.request("GET", "/")
            connection.getresponse().read()
        with calling(replica):
            wait_until(lambda: "started" in replica.log())
        wait_until(lambda: "cancelled" in replica.log())
        connection.close()


@pytest.mark.parametrize("source", [SYNC, ASYNC, GENERATOR, ASYNC_GENERATOR])
def test_with_finish_a_call_runs_to_its_end(source: str, tmp_path: Path) -> None:
    with running_replica(source, on_disconnect="finish", metrics_dir=str(tmp_path)) as replica:
        replica.wait_ready()
        with calling(replica) as client:
            wait_until(lambda: "started" in replica.log())
            if "yield" in source:
                assert client.recv(1) == b"H"  # the response has begun, so the request has its status already
        if "yield" not in source:
            wait_until(lambda: disconnected(tmp_path) == 1)
        end(replica)
        wait_until(lambda: "finished" in replica.log())
        assert "cancelled" not in replica.log()
        assert replica.request({}).status == 200


def test_a_changed_option_applies_to_running_replicas() -> None:
    with running_replica(SYNC) as replica:
        replica.wait_ready()
        replica.command(command="configure", timeout_s=60, max_body_bytes=1000, on_disconnect="finish")
        with calling(replica):
            wait_until(lambda: "started" in replica.log())
        end(replica)
        wait_until(lambda: "finished" in replica.log())


def test_a_request_whose_client_disconnects_counts_once_as_499(tmp_path: Path) -> None:
    with running_replica(SYNC, metrics_dir=str(tmp_path), threads=2) as replica:
        replica.wait_ready()
        with calling(replica):
            wait_until(lambda: "started" in replica.log())
        wait_until(lambda: "cancelled" in replica.log())
        assert replica.request(method="GET").status == 200
        wait_until(lambda: disconnected(tmp_path) == 1)


def test_a_batch_is_cancelled_when_all_its_clients_have_disconnected(tmp_path: Path) -> None:
    with running_replica(BATCH, max_batch_size=2, metrics_dir=str(tmp_path)) as replica, contextlib.ExitStack() as one:
        replica.wait_ready()
        first = contextlib.ExitStack()
        first.enter_context(calling(replica))
        wait_until(lambda: "started 1" in replica.log())
        one.enter_context(calling(replica))  # these wait for the call that runs, and become one batch
        with calling(replica):
            for _ in range(2):  # the event loop has then read both
                assert replica.request(method="GET", headers={"x-cortex-info": "1"}).status == 200
            first.close()
            wait_until(lambda: "started 2" in replica.log())
            wait_until(lambda: replica.log().count("cancelled") == 1)
        wait_until(lambda: disconnected(tmp_path) == 2)
        wait_until(lambda: replica.log().count("cancelled") == 1)
        one.close()
        wait_until(lambda: replica.log().count("cancelled") == 2)


def test_with_kill_a_call_that_continues_ends_its_process(tmp_path: Path) -> None:
    with running_replica(STUCK, on_disconnect="kill", metrics_dir=str(tmp_path)) as replica:
        pid = replica.wait_ready().processes[0].pid
        with calling(replica, b'{"s": 3600}'):
            wait_until(lambda: "started" in replica.log())
        wait_until(lambda: replica.status().processes[0].restarts == 1)
        death = replica.status().processes[0].death
        assert death is not None
        assert (death.cause, death.pid) == (DeathCause.CLIENT_DISCONNECTED, pid)
        wait_until(lambda: "killed: its call continued after the client disconnected" in replica.log())
        replica.wait_ready()
        assert replica.request({"s": 0}).status == 200
        wait_until(lambda: disconnected(tmp_path) == 1)


def test_a_disconnect_over_tcp_is_noticed() -> None:
    with running_replica(STUCK, on_disconnect="kill", listen_host="127.0.0.1", gateway_secret="x") as replica:
        replica.wait_ready()
        client = replica.connection()
        client.request("POST", "/", b'{"s": 3600}', {"content-type": "application/json"})
        wait_until(lambda: "started" in replica.log())
        client.close()
        wait_until(lambda: replica.status().processes[0].restarts == 1)


def test_with_kill_the_other_calls_of_the_process_finish_first() -> None:
    with running_replica(STUCK, on_disconnect="kill", threads=2) as replica, ThreadPoolExecutor(1) as pool:
        replica.wait_ready()
        other = pool.submit(replica.request, {"s": 3})
        with calling(replica, b'{"s": 3600}'):
            wait_until(lambda: replica.log().count("started") == 2)
        assert other.result(PATIENCE_S).status == 200
        wait_until(lambda: replica.status().processes[0].restarts == 1)


def test_with_kill_a_call_that_ends_by_itself_ends_no_process() -> None:
    with running_replica(SYNC, on_disconnect="kill") as replica:
        replica.wait_ready()
        pid = replica.request(method="GET").body
        with calling(replica):
            wait_until(lambda: "started" in replica.log())
        wait_until(lambda: "cancelled" in replica.log())
        assert replica.request(method="GET").body == pid


def test_outside_of_calls_nothing_is_cancelled() -> None:
    assert not Context().run(cortex.cancelled)  # a test before may have called a method on this thread


ENDLESS = """
    import asyncio, time
    from contextlib import aclosing
    from starlette.responses import StreamingResponse

    def endless(item=bytes):
        try:
            while True:
                yield item(b"x" * 1_000_000)
        finally:
            print("cleans up", flush=True)
            time.sleep(1000)

    async def endless_async(item=bytes):
        try:
            while True:
                yield item(b"x" * 1_000_000)
        finally:
            print("cleans up", flush=True)
            await asyncio.sleep(1000)
"""
METHODS = """
    class Handler:
        def __init__(self, config):
            pass
"""
APPLICATION = """
    async def app(scope, receive, send):
        if scope["type"] == "http":
            async with aclosing(endless_async()) as parts:
                RESPONSE
"""
SENDS = """
                await send({"type": "http.response.start", "status": 200})
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
"""
WSGI = """
    def app(environ, start_response):
        start_response("200 OK", [])
        return endless()
"""
SERVICE = """
    class Handler:
        def __init__(self, config, proto_module_pb2):
            self.item = lambda data: proto_module_pb2.Item(data=data)
"""
PROTO = """
    syntax = "proto3";
    service T { rpc Count (Item) returns (stream Item); }
    message Item { bytes data = 1; }
"""
FIELDS: dict[str, dict[str, Any]] = {
    "python": {},
    "asgi": {"type": "asgi", "app": "app"},
    "wsgi": {"type": "wsgi", "app": "app"},
    "grpc": {"protobuf_path": "t.proto", "files": {"t.proto": PROTO}},
}


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (METHODS + "        def handle_post(self, payload): yield from endless()", "python"),
        pytest.param(WSGI, "wsgi", marks=pytest.mark.long),
        pytest.param(
            SERVICE + "        def Count(self, payload, context): return endless(self.item)",
            "grpc",
            marks=pytest.mark.long,
        ),
    ],
    ids=["generator", "wsgi", "grpc"],
)
def test_the_process_ends_if_a_clean_up_on_a_thread_never_does(source: str, kind: str) -> None:
    with running_replica(ENDLESS + source, timeout_s=1, **FIELDS[kind]) as replica:
        replica.wait_ready()
        process = replica.pid
        with calling(replica, path="/T/Count"):
            wait_until(lambda: "has a slow client" in replica.log() and "cleans up" in replica.log())
            wait_until(lambda: replica.pid != process)
        assert "timed out after 1 s" in replica.log()


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (APPLICATION.replace("RESPONSE", SENDS.strip()), "asgi"),
        pytest.param(
            APPLICATION.replace("RESPONSE", "await anext(parts); await asyncio.sleep(1000)"),
            "asgi",
            marks=pytest.mark.long,
        ),
        pytest.param(
            METHODS + "        def handle_post(self, payload): return StreamingResponse(endless_async())",
            "python",
            marks=pytest.mark.long,
        ),
        pytest.param(
            METHODS + "        async def handle_post(self, payload): return endless_async()",
            "python",
            marks=pytest.mark.long,
        ),
        pytest.param(
            SERVICE + "        async def Count(self, payload, context): return endless_async(self.item)",
            "grpc",
            marks=pytest.mark.long,
        ),
    ],
    ids=["asgi stream", "asgi without a response", "starlette", "async generator", "grpc"],
)
def test_a_clean_up_on_the_event_loop_that_never_ends_is_cancelled(source: str, kind: str) -> None:
    with running_replica(ENDLESS + source, timeout_s=1, **FIELDS[kind]) as replica:
        replica.wait_ready()
        process = replica.pid
        with calling(replica, path="/T/Count"):
            wait_until(lambda: "cleans up" in replica.log())
            wait_until(lambda: "and its code still ran 1 s later: cancelled it again" in replica.log())
        assert replica.pid == process
