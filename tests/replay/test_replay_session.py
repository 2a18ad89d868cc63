"""A replay against a small HTTP server of the test: what is sent, in what order, and what is counted."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cortex.errors import InputError
from cortex.recording.exchange import encode_head
from cortex.recording.files import Recording
from cortex.replay.comparison import ComparisonRules
from cortex.replay.session import ReplaySession, ReplaySettings, ReplayTarget
from cortex.replay.statistics import ReplayStatistics
from harness.wait import PATIENCE_S

START = 1_795_444_400.0


class Server(ThreadingHTTPServer):
    """Answers `{"x": 2 * x}`, and keeps what it got."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, str, dict[str, str], bytes, float]] = []
        self.closes_after = 0  #: requests per connection; 0: no limit

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.server_port, timeout=PATIENCE_S)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    count = 0

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.got.append((self.command, self.path, headers, body, time.monotonic()))
        content = json.dumps({"x": 2 * json.loads(body)["x"]} if body else None).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.send_header("server-timing", "queue;dur=0.5, handler;dur=2.5, encode;dur=1, total;dur=4.0")
        self.end_headers()
        self.wfile.write(content)
        self.count += 1
        if self.count == self.server.closes_after:  # as a gateway does after an idle time: without a warning
            self.close_connection = True

    do_GET = do_POST = _answer

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def recorded(x: float, answer: Any, at_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"id-{x}",
        "time": datetime.fromtimestamp(START + at_s, UTC).isoformat(),
        "duration_ms": 8.0,
        "handler_ms": 5.0,
        "method": "POST",
        "path": "",
        "query": "",
        "headers": [],
        "request": {"content_type": "application/json", "json": {"x": x}},
        "status": 200,
        "response": {"content_type": "application/json", "json": answer},
    } | fields


def write(folder: Path, *exchanges: dict[str, Any], rest: str = "", **fields: Any) -> Recording:
    head = encode_head(api="iris", started=datetime.fromtimestamp(START, UTC), **fields).decode()
    (folder / "a.ndjson").write_text(head + "".join(json.dumps(each) + "\n" for each in exchanges) + rest)
    return Recording.open(folder)


def replay(recording: Recording, server: Server, **settings: Any) -> ReplayStatistics:
    target = ReplayTarget("iris", server.connect, "/iris", lambda exchange: {"x-api-key": "k"})
    return ReplaySession(recording, target, ReplaySettings(**settings), ComparisonRules()).run()


def test_each_request_is_sent_as_it_was_recorded(tmp_path: Path, server: Server) -> None:
    other = recorded(
        2,
        None,
        method="GET",
        path="/v1/items",
        query="limit=2&q=%C3%A4",
        headers=[["x-thing", "7"], ["user-agent", "curl"]],
        request={},
    )
    found = replay(write(tmp_path, recorded(1, {"x": 2}), other), server, concurrency=1)
    (verb, path, headers, body, _), (other_verb, other_path, other_headers, other_body, _) = server.got
    assert (verb, path, body) == ("POST", "/iris", b'{"x":1}')
    assert (headers["content-type"], headers["x-api-key"]) == ("application/json", "k")
    assert (other_verb, other_path, other_body) == ("GET", "/iris/v1/items?limit=2&q=%C3%A4", b"")
    assert other_headers["x-thing"] == "7"
    assert other_headers["user-agent"].startswith("cortex-replay/")
    assert (found.compared, found.different, found.share) == (2, 0, 0.0)


def test_bytes_of_a_url_that_are_not_ascii_are_sent_in_their_escaped_form(tmp_path: Path, server: Server) -> None:
    exchange = recorded(1, {"x": 2}, path="/b\xe9%20", query="q=\xff&r=[1]")
    assert replay(write(tmp_path, exchange), server).different == 0
    [(_, path, *_)] = server.got
    assert path == "/iris/b%E9%20?q=%FF&r=[1]"


def test_differences_are_counted_by_field_with_examples(tmp_path: Path, server: Server) -> None:
    recording = write(tmp_path, *(recorded(x, {"x": 2 * x + (x % 2), "y": x}) for x in range(20)))
    found = replay(recording, server, concurrency=4)
    assert (found.compared, found.different) == (20, 20)
    missing, value = found.by_frequency
    assert (missing.name, missing.kind, missing.answers) == ("$.y", "missing", 20)
    assert (value.name, value.kind, value.answers, value.largest) == ("$.x", "value", 10, 1.0)
    assert len(value.examples) == 5
    assert all(int(place.rpartition(":")[2]) % 2 for place, _ in value.examples)  # line 3 has x = 1


def test_durations_are_those_that_the_worker_measured(tmp_path: Path, server: Server) -> None:
    found = replay(write(tmp_path, *(recorded(x, {"x": 2 * x}) for x in range(9))), server)
    shown = [found.recorded, found.now, found.recorded_handler, found.now_handler]
    assert [round(each.quantile_ms(0.5) or 0, 1) for each in shown] == [8.0, 4.0, 5.0, 2.5]


def test_the_pace_is_that_of_the_recording(tmp_path: Path, server: Server) -> None:
    recording = write(tmp_path, *(recorded(x, {"x": 2 * x}, at_s=x / 4) for x in range(5)))
    began = time.monotonic()
    found = replay(recording, server, speed=5.0, concurrency=2)
    assert max(each[4] for each in server.got) - began >= 0.2  # a second at five times the pace
    assert found.compared == 5


def test_requests_that_a_recording_lacks_are_estimated(tmp_path: Path, server: Server) -> None:
    exchanges = [recorded(x, {"x": 2 * x}, **({"unrecorded": 3} if x % 2 else {})) for x in range(4)]
    found = replay(write(tmp_path, *exchanges, share=0.1), server)
    assert (found.recorded_requests, round(found.original_requests)) == (4, 100)
    found = replay(write(tmp_path, *exchanges), server)  # of a version that did not store the share
    assert (found.recorded_requests, found.original_requests) == (4, 10)


def test_requests_without_their_whole_body_are_skipped(tmp_path: Path, server: Server) -> None:
    cut = recorded(1, None, request={"content_type": "text/plain", "truncated": True, "bytes": 99, "text": "a"})
    found = replay(write(tmp_path, cut, recorded(2, {"x": 4}), rest='{"unfinished'), server)
    assert (found.compared, found.skipped, found.unfinished, found.different) == (1, 1, 1, 0)


def test_a_limit_ends_the_replay(tmp_path: Path, server: Server) -> None:
    found = replay(write(tmp_path, *(recorded(x, {"x": 2 * x}) for x in range(9))), server, limit=4)
    assert found.compared == len(server.got) == 4


def test_a_connection_that_the_server_closed_is_opened_again(tmp_path: Path, server: Server) -> None:
    server.closes_after = 2
    found = replay(write(tmp_path, *(recorded(x, {"x": 2 * x}) for x in range(9))), server, concurrency=1)
    assert (found.compared, found.different, found.unanswered) == (9, 0, 0)


def test_requests_without_an_answer_differ(tmp_path: Path, server: Server) -> None:
    recording = write(tmp_path, recorded(1, {"x": 2}))
    server.server_close()
    found = replay(recording, server)
    assert (found.compared, found.different, found.unanswered) == (1, 1, 1)
    [each] = found.by_frequency
    assert each.kind == "no answer"


def test_a_damaged_line_ends_the_replay_with_its_place(tmp_path: Path, server: Server) -> None:
    recording = write(tmp_path, recorded(1, {"x": 2}), rest="damaged\n")
    with pytest.raises(InputError, match=r"a\.ndjson:3: "):
        replay(recording, server)


@pytest.mark.heavy
def test_memory_does_not_grow_with_the_recording(tmp_path: Path, server: Server) -> None:
    """The queue holds two exchanges per connection, whatever the length of the recording is."""
    recording = write(tmp_path, *(recorded(x, {"x": 2 * x}) for x in range(200)))
    ahead: list[int] = []
    counter = itertools.count(1)

    class Counting(Recording):
        def exchanges(self) -> Iterator[Any]:
            for exchange in super().exchanges():
                ahead.append(next(counter) - len(server.got))
                yield exchange

    replay(Counting(recording.files), server, concurrency=2)
    assert max(ahead) <= 2 * 2 + 2 + 1
