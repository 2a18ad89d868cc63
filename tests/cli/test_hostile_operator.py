"""Commands against a server that is no operator, or a hostile one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cortex.cli.main import main
from cortex.client.environments import Environments
from harness.installations.command_line import CORTEX, environ
from harness.installations.terminal import on_terminal
from harness.servers.answering import Server, reply

pytestmark = pytest.mark.processes

Capture = pytest.CaptureFixture[str]
SPEC = {"name": "t", "kind": "RealtimeAPI", "networking": {"auth": "none"}, "handler": {}}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("CORTEX_HOME", str(tmp_path))
    monkeypatch.delenv("CORTEX_CLI_CONFIG_DIR", raising=False)
    made = Server()
    Environments.from_environ(os.environ).configure("there", made.url, "secret")
    yield made
    made.close()


def answers(handler: BaseHTTPRequestHandler, status: int, body: Any, **headers: str) -> None:
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in {"content-length": str(len(content)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


@pytest.mark.parametrize(
    ("words", "status", "body", "headers"),
    [
        (["get", "t"], 302, "", {"location": "https://login.example/"}),
        (["get"], 200, "<html>welcome</html>", {"content_type": "text/html"}),
        (["get"], 404, "<html>nothing here</html>", {"content_type": "text/html"}),
        (["logs", "t"], 200, "<html>welcome</html>", {"content_type": "Text/HTML; charset=utf-8"}),
        (["get"], 200, {"hello": "world"}, {}),
        (["get"], 200, [{}], {}),
        (["get"], 200, [1], {}),
        (["get"], 204, "", {}),
        (["get"], 200, "[" * 100_000, {}),
        (["get", "t"], 200, {"spec": None}, {}),
        (["get", "t", "j"], 200, {"job_status": []}, {}),
        (["history", "t"], 200, [{"revision": None}], {}),
        (["keys", "list"], 200, "null", {}),
        (["tokens", "list"], 200, [[]], {}),
        (["delete", "t"], 200, "true", {}),
        (["dashboard"], 200, {"path": "@evil.example/x"}, {}),
        (["dashboard"], 200, {"path": ".evil.example/x"}, {}),
        (["dashboard"], 200, [], {}),
    ],
)
def test_a_server_that_is_no_operator_is_named_as_such(
    server: Server, words: list[str], status: int, body: Any, headers: dict[str, str], capsys: Capture
) -> None:
    server.answering = lambda handler: answers(handler, status, body, **headers)

    assert main([*words, "-e", "there"]) in (1, 2)

    shown = capsys.readouterr()
    assert f"error: {server.url} is not a cortex operator" in shown.err, shown.err
    assert "internal error" not in shown.err and shown.out == ""


@pytest.mark.parametrize(
    "body", [{"code": "config_invalid", "diagnostics": [5]}, [], {"error": {"a": 1}}, "[" * 100_000]
)
def test_an_error_of_another_form_is_still_an_error(server: Server, body: Any, capsys: Capture) -> None:
    server.answering = lambda handler: answers(handler, 400, body)

    assert main(["get", "-e", "there"]) in (1, 2)
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "endpoint",
    ["http://192.0.2.1:8888/t", "http://127.0.0.1@192.0.2.1/t", "http://[", "file:///etc/passwd", "", "//192.0.2.1/t"],
)
def test_payload_and_key_go_to_the_host_of_the_operator_only(server: Server, endpoint: str, capsys: Capture) -> None:
    server.answering = lambda handler: answers(handler, 200, {"spec": SPEC, "endpoint": endpoint})

    assert main(["predict", "t", "-e", "there", "--api-key", "k"]) == 2

    shown = capsys.readouterr().err
    assert "on another host than its own" in shown and "cortex env configure there --gateway-host" in shown
    assert len(server.requests) == 1 and "x-api-key" not in server.requests[0][2]


def test_completion_shows_no_escapes_and_ignores_answers_of_another_form(server: Server, capsys: Capture) -> None:
    api = {"spec": SPEC, "status": {"message": "live\x1b[2J\u202e"}}
    for body, expected in (([api], "t\tRealtimeAPI, live\\x1b[2J\\u202e\n"), ([{"spec": None}], ""), (5, "")):
        server.answering = lambda handler, body=body: answers(handler, 200, body)  # type: ignore[misc]
        assert main(["completion", "bash", "--words", "get", "-e", "there", ""]) == 0
        assert capsys.readouterr() == (expected, "")


def test_another_host_can_be_configured(server: Server, capsys: Capture) -> None:
    api = {"spec": SPEC, "endpoint": server.url.replace("127.0.0.1", "127.0.0.2") + "/t"}
    server.answering = lambda handler: answers(handler, 200, api)
    words = ("--operator-endpoint", server.url, "--token", "t", "--gateway-host", "127.0.0.2")
    assert main(["env", "configure", "there", *words]) == 0

    assert main(["predict", "t", "-e", "there"]) == 1

    assert "does not answer" in capsys.readouterr().err  # it was asked


def test_hostile_text_does_not_reach_the_terminal(tmp_path: Path, server: Server) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r\u202e"
    server.answering = lambda handler: answers(handler, 400, {"error": evil, "code": "bad_input"})
    shown = on_terminal(tmp_path, "get", "-e", "there", TERM="xterm")

    def logs(handler: BaseHTTPRequestHandler) -> None:
        if "/logs" in handler.path:
            answers(handler, 200, f"before\n{evil}\n")
        else:
            answers(handler, 200, {"spec": SPEC})

    server.answering = logs
    shown += on_terminal(tmp_path, "logs", "t", "-e", "there", TERM="xterm")

    assert shown.count(r"\x1b]0;owned\x07\x1b[2J\r\u202e") == 2
    assert "\x07" not in shown and "\x1b]" not in shown and "\u202e" not in shown


def test_responses_of_apis_are_escaped_on_terminals_and_unchanged_in_pipes(tmp_path: Path, server: Server) -> None:
    evil = b"\x1b[2J\xc2\x9b\r\xc3"

    def predict(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/t":
            reply(handler, 200, evil)
        else:
            answers(handler, 200, {"spec": SPEC, "endpoint": f"{server.url}/t"})

    server.answering = predict
    assert on_terminal(tmp_path, "predict", "t", "-e", "there").rstrip() == r"\x1b[2J\x9b\r"
    words = [*CORTEX, "predict", "t", "-e", "there"]
    assert subprocess.run(words, env=environ(tmp_path), capture_output=True, timeout=60).stdout == evil
