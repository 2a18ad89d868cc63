"""HTTP/1.1 on the wire: framing, keep-alive, response heads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from email.utils import parsedate_to_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.worker.grpc.connection import GrpcConnection
from cortex.worker.http.connection import Connection
from cortex.worker.http.connection_pool import ConnectionPool
from cortex.worker.http.responses import _date, framed_chunk
from cortex.worker.http.streaming_connection import StreamingConnection
from cortex.worker.monitoring.metrics import RequestRecorder
from cortex.worker.shared_state import SharedConnectionState
from harness.connections import read_until
from harness.replicas.replicas import Replica, running_replica
from harness.replicas.specs import limits
from harness.wait import PATIENCE_S

pytestmark = pytest.mark.processes

ECHO = "def predict(sample, metadata):\n    return sample\n"


@given(st.integers(0, 253402300799))
def test_dates_are_those_of_the_http_standard(second: int) -> None:
    line = _date(second).decode()
    assert line.startswith("date: ")
    assert line.endswith(" GMT\r\n")
    assert parsedate_to_datetime(line[6:].strip()).timestamp() == second


@pytest.mark.parametrize(
    ("endpoint", "target", "below"),
    [
        ("/iris", "/iris/v1/models?limit=1", b"/v1/models"),
        ("/iris", "/iris/", b"/"),
        ("/", "/signature", b"/signature"),
        (None, "/iris", b""),
    ],
)
def test_a_request_has_a_path_below_its_endpoint(endpoint: str | None, target: str, below: bytes) -> None:
    loop = asyncio.new_event_loop()
    found = loop.create_future()

    def handle(connection: Connection) -> None:
        found.set_result(connection.path_below)

    pool = ConnectionPool(loop, SharedConnectionState(), RequestRecorder(None), handle, limits(100))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pool.add(theirs, 0, lambda connection: None)
        header = f"x-cortex-endpoint: {endpoint}\r\n" if endpoint else ""
        ours.sendall(f"GET {target} HTTP/1.1\r\n{header}\r\n".encode())
        assert loop.run_until_complete(asyncio.wait_for(found, PATIENCE_S)) == below
    loop.close()


@pytest.mark.parametrize("piece_bytes", [1000, 70_000, 1_000_000])
@pytest.mark.parametrize("framing", ["content-length", "transfer-encoding"])
def test_large_bodies_arrive_complete_however_they_are_divided(framing: str, piece_bytes: int) -> None:
    loop = asyncio.new_event_loop()
    received: list[tuple[str, bytes]] = []

    def handle(connection: Connection) -> None:
        received.append((connection.method, connection.body))
        connection.respond(200, None, b"")

    async def send(sock: socket.socket, data: bytes) -> None:
        sock.setblocking(False)
        for start in range(0, len(data), piece_bytes):
            await loop.sock_sendall(sock, data[start : start + piece_bytes])
        assert (await loop.sock_recv(sock, 4096)).startswith(b"HTTP/1.1 200 OK")

    bodies = [bytes(range(256)) * 2000, b"small", b"y" * 300_000]
    pool = ConnectionPool(loop, SharedConnectionState(), RequestRecorder(None), handle, limits(10**6))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pool.add(theirs, 0, lambda connection: None)
        for verb, body in zip(("PUT", "POST", "PATCH"), bodies, strict=True):
            if framing == "content-length":
                head, framed = f"content-length: {len(body)}", body
            else:
                head, framed = "transfer-encoding: chunked", framed_chunk(body) + b"0\r\n\r\n"
            request = f"{verb} / HTTP/1.1\r\n{head}\r\n\r\n".encode() + framed
            loop.run_until_complete(asyncio.wait_for(send(ours, request), PATIENCE_S))
    loop.close()
    assert received == list(zip(("PUT", "POST", "PATCH"), bodies, strict=True))


def test_large_bodies_that_arrive_at_the_same_time_stay_apart() -> None:
    loop = asyncio.new_event_loop()
    received: dict[int, bytes] = {}

    def handle(connection: Connection) -> None:
        received[connection.index] = connection.body
        connection.respond(200, None, b"")

    bodies = [bytes([number]) * 1_000_000 for number in range(3)]
    pool = ConnectionPool(loop, SharedConnectionState(), RequestRecorder(None), handle, limits(10**6))
    pairs = [socket.socketpair() for _ in bodies]

    async def upload() -> None:
        for number, (ours, theirs) in enumerate(pairs):
            ours.setblocking(False)
            pool.add(theirs, number, lambda connection: None)
            await loop.sock_sendall(ours, b"POST / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
        for start in range(0, 1_000_000, 50_000):
            for (ours, _), body in zip(pairs, bodies, strict=True):
                await loop.sock_sendall(ours, body[start : start + 50_000])
        for ours, _ in pairs:
            assert (await loop.sock_recv(ours, 4096)).startswith(b"HTTP/1.1 200 OK")

    loop.run_until_complete(asyncio.wait_for(upload(), PATIENCE_S))
    for sock in (sock for pair in pairs for sock in pair):
        sock.close()
    loop.close()
    assert received == dict(enumerate(bodies))


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_arrives() -> None:
    loop = asyncio.new_event_loop()
    handled: list[Connection] = []
    pool = ConnectionPool(loop, SharedConnectionState(), RequestRecorder(None), handled.append, limits(100_000))
    ours, theirs = socket.socketpair()

    async def response() -> bytes:
        ours.setblocking(False)
        await loop.sock_sendall(ours, b"POST / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\nx")
        return await loop.sock_recv(ours, 4096)

    with ours, theirs:
        pool.add(theirs, 0, lambda connection: None)
        refusal = loop.run_until_complete(asyncio.wait_for(response(), PATIENCE_S))
    loop.close()
    assert refusal.startswith(b"HTTP/1.1 413")
    assert b"larger than 100000 bytes" in refusal
    assert not handled


def test_connection_is_kept_alive_between_requests() -> None:
    with running_replica(ECHO, interface="functions") as replica:
        replica.wait_ready()
        connection = replica.connection()
        for number in range(50):
            connection.request("POST", "/", str(number).encode(), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.read() == str(number).encode()
        connection.close()


JSON_HEAD = b"POST /x HTTP/1.1\r\ncontent-type: application/json\r\n"
APPLICATION = """
    async def app(scope, receive, send):
        if scope["type"] == "http":
            body = (await receive())["body"]
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": body})
"""


@pytest.mark.parametrize("is_application", [False, True])
@pytest.mark.parametrize(
    "request_of_client",
    [
        JSON_HEAD + b"proxy-connection: close\r\ncontent-length: 2\r\n\r\n17",
        JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n17\r\n0\r\nconnection: close\r\n\r\n",
        JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n17\r\n0\r\nproxy-connection: close\r\n\r\n",
    ],
)
def test_no_client_ends_the_connection_of_the_gateway_for_the_next_one(
    request_of_client: bytes, is_application: bool
) -> None:
    form = {"type": "asgi", "app": "app"} if is_application else {"interface": "functions"}
    with running_replica(APPLICATION if is_application else ECHO, **form) as replica:
        replica.wait_ready()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(replica.spec.sockets[0])
            for _ in range(2):
                for sent in (request_of_client, JSON_HEAD + b"content-length: 2\r\n\r\n17"):
                    sock.sendall(sent)
                    answer = read_until(sock, b"\r\n\r\n17")
                    assert answer.startswith(b"HTTP/1.1 200")


STREAM = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_get(self, query_params):
            for size in (1, 70_000, 2):
                yield "x" * size
"""


def last_response(replica: Replica, request: bytes) -> tuple[bytes, bytes]:
    """Send a request, and return the head and the body of a response that ends with the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(replica.spec.sockets[0])
        sock.sendall(request)
        head, _, body = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("is_application", [False, True])
def test_a_request_with_an_unknown_verb_is_refused_with_its_id(is_application: bool) -> None:
    form = {"type": "asgi", "app": "app"} if is_application else {"interface": "functions"}
    with running_replica(APPLICATION if is_application else ECHO, **form) as replica:
        replica.wait_ready()
        request = b"FOO /x HTTP/1.1\r\nhost: a\r\nx-cortex-request-id: 17-1\r\ncontent-length: 2\r\n\r\n17"
        head, body = last_response(replica, request)
        assert head.startswith(b"HTTP/1.1 501 Not Implemented\r\n")
        assert json.loads(body) == {"error": "the verb of the request is unknown", "request_id": "17-1"}


def test_a_request_that_is_not_valid_is_refused_with_its_id() -> None:
    with running_replica(ECHO, interface="functions") as replica:
        replica.wait_ready()
        head, body = last_response(replica, b"GET /x\xff HTTP/1.1\r\nhost: a\r\nx-cortex-request-id: 17-2\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body) == {"error": "the request is not valid HTTP", "request_id": "17-2"}


@pytest.mark.parametrize("framing", [b"content-length: 100\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n5\r\n"])
@pytest.mark.parametrize("is_application", [False, True])
def test_a_request_whose_client_ends_it_too_early_is_refused(framing: bytes, is_application: bool) -> None:
    loop = asyncio.new_event_loop()
    connection_class = StreamingConnection if is_application else Connection
    recorder = RequestRecorder(None)
    pool = ConnectionPool(
        loop, SharedConnectionState(), recorder, lambda each: each.begin(2**62), limits(10**6), connection_class
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    closed = loop.create_future()
    with ours, theirs:
        pool.add(theirs, 0, closed.set_result)
        ours.sendall(b"POST / HTTP/1.1\r\nx-cortex-request-id: 17-3\r\n" + framing + b"abc")
        ours.shutdown(socket.SHUT_WR)
        while not (received := _received(ours)):
            loop.run_until_complete(asyncio.sleep(0))
        if not is_application:  # else the call still runs
            loop.run_until_complete(asyncio.wait_for(closed, PATIENCE_S))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    message = "the connection ended before the request body was complete"
    assert json.loads(body) == {"error": message, "request_id": "17-3"}
    loop.close()


@pytest.mark.parametrize("connection_class", [Connection, StreamingConnection, GrpcConnection])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_request_that_nobody_has_read_is_answered_before_the_process_ends(
    connection_class: type[Connection], is_whole: bool
) -> None:
    loop = asyncio.new_event_loop()
    handled: list[Connection] = []
    recorder = RequestRecorder(None)
    pool = ConnectionPool(loop, SharedConnectionState(), recorder, handled.append, limits(1_000), connection_class)
    pool.set_paused(True)
    kind = "grpc" if connection_class is GrpcConnection and is_whole else "json"
    request = f"POST / HTTP/1.1\r\nx-cortex-request-id: 17-3\r\ncontent-type: application/{kind}\r\n".encode()
    (ours, theirs), (other, idle) = socket.socketpair(), socket.socketpair()
    with ours, theirs, other, idle:
        for index, sock in enumerate((theirs, idle)):
            pool.add(sock, index, lambda connection: None)
        ours.sendall(request + b"\r\n" * is_whole)
        pool.end_all("it ends")
        response = ours.recv(4096)
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"the process ended before it ran this request: it ends" in response
        assert (b"grpc-status: 14" in response) == (kind == "grpc")
        assert (b'"request_id": "17-3"' in response) == (kind == "json" and is_whole)
        assert other.recv(1) == b"", "connections without a request are closed"
    assert not handled
    loop.close()


def _received(sock: socket.socket) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return sock.recv(65536)
    return b""


def test_request_is_parsed_byte_by_byte() -> None:
    with running_replica(ECHO, interface="functions") as replica, socket.socket(socket.AF_UNIX) as sock:
        replica.wait_ready()
        sock.connect(replica.spec.sockets[0])
        for byte in b"POST /x HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n17":
            sock.sendall(bytes([byte]))
        sock.settimeout(PATIENCE_S)
        assert sock.recv(4096).endswith(b"\r\n\r\n17")


def test_responds_100_continue_to_a_client_that_expects_it() -> None:
    with running_replica(ECHO, interface="functions") as replica, socket.socket(socket.AF_UNIX) as sock:
        replica.wait_ready()
        sock.connect(replica.spec.sockets[0])
        sock.settimeout(PATIENCE_S)
        head = b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n"
        sock.sendall(head)
        assert sock.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"7")
        assert sock.recv(4096).endswith(b"\r\n\r\n7")
