"""Probes of a server that answers well, badly or not at all."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cortex.worker.channel import Channel
from cortex.worker.commands import readiness_probe, worker
from cortex.worker.commands.readiness_probe import ProbeResult, probe
from harness.wait import PATIENCE_S


async def listen(path: Path, answer: bytes | None) -> asyncio.AbstractServer:
    """Start a server that gives one answer, or none."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    return await asyncio.start_unix_server(serve, path)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", ""),
        (b"HTTP/1.0 302 Found\r\n\r\n", ""),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "GET /health answered 404"),
        (b"HTTP/1.1 503 Loading\r\n\r\n", "GET /health answered 503"),
        (b"hello\r\n", "GET /health failed: the answer is not HTTP"),
        (b"", "GET /health failed: the connection was closed without an answer"),
        (None, "GET /health had no answer within 0.2 s"),
    ],
)
def test_a_status_from_200_to_399_is_ready(
    answer: bytes | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness_probe, "PROBE_S", 0.2 if answer is None else PATIENCE_S)

    async def scenario() -> ProbeResult:
        async with await listen(tmp_path / "s", answer):
            return await probe(str(tmp_path / "s"), "/health")

    assert asyncio.run(scenario()) == ProbeResult(not problem, problem)


def test_nothing_listens(tmp_path: Path) -> None:
    result = asyncio.run(probe(str(tmp_path / "s"), "/health"))
    assert not result.is_ready
    assert "No such file" in result.problem


def test_without_a_path_a_server_that_listens_is_ready(tmp_path: Path) -> None:
    assert asyncio.run(probe(str(tmp_path / "s"), None)).is_ready


@dataclass
class Spec:
    readiness: str = "/health"


class Answers:
    """When the server has last answered, as `CommandServer` knows it."""

    timeout_s = 0.0
    is_stopping = False

    def __init__(self, answered_at: float) -> None:
        self.answered_at = answered_at

    def answered(self) -> None:
        self.answered_at = float("inf")


@pytest.mark.parametrize(
    ("answer", "kinds"), [(b"HTTP/1.1 500 Broken\r\n\r\n", ["unresponsive"]), (b"HTTP/1.1 200 OK\r\n\r\n", [])]
)
def test_a_server_that_is_silent_for_long_is_reported_to_the_supervisor(
    answer: bytes, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PROBE_S", 0.001)
    ours, theirs = Channel.pair()
    server: Any = Answers(answered_at=0.0)

    async def scenario() -> None:
        async with await listen(tmp_path / "s", answer):
            watch = asyncio.create_task(worker._watch(Spec(), server, str(tmp_path / "s"), theirs))  # type: ignore[arg-type]
            loop = asyncio.get_running_loop()
            if kinds:
                ours.sock.setblocking(False)
                await asyncio.wait_for(readable(loop, ours.sock), PATIENCE_S)
            else:
                while server.answered_at == 0.0:
                    await asyncio.sleep(0.001)
            watch.cancel()

    asyncio.run(scenario())
    ours.sock.setblocking(False)
    received = []
    try:
        while (message := ours.receive()) is not None:
            received.append(message[0])
    except BlockingIOError:
        pass
    assert [each["kind"] for each in received][:1] == kinds
    if kinds:
        assert "GET /health answered 500; no request was answered for " in received[0]["message"]
    ours.close()
    theirs.close()


async def readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    await ready.wait()
    loop.remove_reader(sock)
