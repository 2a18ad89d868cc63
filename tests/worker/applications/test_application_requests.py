"""HTTP requests of ASGI and WSGI applications, from real replicas."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.connections import read_until
from harness.replicas.applications import ENDPOINT, FROM_GATEWAY, ask
from harness.replicas.replicas import Replica, read, running_replica
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    import asyncio, contextlib, os
    from fastapi import BackgroundTasks, FastAPI, Request
    from fastapi.responses import StreamingResponse
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    SHARED = os.environ["SHARED_FOLDER"]
    open(os.path.join(SHARED, "page.txt"), "w").write("static")

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield {"model": "loaded"}
        print("shut down", flush=True)

    app = FastAPI(lifespan=lifespan)
    app.mount("/static", StaticFiles(directory=SHARED))
    app.mount("/sub", Starlette(routes=[Route("/deep/{name}", lambda request: JSONResponse(request.path_params))]))

    def touch(name):
        open(os.path.join(SHARED, name), "w").close()

    async def wait_for(name):
        while not os.path.exists(os.path.join(SHARED, name)):
            await asyncio.sleep(0.01)

    @app.get("/items/{number}")
    def item(number: int, request: Request):
        print("item", number)
        return {
            "number": number,
            "model": request.state.model,
            "url": str(request.url),
            "link": str(request.url_for("item", number=8)),
            "client": request.client.host,
            "root": request.scope["root_path"],
            "endpoint_header": request.headers.get("x-cortex-endpoint"),
        }

    @app.get("/slash/")
    def slash():
        return "slash"

    @app.post("/echo")
    async def echo(request: Request):
        async def chunks():
            async for chunk in request.stream():
                yield chunk
        return StreamingResponse(chunks())

    @app.post("/size")
    async def size(request: Request):
        return len(await request.body())

    @app.post("/unread")
    async def unread():
        return "not read"

    @app.get("/events")
    async def events():
        async def lines():
            try:
                yield "data: 0\\n\\n"
                await wait_for("go")
                yield "data: 1\\n\\n"
            finally:
                touch("closed")
        return StreamingResponse(lines(), media_type="text/event-stream")

    @app.get("/later")
    def later(background: BackgroundTasks):
        async def wait():
            await wait_for("go")
            touch("done")
        background.add_task(wait)
        return "now"

    @app.get("/slow")
    async def slow(request: Request):
        touch("slow")
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)

    @app.get("/silent")
    async def silent():
        async def lines():
            yield "one"
            await asyncio.sleep(1000)
        return StreamingResponse(lines())

    @app.get("/headers/{count}")
    def headers(count: int, size: int = 1):
        return JSONResponse("many", headers={f"x-{number}": "1" * size for number in range(count)})

    @app.get("/fail")
    def fail():
        raise ValueError("bad input")
"""


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with running_replica(SOURCE, type="asgi", app="app", max_body_bytes=20_000_000) as replica:
        replica.wait_ready()
        yield replica


def test_the_prefix_is_the_root_path_and_the_client_is_that_of_the_gateway(replica: Replica) -> None:
    answer = ask(replica, "/items/7?q=1")
    assert answer.json == {
        "number": 7,
        "model": "loaded",
        "url": "https://example.com/app/items/7?q=1",
        "link": "https://example.com/app/items/8",
        "client": "192.0.2.7",
        "root": "/app",
        "endpoint_header": None,
    }
    assert "handler;dur=" in answer.headers["server-timing"]
    assert answer.headers["content-length"] == str(len(answer.body))


def test_documentation_static_files_mounts_and_redirects_have_the_prefix(replica: Replica) -> None:
    assert "/app/openapi.json" in ask(replica, "/docs").body.decode()
    assert ask(replica, "/openapi.json").json["servers"] == [{"url": "/app"}]
    assert ask(replica, "/static/page.txt").body == b"static"
    assert ask(replica, "/sub/deep/x").json == {"name": "x"}
    assert ask(replica, "/slash").headers["location"] == "https://example.com/app/slash/"
    assert ask(replica, "/none").status == 404
    assert ask(replica, "/items/7", "DELETE").status == 405


def test_the_bare_endpoint_redirects_to_its_slash_unless_the_application_answers_there(replica: Replica) -> None:
    headers = {name: value for name, value in FROM_GATEWAY.items() if name != "x-cortex-endpoint"}
    bare = replica.request(method="GET", path=f"{ENDPOINT}?q=1", headers=headers)
    assert (bare.status, bare.headers["location"], bare.body) == (307, "/app/?q=1", b"")
    assert replica.request(method="GET", path=f"{ENDPOINT}/", headers=headers).status == 404
    assert replica.request(method="POST", path=ENDPOINT, headers=headers).status == 404


def test_bodies_are_streamed_in_both_directions_at_once(replica: Replica) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(replica.spec.sockets[0])
        head = b"host: x\r\nx-cortex-endpoint: /app\r\n"
        sock.sendall(b"POST /app/echo HTTP/1.1\r\n" + head + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        assert read_until(sock, b"3\r\none\r\n")
        sock.sendall(b"3\r\ntwo\r\n0\r\n\r\n")
        assert b"3\r\ntwo\r\n" in read_until(sock, b"0\r\n\r\n")
        sock.sendall(b"GET /app/slash/ HTTP/1.1\r\n" + head + b"\r\n")
        assert read_until(sock, b'"slash"')


def test_large_uploads_are_complete_and_too_large_ones_are_refused(replica: Replica) -> None:
    body = bytes(range(256)) * 70_000
    assert ask(replica, "/size", "POST", body).json == len(body)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(replica.spec.sockets[0])
        head = b"host: x\r\nx-cortex-endpoint: /app\r\n"
        sock.sendall(b"POST /app/unread HTTP/1.1\r\n" + head + b"content-length: 20000001\r\n\r\n")
        assert b"\r\nconnection: close\r\n" in read_until(sock, b'"not read"')
        assert sock.recv(1) == b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(replica.spec.sockets[0])
        sock.sendall(b"POST /app/size HTTP/1.1\r\n" + head + b"content-length: 20000001\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # it is closed a moment after the refusal
            sock.sendall(bytes(20_000_001))
        refusal = read_until(sock, b"}")
        assert refusal.startswith(b"HTTP/1.1 413")
        assert b"\r\nconnection: close\r\n" in refusal


def test_a_stream_ends_when_its_client_disconnects(replica: Replica) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(replica.spec.sockets[0])
        sock.sendall(b"GET /app/events HTTP/1.1\r\nhost: x\r\nx-cortex-endpoint: /app\r\n\r\n")
        read_until(sock, b"data: 0\n\n\r\n")
    folder = replica.spec.run_dir
    wait_until(lambda: _exists(folder, "closed"))


def test_a_head_request_has_no_body() -> None:
    source = """
        async def app(scope, receive, send):
            if scope["type"] == "lifespan":
                raise NotImplementedError
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"body"})
    """
    with running_replica(source, type="asgi", app="app") as replica:
        replica.wait_ready()
        connection = replica.connection()
        for method in ("HEAD", "GET", "HEAD"):
            connection.request(method, "/app/x", headers=FROM_GATEWAY)
            answer = connection.getresponse()
            assert (answer.headers["content-length"], answer.read()) == ("4", b"body" if method == "GET" else b"")


def test_a_body_of_another_length_than_declared_is_an_error_of_the_application() -> None:
    source = """
        async def app(scope, receive, send):
            if scope["type"] != "http":
                raise RuntimeError
            declared = int(scope["query_string"])
            headers = [(b"content-length", b"%d" % declared)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"body"})
    """
    with running_replica(source, type="asgi", app="app") as replica:
        replica.wait_ready()
        assert [ask(replica, f"/?{declared}").status for declared in (3, 4, 5)] == [500, 200, 500]
        wait_until(lambda: "the body is longer than its content-length, 3" in replica.log())
        wait_until(lambda: "the body has 4 bytes, but its content-length is 5" in replica.log())


def test_background_tasks_do_not_occupy_the_connection() -> None:
    with running_replica(SOURCE, type="asgi", app="app") as replica:
        replica.wait_ready()
        connection = replica.connection()
        for _ in range(2):
            connection.request("GET", "/app/later", headers=FROM_GATEWAY)
            assert connection.getresponse().read() == b'"now"'
        assert not _exists(replica.spec.run_dir, "done")
        _create(replica.spec.run_dir, "go")
        wait_until(lambda: _exists(replica.spec.run_dir, "done"))


def test_the_timeout_covers_the_first_byte_and_then_silence() -> None:
    with running_replica(SOURCE, type="asgi", app="app", timeout_s=4) as replica:
        pid = replica.wait_ready().processes[0].pid
        late = ask(replica, "/slow")
        assert (late.status, late.json["error"]) == (504, "timed out after 4 s")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(replica.spec.sockets[0])
            sock.sendall(b"GET /app/silent HTTP/1.1\r\nhost: x\r\nx-cortex-endpoint: /app\r\n\r\n")
            received = b"".join(iter(lambda: sock.recv(4096), b""))
        assert received.endswith(b"3\r\none\r\n")
        assert ask(replica, "/slash/").body == b'"slash"'
        assert replica.status().processes[0].pid == pid


def test_an_exception_is_logged_with_the_frames_of_the_project(replica: Replica) -> None:
    many = ask(replica, "/headers/1001")
    assert (many.status, "has 1002 headers; the gateway passes on up to 1000" in many.json["error"]) == (500, True)
    large = ask(replica, "/headers/9?size=100000")
    assert (large.status, "; the gateway passes on up to 512 KiB" in large.json["error"]) == (500, True)
    answer = ask(replica, "/fail", **{"x-cortex-request-id": "the-id"})
    assert answer.status == 500
    wait_until(lambda: "ValueError: bad input" in replica.log())
    lines = [line for line in replica.log().splitlines() if "the-id" in line]
    assert any('File "handler.py"' in line for line in lines)
    assert not any("site-packages" in line for line in lines)


def test_what_an_application_prints_belongs_to_its_request(replica: Replica) -> None:
    ask(replica, "/items/77", **{"x-cortex-request-id": "id-of-77"})
    wait_until(lambda: any("id-of-77" in line and "item 77" in line for line in replica.log().splitlines()))


def test_the_lifespan_ends_before_the_process() -> None:
    with running_replica(SOURCE, type="asgi", app="app") as replica:
        replica.wait_ready()
        replica.command(command="stop", drain_s=1.0)
        wait_until(lambda: "shut down" in replica.log())


#: Calls that never end; one reads its request first, which may be incomplete.
ENDLESS = {
    "asgi": """
        import asyncio

        async def app(scope, receive, send):
            if scope["type"] == "http":
                print("begun", flush=True)
                if scope["path"] == "/app/read":
                    while (await receive())["type"] == "http.request":
                        pass
                await asyncio.Event().wait()
    """,
    "wsgi": """
        import threading

        def app(environ, start_response):
            print("begun", flush=True)
            if environ["PATH_INFO"] == "/read":
                environ["wsgi.input"].read()
            threading.Event().wait()
    """,
}


@pytest.mark.parametrize("path", ["/wait", "/read"])
@pytest.mark.parametrize("type", ENDLESS)
def test_requests_that_outlast_a_stop_are_answered_with_the_reason(type: str, path: str) -> None:
    with running_replica(ENDLESS[type], type=type, app="app") as replica:
        replica.wait_ready()
        connection = replica.connection()
        connection.putrequest("POST", ENDPOINT + path)
        for name, value in (FROM_GATEWAY | {"content-length": "2"}).items():
            connection.putheader(name, value)
        connection.endheaders(b"1" if path == "/read" else b"12")
        wait_until(lambda: "begun" in replica.log())
        replica.command(command="stop", drain_s=0)
        answer = read(connection.getresponse(), 0)
        assert (answer.status, answer.headers["connection"]) == (500, "close")
        reason = "the process that handled this request ended: stopped before the call was finished"
        assert answer.json["error"] == reason
        assert replica.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("source", "message", "summary"),
    [
        (
            """
            import contextlib
            from fastapi import FastAPI

            @contextlib.asynccontextmanager
            async def lifespan(app):
                raise ValueError("bad weights")
                yield

            app = FastAPI(lifespan=lifespan)
            """,
            "ValueError: bad weights",
            "ValueError while it started",
        ),
        (
            """
            async def app(scope, receive, send):
                await receive()
                await send({"type": "lifespan.startup.failed", "message": "no licence"})
            """,
            "the application failed to start: no licence",
            "",
        ),
        (
            """
            async def app(scope, receive, send):
                await receive()
                raise OSError("disk full")
            """,
            "OSError: disk full",
            "OSError while it started",
        ),
    ],
)
def test_a_failed_startup_is_not_ready_and_says_why(source: str, message: str, summary: str) -> None:
    with running_replica(source, type="asgi", app="app") as replica:
        status = wait_until(lambda: (status := replica.try_status()) and status.processes[0].failure and status)
        failure = status.processes[0].failure
        assert failure is not None
        assert (failure.message, failure.summary) == (message, summary)
        if "bad weights" in message:
            assert 'raise ValueError("bad weights")' in failure.traceback


def test_a_call_that_blocks_the_event_loop_is_named_with_its_line() -> None:
    source = """
        import asyncio, os, time
        from fastapi import FastAPI

        app = FastAPI()

        @app.get("/block")
        async def block():
            while not os.path.exists(os.path.join(os.environ["SHARED_FOLDER"], "go")):
                time.sleep(0.01)

        @app.get("/wait")
        async def wait():
            await asyncio.sleep(1000)
    """
    with running_replica(source, type="asgi", app="app") as replica, ThreadPoolExecutor(1) as pool:
        replica.wait_ready()
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(replica.spec.sockets[0])
            waiting.sendall(b"GET /app/wait HTTP/1.1\r\nhost: x\r\nx-cortex-endpoint: /app\r\n\r\n")
            blocked = pool.submit(ask, replica, "/block", **{"x-cortex-request-id": "blocking-id"})
            wait_until(lambda: "request blocking-id blocks the event loop" in replica.log())
            wait_until(lambda: "in block" in replica.log())
            _create(replica.spec.run_dir, "go")
            assert blocked.result().status == 200
        wait_until(lambda: "the event loop was blocked for " in replica.log())
        lines = [line for line in replica.log().splitlines() if "blocking-id" in line]
        assert any('File "handler.py"' in line and "in block" in line for line in lines), lines
        assert not any("site-packages" in line for line in lines), lines


def test_a_wsgi_application_knows_its_prefix_streams_and_sees_no_forged_header() -> None:
    source = """
        import json

        def create(config):
            def app(environ, start_response):
                body = environ["wsgi.input"].read()
                start_response("200 OK", [("content-type", "application/json")])
                yield json.dumps([environ["SCRIPT_NAME"], environ["PATH_INFO"], environ["wsgi.url_scheme"]]).encode()
                yield body + config["end"].encode()
                yield environ["HTTP_X_FORWARDED_FOR"].encode()
            return app
    """
    with running_replica(source, type="wsgi", app="create", config={"end": "!"}, threads=2) as replica:
        status = replica.wait_ready()
        assert status.slots == 2
        answer = ask(replica, "/a/b", "POST", b"body", **{"x_forwarded_for": "203.0.113.9"})
        assert answer.body == b'["/app", "/a/b", "https"]body!192.0.2.7'


@pytest.mark.parametrize(
    ("type", "source"),
    [
        (
            "wsgi",
            """
            def app(environ, start_response):
                start_response("200 OK", [])
                return b"text"  # its parts are numbers
            """,
        ),
        (
            "asgi",
            """
            async def app(scope, receive, send):
                if scope["type"] == "http":
                    await send({"type": "http.response.start", "status": 200})
                    await send({"type": "http.response.body", "body": 3})
            """,
        ),
    ],
)
def test_a_part_that_is_not_of_bytes_is_an_error(type: str, source: str) -> None:
    with running_replica(source, type=type, app="app") as replica:
        replica.wait_ready()
        assert ask(replica, "/").status == 500
        wait_until(lambda: "a part of the response's body is of the type int; use bytes" in replica.log())


def test_a_wsgi_application_receives_a_body_of_unknown_length() -> None:
    source = """
        def app(environ, start_response):
            start_response("200 OK", [])
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # as Django does
            return [str(len(body)).encode()]
    """
    with running_replica(source, type="wsgi", app="app", max_body_bytes=5_000_000) as replica:
        replica.wait_ready()
        for megabytes, expected in ((3, (200, b"3000000")), (6, (413, None)), (0, (200, b"0"))):
            connection = replica.connection()
            with contextlib.suppress(BrokenPipeError):  # refused before it was sent
                connection.request("POST", f"{ENDPOINT}/", iter([b"x" * 1_000_000] * megabytes), FROM_GATEWAY)
            response = connection.getresponse()
            assert (response.status, response.read() if expected[1] else None) == expected
            connection.close()
        assert "Traceback" not in replica.log()


def test_a_stuck_wsgi_call_ends_its_process() -> None:
    source = """
        import time

        def app(environ, start_response):
            if environ["PATH_INFO"] == "/stuck":
                time.sleep(1000)
            start_response("200 OK", [])
            return [b"fine"]
    """
    with running_replica(source, type="wsgi", app="app", timeout_s=1) as replica:
        pid = replica.wait_ready().processes[0].pid
        assert ask(replica, "/stuck").status == 504
        wait_until(lambda: replica.status().processes[0].pid != pid)
        wait_until(lambda: ask(replica, "/").body == b"fine")


def test_requests_are_counted_by_route_template(tmp_path: object) -> None:
    from cortex.worker.monitoring.metrics import parse_key, read_folder

    with running_replica(SOURCE, type="asgi", app="app", metrics_dir=f"{tmp_path}/metrics") as replica:
        replica.wait_ready()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(replica.spec.sockets[0])
            sock.sendall(b"GET /app/slow HTTP/1.1\r\nhost: x\r\nx-cortex-endpoint: /app\r\n\r\n")
            wait_until(lambda: _exists(replica.spec.run_dir, "slow"))
        for path in ("/items/1", "/items/2", "/items/x", "/sub/deep/a", "/static/page.txt", "/none"):
            ask(replica, path)

        def counted() -> dict[tuple[str, str], float]:
            found = {}
            for key, value in read_folder(Path(f"{tmp_path}/metrics")).items():
                series = parse_key(key)
                if series is not None and series.name == "cortex_route_requests_total" and value:
                    labels = dict(series.labels)
                    found[labels["route"], labels["code"]] = value
            return found

        expected = {
            ("/items/{number}", "200"): 2,
            ("/items/{number}", "422"): 1,
            ("/sub/deep/{name}", "200"): 1,
            ("/slow", "499"): 1,
            ("other", "200"): 1,
            ("other", "404"): 1,
        }
        wait_until(lambda: counted() == expected, message=json.dumps([str(item) for item in counted().items()]))


def _create(folder: str, name: str) -> None:
    (Path(folder) / name).touch()


def _exists(folder: str, name: str) -> bool:
    return (Path(folder) / name).exists()
