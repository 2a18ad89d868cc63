"""Children that user code forks and that leave it: they end, and only their parent answers."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from http.client import HTTPConnection

import psutil
import pytest

from cortex.predictor.user_forks import end_if_forked, process_id
from harness.replicas.replicas import Replica, new_request_id, running_replica
from harness.wait import PATIENCE_S, SLACK, wait_until

pytestmark = pytest.mark.processes

LEAVING = """
    import os, sys

    def leave(how):
        pid = os.fork()
        if pid:
            return os.waitpid(pid, os.WNOHANG) and "parent"
        if how == "raise":
            raise ValueError("of the child")
        if how == "exit":
            sys.exit(0)
        return "child"
"""
METHODS = """
    import asyncio, concurrent.futures, multiprocessing, threading
    import cortex

    class Result(dict):
        pass

    class Handler:
        def __init__(self, config):
            pass

        def handle_get(self):
            return "event-loop" not in [thread.name for thread in threading.enumerate()]

        def handle_post(self, payload):
            return leave(payload)

        async def handle_put(self, payload):
            found = leave(payload)
            await asyncio.sleep(0.01)
            assert found == "parent"
            return found

        def handle_v2(self, inputs, parameters):
            leave(parameters["how"])
            return inputs

        @cortex.route("POST", "/routes/{how}")
        def route(self, how):
            return leave(how)

        @cortex.route("POST", "/async/{how}")
        async def async_chunks(self, how):
            yield leave(how)

        @cortex.route("POST", "/after/{how}")
        def after(self, how):
            from starlette.background import BackgroundTask
            from starlette.responses import PlainTextResponse
            return PlainTextResponse("parent", background=BackgroundTask(self.leave_later, how))

        async def leave_later(self, how):
            leave(how)

        @cortex.route("POST", "/thread/{how}")
        async def thread(self, how):
            return await asyncio.to_thread(leave, how)

        @cortex.route("POST", "/pools")
        def pools(self):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                found = pool.map(abs, [-1, -2])
            with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                return found + [pool.submit(abs, -3).result()]
"""
BATCHED = """
    class Handler:
        def __init__(self, config):
            pass

        def batch_key(self, payload):
            return leave(payload)

        def handle_post(self, payload):
            return [leave(how) for how in payload]

        def handle_patch(self, payload):
            yield leave(payload)
            yield leave(payload)
"""
PLAIN = ["raise", "exit", "return"]


def exchange(connection: HTTPConnection, method: str, how: str, path: str = "") -> str:
    """Send one request on a connection, and return the status and body of the response."""
    headers = {"content-type": "application/json", "x-cortex-request-id": new_request_id()}
    payload: object = how
    if path.startswith("/v2"):
        x = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
        payload = {"inputs": [x], "parameters": {"how": how}}
    if path:
        headers["x-cortex-endpoint"] = "/t"
    connection.request(method, f"/t{path}", json.dumps(payload), headers)
    response = connection.getresponse()
    return f"{response.status} {response.read().decode()}"


def await_no_children(replica: Replica) -> None:
    worker = psutil.Process(replica.pid)
    wait_until(lambda: not [each for each in worker.children() if each.status() != psutil.STATUS_ZOMBIE])


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with running_replica(LEAVING + METHODS) as replica:
        replica.wait_ready()
        yield replica


def test_only_the_parent_answers_on_a_thread_and_inline(replica: Replica) -> None:
    process, connection = replica.pid, replica.connection()
    wait_until(lambda: replica.request(method="GET").json, PATIENCE_S / SLACK)  # calls are inline now
    for how in PLAIN * 3:  # each is slow enough that the first calls are inline, and later ones on a thread
        assert exchange(connection, "POST", how) == "200 parent"
        assert exchange(connection, "POST", how, f"/routes/{how}") == "200 parent"
        assert exchange(connection, "POST", how, "/v2/models/api/infer").startswith('200 {"model_name"')
    await_no_children(replica)
    assert replica.pid == process


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [("PUT", "", "parent"), ("POST", "/async", "parent"), ("POST", "/after", "parent"), ("POST", "/thread", "parent")],
)
def test_only_the_parent_continues_other_calls(replica: Replica, method: str, path: str, right: str) -> None:
    process, connection = replica.pid, replica.connection()
    for how in PLAIN * 2:
        assert exchange(connection, method, how, path and f"{path}/{how}") == f"200 {right}"
    await_no_children(replica)
    assert replica.pid == process


def test_pools_of_processes_work_and_the_exceptions_of_children_are_in_the_log(replica: Replica) -> None:
    assert exchange(replica.connection(), "POST", "", "/pools") == "200 [1,2,3]"
    assert exchange(replica.connection(), "POST", "raise") == "200 parent"
    wait_until(lambda: "a process that user code forked failed:" in replica.log())
    assert "ValueError: of the child" in replica.log()
    await_no_children(replica)


def test_only_the_parent_answers_batches_and_yields() -> None:
    with running_replica(LEAVING + BATCHED, max_batch_size=4, batch_interval_s=0.01) as replica:
        replica.wait_ready()
        connection = replica.connection()
        for how in PLAIN * 2:
            assert exchange(connection, "POST", how) == "200 parent"
            assert exchange(connection, "PATCH", how) == "200 parentparent"
        await_no_children(replica)


ASGI = """
    async def app(scope, receive, send):
        text = leave(scope["path"].rpartition("/")[2]).encode()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": text, "more_body": True})
        leave(scope["path"].rpartition("/")[2])
        await send({"type": "http.response.body", "body": b""})
"""
WSGI = """
    def app(environ, start_response):
        text = leave(environ["PATH_INFO"].rpartition("/")[2])
        start_response("200 OK", [])
        yield text.encode()
        leave(environ["PATH_INFO"].rpartition("/")[2])
"""


FASTAPI = """
    from fastapi import FastAPI
    from fastapi.responses import PlainTextResponse
    app = FastAPI()

    @app.get("/{how}")
    def plain(how: str):
        return PlainTextResponse(leave(how))
"""


@pytest.mark.parametrize(("source", "kind"), [(ASGI, "asgi"), (WSGI, "wsgi"), (FASTAPI, "asgi")])
def test_only_the_parent_responds_with_an_application(source: str, kind: str) -> None:
    with running_replica(LEAVING + source, type=kind, app="app") as replica:
        replica.wait_ready()
        for how in PLAIN * 2:
            answer = replica.request(method="GET", path=f"/t/{how}", headers={"x-cortex-endpoint": "/t"})
            assert (answer.status, answer.body) == (200, b"parent")
        await_no_children(replica)


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("leave('return')\nclass Handler:\n    def __init__(self, config): pass", {}),
        ("class Handler:\n    def __init__(self, config): leave('exit')", {}),
        ("class Handler:\n    def __init__(self, config): leave('return')", {"preload": True}),
        ("class Handler:\n    def __init__(self, config): pass\n    def after_fork(self): leave('raise')", {}),
    ],
    ids=["import", "constructor", "preloaded constructor", "after_fork"],
)
def test_a_child_of_a_start_ends(source: str, fields: dict[str, bool]) -> None:
    source = "".join(
        [LEAVING.replace("\n    ", "\n"), source, "\n    def handle_post(self, payload): return payload\n"]
    )
    with running_replica(source, **fields) as replica:
        replica.wait_ready()
        connection = replica.connection()
        assert [exchange(connection, "POST", str(n)) for n in range(20)] == [f"200 {n}" for n in range(20)]
        await_no_children(replica)


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (SystemExit(), 0), (SystemExit(3), 3), (SystemExit("no"), 1), (ValueError(), 1)]
)
def test_a_child_ends_with_the_exit_code_of_a_program(error: BaseException | None, code: int) -> None:
    parent = process_id()

    def leave() -> None:
        try:
            if error is not None:
                raise error
        finally:
            end_if_forked(parent)

    child = multiprocessing.get_context("fork").Process(target=leave)
    child.start()
    child.join()
    assert child.exitcode == code
    assert process_id() == os.getpid()
