"""The client's methods for jobs against an HTTP server in the role of the operator."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.client.client import Client
from cortex.client.environments import Environment
from cortex.client.jobs import BLOCK_BYTES, item_blocks
from cortex.client.transport import Transport
from cortex.errors import InputError, NotFoundError, OperatorUnavailableError
from harness.servers.answering import Server, reply

pytestmark = pytest.mark.processes

RECORD = {"job_id": "7f00", "workers": 2}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def client(server: Server) -> Client:
    return client_of(server.url)


def client_of(url: str) -> Client:
    return Client(Environment("test", url, lambda: Transport(url, "token")))


def answers(server: Server, answer: Any, status: int = 200) -> None:
    server.answering = lambda handler: reply(handler, status, json.dumps(answer).encode())


def streams(server: Server, body: bytes) -> None:
    server.answering = lambda handler: reply(handler, 200, body)


# Submitting.


def test_a_submission_is_sent_unchanged(server: Server, client: Client) -> None:
    answers(server, RECORD)
    spec = {"workers": 2, "item_list": {"items": [1, "two", None], "batch_size": 2}}

    assert client.submit_job("sum", spec) == RECORD
    method, path, headers, body = server.requests[0]
    assert (method, path, json.loads(body)) == ("POST", "/v1/apis/sum/jobs", spec)
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer token"


class Named:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.parametrize("source", ["objects", "generator", "path", "text path", "path-like", "file", "memory", "pipe"])
def test_items_of_every_source_become_lines(server: Server, client: Client, tmp_path: Path, source: str) -> None:
    answers(server, RECORD)
    file = tmp_path / "items.ndjson"
    file.write_bytes(b'1\n"zwei"\n{"a":[3]}\n')
    objects = [1, "zwei", {"a": [3]}]
    reader, writer = os.pipe()
    os.write(writer, file.read_bytes())
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe, file.open("rb") as opened:
        items: dict[str, Any] = {
            "objects": objects,
            "generator": (item for item in objects),
            "path": file,
            "text path": str(file),
            "path-like": Named(file),
            "file": opened,
            "memory": io.BytesIO(file.read_bytes()),
            "pipe": pipe,
        }
        job = client.submit_job(
            "sum", {"workers": 2, "config": {"a": 1}, "item_list": {"batch_size": 3}}, items[source]
        )

    assert job == RECORD
    method, path, headers, body = server.requests[0]
    assert (method, body) == ("POST", file.read_bytes())
    assert path == "/v1/apis/sum/jobs?batch_size=3&workers=2&config=%7B%22a%22%3A+1%7D"
    assert headers["content-type"] == "application/x-ndjson"
    assert headers["transfer-encoding"] == "chunked"


def test_many_items_are_sent_in_lazily_created_chunks(server: Server, client: Client) -> None:
    answers(server, RECORD)
    made = 0

    def items() -> Iterator[str]:
        nonlocal made
        for made in range(100_000):
            yield f"item {made}"

    client.submit_job("sum", {"workers": 1, "batch_size": 10}, items())

    assert [json.loads(line) for line in server.requests[0][3].splitlines()] == [f"item {n}" for n in range(100_000)]
    size = len(server.requests[0][3])
    assert size / BLOCK_BYTES / 1.1 < server.parts <= size / BLOCK_BYTES + 1


SCALARS = st.none() | st.booleans() | st.text() | st.integers(-(2**63), 2**63)


@given(items=st.lists(st.recursive(SCALARS, st.lists, max_leaves=10)))
def test_every_item_is_one_line_of_json(items: list[Any]) -> None:
    with item_blocks(items) as blocks:
        lines = b"".join(blocks).split(b"\n")[:-1]

    assert [json.loads(line) for line in lines] == items


@pytest.mark.parametrize("number", [1, 3, 1000])
def test_an_item_that_is_not_json_is_reported_and_ends_the_upload(server: Server, client: Client, number: int) -> None:
    with pytest.raises(InputError, match=f"item {number} can't be written as JSON: .*object"):
        client.submit_job("sum", {"workers": 1}, [*range(number - 1), object(), 5])


@pytest.mark.parametrize("raised", [ConnectionResetError, TypeError])
def test_an_exception_of_the_callers_items_is_raised(server: Server, client: Client, raised: type[Exception]) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise raised("of the caller's database")

    with pytest.raises(raised, match="of the caller's database"):
        client.submit_job("sum", {"workers": 1}, items())


@pytest.mark.parametrize("items", [b"[1]", {"a": 1}, 7])
def test_rejects_values_that_are_no_items(client: Client, items: Any) -> None:
    with pytest.raises(ValueError, match="`items` must be an iterable of items, a path or a file"):
        client.submit_job("sum", {"workers": 1}, items)


def test_a_submission_that_is_not_json_is_bad_input(server: Server, client: Client) -> None:
    with pytest.raises(InputError, match="`job_spec` can't be written as JSON: Object of type range is not"):
        client.submit_job("sum", {"workers": 1, "item_list": {"items": range(3)}})
    assert server.requests == []


def test_a_missing_file_is_reported_and_nothing_is_sent(server: Server, client: Client, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nope.ndjson: can't be read: no such file"):
        client.submit_job("sum", {"workers": 1}, tmp_path / "nope.ndjson")
    with pytest.raises(InputError, match="can't be read: is a directory"):
        client.submit_job("sum", {"workers": 1}, tmp_path)
    assert server.requests == []


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ({"workers": 1, "item_list": {"items": [1], "batch_size": 1}}, "item_list.items"),
        ({"workers": 1, "delimited_files": {"s3_paths": ["s3://a/b"]}}, "delimited_files"),
    ],
)
def test_rejects_items_in_the_submission_and_in_an_upload(client: Client, spec: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=f"{key} can't be combined with uploaded items"):
        client.submit_job("sum", spec, [1])


def test_a_refusal_ends_an_upload_that_would_never_end() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    body = json.dumps({"error": "line 2: not JSON", "code": "bad_input"}).encode()

    def refuse() -> None:
        connection, _ = listener.accept()
        connection.recv(1024)
        connection.sendall(b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        while connection.recv(1 << 20):  # continues to read, as a proxy may
            pass
        connection.close()

    thread = threading.Thread(target=refuse)
    thread.start()

    def endless() -> Iterator[int]:
        while True:
            yield 1

    try:
        with pytest.raises(InputError, match="line 2: not JSON"):
            client_of(f"http://127.0.0.1:{listener.getsockname()[1]}").submit_job("sum", {"workers": 1}, endless())
    finally:
        thread.join(30)
        listener.close()


def test_an_operator_that_dies_during_an_upload_is_unavailable() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def leave() -> None:
        connection, _ = listener.accept()
        connection.recv(1024)
        connection.close()

    thread = threading.Thread(target=leave)
    thread.start()
    try:
        with pytest.raises(OperatorUnavailableError):
            client_of(f"http://127.0.0.1:{listener.getsockname()[1]}").submit_job("a", {"workers": 1}, range(10**9))
    finally:
        thread.join(30)
        listener.close()


# Dry runs.


def test_a_dry_run_yields_paths_and_the_verdict(server: Server, client: Client) -> None:
    streams(server, b"s3://a/1\ns3://a/2\nvalidations passed\n")
    spec = {"workers": 1, "file_path_lister": {"s3_paths": ["s3://a/"], "batch_size": 1}}

    expected = ["s3://a/1", "s3://a/2", "validations passed"]
    assert list(client.dry_run_job("sum", spec)) == expected
    assert client.submit_job("sum", spec, dry_run=True) == {"lines": expected}
    method, path, _, body = server.requests[0]
    assert (method, path, json.loads(body)) == ("POST", "/v1/apis/sum/jobs?dryRun=true", spec)


def test_a_dry_run_of_an_upload_sends_the_items(server: Server, client: Client) -> None:
    streams(server, b"validations passed\n")

    assert list(client.dry_run_job("sum", {"workers": 1, "batch_size": 1}, [1, 2])) == ["validations passed"]
    assert server.requests[0][1] == "/v1/apis/sum/jobs?workers=1&batch_size=1&dryRun=true"
    assert server.requests[0][3] == b"1\n2\n"


def test_a_mistake_found_during_a_dry_run_is_raised(server: Server, client: Client) -> None:
    streams(server, b"s3://a/1\ns3://b/: no such bucket\n")
    lines = client.dry_run_job("sum", {"workers": 1})

    assert next(lines) == "s3://a/1"
    with pytest.raises(InputError, match="s3://b/: no such bucket"):
        next(lines)


def test_a_rejected_dry_run_raises_the_plain_text_of_the_response(server: Server, client: Client) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(400)
        handler.send_header("content-type", "text/plain; charset=utf-8")
        handler.end_headers()
        handler.wfile.write(b"no s3 files match search criteria\n")

    server.answering = refuse

    with pytest.raises(InputError, match="^no s3 files match search criteria$"):
        list(client.dry_run_job("sum", {"workers": 1}))


# Reading, waiting, stopping.


def test_jobs_are_read_listed_stopped_and_retried(server: Server, client: Client) -> None:
    answers(server, [])
    assert client.list_jobs("sum") == []
    answers(server, {"message": "stopped job 7f00"})
    client.get_job("a b", "7f00")
    assert client.stop_job("sum", "7f00", keep_cache=True) == {"message": "stopped job 7f00"}
    client.retry_failed("sum", "7f00", workers=3)
    client.retry_failed("sum", "7f00")

    assert [(method, path) for method, path, _, _ in server.requests] == [
        ("GET", "/v1/apis/sum/jobs?limit=10"),
        ("GET", "/v1/apis/a%20b/jobs/7f00"),
        ("DELETE", "/v1/apis/sum/jobs/7f00"),
        ("POST", "/v1/apis/sum/jobs/7f00/retry?workers=3"),
        ("POST", "/v1/apis/sum/jobs/7f00/retry"),
    ]


def test_an_unknown_job_and_empty_names_are_errors(server: Server, client: Client) -> None:
    message = "unable to find BatchAPI job 7f00 (sum api)"
    answers(server, {"error": message, "code": "not_found"}, 404)

    with pytest.raises(NotFoundError) as caught:
        client.get_job("sum", "7f00")
    assert str(caught.value) == message
    asked = len(server.requests)
    for name, message in (("", "the {} is empty"), ("..", ".. can't be the {}"), ("a/../b", "a/../b can't be the {}")):
        calls: dict[str, Callable[[], object]] = {
            "id of the job": partial(client.get_job, "sum", name),
            "name of the API": partial(client.rollback, name),
            "id of the key": partial(client.revoke_key, name),
            "id of the token": partial(client.revoke_token, name),
        }
        for what, call in calls.items():
            with pytest.raises(InputError, match=f"^{re.escape(message.format(what))}$"):
                call()
    assert len(server.requests) == asked


def test_a_wait_ends_with_the_job(server: Server, client: Client) -> None:
    statuses = iter(["enqueuing", "pending", "running", "completed_with_failures"])
    server.answering = lambda handler: reply(
        handler, 200, json.dumps({"job_status": {"status": next(statuses)}}).encode()
    )

    assert client.wait_job("sum", "7f00")["job_status"]["status"] == "completed_with_failures"


def test_a_wait_ends_at_its_timeout(server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """Only pauses take time: a request may take long on a loaded machine."""

        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    answers(server, {"job_status": {"status": "running"}})
    monkeypatch.setattr(sys.modules[item_blocks.__module__], "time", Clock())

    assert client.wait_job("sum", "7f00", timeout_s=0.2)["job_status"]["status"] == "running"
    assert len(server.requests) > 1


def test_a_wait_continues_across_an_operator_restart(server: Server, client: Client) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        if len(server.requests) == 2:
            handler.connection.shutdown(socket.SHUT_RDWR)
        status = "running" if len(server.requests) < 3 else "succeeded"
        reply(handler, 200, json.dumps({"job_status": {"status": status}}).encode())

    server.answering = answer

    assert client.wait_job("sum", "7f00")["job_status"]["status"] == "succeeded"
    assert len(server.requests) == 3


# Results and logs.


def test_results_and_dead_letters_are_read_line_by_line(server: Server, client: Client) -> None:
    rows = [{"seq": seq, "result": "x\u2028y" * seq} for seq in range(5000)]
    streams(server, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())

    assert list(client.job_results("sum", "7f00")) == rows
    assert list(client.dead_letters("sum", "7f00")) == rows
    assert b"".join(client.raw_job_results("sum", "7f00")).count(b"\n") == 5000
    assert {path for _, path, _, _ in server.requests} == {
        "/v1/apis/sum/jobs/7f00/results",
        "/v1/apis/sum/jobs/7f00/dead-letters",
    }


def test_raises_if_the_connection_closes_during_results(server: Server, client: Client) -> None:
    def break_off(handler: BaseHTTPRequestHandler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b'a\r\n{"seq": 0}\r\n')
        handler.close_connection = True

    server.answering = break_off

    with pytest.raises(OperatorUnavailableError, match=r"closed the connection \(incomplete response\)"):
        list(client.job_results("sum", "7f00"))


def test_options_of_logs_are_sent(server: Server, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    streams(server, b"one\r\ntwo\n")

    assert list(client.job_logs("sum", "7f00", replica="w1", tail=5)) == ["one", "two"]
    client.stream_job_logs("sum", "7f00")

    assert capsys.readouterr().out == "one\ntwo\n"
    assert [path for _, path, _, _ in server.requests] == [
        "/v1/apis/sum/jobs/7f00/logs?follow=false&replica=w1&tail=5",
        "/v1/apis/sum/jobs/7f00/logs?follow=true",
    ]
