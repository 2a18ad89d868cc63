"""Streamed responses and response objects of user code, from real replicas."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.replicas.replicas import Answer, Replica, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    import asyncio, os, time
    from collections.abc import AsyncIterator, Iterator
    import cortex
    from starlette.responses import JSONResponse, StreamingResponse

    class Handler:
        def __init__(self, config):
            pass

        @cortex.route("POST", "/gated")
        def gated(self, payload):
            yield "0\\n"
            while not os.path.exists(payload["gate"]):
                time.sleep(0.01)
            yield "1\\n"
            yield "2\\n"

        @cortex.route("POST", "/numbers")
        async def numbers(self, payload):
            for number in range(payload["n"]):
                yield {"number": number}
                await asyncio.sleep(0)

        @cortex.route("GET", "/texts")
        def texts(self) -> Iterator[str]:
            yield from ()

        @cortex.route("GET", "/objects")
        async def objects(self) -> AsyncIterator[dict]:
            for number in ():
                yield {"number": number}

        @cortex.route("GET", "/unknown")
        def unknown(self):
            yield from ()

        @cortex.route("POST", "/raises")
        def raises(self, payload):
            for number in range(payload["n"]):
                yield "x"
            raise ValueError("enough")

        @cortex.route("POST", "/large")
        def large(self, payload):
            return bytes(payload["n"])

        @cortex.route("GET", "/teapot")
        def teapot(self):
            return JSONResponse({"teapot": True}, status_code=418, headers={"x-extra": "1"})

        @cortex.route("POST", "/status")
        def status(self, payload):
            return StreamingResponse(iter(["a", "b"]), payload["status"], {"etag": "x"}, "text/event-stream")

        @cortex.route("POST", "/blocks")
        def blocks(self, payload):
            for _ in range(payload["n"]):
                yield b"x" * 100_000
            print("generator done", flush=True)
"""
HEADERS = {"content-type": "application/json", "x-cortex-endpoint": "/t"}


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with running_replica(SOURCE) as replica:
        replica.wait_ready()
        yield replica


def ask(replica: Replica, path: str, payload: object = None) -> Answer:
    method = "GET" if payload is None else "POST"
    return replica.request(payload, method=method, path=f"/t{path}", headers=HEADERS)


def test_a_generator_is_streamed_while_it_runs(replica: Replica) -> None:
    connection = replica.connection()
    gate = Path(replica.spec.run_dir) / "gate"
    connection.request("POST", "/t/gated", json.dumps({"gate": str(gate)}), HEADERS)
    response = connection.getresponse()
    assert response.readline() == b"0\n"
    gate.touch()
    assert response.read() == b"1\n2\n"
    assert response.getheader("transfer-encoding") == "chunked"
    connection.close()


def test_an_async_generator_streams_json_lines(replica: Replica) -> None:
    answer = ask(replica, "/numbers", {"n": 3})
    assert [json.loads(line) for line in answer.body.splitlines()] == [{"number": n} for n in range(3)]
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert ask(replica, "/numbers", {"n": 0}).body == b""


def test_a_stream_without_items_has_the_content_type_of_its_annotation(replica: Replica) -> None:
    for path, expected in (
        ("/texts", "text/plain; charset=utf-8"),
        ("/objects", "application/x-ndjson"),
        ("/unknown", None),
    ):
        assert ask(replica, path).headers.get("content-type") == expected


def test_a_generator_that_raises_is_an_error_at_first_and_truncates_the_response_later(replica: Replica) -> None:
    answer = ask(replica, "/raises", {"n": 0})
    assert answer.status == 500
    assert "ValueError" in answer.json["error"]
    with socket.socket(socket.AF_UNIX) as sock:
        send(replica, sock, b'{"n": 2}', "/raises")
        received = b"".join(iter(lambda: sock.recv(4096), b""))
    assert received.count(b"1\r\nx\r\n") == 2
    assert not received.endswith(b"0\r\n\r\n")
    wait_until(lambda: replica.log().count("ValueError: enough") == 2)


def test_large_responses_are_complete(replica: Replica) -> None:
    for size in (0, 70_000, 20_000_000):
        assert len(ask(replica, "/large", {"n": size}).body) == size


def test_starlette_responses_are_sent_unchanged(replica: Replica) -> None:
    answer = ask(replica, "/teapot")
    assert (answer.status, answer.json, answer.headers["x-extra"]) == (418, {"teapot": True}, "1")
    stream = ask(replica, "/status", {"status": 206})
    assert (stream.status, stream.body) == (206, b"ab")
    assert stream.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("status", [204, 304])
def test_a_stream_whose_status_has_no_body_is_its_head_alone(replica: Replica, status: int) -> None:
    connection = replica.connection()
    for path, payload, expected in (("/status", {"status": status}, (status, b"")), ("/large", {"n": 1}, (200, b"\0"))):
        connection.request("POST", f"/t{path}", json.dumps(payload), HEADERS)
        response = connection.getresponse()
        assert (response.status, response.read()) == expected
        assert response.headers["transfer-encoding"] is None
    connection.close()


def test_a_slow_reader_does_not_stop_a_generator(replica: Replica) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        send(replica, sock, b'{"n": 50}', "/blocks")
        wait_until(lambda: "generator done" in replica.log())
        assert ask(replica, "/blocks", {"n": 1}).status == 200


def send(replica: Replica, sock: socket.socket, body: bytes, route: str = "") -> None:
    """Send a request over a connection from which nothing is read."""
    sock.connect(replica.spec.sockets[0])
    head = f"POST /t{route} HTTP/1.1\r\nx-cortex-endpoint: /t\r\n" if route else "POST / HTTP/1.1\r\n"
    sock.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def test_the_first_chunk_is_sent_before_a_generator_that_keeps_the_gil_continues() -> None:
    source = """
        import ctypes, sys

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                yield "first\\n"
                keeping_the_gil, is_open = ctypes.PyDLL(None), False
                sys.setswitchinterval(120)
                for _ in range(60_000):
                    keeping_the_gil.usleep(1000)
                    is_open = is_open or keeping_the_gil.access(payload["gate"].encode(), 0) == 0
                    if is_open:
                        break
                sys.setswitchinterval(0.005)
                yield f"{is_open}\\n"
    """
    with running_replica(source) as replica:
        replica.wait_ready()
        connection = replica.connection()
        gate = Path(replica.spec.run_dir) / "gate"
        connection.request("POST", "/", json.dumps({"gate": str(gate)}), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.readline() == b"first\n"
        gate.touch()
        assert response.readline() == b"True\n"
        connection.close()


@pytest.mark.parametrize("function", ["def", "async def"])
def test_a_client_that_stops_reading_ends_the_call_and_keeps_only_its_connection(function: str) -> None:
    source = f"""
        class Handler:
            def __init__(self, config):
                pass

            {function} handle_post(self, payload):
                try:
                    while payload["endless"]:
                        yield b"x" * 100_000
                finally:
                    print("closed", flush=True)
    """
    with running_replica(source, timeout_s=1) as replica, socket.socket(socket.AF_UNIX) as sock:
        replica.wait_ready()
        send(replica, sock, b'{"endless": 1}')
        wait_until(lambda: "closed" in replica.log())
        assert "slow client: it has read nothing for 1 s" in replica.log()
        wait_until(lambda: replica.status().processes[0].lent == 1)
        assert replica.request({"endless": 0}).status == 200
        assert replica.status().processes[0].restarts == 0
        received = bytearray()
        while data := sock.recv(1 << 20):
            received += data
        assert received.count(b"x") > 8 << 20
        assert not received.endswith(b"0\r\n\r\n")
        wait_until(lambda: replica.status().processes[0].lent == 0)


@pytest.mark.parametrize("function", ["def", "async def"])
def test_clients_that_do_not_read_cost_other_requests_neither_thread_nor_call_slot(function: str) -> None:
    source = f"""
        class Handler:
            def __init__(self, config):
                pass

            {function} handle_post(self, payload):
                for number in range(payload["n"]):
                    yield b"%07d\\n" % number * 100_000
        """
    with running_replica(source, timeout_s=30, max_concurrency=2) as replica, contextlib.ExitStack() as stack:
        replica.wait_ready()
        stalled = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for sock in stalled:
            send(replica, sock, b'{"n": 40}')
        wait_until(lambda: replica.status().processes[0].lent == 3)
        assert replica.request({"n": 1}).body == b"0000000\n" * 100_000
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):  # a client that goes on gets the rest
            received += stalled[0].recv(1 << 20)
        assert received.count(b"0000039\n") == 100_000
        wait_until(lambda: replica.status().processes[0].lent == 2)
        assert replica.status().processes[0].restarts == 0


def test_a_generator_continues_on_its_thread_after_a_slow_client() -> None:
    source = """
        import sqlite3

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                numbers = sqlite3.connect(":memory:")  # it belongs to this thread
                for number in range(payload["n"]):
                    yield b"%07d\\n" % numbers.execute("select ?", (number,)).fetchone() * 100_000
    """
    with running_replica(source, threads=2) as replica, contextlib.ExitStack() as stack:
        replica.wait_ready()
        stalled = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
        for sock in stalled:
            send(replica, sock, b'{"n": 40}')
        wait_until(lambda: replica.status().processes[0].lent == len(stalled))
        assert replica.request({"n": 1}).status == 200
        for sock in reversed(stalled):
            received = bytearray()
            while data := not received.endswith(b"0\r\n\r\n") and sock.recv(1 << 20):
                received += data
            assert received.count(b"0000039\n") == 100_000, replica.log()


def test_a_stream_that_waits_for_its_thread_leaves_the_other_one_to_requests() -> None:
    source = """
        import os, threading, time

        class Handler:
            def __init__(self, config):
                pass

            def handle_get(self):
                return "quick"

            def handle_put(self, payload):
                print("call on", threading.get_ident(), flush=True)
                while not os.path.exists(os.path.join(payload["gates"], str(threading.get_ident()))):
                    time.sleep(0.01)

            def handle_post(self, payload):
                print("stream on", threading.get_ident(), flush=True)
                for number in range(40):
                    yield b"%07d\\n" % number * 100_000
    """
    with running_replica(source, threads=2) as replica, contextlib.ExitStack() as stack:
        replica.wait_ready()
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        send(replica, sock, b"{}")
        wait_until(lambda: replica.status().processes[0].lent == 1)
        gates = Path(replica.spec.run_dir)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for _ in range(2):
            pool.submit(replica.request, {"gates": str(gates)}, method="PUT")
        calls = wait_until(lambda: len(found := re.findall(r"call on (\d+)", replica.log())) == 2 and found)
        (of_stream,) = re.findall(r"stream on (\d+)", replica.log())
        received = bytearray()
        sock.settimeout(0.5)
        with contextlib.suppress(TimeoutError):  # all that was sent before it waited for its thread
            while True:
                received += sock.recv(1 << 20)
        (other,) = set(calls or []) - {of_stream}
        (gates / other).touch()
        assert replica.request(method="GET").body == b"quick"
        (gates / of_stream).touch()
        sock.settimeout(None)
        while data := not received.endswith(b"0\r\n\r\n") and sock.recv(1 << 20):
            received += data
        assert received.count(b"0000039\n") == 100_000


def test_a_generator_of_many_small_chunks_leaves_the_event_loop_time_for_others() -> None:
    source = """
        class Handler:
            def __init__(self, config):
                pass

            async def handle_get(self):
                return "other"

            def handle_post(self, payload):
                for number in range(payload["n"]):
                    yield b"x" * payload["size"]
        """
    with running_replica(source, timeout_s=5) as replica:
        replica.wait_ready()
        for count, size in ((60_000, 10), (20_000, 1_000)):
            connection = replica.connection()
            connection.request(
                "POST", "/", json.dumps({"n": count, "size": size}), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            assert replica.request(method="GET").body == b"other"
            assert len(response.read()) == count * size
            connection.close()
        assert replica.status().processes[0].restarts == 0
