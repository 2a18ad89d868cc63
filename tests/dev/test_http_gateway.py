"""The HTTP server of `cortex dev`, in front of an API in the process of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cortex.config.schema import Api
from cortex.dev.http_gateway import DevGateway, ServedRequest, UnavailableError
from cortex.dev.local.api import ApplicationApi, RequestApi
from cortex.dev.local.project import LocalProject, spec_for_this_process
from cortex.home import Home
from harness.wait import PATIENCE_S

CODE = """
class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload, headers):
        return {"payload": payload, "headers": dict(headers)}

    def handle_put(self):
        from starlette.responses import Response
        return Response("{}", 400, {"X-Cortex-Disconnected": "1", "x-cortex-request-id": "2", "own": "kept"})

    def handle_get(self):
        for number in range(3):
            yield f"{number} "
"""


async def notice_nothing() -> None:
    pass


class Upstream:
    """An API whose event loop and user code run on a thread."""

    def __init__(self, folder: Path, kind: type[RequestApi] | type[ApplicationApi] = RequestApi) -> None:
        project = LocalProject.read(folder / "cortex.yaml", {})
        (self.api,) = project.diagnosis.apis
        self.signature = ""
        self.has_routes: bool | None = False
        self.is_serving = True
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.failure = ""
        self.loop = asyncio.new_event_loop()
        self.served = kind(spec_for_this_process(project, self.api, Home(folder / "home"), {}), self.loop)
        self.served.load()
        self.thread = threading.Thread(target=self.served.run, daemon=True)
        self.thread.start()

    async def connect(self) -> socket.socket:
        await self.is_open.wait()
        if self.failure:
            raise UnavailableError(self.failure)
        ours, theirs = socket.socketpair()
        self.loop.call_soon_threadsafe(self.served.add, theirs, lambda connection: None)
        return ours

    def disconnect(self, connection: socket.socket) -> None:
        pass

    def close(self) -> None:
        self.served.stop()
        self.thread.join()


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Upstream]:
    handler, networking = "{type: python, path: one.py}", "{max_body_size: 2Mi}"
    entry = f"- name: one\n  kind: RealtimeAPI\n  handler: {handler}\n  networking: {networking}\n"
    (tmp_path / "cortex.yaml").write_text(entry)
    (tmp_path / "one.py").write_text(CODE)
    made = Upstream(tmp_path)
    yield made
    made.close()


async def exchange(port: int, *pieces: bytes | None) -> bytes:
    """Send pieces, and return everything until the server closes the connection; None ends the client's side of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece) if piece is not None else writer.write_eof()
        await writer.drain()
        await asyncio.sleep(0)
    data = await reader.read()
    writer.close()
    return data


def run(upstream: Any, *pieces: bytes | None) -> tuple[bytes, list[ServedRequest]]:
    """Return the responses to one connection, and what was logged."""
    logged: list[ServedRequest] = []

    async def main() -> bytes:
        gateway = DevGateway(logged.append, notice_nothing)
        gateway.upstreams = upstream if isinstance(upstream, list) else [upstream]
        port = await gateway.start("127.0.0.1", 0)
        try:
            return await exchange(port, *pieces)
        finally:
            await gateway.stop()

    return asyncio.run(main()), logged


JSON = b"content-type: application/json\r\n"
LAST = b"connection: close\r\n\r\n"


def test_user_code_can_not_send_the_headers_of_cortex(upstream: Upstream) -> None:
    head = run(upstream, b"PUT /one HTTP/1.1\r\nhost: x\r\n" + LAST)[0].partition(b"\r\n\r\n")[0].lower()
    names = [line.partition(b":")[0] for line in head.split(b"\r\n")]
    assert (names[0], b"own" in names) == (b"http/1.1 400 bad request", True)
    assert [name for name in names if name.startswith(b"x-cortex-")] == [b"x-cortex-request-id"]
    assert b"x-cortex-request-id: 2" not in head


def test_a_request_gets_an_id_and_loses_headers_that_clients_cannot_set(upstream: Upstream) -> None:
    request = b"POST /one HTTP/1.1\r\nhost: a\r\nx-cortex-endpoint: /x\r\nX-Color: red\r\n" + JSON
    response, logged = run(upstream, request + b"content-length: 2\r\n" + LAST + b"[1")
    assert response.startswith(b"HTTP/1.1 400")
    response, logged = run(upstream, request + b"content-length: 3\r\n" + LAST, b"[1", b"]")
    head, _, body = response.partition(b"\r\n\r\n")
    found = json.loads(body)
    assert found["payload"] == [1]
    assert found["headers"]["x-color"] == "red"
    assert found["headers"]["x-forwarded-for"] == "127.0.0.1"
    assert "x-cortex-endpoint" not in found["headers"]
    assert found["headers"]["x-cortex-request-id"].encode() in head
    assert [(each.api, each.method, each.path, each.status) for each in logged] == [("one", "POST", "/one", 200)]


def test_a_request_that_its_client_ends_too_early_is_refused(upstream: Upstream) -> None:
    response, logged = run(upstream, b"POST /one HTTP/1.1\r\ncontent-length: 100\r\n" + JSON + b"\r\nabc", None)
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)
    assert error["error"] == "the connection ended before the request body was complete"
    assert b"x-cortex-request-id: " + error["request_id"].encode() in head
    assert [(each.status, each.reason) for each in logged] == [(400, error["error"])]


def test_chunked_bodies_streams_and_several_requests_on_a_connection(upstream: Upstream) -> None:
    chunked = (
        b"POST /one HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
        + JSON
        + b"\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n"
    )
    stream = b"GET /one HTTP/1.1\r\nhost: a\r\n\r\n"
    response, logged = run(upstream, chunked, stream + b"HEAD /one HTTP/1.1\r\nhost: a\r\n" + LAST)
    assert b'"payload":[1]' in response
    assert b"0 \r\n2\r\n1 \r\n2\r\n2 \r\n0\r\n\r\nHTTP/1.1" in response
    assert [each.status for each in logged] == [200, 200, 200]


@pytest.mark.parametrize("header", [b"", b"connection: keep-alive\r\n"])
def test_a_stream_to_a_client_of_http_1_0_has_no_chunks(header: bytes, upstream: Upstream) -> None:
    response, logged = run(upstream, b"GET /one HTTP/1.0\r\n" + header + b"\r\n")
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"0 1 2 "
    assert [each.status for each in logged] == [200]


@pytest.mark.parametrize(
    ("request_line", "status", "text"),
    [
        (b"GET /two HTTP/1.1", 404, b"no API has the path /two; the endpoints are /one"),
        (b"GET /one/below HTTP/1.1", 404, b"one has no path /below; below its endpoint, it has /docs, "),
        (b"GET /oneself HTTP/1.1", 404, b"no API has the path /oneself; the endpoints are /one"),
        (b"GET /healthz HTTP/1.1", 200, b'"ok": true'),
        (b"GET /readyz HTTP/1.1", 200, b'{"ready":true}'),
        (b"GET /readyz?api=one HTTP/1.1", 200, b'{"ready":true}'),
        (b"GET /readyz?api=one&api=nope HTTP/1.1", 404, b"nope: no such API"),
        (b"GET /one/readyz HTTP/1.1", 200, b'{"ready":true}'),
        (b"GET /one/v2/health/live HTTP/1.1", 200, b'"live":true'),
        (b"GET /one/openapi.json HTTP/1.1", 200, b'"openapi":"3.1.0"'),
        (b"GET /one/docs HTTP/1.1", 200, b"swagger-ui"),
        (b"GET /one/docs/none.js HTTP/1.1", 404, b"has no file"),
        (b"PATCH /one HTTP/1.1", 405, b"PATCH is not supported"),
        (b"what is this", 400, b"not valid HTTP"),
    ],
)  # fmt: skip
def test_paths(upstream: Upstream, request_line: bytes, status: int, text: bytes) -> None:
    response, _ = run(upstream, request_line + b"\r\nhost: a\r\n" + LAST)
    assert response.startswith(b"HTTP/1.1 %d" % status)
    assert text in response


@pytest.mark.parametrize(("other", "status"), [(0, 200), (50, 503)])
def test_a_splitter_is_ready_if_each_api_with_weight_is(upstream: Upstream, other: int, status: int) -> None:
    shares = [{"name": "one", "weight": 100 - other}, {"name": "away", "weight": other}]
    shares.append({"name": "dark", "weight": 5, "shadow": True})
    api = Api.model_validate({"name": "both", "kind": "TrafficSplitter", "apis": shares})
    splitter = SimpleNamespace(api=api, is_serving=False)
    for path in (b"/readyz?api=both", b"/both/readyz", b"/readyz"):
        response, _ = run([upstream, splitter], b"GET " + path + b" HTTP/1.1\r\nhost: a\r\n" + LAST)
        assert response.startswith(b"HTTP/1.1 %d" % status), path


def test_the_reasons_of_refused_requests_are_reported(upstream: Upstream) -> None:
    bad = b"POST /one HTTP/1.1\r\nhost: a\r\n" + JSON + b"content-length: 2\r\n" + LAST + b"[1"
    for request, status, reason in (
        (bad, 400, "malformed JSON: "),
        (b"PATCH /one HTTP/1.1\r\nhost: a\r\n" + LAST, 405, "PATCH is not supported by this API; it answers "),
        (b"GET /two HTTP/1.1\r\nhost: a\r\n" + LAST, 404, "no API has the path /two; the endpoints are /one"),
        (b"GET /one HTTP/1.1\r\nhost: a\r\n" + LAST, 200, ""),
    ):
        _, (served,) = run(upstream, request)
        assert (served.status, served.reason[: len(reason)]) == (status, reason)
        assert bool(served.reason) == bool(reason)


def test_unknown_paths_wait_until_a_change_of_the_configuration_is_applied(upstream: Upstream) -> None:
    async def main() -> bytes:
        gateway = DevGateway(lambda request: None, notice_nothing)
        gateway.upstreams = [SimpleNamespace(api=Api.model_validate({"name": "two", "kind": "RealtimeAPI"}))]
        port = await gateway.start("127.0.0.1", 0)
        gateway.paths_known.clear()
        held = asyncio.create_task(exchange(port, b"GET /one HTTP/1.1\r\nhost: a\r\n" + LAST))
        done, _ = await asyncio.wait([held], timeout=0.1)
        assert not done
        gateway.upstreams = [upstream]
        gateway.paths_known.set()
        response = await held
        await gateway.stop()
        return response

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200")


def test_requests_are_held_and_an_api_without_a_process_says_why(upstream: Upstream) -> None:
    request = b"GET /one HTTP/1.1\r\nhost: a\r\n" + LAST

    async def main() -> tuple[bytes, bytes]:
        gateway = DevGateway(lambda *_: None, notice_nothing)
        gateway.upstreams = [upstream]
        port = await gateway.start("127.0.0.1", 0)
        upstream.is_open.clear()
        held = asyncio.create_task(exchange(port, request))
        done, _ = await asyncio.wait([held], timeout=0.1)
        assert not done
        upstream.is_open.set()
        first = await held
        upstream.failure = "one does not run: ValueError"
        second = await exchange(port, request)
        await gateway.stop()
        return first, second

    first, second = asyncio.run(main())
    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 503")
    assert b"one does not run: ValueError" in second


def test_a_path_that_may_be_a_route_gets_the_reason_why_no_process_serves(upstream: Upstream) -> None:
    upstream.has_routes, upstream.failure = None, "one does not run: KeyError"
    response, _ = run(upstream, b"GET /one/stats HTTP/1.1\r\nhost: a\r\n" + LAST)
    assert response.startswith(b"HTTP/1.1 503") and b"one does not run: KeyError" in response


def test_a_path_that_turns_out_to_be_no_route_gets_404(upstream: Upstream) -> None:
    upstream.has_routes = None
    response, _ = run(upstream, b"GET /one/stats HTTP/1.1\r\nhost: a\r\n" + LAST)
    assert response.startswith(b"HTTP/1.1 404")


def test_requests_before_the_first_api_is_known_get_503() -> None:
    async def main() -> bytes:
        gateway = DevGateway(lambda *_: None, notice_nothing)
        port = await gateway.start("127.0.0.1", 0)
        response = await exchange(port, b"GET /one HTTP/1.1\r\nhost: a\r\n" + LAST)
        await gateway.stop()
        return response

    response = asyncio.run(main())
    assert response.startswith(b"HTTP/1.1 503") and b"cortex dev is starting" in response


@pytest.mark.parametrize(
    ("exit_reason", "status", "message"),
    [
        ("exited with code 3", 500, "the process that handled this request died: exited with code 3"),
        ("", 502, "the process of the API closed the connection before it answered"),
    ],
)
def test_a_connection_that_ends_before_an_answer_is_reported(exit_reason: str, status: int, message: str) -> None:
    class Dead:
        api = Api.model_validate({"name": "one", "kind": "RealtimeAPI", "networking": {}})
        signature, has_routes = "", False

        async def connect(self) -> socket.socket:
            ours, theirs = socket.socketpair()
            theirs.close()
            return ours

        async def exit_reason(self, connection: socket.socket) -> str:
            return exit_reason

        def disconnect(self, connection: socket.socket) -> None:
            pass

    response, logged = run(Dead(), b"GET /one HTTP/1.1\r\nhost: a\r\n" + LAST)
    assert response.startswith(b"HTTP/1.1 %d" % status) and message.encode() in response
    assert [(each.status, each.reason) for each in logged] == [(status, message)]


def test_the_api_of_a_splitter_is_drawn_by_weight(upstream: Upstream) -> None:
    split = SimpleNamespace(
        api=Api.model_validate(
            {
                "name": "split",
                "kind": "TrafficSplitter",
                "networking": {},
                "apis": [{"name": "one", "weight": 100}, {"name": "gone", "weight": 0}],
            }
        ),
        signature="",
        has_routes=False,
    )

    async def main() -> bytes:
        gateway = DevGateway(lambda *_: None, notice_nothing)
        gateway.upstreams = [upstream, split]  # type: ignore[list-item]
        port = await gateway.start("127.0.0.1", 0)
        response = await exchange(port, b"GET /split HTTP/1.1\r\nhost: a\r\n" + LAST)
        await gateway.stop()
        return response

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200")


OPEN = b"\r\n\r\n"
POST = b"POST /one HTTP/1.1\r\nhost: a\r\n" + JSON
GET = b"GET /one HTTP/1.1\r\nhost: a\r\n"
LAST_GET = GET + LAST


@pytest.mark.parametrize(
    ("pieces", "statuses"),
    [
        ([b"HEAD /two HTTP/1.1\r\nhost: a" + OPEN + LAST_GET], [404, 200]),
        ([GET + b"\r\n[1]" + LAST_GET], [200, 400]),
        ([POST + b"content-length: 3\r\n\r\n[1]\r\n" + LAST_GET], [200, 200]),
        ([POST + b"transfer-encoding: chunked\r\n\r\n3\r\n[1]\r\n0\r\n\r\n" + LAST_GET], [200, 200]),
        # Java's client asks for HTTP/2 with each request.
        ([POST + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\n[1]" + LAST_GET], [200, 200]),
        ([GET + b"connection: upgrade\r\nupgrade: websocket" + OPEN + LAST_GET], [200, 200]),
        ([POST + b"content-length: 2000002\r\n\r\n", b'"', b"x" * 2_000_000, b'"' + LAST_GET], [200, 200]),
        ([POST + b"expect: 100-continue\r\ncontent-length: 2" + OPEN, b"[]" + LAST_GET], [100, 200, 200]),
        ([b"POST /one HTTP/1.0\r\n" + JSON + b"content-length: 2" + OPEN + b"[]"], [200]),
        ([POST + b"content-length: 3000000" + OPEN, b'"' + b"x" * 2_999_999], [413]),
        ([GET + b"x: " + b"x" * 70_000 + b"\r\n" + LAST], [431]),
        ([GET + b"x: y\r\n" * 1001 + LAST], [431]),
        ([b"GET /one?" + b"x" * 70_000 + b" HTTP/1.1\r\n" + LAST], [431]),
        ([b"FOO /one HTTP/1.1\r\nhost: a\r\n" + LAST], [501]),
        ([POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], [400]),
        ([POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n"], [400]),
        ([POST + b"transfer-encoding: chunked\r\n\r\n2\r\n[1", None], [400]),
        ([b"POST /two HTTP/1.1\r\ncontent-length: 9\r\n\r\n[1"], [404]),
        ([GET + b"\r\n", None], []),
    ],
)
def test_requests_are_read_as_by_a_deployed_api(
    upstream: Upstream, pieces: list[bytes | None], statuses: list[int]
) -> None:
    response, _ = run(upstream, *pieces)
    found = re.findall(rb"HTTP/1\.1 (\d+) [^\r]+\r\n((?:[^\r]+\r\n)*)\r\n", response)
    assert [int(status) for status, _ in found] == statuses
    assert all(b"x-cortex-request-id: " in head for status, head in found if status != b"100")


def test_a_websocket_is_passed_on_with_what_follows_its_request(tmp_path: Path) -> None:
    application = """
async def app(scope, receive, send):
    await receive()
    await send({"type": "websocket.accept"})
    message = await receive()
    await send({"type": "websocket.send", "text": message["text"] + scope["path"]})
    await send({"type": "websocket.close", "code": 1000})
"""
    entry = "- name: one\n  kind: RealtimeAPI\n  handler: {type: asgi, path: one.py, app: app}\n"
    (tmp_path / "cortex.yaml").write_text(entry)
    (tmp_path / "one.py").write_text(application)
    upstream = Upstream(tmp_path, ApplicationApi)
    key = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: "
    frame = b"\x81\x82\0\0\0\0hi"
    try:
        response, logged = run(
            upstream, b"GET /one/ws HTTP/1.1\r\nhost: a\r\n" + key + b"a" * 22 + b"==" + OPEN + frame
        )
    finally:
        upstream.close()
    head, _, frames = response.partition(OPEN)
    assert head.startswith(b"HTTP/1.1 101 ") and head.count(b"x-cortex-request-id") == 1
    assert frames == b"\x81\x09hi/one/ws" + b"\x88\x02\x03\xe8"
    assert [(each.status, each.path) for each in logged] == [(101, "/one/ws")]


def test_a_fault_of_cortex_dev_does_not_leave_the_client_waiting(upstream: Upstream) -> None:
    class Faulty:
        """As `upstream`, but it cannot be connected to, for no reason that is foreseen."""

        api, signature = upstream.api, ""

        async def connect(self) -> socket.socket:
            raise RuntimeError("unforeseen")

    data, logged = run(Faulty(), b"GET /one HTTP/1.1\r\nhost: x\r\n" + LAST)
    assert data.startswith(b"HTTP/1.1 500 ")
    assert [each.status for each in logged] == [500]


async def test_clients_wait_quietly_while_no_descriptor_is_free() -> None:
    gateway = DevGateway(lambda served: None, notice_nothing)
    port = await gateway.start("127.0.0.1", 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    with socket.socket() as client:
        client.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 64, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(client.fileno()))
            with contextlib.suppress(BlockingIOError):
                client.connect(("127.0.0.1", port))
            turns, until = 0, time.monotonic() + 0.3
            while time.monotonic() < until:
                await asyncio.sleep(0)
                turns += 1
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert turns < 100, "the event loop spins"
        await asyncio.get_running_loop().sock_sendall(client, b"GET /livez HTTP/1.1\r\nhost: x\r\n" + LAST)
        received = asyncio.get_running_loop().sock_recv(client, 4096)
        assert (await asyncio.wait_for(received, PATIENCE_S)).startswith(b"HTTP/1.1 200 ")
    await gateway.stop()
