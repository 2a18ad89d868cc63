"""Requests at the routes of a class, to real replicas, as the gateway sends them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from cortex.worker.monitoring.metrics import parse_key, read_folder
from harness.replicas.replicas import Answer, Replica, new_request_id, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    import asyncio, os, threading, time
    import cortex
    from pydantic import BaseModel, Field
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse, StreamingResponse

    SHARED = os.environ["SHARED_FOLDER"]

    class Message(BaseModel):
        text: str
        n: int = Field(1, le=9)
        parts: list[str | dict] = []

    class Handler:
        def __init__(self, config):
            self.loaded = "model"

        def handle_post(self, payload):
            return {"endpoint": payload}

        @cortex.route("GET", "/users/{id}")
        def user(self, id: int, query_params, headers):
            print("user", id)
            return {"id": id, "q": query_params.get("q"), "x": headers.get("x-mine"), "model": self.loaded}

        @cortex.route("GET", "/users/me")
        def me(self, loud: bool = False):
            return "ME" if loud else "me"

        @cortex.route("DELETE", "/users/{id}")
        async def delete(self, id):
            return JSONResponse({"deleted": id}, 202, {"x-mine": "yes"})

        @cortex.route("GET", "/files/{name:path}")
        def file(self, name):
            return name

        @cortex.route("POST", "/v1/messages")
        async def message(self, payload: Message):
            if payload.text == "teapot":
                raise HTTPException(418, "a teapot", {"x-tea": "green"})
            if payload.text == "typed":
                raise HTTPException(400, {"message": "too long", "code": "context_length_exceeded"})
            if payload.text == "raise":
                raise KeyError("secret")
            if payload.text == "exit":
                os._exit(3)
            if payload.text == "block":
                time.sleep(60)
            return {"text": payload.text * payload.n}

        @cortex.route("GET", "/v1/events")
        async def events(self):
            try:
                for number in range(1000):
                    yield f"data: {number}\\n\\n"
                    await asyncio.sleep(0 if number < 2 else 60)
            finally:
                open(os.path.join(SHARED, "closed"), "w").close()

        @cortex.route("GET", "/together")
        async def together(self):
            self.inside = getattr(self, "inside", 0) + 1
            while self.inside < 4:
                await asyncio.sleep(0.001)
            return self.inside

        @cortex.route("GET", "/chunks")
        def chunks(self):
            yield {"n": 1}
            yield {"n": 2}

        @cortex.route("GET", "/sse")
        def sse(self):
            return StreamingResponse(iter(["data: 1\\n\\n"]), media_type="text/event-stream")
"""


def call(replica: Replica, path: str, body: Any = None, *, method: str = "", **headers: str) -> Answer:
    """Send a request as the gateway does for paths below `/api`."""
    data = body if isinstance(body, bytes) else None if body is None else orjson.dumps(body)
    sent = {"x-cortex-endpoint": "/api"} | {name.replace("_", "-"): value for name, value in headers.items()}
    verb = method or ("GET" if body is None else "POST")
    return replica.request(method=verb, path=f"/api{path}", body=data, headers=sent)


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with running_replica(SOURCE, timeout_s=60, max_body_bytes=10_000) as started:
        started.wait_ready()
        yield started


def test_routes_answer_below_the_endpoint_and_the_other_methods_at_it(replica: Replica) -> None:
    answer = call(replica, "/users/7?q=a", x_mine="b")
    assert answer.json == {"id": 7, "q": "a", "x": "b", "model": "model"}
    assert "handler" in answer.headers["server-timing"]
    assert call(replica, "/users/me/").body == b"me"  # more specific than /users/{id}
    assert call(replica, "/files/a/b%2F%C3%A4").body.decode() == "a/b/ä"
    deleted = call(replica, "/users/a%2Fb", method="DELETE")
    assert (deleted.status, deleted.json, deleted.headers["x-mine"]) == (202, {"deleted": "a/b"}, "yes")
    assert call(replica, "/v1/messages", {"text": "ab", "n": 2}).json == {"text": "abab"}
    assert call(replica, "/chunks").body == b'{"n":1}\n{"n":2}\n'
    assert call(replica, "/sse").headers["content-type"].startswith("text/event-stream")
    absolute = replica.request(method="GET", path="http://a/api/users/7", headers={"x-cortex-endpoint": "/api"})
    assert absolute.json["id"] == 7
    assert replica.request([1]).json == {"endpoint": [1]}
    assert len(replica.request(method="GET").json["routes"]) == 9
    assert call(replica, "/v2/health/live").json == {"live": True}


def test_a_query_string_fills_arguments_with_a_default(replica: Replica) -> None:
    assert call(replica, "/users/me").body == b"me"
    assert call(replica, "/users/me?loud=true&other=1").body == b"ME"
    refused = call(replica, "/users/me?loud=perhaps")
    assert (refused.status, refused.json["detail"][0]["loc"]) == (422, ["query", "loud"])


def test_calls_of_async_routes_share_the_event_loop() -> None:
    with running_replica(SOURCE.replace("def handle_post", "def helper"), timeout_s=10) as replica:
        assert replica.wait_ready().slots > 4
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda _: call(replica, "/together"), range(4)))
        assert [answer.json for answer in answers] == [4] * 4


def test_paths_and_verbs_without_a_route_are_refused(replica: Replica) -> None:
    unknown = call(replica, "/nothing")
    assert (unknown.status, unknown.json["error"]) == (
        404,
        "this API has no route /nothing; GET /api/info lists its routes",
    )
    info = replica.request(method="GET", headers={"x-cortex-info": "1"})
    assert "/users/{id}" in {each["path"] for each in info.json["routes"]}
    assert call(replica, "/users").status == 404
    wrong = call(replica, "/users/me", method="PATCH")
    assert (wrong.status, wrong.headers["allow"]) == (405, "DELETE, GET, HEAD")
    assert call(replica, "/v1/messages", method="OPTIONS").headers["allow"] == "POST"
    assert call(replica, "/users/me", method="DELETE").json == {"deleted": "me"}  # only /users/{id} has this verb


def test_a_head_request_is_answered_like_get_without_the_body(replica: Replica) -> None:
    connection = replica.connection()
    answers = []
    for path in ("/users/me", "/nothing", "/users/me", "/sse"):  # the last one closes the connection
        connection.request("HEAD", f"/api{path}", headers={"x-cortex-endpoint": "/api"})
        response = connection.getresponse()
        assert response.read() == b""
        answers.append((response.status, response.headers["content-length"], response.headers["transfer-encoding"]))
    connection.close()
    assert answers[:3:2] == [(200, "2", None)] * 2
    assert answers[1][0] == 404
    assert answers[3] == (200, None, None)


def test_errors_have_openais_form_below_v1_only(replica: Replica) -> None:
    outside = call(replica, "/users/x")
    assert (outside.status, outside.json["error"][:25]) == (422, "id: Input should be a val")
    assert outside.json["detail"][0]["loc"] == ["path", "id"]

    invalid = call(replica, "/v1/messages", {"text": "a", "n": 10})
    assert invalid.status == 422
    assert invalid.json["error"] == {
        "message": "payload.n: Input should be less than or equal to 9",
        "type": "invalid_request_error",
        "param": "n",
        "code": "less_than_equal",
    }
    assert invalid.json["request_id"]
    for body, field in (({"text": "a", "parts": ["b", 5]}, "parts.1"), ({}, "text"), ([], None)):
        assert call(replica, "/v1/messages", body).json["error"]["param"] == field  # without the members of unions
    teapot = call(replica, "/v1/messages", {"text": "teapot"})
    assert (teapot.status, teapot.headers["x-tea"], teapot.json["error"]["message"]) == (418, "green", "a teapot")
    typed = call(replica, "/v1/messages", {"text": "typed"})
    assert (typed.json["error"]["message"], typed.json["error"]["code"]) == ("too long", "context_length_exceeded")
    failed = call(replica, "/v1/messages", {"text": "raise"})
    assert (failed.status, failed.json["error"]["type"]) == (500, "server_error")
    assert "secret" not in failed.body.decode()
    assert call(replica, "/v1/nothing").json["error"]["type"] == "invalid_request_error"
    assert (
        call(replica, "/v1/messages", b"x" * 20_000).json["error"]["message"].startswith("the request body is larger")
    )


def test_a_dead_process_is_reported_in_the_form_of_the_path(replica: Replica) -> None:
    died = call(replica, "/v1/messages", {"text": "exit"})
    assert died.status == 500
    assert "exited with code 3" in died.json["error"]["message"]
    assert died.json["error"]["type"] == "server_error"
    replica.wait_ready()


def test_a_stream_whose_client_disconnects_is_closed(replica: Replica) -> None:
    connection = replica.connection()
    connection.request("GET", "/api/v1/events", headers={"x-cortex-endpoint": "/api"})
    response = connection.getresponse()
    assert response.read(9) == b"data: 0\n\n"
    response.close()
    connection.close()
    wait_until((Path(replica.spec.run_dir) / "closed").exists)


def test_requests_are_counted_by_route_and_logged_by_request(tmp_path: Path) -> None:
    with running_replica(SOURCE, timeout_s=60, metrics_dir=str(tmp_path)) as replica:
        replica.wait_ready()
        for path in ("/users/7", "/users/x", "/files/a/b", "/nothing"):
            call(replica, path)
        replica.request([1])
        request_id = new_request_id()
        sent = {"x-cortex-endpoint": "/api"}
        assert replica.request(method="GET", path="/api/users/5", headers=sent, request_id=request_id).status == 200
        wait_until(lambda: f"{request_id} user 5" in replica.log(), message=replica.log())
        # A response is counted once it is written, which may be after the client has read it.
        wait_until(
            lambda: (
                _counted_routes(tmp_path)
                == {
                    ("GET", "/users/{id}", "200"): 2,
                    ("GET", "/users/{id}", "422"): 1,
                    ("GET", "/files/{name}", "200"): 1,
                    ("GET", "other", "404"): 1,
                    ("POST", "/", "200"): 1,
                }
            ),
            message=str(_counted_routes(tmp_path)),
        )


def _counted_routes(folder: Path) -> dict[tuple[str, str, str], float]:
    counted = {}
    for key, value in read_folder(folder).items():
        series = parse_key(key)
        if series is not None and series.name == "cortex_route_requests_total" and value:
            labels = dict(series.labels)
            counted[labels["method"], labels["route"], labels["code"]] = value
    return counted
