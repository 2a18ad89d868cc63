"""Feedback is sent in parts of a size that the operator accepts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from cortex.client.client import Client, Feedback
from cortex.client.environments import Environment
from cortex.client.transport import Transport
from cortex.errors import InputError
from harness.servers.answering import Server, reply

pytestmark = pytest.mark.processes


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.answering = answer
    yield made
    made.close()


def client_of(server: Server) -> Client:
    return Client(Environment("test", server.url, lambda: Transport(server.url, "t")))


def answer(handler: BaseHTTPRequestHandler) -> None:
    reply(handler, 200, b'{"matched": 2, "unknown": 1, "unknown_ids": ["x"]}')


ITEMS = [{"request_id": "a", "truth": "cat"}, {"request_id": "b", "truth": 7}]
LINES = "\n".join(map(json.dumps, ITEMS)).encode()


@pytest.mark.parametrize(
    "feedback",
    [{"a": "cat", "b": 7}, ITEMS, iter(ITEMS), LINES],
    ids=["mapping", "list", "iterator", "bytes"],
)
def test_feedback_can_be_a_mapping_objects_or_bytes(server: Server, feedback: Feedback) -> None:
    client = client_of(server)

    assert client.post_feedback("iris", feedback) == {"matched": 2, "unknown": 1, "unknown_ids": ["x"]}
    [(method, path, _, body)] = server.requests
    assert (method, path) == ("POST", "/v1/apis/iris/feedback")
    assert [json.loads(line) for line in body.splitlines()] == ITEMS


def test_feedback_that_is_not_json_is_reported(server: Server) -> None:
    with pytest.raises(InputError, match="truth 2 can't be written as JSON: Object of type set"):
        client_of(server).post_feedback("iris", {"a": 1, "b": {2}})
    assert server.requests == []


@pytest.mark.parametrize("as_bytes", [False, True], ids=["objects", "lines"])
def test_large_feedback_is_sent_in_parts(server: Server, as_bytes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Client.__module__], "_FEEDBACK_PART_BYTES", 100)
    client = client_of(server)
    items = [{"request_id": f"r{number}", "truth": number} for number in range(10)]
    lines = b"\n".join(json.dumps(item).encode() for item in items)

    found = client.post_feedback("iris", lines if as_bytes else items)

    parts = [body for *_, body in server.requests]
    assert len(parts) > 2
    assert [json.loads(line) for part in parts for line in part.splitlines()] == items
    assert (found["matched"], found["unknown"]) == (2 * len(parts), len(parts))


@pytest.mark.parametrize("body", [b" [" + b"3,\n" * 60 + b"3]", b"x" * 150, b""], ids=["list", "one line", "nothing"])
def test_feedback_without_lines_is_sent_whole(server: Server, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Client.__module__], "_FEEDBACK_PART_BYTES", 100)
    client_of(server).post_feedback("iris", body)

    assert [sent for *_, sent in server.requests] == [body]
