"""Worker routes on a real Unix socket: calls and rejected requests."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.jobs.http import wire
from cortex.jobs.http.wire import ExchangeRequest, RenewalRequest
from cortex.jobs.spec import (
    HOOK_SEQ,
    Assignment,
    BatchFailure,
    ExchangeReply,
    Lease,
    LeasedBatch,
    RenewalReply,
    Report,
    StopSignal,
)
from cortex.operator.jobs.jobs import worker_token
from cortex.processes.sockets import replace_listener
from harness.jobs.jobs_server import JobsServer, jobs_server
from harness.wait import wait_until


@pytest.fixture
def server() -> Iterator[JobsServer]:
    with jobs_server() as running:
        yield running


def test_a_worker_joins_and_is_assigned_a_job(server: JobsServer) -> None:
    server.workers.joined = Assignment("7fff", {"x": 1}, {"job_id": "7fff"}, {}, "/logs/w.log", 30.0)
    status, body = server.as_worker("join", wire.write(wire.JoinRequest(4711)))
    assert (status, wire.parse_joined(body)) == (200, server.workers.joined)
    assert server.workers.calls == [("join", "sum-1", 4711, 20.0)]
    server.workers.joined = StopSignal()
    assert wire.parse_joined(server.as_worker("join", wire.write(wire.JoinRequest(4711)))[1]) == StopSignal()


def test_an_exchange_forwards_reports_and_returns_a_lease(server: JobsServer) -> None:
    reports = (Report("t0", 5, (BatchFailure(4, "ValueError: no", "…"),), ((3, b'{"a":1}'), (5, b"2")), 0.25),)
    server.workers.exchanged = ExchangeReply(Lease("t1", (LeasedBatch(6, b"[1]"), LeasedBatch(9, b"[2]"))), ("t9",))
    status, body = server.as_worker(
        "exchange", wire.write_exchange(ExchangeRequest(4711, "7fff", reports, 8, 1000, 0.5))
    )
    assert (status, wire.parse_exchanged(body)) == (200, server.workers.exchanged)
    assert server.workers.calls == [("exchange", "sum-1", 4711, "7fff", reports, 8, 1000, 0.5)]


def test_leases_are_renewed(server: JobsServer) -> None:
    status, body = server.as_worker("renew", wire.write(RenewalRequest(4711, ("a", "b"))))
    assert (status, wire.parse(RenewalReply, body)) == (200, RenewalReply(lost=("b",)))


@pytest.mark.parametrize(
    ("outcome", "failures"),
    [(b'"error":"E","traceback":"tb"', (BatchFailure(HOOK_SEQ, "E", "tb"),)), (b'"error":null,"traceback":""', ())],
    ids=["raised", "returned"],
)
def test_the_hook_of_a_worker_of_an_older_version_is_a_report(
    server: JobsServer, outcome: bytes, failures: tuple[BatchFailure, ...]
) -> None:
    server.workers.exchanged = ExchangeReply(Lease("t", (LeasedBatch(HOOK_SEQ, b""),)))
    _, body = server.as_worker("exchange", wire.write_exchange(ExchangeRequest(4711, "7fff")))
    assert json.loads(body) == {"lease": None, "lost": [], "done": False, "hook": "t", "stop": False}
    sent = b'{"pid":4711,"job":"7fff","token":"t",%b}' % outcome
    assert server.as_worker("hook", sent) == (200, b"{}")
    assert server.workers.calls[1] == ("exchange", "sum-1", 4711, "7fff", (Report("t", HOOK_SEQ, failures),), 0, 0, 0.0)


def test_a_wait_is_limited(server: JobsServer) -> None:
    server.as_worker("exchange", wire.write_exchange(ExchangeRequest(4711, "7fff", wait_s=1e9)))
    assert server.workers.calls[0][-1] == 20.0


@pytest.mark.parametrize("token", ["", "wrong", "é", worker_token("secret", "sum-2"), worker_token("other", "sum-1")])
def test_a_worker_cannot_act_for_another_worker(server: JobsServer, token: str) -> None:
    for action in ("join", "exchange", "renew", "hook", "other"):
        assert server.as_worker(action, wire.write(wire.JoinRequest(1)), token=token)[0] == 401
    assert server.send("POST", "/worker/sum-1/join", wire.write(wire.JoinRequest(1)))[0] == 401
    assert server.send("GET", "/")[0] == 401
    assert server.workers.calls == []


def test_users_cannot_call_worker_routes(server: JobsServer) -> None:
    headers = {"x-cortex-api": "sum", "authorization": f"Bearer {worker_token('secret', 'sum-1')}"}
    assert server.send("POST", "/worker/sum-1/join", wire.write(wire.JoinRequest(1)), headers)[0] == 400
    assert server.workers.calls == []


@pytest.mark.parametrize(
    ("worker", "action", "body", "status", "code"),
    [
        ("gone", "join", wire.write(wire.JoinRequest(1)), 404, "not_found"),
        ("sum-1", "renew", wire.write(RenewalRequest(13, ())), 409, "conflict"),
        ("sum-1", "join", wire.write(wire.JoinRequest(14)), 500, "internal"),
        ("sum-1", "other", b"", 404, "not_found"),
        ("sum-1", "join/x", b"", 404, "not_found"),
        ("sum-1", "join", b"", 400, "bad_wire"),
        ("sum-1", "join", b"[]", 400, "bad_wire"),
        ("sum-1", "exchange", b"{}\n1 1", 400, "bad_wire"),
        ("sum-1", "renew", b'{"pid":1,"tokens":[1]}', 400, "bad_wire"),
        ("sum-1", "hook", b"\xff", 400, "bad_wire"),
        ("x" * 5000, "join", b"\xff", 400, "bad_wire"),
    ],
)
def test_errors_have_a_status_and_code(
    server: JobsServer, worker: str, action: str, body: bytes, status: int, code: str
) -> None:
    answer = server.as_worker(action, body, worker)
    assert (answer[0], json.loads(answer[1])["code"]) == (status, code)


def test_other_methods_are_not_found(server: JobsServer) -> None:
    token = worker_token("secret", "sum-1")
    assert server.send("GET", "/worker/sum-1/join", headers={"authorization": f"Bearer {token}"})[0] == 404


def test_rejects_a_body_over_the_limit(server: JobsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 100_000)
    answer = server.as_worker("join", b"x" * 100_001)
    assert (answer[0], json.loads(answer[1])["code"]) == (413, "too_large")


def test_a_waiting_request_is_cancelled_when_its_worker_disconnects(server: JobsServer) -> None:
    server.workers.hangs = True
    body = wire.write_exchange(ExchangeRequest(4711, "7fff", (), 1, 1, 20.0))
    head = (
        f"POST /worker/sum-1/exchange HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        f"authorization: Bearer {worker_token('secret', 'sum-1')}\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.path))
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.workers.waiting == 1)
    wait_until(lambda: server.workers.waiting == 0)


def test_a_token_does_not_reveal_the_operators_token() -> None:
    assert worker_token("a", "w") == worker_token("a", "w") != worker_token("b", "w")
    assert len(bytes.fromhex(worker_token("a", "w"))) == 32


def test_the_socket_is_private_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    left = replace_listener(path)
    left.close()
    assert path.exists()
    listener = replace_listener(path)
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert [entry.name for entry in tmp_path.iterdir()] == ["jobs"]
    finally:
        listener.close()
