"""The writer of a recording in a worker: what it takes from connections, and what happens if it cannot write."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cortex.recording.exchange import MAX_BODY_BYTES, Redaction, encode_head
from cortex.recording.files import Recording
from cortex.recording.storage import FolderStorage, RecordingStorage
from cortex.worker.http.connection import Connection
from cortex.worker.http.connection_pool import ConnectionPool
from cortex.worker.monitoring import exchange_writer
from cortex.worker.monitoring.exchange_writer import (
    FAILED_KEY,
    FULL_KEY,
    LIMITED_KEY,
    RECORDED_KEY,
    STOPPED_KEY,
    CpuBudget,
    ExchangeWriter,
)
from cortex.worker.monitoring.metrics import MetricFile, RequestRecorder, read_metrics
from cortex.worker.shared_state import SharedConnectionState
from harness.replicas.specs import limits
from harness.wait import PATIENCE_S, wait_until

MAX_BYTES = 64 * 1024 * 1024
#: A body that the thread encodes.
LONG = b'"' + b"x" * 5000 + b'"'


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the thread as long as a loaded machine needs, where a worker that ends waits for two seconds."""
    monkeypatch.setattr(exchange_writer, "_CLOSE_S", PATIENCE_S)


def head(started: datetime) -> bytes:
    return encode_head(api="iris", started=started)


def echo(connection: Connection) -> None:
    connection.respond(200, b"application/json", connection.body)


def stream(connection: Connection) -> None:
    connection.start_stream(200, b"text/plain", (), b"one ")
    connection.stream(b"two")
    connection.end_stream()


class Client:
    """One connection to a pool, on an event loop that it closes."""

    def __init__(
        self, handle: Callable[[Connection], None], exchanges: ExchangeWriter | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        recorder, bound = RequestRecorder(None), limits(10 * MAX_BODY_BYTES)
        pool = ConnectionPool(self.loop, SharedConnectionState(), recorder, handle, bound)
        pool.exchanges = exchanges
        pool.add(theirs, 0, lambda connection: None)

    def send(self, body: bytes, number: int = 1, target: str = "/iris", headers: str = "") -> None:
        request = (
            f"POST {target} HTTP/1.1\r\nx-cortex-request-id: {number}\r\ncontent-type: application/json\r\n"
            f"{headers}content-length: {len(body)}\r\n\r\n"
        )
        self.loop.run_until_complete(asyncio.wait_for(self._send(request.encode() + body), PATIENCE_S))

    async def _send(self, request: bytes) -> None:
        await self.loop.sock_sendall(self.ours, request)
        received = b""
        while not (b"\r\n\r\n" in received and self._is_complete(received)):
            received += await self.loop.sock_recv(self.ours, 1 << 20)

    def _is_complete(self, received: bytes) -> bool:
        start, _, body = received.partition(b"\r\n\r\n")
        if b"chunked" in start:
            return body.endswith(b"0\r\n\r\n")
        return len(body) == int(start.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])

    def close(self) -> None:
        self.ours.close()
        self.loop.close()


@contextmanager
def running(
    folder: Path,
    handle: Callable[[Connection], None] = echo,
    storage: RecordingStorage | None = None,
    share: float = 1,
    max_cpu: float = 1,
) -> Iterator[tuple[Client, Callable[[str], float]]]:
    """Yield a client of a recorded connection, and a function that reads a counter."""
    file = MetricFile(folder / "metrics")
    storage = storage or FolderStorage(folder / "rec", "iris-0-1", head, MAX_BYTES)
    loop = asyncio.new_event_loop()
    writer = ExchangeWriter(share, max_cpu, Redaction(), storage, file, "rec", loop)
    writer.start()
    client = Client(handle, writer, loop)
    try:
        yield client, lambda key: read_metrics(folder / "metrics").get(key, 0)
    finally:
        writer.close()
        client.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted((folder / "rec").iterdir()) for line in path.read_text().splitlines()]


def test_requests_and_answers_are_recorded(tmp_path: Path) -> None:
    with running(tmp_path) as (client, count):
        for number in range(5):
            client.send(b'{"x": %d}' % number, number, f"/iris?n={number}")
        wait_until(lambda: count(RECORDED_KEY) == 5)
    found = lines(tmp_path)[1:]
    assert [(each["id"], each["query"], each["request"]["json"]) for each in found] == [
        (str(number), f"n={number}", {"x": number}) for number in range(5)
    ]
    assert all(each["response"]["json"] == each["request"]["json"] for each in found)


def test_what_is_queued_is_written_at_the_end(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _):
        client.send(b"{}")
    assert len(lines(tmp_path)) == 2


def test_a_streamed_answer_is_recorded_as_one_body(tmp_path: Path) -> None:
    with running(tmp_path, stream) as (client, _):
        client.send(b"{}")
    _, found = lines(tmp_path)
    assert found["response"] == {"content_type": "text/plain", "text": "one two"}
    assert found["stream"] is True


def test_long_bodies_are_cut(tmp_path: Path) -> None:
    def handle(connection: Connection) -> None:
        connection.start_stream(200, b"text/plain", (), b"x" * MAX_BODY_BYTES)
        connection.stream(b"y")
        connection.end_stream()

    with running(tmp_path, handle) as (client, _):
        client.send(b'"' + b"x" * MAX_BODY_BYTES + b'"')
    _, found = lines(tmp_path)
    assert (found["request"]["truncated"], found["request"]["bytes"]) == (True, MAX_BODY_BYTES + 2)
    assert (found["response"]["truncated"], found["response"]["bytes"]) == (True, MAX_BODY_BYTES + 1)
    assert len(found["response"]["text"]) == MAX_BODY_BYTES


def test_the_share_is_chosen_by_the_request_id(tmp_path: Path) -> None:
    chosen = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        with running(tmp_path / name, share=0.3) as (client, _):
            for number in range(200):
                client.send(b"{}", number)
        chosen.append([each["id"] for each in lines(tmp_path / name)[1:]])
    assert chosen[0] == chosen[1]
    assert 30 < len(chosen[0]) < 90


@pytest.mark.heavy
def test_recording_takes_a_part_of_a_core_at_most_and_saves_up_one_second() -> None:
    budget, now_ns, used_ns, thread_ns = CpuBudget(0.01), 5_000_000_000, 0, 0
    for _ in range(200_000):  # requests without an end, each recorded unless recording pauses
        thread_ns += 5_000
        used_ns += 20_000 + 5_000
        pause_s = budget.spend(now_ns, 20_000, thread_ns)
        now_ns += 20_000 + int(pause_s * 1e9)
        assert used_ns <= 0.01 * (now_ns - 5_000_000_000) + 0.01 * 1e9 + 25_000
    assert used_ns > 0.0099 * (now_ns - 5_000_000_000)


def test_recording_without_a_limit_never_pauses() -> None:
    budget = CpuBudget(1.0)
    assert not any(budget.spend(number, 10**12, 10**12 * number) for number in range(10))


def test_requests_beyond_the_cpu_time_are_counted_and_not_recorded(tmp_path: Path) -> None:
    with running(tmp_path, max_cpu=1e-9) as (client, count):
        for number in range(30):
            client.send(b"{}", number)
        wait_until(lambda: count(RECORDED_KEY) == 1)
    assert count(LIMITED_KEY) == 29
    assert [each["id"] for each in lines(tmp_path)[1:]] == ["0"]


@pytest.mark.parametrize("handle", [echo, stream])
def test_a_recording_counts_the_requests_that_it_lacks(
    tmp_path: Path, handle: Callable[[Connection], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_writer, "_BURST_S", 0.0)
    numbers = itertools.count(1)
    with running(tmp_path, handle, max_cpu=0.01) as (client, count):

        def send() -> bool:
            client.send(b"{}", next(numbers))
            return count(RECORDED_KEY) >= 4

        wait_until(send)
    found = lines(tmp_path)[1:]
    ids = [int(each["id"]) for each in found]
    assert [each.get("unrecorded", 0) for each in found] == [ids[0] - 1, *(b - a - 1 for a, b in pairwise(ids))]
    assert len(found) + count(LIMITED_KEY) == next(numbers) - 1


def test_requests_of_a_replay_are_left_out(tmp_path: Path) -> None:
    with running(tmp_path) as (client, count):
        client.send(b"{}", 1, headers="user-agent: cortex-replay/1\r\n")
        client.send(b"{}", 2)
        wait_until(lambda: count(RECORDED_KEY) == 1)
    assert [each["id"] for each in lines(tmp_path)[1:]] == ["2"]


def test_short_and_long_exchanges_are_written_in_the_order_of_their_ends(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _):
        for number in range(20):
            client.send(LONG if number % 3 else b"{}", number)
    assert [int(each["id"]) for each in lines(tmp_path)[1:]] == list(range(20))


@pytest.mark.parametrize("padding", [b"", b" " * len(LONG)], ids=["short", "long"])
def test_a_value_that_cannot_be_written_is_counted_and_stops_nothing(tmp_path: Path, padding: bytes) -> None:
    deep = b"[" * 1020 + b"\n" + padding + b"]" * 1020  # read by orjson, but written by nothing
    with running(tmp_path) as (client, count):
        client.send(deep, 1)
        client.send(b"{}", 2)
        wait_until(lambda: count(RECORDED_KEY) == 1)
        assert count(FAILED_KEY) == 1
    assert [each["id"] for each in lines(tmp_path)[1:]] == ["2"]


class BlockedStorage(FolderStorage):
    """A disk that does not answer until it is released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "iris-0-1", head, MAX_BYTES)
        self.released = threading.Event()
        self.is_waiting = threading.Event()

    def write(self, lines: bytes) -> None:
        self.is_waiting.set()
        assert self.released.wait(PATIENCE_S)
        super().write(lines)


@pytest.mark.parametrize("body", [b"{}", LONG], ids=["short", "long"])
def test_a_full_queue_drops_requests_and_counts_them(
    tmp_path: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_writer, "MAX_QUEUED_BYTES", 3_000 + 20 * len(body))
    storage = BlockedStorage(tmp_path / "rec")
    with running(tmp_path, storage=storage) as (client, count):
        client.send(body, 0)
        assert storage.is_waiting.wait(PATIENCE_S)
        for number in range(1, 31):
            client.send(body, number)  # answered although nothing can be written
        dropped = count(FULL_KEY)
        assert dropped >= 15
        storage.released.set()
        wait_until(lambda: count(RECORDED_KEY) == 31 - dropped)
    assert len(list(Recording.open(tmp_path / "rec").exchanges())) == 31 - dropped


def test_a_disk_that_fails_stops_recording_with_one_line_until_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchange_writer, "RETRY_S", PATIENCE_S)
    storage = FolderStorage(tmp_path / "disk" / "recordings" / "rec", "iris-0-1", head, MAX_BYTES)
    with running(tmp_path, storage=storage) as (client, count):
        client.send(b"{}", 0)
        wait_until(lambda: count(FAILED_KEY) == 1)
        for number in range(20):
            client.send(b"{}", number)
        wait_until(lambda: count(STOPPED_KEY) + count(FAILED_KEY) == 21)
        assert count(RECORDED_KEY) == 0
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["recording of requests to rec stopped: No such file or directory; requests are served as before"]


def test_recording_continues_once_the_disk_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchange_writer, "RETRY_S", 0.0)
    storage = FolderStorage(tmp_path / "disk" / "recordings" / "rec", "iris-0-1", head, MAX_BYTES)
    with running(tmp_path, storage=storage) as (client, count):
        client.send(b"{}", 0)
        wait_until(lambda: count(FAILED_KEY) == 1)
        (tmp_path / "disk").mkdir()
        client.send(b"{}", 1)
        wait_until(lambda: count(RECORDED_KEY) == 1)
    assert capsys.readouterr().err.splitlines()[-1] == "recording of requests to rec continues"


def test_without_a_recording_connections_have_no_writer(tmp_path: Path) -> None:
    seen = []

    def handle(connection: Connection) -> None:
        seen.append((connection._exchanges, connection._answer))
        echo(connection)

    client = Client(handle, None, asyncio.new_event_loop())
    client.send(b"{}")
    client.close()
    assert seen == [(None, None)]
