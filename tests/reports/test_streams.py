"""Reports about streamed responses: slow clients, responses that break off, HTTP/1.0, heads."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.installations.installation import Installation
from harness.installations.number_chaos import numbers
from harness.installations.reports import Report, ReportedApi, deployed_report
from harness.wait import PATIENCE_S, wait_until

_TIMEOUTS_S = itertools.count(3, 0.1)
_REALTIME = """
    - name: t
      kind: RealtimeAPI
      networking: {timeout: 2s}
      handler: {type: python, path: handler.py}
"""
_APPLICATION = """
    - name: t
      kind: RealtimeAPI
      networking: {timeout: 2s}
      handler: {type: asgi, path: handler.py, app: app}
"""
_COMMAND = """
    - name: t
      kind: RealtimeAPI
      networking: {timeout: 2s}
      handler: {type: command, command: [python, handler.py]}
"""
_GRPC = """
    - name: t
      kind: RealtimeAPI
      networking: {timeout: 2s}
      handler: {type: python, path: handler.py, protobuf_path: t.proto}
"""
_PROTO = b"""
syntax = "proto3";
package t;
service T { rpc Count (Number) returns (stream Number); }
message Number { int64 value = 1; string ballast = 2; }
"""


def _class(signature: str, big: str) -> str:
    """Return a class that answers `{"n": 0}` with a line, and 1 with many megabytes."""
    return f"""
        import asyncio
        from starlette.responses import FileResponse, StreamingResponse
        def endless():
            for _ in range(1000):
                yield b"x" * 100_000
        async def endless_async():
            for chunk in endless():
                yield chunk
        class Handler:
            def __init__(self, config):
                with open("big.bin", "wb") as file:
                    file.truncate(100_000_000)
            {signature} handle_post(self, payload):
                {big}
    """


_ASGI = """
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000 if b"1" in body else 0):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"done"})
"""
_WSGI = """
    def app(environ, start_response):
        body = environ["wsgi.input"].read()
        start_response("200 OK", [])
        return (b"x" * 100_000 for _ in range(1000 if b"1" in body else 1))
"""
_SERVER = """
    import os
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            for _ in range(1000 if b"1" in body else 1):
                self.wfile.write(b"x" * 100_000)
    ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Server).serve_forever()
"""
_SERVICE = """
    class Handler:
        def __init__(self, config, proto_module_pb2):
            self.pb2 = proto_module_pb2
        KIND Count(self, payload, context):
            for value in range(1000 if payload.value else 1):
                yield self.pb2.Number(value=value, ballast="x" * 100_000)
"""


def stall(api: ReportedApi, path: str, body: bytes) -> socket.socket:
    """Send a request over a connection that nobody reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(PATIENCE_S)
    sock.connect((api.cortex.host, api.cortex.gateway_port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def deaths(api: ReportedApi) -> float:
    """Return how many processes have died."""
    return sum(value for name, value in numbers(api.cortex).items() if name.startswith("cortex_process_deaths"))


def _slow(name: str, source: str, config: str = _REALTIME, path: str = "/t") -> Report:
    """Return a report about a client that does not read; the log names it, with the timeout of this row only."""
    timeout = f"{next(_TIMEOUTS_S):g} s"
    field = "value" if config == _GRPC else "n"

    def observe(api: ReportedApi) -> object:
        def small() -> object:
            answer = api.cortex.post(path, {field: 0})
            return answer.status if answer.status == 200 else answer.body

        statuses = {small()}
        with stall(api, path, b'{"%b": 1}' % field.encode()):

            def is_named() -> bool:
                statuses.add(small())
                return f"it has read nothing for {timeout}" in api.cortex.cortex("logs", "t").stdout

            wait_until(is_named)
            statuses |= {small() for _ in range(5)}
        return statuses, deaths(api)

    return Report(
        f"a client that does not read {name} costs only itself",
        "uvicorn#2754",
        source,
        observe,
        ({200}, 0.0),
        config=config.replace("timeout: 2s", f"timeout: {timeout.replace(' ', '')}"),
        files={"t.proto": _PROTO},
    )


_SLOW_CLIENTS = [
    _slow("a generator", _class("def", 'yield from endless() if payload["n"] else "0"')),
    _slow("a file", _class("async def", 'return FileResponse("big.bin") if payload["n"] else "0"')),
]
_MORE_SLOW_CLIENTS = [
    _slow(
        "a WSGI application",
        _WSGI,
        _APPLICATION.replace("asgi", "wsgi").replace("app: app", "app: app, threads_per_process: 2"),
    ),
    _slow("a gRPC stream", _SERVICE.replace("KIND", "def"), _GRPC, "/t.T/Count"),
    _slow("an async generator", _class("async def", 'for chunk in endless() if payload["n"] else "0": yield chunk')),
    _slow("a stream of starlette", _class("def", 'return StreamingResponse(endless() if payload["n"] else "0")')),
    _slow("an ASGI application", _ASGI, _APPLICATION),
    _slow("a command", _SERVER, _COMMAND),
    _slow("an async gRPC stream", _SERVICE.replace("KIND", "async def"), _GRPC, "/t.T/Count"),
]

_BREAKING = """
    import os, time
    from starlette.responses import FileResponse, StreamingResponse
    def breaking(how):
        yield "first\\n"
        yield "second\\n"
        if how == "raise": raise ValueError
        if how == "exit": os._exit(3)
        time.sleep(1000)
    async def breaking_async(how):
        for each in breaking(how):
            yield each
    def cut(path="big.bin"):
        with open(path, "wb") as file:
            file.truncate(1_000_000)
        response = FileResponse(path, stat_result=os.stat(path))
        os.truncate(path, 500_000)
        return response
    class Handler:
        def __init__(self, config):
            pass
        METHOD
"""
_BREAKING_ASGI = """
    async def app(scope, receive, send):
        if scope["type"] == "http":
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"20")]})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            END
"""
_BREAKING_WSGI = """
    def app(environ, start_response):
        start_response("200 OK", [])
        yield b"first"
        raise ValueError
"""
_BREAKING_SERVER = """
    import os
    from http.server import BaseHTTPRequestHandler, HTTPServer
    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def do_POST(self):
            self.send_response(200)
            self.send_header("content-length", "20")
            self.end_headers()
            self.wfile.write(b"first")
            self.wfile.flush()
            END
    HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Server).serve_forever()
"""
_BREAKING_SERVICE = """
    class Handler:
        def __init__(self, config, proto_module_pb2):
            self.pb2 = proto_module_pb2
        def Count(self, payload, context):
            yield self.pb2.Number(value=1)
            raise ValueError
"""


def _broken(name: str, source: str, config: str = _REALTIME, path: str = "/t", counts: int = 1) -> Report:
    """Return a report about a response that ends early: the client notices it, and it is counted."""

    def observe(api: ReportedApi) -> object:
        with contextlib.suppress(http.client.IncompleteRead):
            return "complete", api.cortex.post(path, {}).body

        def counted() -> int:
            return int(api.cortex.get("t")["metrics"]["aborted"])

        wait_until(lambda: counted() == counts)
        return counted(), "aborted" in api.cortex.cortex("get", "t").stdout

    return Report(
        f"{name} counts as an error", "litserve#141", source, observe, (1, True), config, files={"t.proto": _PROTO}
    )


def _method(line: str) -> str:
    return _BREAKING.replace("METHOD", f"def handle_post(self, payload): {line}")


def until_the_client_left(api: ReportedApi) -> object:
    """Return how many responses count as broken after a client has disconnected."""
    with stall(api, "/t", b"{}") as client:
        assert client.recv(1) == b"H"  # else the request may be dropped before its generator begins
    wait_until(lambda: "closed" in api.cortex.cortex("logs", "t").stdout)
    return api.cortex.get("t")["metrics"]["aborted"]


_BROKEN = [
    _broken("a generator that raises an exception", _method('yield from breaking("raise")')),
    _broken("a process that dies during a stream", _method('yield from breaking("exit")')),
]
_MORE_BROKEN = [
    _broken("a WSGI application that breaks off", _BREAKING_WSGI, _APPLICATION.replace("asgi", "wsgi")),
    _broken(
        "a server of a command that breaks off",
        _BREAKING_SERVER.replace("END", "self.close_connection = True"),
        _COMMAND,
    ),
    _broken("a generator that is late", _method('yield from breaking("late")')),
    _broken("an async generator that raises", _method('return StreamingResponse(breaking_async("raise"))')),
    _broken("a file that becomes shorter", _method("return cut()")),
    _broken("an ASGI application that raises", _BREAKING_ASGI.replace("END", "raise ValueError"), _APPLICATION),
    _broken(
        "a body shorter than its content-length",
        _BREAKING_ASGI.replace("END", 'await send({"type": "http.response.body"})'),
        _APPLICATION,
    ),
    _broken("a server of a command that dies", _BREAKING_SERVER.replace("END", "os._exit(3)"), _COMMAND),
    _broken("a gRPC stream in JSON that raises", _BREAKING_SERVICE, _GRPC, "/t.T/Count"),
    Report(
        "a client that disconnects during a stream is no error of the API",
        "litserve#141",
        """
        class Handler:
            def __init__(self, config):
                pass
            def handle_post(self, payload):
                try:
                    while True:
                        yield b"x" * 100_000
                finally:
                    print("closed", flush=True)
        """,
        until_the_client_left,
        0,
    ),
]

_GATED = """
    import asyncio
    gate = asyncio.Event()
    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        if scope["path"].endswith("/open"):
            gate.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await gate.wait()
        await send({"type": "http.response.body", "body": b"body"})
"""


def head_before_body(api: ReportedApi) -> object:
    """Return the first line and the end of a response whose body is sent once its head has arrived."""
    with socket.create_connection((api.cortex.host, api.cortex.gateway_port), PATIENCE_S) as sock:
        sock.sendall(b"GET /t/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = b""
        while b"\r\n\r\n" not in received:
            received += sock.recv(65536)
        api.cortex.post("/t/open", method="GET")
        received += b"".join(iter(lambda: sock.recv(65536), b""))
    return received.split(b"\r\n")[0], b"body" in received


def plain_body(method: str) -> Callable[[ReportedApi], object]:
    """Return what observes the status, the coding and the body of a response to a client of HTTP/1.0."""

    def observe(api: ReportedApi) -> object:
        request = f"{method} /t HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}"
        head, _, body = api.exchange(request.encode()).partition(b"\r\n\r\n")
        return head[9:12], b"transfer-encoding" in head.lower(), body

    return observe


def _old(name: str, source: str, config: str = _REALTIME) -> Report:
    right = b"200", False, b"first\nsecond\n"
    what = f"{name} to a client of HTTP/1.0 is not sent in chunks"
    return Report(what, "RFC 9112, section 6.1", source, plain_body("POST"), right, config=config)


_OLD_CLIENTS = [
    _old(
        "a generator",
        """
        class Handler:
            def __init__(self, config):
                pass
            def handle_post(self, payload):
                yield "first\\n"
                yield "second\\n"
        """,
    ),
    _old(
        "a response of unknown length of an application",
        """
        async def app(scope, receive, send):
            if scope["type"] == "http":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"first\\n", "more_body": True})
                await send({"type": "http.response.body", "body": b"second\\n"})
        """,
        _APPLICATION,
    ),
    _old(
        "a response in chunks of a command",
        """
        import os
        from http.server import BaseHTTPRequestHandler, HTTPServer
        class Server(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            def do_POST(self):
                self.rfile.read(2)
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"6\\r\\nfirst\\n\\r\\n7\\r\\nsecond\\n\\r\\n0\\r\\n\\r\\n")
        HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Server).serve_forever()
        """,
        _COMMAND,
    ),
]

REPORTS = [
    *_SLOW_CLIENTS,
    *_BROKEN,
    _OLD_CLIENTS[0],
    Report(
        "the head of an application's response is sent before its body",
        "llama.cpp#23884",
        _GATED,
        head_before_body,
        (b"HTTP/1.1 200 OK", True),
        config=_APPLICATION,
    ),
]
MORE_REPORTS = [*_MORE_SLOW_CLIENTS, *_MORE_BROKEN, *_OLD_CLIENTS[1:]]


@pytest.mark.parametrize(
    "report", [*REPORTS, *(pytest.param(each, marks=pytest.mark.long) for each in MORE_REPORTS)], ids=str
)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    with deployed_report(report, cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
