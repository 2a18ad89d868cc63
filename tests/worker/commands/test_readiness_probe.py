"""Probes of a server that answers well, badly or not at all."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import uvloop

from cortex.worker.channel import Channel
from cortex.worker.commands import readiness_probe, worker
from cortex.worker.commands.readiness_probe import ProbeResult, Readiness, probe
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
            return await probe(str(tmp_path / "s"), "/health", lambda address: True)

    assert asyncio.run(scenario()) == ProbeResult(problem, is_silent=answer is None)


def test_nothing_listens(tmp_path: Path) -> None:
    result = asyncio.run(probe(str(tmp_path / "s"), "/health", lambda address: True))
    assert not result.is_silent
    assert "No such file" in result.problem


def test_a_server_whose_backlog_is_full_is_silent(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as waiting,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        waiting.connect(str(tmp_path / "s"))
        assert runner.run(probe(str(tmp_path / "s"), "/health", lambda address: True)).is_silent


def test_another_program_gets_no_probe(tmp_path: Path) -> None:
    async def scenario() -> tuple[ProbeResult, bytes]:
        received = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.set_result(await reader.read())
            writer.close()

        async with await asyncio.start_unix_server(serve, tmp_path / "s"):
            result = await probe(str(tmp_path / "s"), "/health", lambda address: False)
            return result, await received

    assert asyncio.run(scenario()) == (ProbeResult("GET /health failed: another program listens at the port"), b"")


def test_without_a_path_a_server_that_listens_is_ready(tmp_path: Path) -> None:
    assert asyncio.run(probe(str(tmp_path / "s"), None, lambda address: True)).is_ready


OK, BAD, LATE, BUSY = "ok", "bad", "late", "busy"  #: BUSY is LATE while requests run


@pytest.mark.parametrize(
    ("probes", "is_ready", "failing_since"),
    [
        ([], True, 0),
        ([BAD, BAD], True, 0),
        ([BAD, BAD, BAD], False, 0),
        ([LATE, LATE, LATE], False, 0),
        ([BAD, LATE, BAD], False, 0),
        ([BAD, BAD, OK, BAD, BAD], True, 3),
        ([BUSY] * 9, True, 0),
        ([BAD, BAD, BUSY, BAD], False, 0),
        ([BUSY, BUSY, BAD, BAD, BAD], False, 2),
        ([BAD] * 9, False, 0),
        ([BAD] * 9 + [BUSY], False, 0),
        ([BAD] * 9 + [OK], True, 0),
    ],
)
def test_three_failures_in_a_row_end_readiness_unless_requests_explain_the_silence(
    probes: list[str], is_ready: bool, failing_since: float
) -> None:
    readiness = Readiness()
    for now, kind in enumerate(probes):
        problem = "" if kind == OK else kind
        readiness.observe(ProbeResult(problem, is_silent=kind in (LATE, BUSY)), kind == BUSY, now)
    assert readiness.is_ready == is_ready
    assert readiness.failing_since == failing_since


class Probed:
    """A server whose probes have these problems, then none."""

    is_stopping = False

    def __init__(self, *problems: str, busy: bool = False) -> None:
        self.problems = list(problems)
        self._is_busy = busy

    async def probe(self) -> ProbeResult:
        return ProbeResult(self.problems.pop(0) if self.problems else "")

    def is_busy(self, since: float) -> bool:
        return self._is_busy


@pytest.mark.parametrize(
    ("server", "max_failing_s", "kinds"),
    [
        (Probed("503", "503"), 60.0, []),
        (Probed("503", "503", "503"), 60.0, ["unready", "recovered"]),
        (Probed("503", "503", "refused", "503"), 60.0, ["unready", "unready", "recovered"]),
        (Probed("503", "503", "503"), 0.0, ["unready", "unresponsive", "recovered"]),
        (Probed("503", "503", "503", busy=True), 0.0, ["unready", "recovered"]),
    ],
)
def test_the_supervisor_learns_when_readiness_ends_and_returns_and_when_it_should_restart_the_command(
    server: Any, max_failing_s: float, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PROBE_S", 0.001)
    monkeypatch.setattr(worker, "FAILING_S", 0.001)
    ours, theirs = Channel.pair()
    ours.sock.setblocking(False)

    async def scenario() -> list[str]:
        received: list[dict[str, Any]] = []
        async with asyncio.timeout(PATIENCE_S):
            watch = asyncio.create_task(worker._watch(server, theirs, max_failing_s))
            while server.problems or len(received) < len(kinds):
                try:
                    message = ours.receive()
                    assert message is not None
                    received.append(message[0])
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            watch.cancel()
        assert all("503" in each["message"] or "refused" in each["message"] for each in received if "message" in each)
        return [each["kind"] for each in received]

    assert asyncio.run(scenario()) == kinds
    ours.close()
    theirs.close()
