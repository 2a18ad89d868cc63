"""The open-loop generator against servers that answer, stall and hang up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from benchmarks.tools.endpoint import Endpoint
from benchmarks.tools.open_loop import OpenLoad, is_whole, open_loop
from benchmarks.tools.workloads import NOOP

pytestmark = pytest.mark.processes

_ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"y":1}'


@contextmanager
def _server(answer: Callable[[int], bytes]) -> Iterator[Endpoint]:
    """Answer the n-th request of all connections with `answer(n)`, one at a time; empty: hang up."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    lock = threading.Lock()
    seen = 0

    def talk(connection: socket.socket) -> None:
        nonlocal seen
        with connection:
            while connection.recv(65536):
                with lock:
                    seen += 1
                    data = answer(seen)
                if not data:
                    return
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield Endpoint(listener.getsockname()[1], "/noop")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_every_due_request_is_sent_and_counted() -> None:
    with _server(lambda _: _ANSWER) as endpoint:
        load = open_loop(endpoint, NOOP, rate=200, seconds=1, connections=4)
    assert (load.requests, load.errors) == (200, 0)
    assert 0 < load.p50_us <= load.p99_us


def test_a_stall_is_charged_to_every_request_that_was_due_during_it() -> None:
    never = threading.Event()

    def answer(number: int) -> bytes:
        if number == 50:
            never.wait(0.5)
        return _ANSWER

    with _server(answer) as endpoint:
        load = open_loop(endpoint, NOOP, rate=400, seconds=1, connections=2)
    assert load.errors == 0
    # About 200 were due while nothing was answered. By the time of sending, only the two connections' would be late,
    # and two of 400 do not reach the 99th percentile.
    assert load.p99_us > 300_000


def test_latencies_of_a_saturated_generator_or_server_do_not_count() -> None:
    with _server(lambda _: _ANSWER) as endpoint:
        assert not open_loop(endpoint, NOOP, rate=1_000_000, seconds=0.05, connections=64).is_sustained
    quiet = OpenLoad(1000, 1.0, 100, 200, 0, rate=1000, busy=0.3)
    assert quiet.is_sustained
    assert not replace(quiet, busy=0.97).is_sustained, "the generator had no idle time"
    assert not replace(quiet, seconds=1.1).is_sustained, "the queue grew until the end"


def test_requests_without_an_answer_do_not_count_as_answered() -> None:
    never = threading.Event()

    def answer(number: int) -> bytes:
        if number > 20:
            never.wait(60)
        return _ANSWER

    with _server(answer) as endpoint:
        load = open_loop(endpoint, NOOP, rate=100, seconds=0.5, connections=4)
    assert (load.requests, load.errors) == (20, 30)


def test_hang_ups_and_bad_statuses_are_errors() -> None:
    answers = {3: b"", 5: b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"}
    with _server(lambda number: answers.get(number, _ANSWER)) as endpoint:
        load = open_loop(endpoint, NOOP, rate=100, seconds=0.5, connections=2)
    assert (load.requests, load.errors) == (50, 2)


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"", False),
        (b"HTTP/1.1 200 OK\r\nContent-Le", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length:2\r\nA: b\r\n\r\n{}", True),
        (b"HTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True),
    ],
)
def test_an_answer_is_whole_when_its_last_byte_came(data: bytes, whole: bool) -> None:
    assert is_whole(data) is whole
