"""Paths below an endpoint behind the gateway: a FastAPI application, routes of a class, and an OpenAI client.

`test_long_connections.py` has many connections at once, through many deploys.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.connections import read_until
from harness.installations.example_cases import EXAMPLES_DIR, with_what_is_installed
from harness.installations.installation import ECHO_CONFIG, ECHO_SOURCE, Installation, write_project
from harness.replicas.applications import WebSocket
from harness.wait import PATIENCE_S

SOURCE = """
    import os
    from fastapi import FastAPI, Request, WebSocket
    from fastapi.responses import StreamingResponse

    app = FastAPI()

    @app.get("/version")
    def version():
        return VERSION

    @app.post("/echo")
    async def echo(request: Request):
        return StreamingResponse(request.stream())

    @app.websocket("/socket")
    async def serve(websocket: WebSocket):
        await websocket.accept()
        async for text in websocket.iter_text():
            if text == "die":
                os._exit(3)
            await websocket.send_text(f"{VERSION} {text}")
"""

CONFIG = """
    - name: shop
      kind: RealtimeAPI
      handler: {type: asgi, path: handler.py, app: app}
      networking: {timeout: 8s}
"""


def connect(cortex: Installation) -> socket.socket:
    sock = socket.create_connection((cortex.host, cortex.gateway_port), PATIENCE_S)
    sock.settimeout(PATIENCE_S)
    return sock


def test_an_application_streams_and_its_websocket_outlives_an_update(cortex: Installation, tmp_path: Path) -> None:
    write_project(tmp_path, SOURCE.replace("VERSION", "1"), CONFIG)
    assert "docs:" not in cortex.cortex("deploy", tmp_path).stdout  # only the application knows whether it has a page
    assert cortex.get("shop")["docs"] is None
    assert cortex.post("/shop/version", method="GET").json == 1
    assert "/shop/openapi.json" in cortex.post("/shop/docs", method="GET").body.decode()
    assert cortex.post("/shop", method="GET").status == 404  # redirected to /shop/, where there is no route either
    bare = connect(cortex)
    bare.sendall(b"GET /shop HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"location: /shop/\r\n" in read_until(bare, b"\r\n\r\n")

    upload = connect(cortex)
    upload.sendall(b"POST /shop/echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
    assert read_until(upload, b"3\r\none\r\n")  # the response begins before the request is complete
    upload.sendall(b"3\r\ntwo\r\n0\r\n\r\n")
    assert b"3\r\ntwo\r\n" in read_until(upload, b"0\r\n\r\n")
    client = WebSocket(connect(cortex), "/shop/socket")
    client.send("a")
    assert client.receive() == "1 a"
    write_project(tmp_path / "neighbour", ECHO_SOURCE, ECHO_CONFIG)
    cortex.cortex("deploy", tmp_path / "neighbour")  # the gateway reloads
    client.send("a")
    assert client.receive() == "1 a"

    write_project(tmp_path, SOURCE.replace("VERSION", "2"), CONFIG)
    cortex.cortex("deploy", tmp_path)
    assert cortex.post("/shop/version", method="GET").json == 2
    client.send("b")
    assert client.receive() == "1 b"
    assert client.closed() == (1012, "the service restarts")

    client = WebSocket(connect(cortex), "/shop/socket")
    client.send("die")
    assert client.closed() == (1011, "exited with code 3")


def test_the_official_openai_client_calls_the_chat_example(cortex: Installation, tmp_path: Path) -> None:
    import openai

    project = tmp_path / "llm-chat"
    shutil.copytree(EXAMPLES_DIR / "llm-chat", project, ignore=shutil.ignore_patterns("__pycache__"))
    cortex.cortex("deploy", with_what_is_installed(project))
    options: dict[str, Any] = {"base_url": cortex.url("/llm-chat/v1"), "api_key": "none", "max_retries": 0}
    asked: dict[str, Any] = {"model": "tiny-random", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    client = openai.OpenAI(**options)
    assert [model.id for model in client.models.list()] == ["tiny-random"]
    assert client.models.retrieve("tiny-random").owned_by == "cortex"
    answer = client.chat.completions.create(**asked, max_tokens=20)
    text = answer.choices[0].message.content
    assert (len(text or ""), answer.choices[0].finish_reason) == (20, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20

    chunks = list(
        client.chat.completions.create(**asked, max_tokens=20, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-1].usage == answer.usage

    async def concurrently() -> list[str | None]:
        async with openai.AsyncOpenAI(**options) as async_client:
            create = async_client.chat.completions.create
            answers = await asyncio.gather(*(create(**asked, max_tokens=20) for _ in range(8)))
            return [each.choices[0].message.content for each in answers]

    assert asyncio.run(concurrently()) == [text] * 8
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        client.chat.completions.create(**{**asked, "model": "gpt-9"})
    assert (unknown.value.code, unknown.value.param, unknown.value.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    with pytest.raises(openai.UnprocessableEntityError) as invalid:
        client.chat.completions.create(**{**asked, "temperature": 9})
    assert (invalid.value.param, invalid.value.code) == ("temperature", "less_than_equal")
    cortex.cortex("delete", "llm-chat")
    with pytest.raises(openai.NotFoundError):
        client.models.list()


ROUTES = """
    import cortex

    class Handler:
        def __init__(self, config):
            self.version = VERSION

        @cortex.route("GET", "/v1/items/{number}")
        def item(self, number: int, query_params):
            return {"item": number, "version": self.version, **query_params}

        @cortex.route("POST", "/v1/stream")
        def stream(self, payload: dict):
            for number in range(payload["n"]):
                yield f"data: {number}\\n\\n"
"""
ROUTES_CONFIG = """
    - name: routed
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
"""


def test_routes_of_a_class_are_served_below_its_endpoint(cortex: Installation, tmp_path: Path) -> None:
    write_project(tmp_path, ROUTES.replace("VERSION", "1"), ROUTES_CONFIG)
    cortex.cortex("deploy", tmp_path)
    assert cortex.post("/routed/v1/items/7?a=b", method="GET").json == {"item": 7, "version": 1, "a": "b"}
    assert cortex.post("/routed/v1/stream", {"n": 2}).body == b"data: 0\n\ndata: 1\n\n"
    invalid = cortex.post("/routed/v1/items/x", method="GET")
    assert (invalid.status, invalid.json["error"]["param"]) == (422, "number")
    assert cortex.post("/routed/v1/items/1", method="PUT").status == 405
    assert cortex.post("/routed/nothing", method="GET").status == 404
    assert len(cortex.post("/routed/info", method="GET").json["routes"]) == 2
    document = cortex.post("/routed/openapi.json", method="GET").json
    assert sorted(document["paths"]) == ["/routed/info", "/routed/v1/items/{number}", "/routed/v1/stream"]

    write_project(tmp_path, ROUTES.replace("/v1/items/{number}", "/items/{number"), ROUTES_CONFIG)
    refused = cortex.cortex("deploy", tmp_path, check=False)
    assert refused.returncode == 2
    assert 'handler.py:8:26: class Handler: the path "/items/{number" has a brace' in refused.stdout + refused.stderr
