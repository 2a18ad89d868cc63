"""Replicas that listen on TCP: their specific behaviour, and tests of other modules repeated over TCP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_killed_supervisors as killed
import test_model_rollout as rollout
import test_supervisor as supervisor

from cortex.lifecycle import DeathCause, ProcessState
from cortex.supervisor.listeners import ReplicaListeners
from cortex.supervisor.process_slot import fork
from cortex.supervisor.request_worker_slot import RequestWorkerSlot
from harness.models.scripted_agents import ScriptedAgent
from harness.replicas import replicas
from harness.replicas.replicas import Replica, TcpConnection, UnixConnection, read, running_replica
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

agent = rollout.agent  # a fixture

SECRET = "5ec2e7" * 8
TCP: dict[str, Any] = {"listen_host": "127.0.0.1", "gateway_secret": SECRET}
HANDLER = """
    import os

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload, headers):
            print("called with", payload, dict(headers))
            return {"headers": sorted(headers), "pid": os.getpid(), "payload": payload}

        def handle_get(self, headers):
            return sorted(headers)
"""


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TCP.items():
        monkeypatch.setitem(replicas.DEFAULTS, name, value)


@pytest.fixture(scope="module")
def running() -> Iterator[Replica]:
    with running_replica(HANDLER, **TCP) as replica:
        replica.wait_ready()
        yield replica


def connect(replica: Replica) -> socket.socket:
    host, _, port = replica.status().processes[0].socket.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=20)


def head(body: bytes = b"1", *headers: str) -> bytes:
    lines = ["POST / HTTP/1.1", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def shown(secret: str = SECRET) -> str:
    return f"x-cortex-gateway: {secret}"


def receive_all(sock: socket.socket) -> bytes:
    received = b""
    while data := sock.recv(65536):
        received += data
    return received


def test_the_first_status_contains_the_addresses() -> None:
    with running_replica(HANDLER, processes=2, **TCP) as replica:
        first = replica.status()
        assert len({process.socket for process in first.processes}) == 2
        assert all(process.socket.startswith("127.0.0.1:") for process in first.processes)
        ready = replica.wait_ready()
        assert [process.socket for process in ready.processes] == [process.socket for process in first.processes]
        pids = {replica.request(1, index=index).json["pid"] for index in (0, 1)}
        assert pids == {process.pid for process in ready.processes}


def test_unix_sockets_require_no_secret() -> None:
    with running_replica(HANDLER, processes=2, **TCP) as replica:
        ready = replica.wait_ready()
        assert [process.near for process in ready.processes] == list(replica.spec.sockets)
        for index, process in enumerate(ready.processes):
            assert Path(process.near).stat().st_mode & 0o777 == 0o600
            connection = UnixConnection(process.near)
            connection.request("POST", "/", b"1", {"content-type": "application/json", "x-cortex-gateway": "any"})
            answer = read(connection.getresponse(), 0)
            assert answer.json["pid"] == process.pid == replica.request(1, index=index).json["pid"]
            assert "x-cortex-gateway" not in answer.json["headers"]
            connection.close()
        replica.command(command="stop", drain_s=0)
        assert replica.process.wait(PATIENCE_S) == 0
        assert not any(Path(process.near).exists() for process in ready.processes)


def test_ipv6_addresses_are_in_brackets() -> None:
    with running_replica(HANDLER, **TCP | {"listen_host": "::1"}) as replica:
        assert replica.wait_ready().processes[0].socket.startswith("[::1]:")
        assert replica.request(1).status == 200


def test_an_unavailable_address_is_a_failed_start() -> None:
    with running_replica(HANDLER, **TCP | {"listen_host": "192.0.2.1"}) as replica:
        process = replica.wait_state(ProcessState.BACKING_OFF).processes[0]
        assert process.failure is not None
        assert process.failure.message.startswith("can't listen on 192.0.2.1: Cannot assign")
        assert process.failed_starts == 1
        wait_until(lambda: "can't listen on 192.0.2.1" in replica.log())
        assert not Path(replica.spec.sockets[0]).exists()
        replica.command(command="stop", drain_s=0)
        assert replica.process.wait(PATIENCE_S) == 0


def test_a_missing_socket_folder_is_a_failed_start() -> None:
    with running_replica(HANDLER, **TCP | {"sockets": ("/nowhere/0.sock",)}) as replica:
        process = replica.wait_state(ProcessState.BACKING_OFF).processes[0]
        assert process.failure is not None
        assert process.failure.message == "can't listen on /nowhere/0.sock: No such file or directory"


def test_a_connection_admitted_after_its_process_has_stopped_is_closed() -> None:
    with running_replica(HANDLER) as replica:
        listeners = ReplicaListeners(replica.spec, lambda *_: None, lambda *_: None, lambda _: None)
        worker = RequestWorkerSlot(replica.spec, 0, listeners, fork)
    worker.state = ProcessState.STOPPED
    ours, theirs = socket.socketpair()
    with theirs:
        worker.add_connection(ours)
        assert theirs.recv(1) == b""


def test_the_secret_of_the_first_request_is_hidden_from_user_code(running: Replica) -> None:
    connection = TcpConnection(running.status().processes[0].socket, secret="")
    sent = {"content-type": "application/json"}
    connection.request("POST", "/", b"1", {**sent, "X-Cortex-Gateway": SECRET})
    first = read(connection.getresponse(), 0)
    assert first.status == 200
    assert "x-cortex-gateway" not in first.json["headers"]
    for value in (None, SECRET, "wrong"):  # neither checked nor passed to user code any more
        connection.request("POST", "/", b"2", sent if value is None else {**sent, "x-cortex-gateway": value})
        assert "x-cortex-gateway" not in read(connection.getresponse(), 0).json["headers"]
    connection.close()
    assert SECRET not in running.log()


@pytest.mark.parametrize(
    "headers",
    [[], [shown("wrong")], [shown("")], [shown(), shown()], [shown("wrong"), shown()]],
    ids=["missing", "wrong", "empty", "repeated", "one of two wrong"],
)
def test_a_connection_without_the_secret_is_refused_before_user_code(running: Replica, headers: list[str]) -> None:
    with connect(running) as sock:
        sock.sendall(head(b"401", *headers) + head(b"401", shown()))
        answer = receive_all(sock)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"] == "replicas accept requests only from their gateway"
    later = time.monotonic_ns()
    assert running.request(later).status == 200
    wait_until(lambda: f"called with {later} " in running.log())
    assert "called with 401 " not in running.log()
    assert running.status().processes[0].restarts == 0


def test_a_head_sent_byte_by_byte_is_read(running: Replica) -> None:
    with connect(running) as sock:
        for byte in head(b"17", shown()):
            sock.sendall(bytes([byte]))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_requests_pipelined_behind_the_first_are_served(running: Replica) -> None:
    with connect(running) as sock, connect(running) as other:
        sock.sendall(head(b"1", shown()) + head(b"2", shown("wrong")))
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        other.sendall(b"POST / HTTP/1.1\r\n" + shown().encode() + b"\r\ncontent-length: x\r\n\r\n")
        assert receive_all(other).startswith(b"HTTP/1.1 400 ")
    assert running.request(1).status == 200


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x00\xa5\x01", b"\0" * 1000, b"\r\n\r\n", b"GET /" + b"x" * 400_000], ids=range(4)
)
def test_non_http_connections_are_refused(running: Replica, data: bytes) -> None:
    with connect(running) as sock, contextlib.suppress(ConnectionError):  # reset because of unread data
        sock.sendall(data)
        assert receive_all(sock).startswith(b"HTTP/1.1 400 ")
    assert running.request(1).status == 200
    assert running.status().processes[0].restarts == 0


def test_pending_connections_delay_neither_requests_nor_a_stop() -> None:
    with running_replica(HANDLER, **TCP) as running:
        running.wait_ready()
        strangers = [connect(running) for _ in range(300)]
        for stranger in strangers[::2]:
            try:
                stranger.sendall(b"POST / HT")
            except ConnectionError:
                continue  # beyond the limit, the oldest are closed
        assert running.request(1).status == 200
        running.command(command="stop", drain_s=600)
        assert running.process.wait(PATIENCE_S) == 0
        for stranger in strangers:
            stranger.close()


def test_a_killed_supervisor_closes_its_tcp_port() -> None:
    with running_replica(HANDLER, **TCP) as running:
        status = running.wait_ready()
        host, _, port = status.processes[0].socket.rpartition(":")
        with connect(running) as stranger:
            os.kill(status.supervisor_pid, signal.SIGKILL)
            running.process.wait(PATIENCE_S)

            def is_refused() -> bool:
                with socket.socket() as sock:
                    return sock.connect_ex((host, int(port))) != 0

            wait_until(is_refused)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""


@pytest.mark.usefixtures("over_tcp")
class TestOtherModulesOverTcp:
    """Tests of other modules, repeated over TCP."""

    def test_a_worker_death_in_a_call(self) -> None:
        supervisor.test_a_worker_that_dies_in_a_call_is_reported_and_replaced(
            {"do": "exit"}, "exited with code 3", DeathCause.EXITED
        )

    @pytest.mark.parametrize(
        "test",
        [
            supervisor.test_a_killed_worker_is_reported_and_replaced,
            supervisor.test_idle_connections_survive_a_worker_death,
            supervisor.test_requests_waiting_in_the_sockets_survive_a_worker_death,
        ],
        ids=lambda test: test.__name__.removeprefix("test_"),
    )
    def test_supervisor(self, test: Any) -> None:
        test()

    @pytest.mark.parametrize(
        "test",
        [
            rollout.test_a_killed_worker_is_replaced_with_the_same_models,
            rollout.test_a_replica_stops_while_it_waits_for_models,
        ],
        ids=lambda test: test.__name__.removeprefix("test_"),
    )
    def test_model_rollout(self, test: Any, agent: ScriptedAgent) -> None:
        test(agent)

    @pytest.mark.parametrize(
        "test",
        [
            killed.test_every_running_request_is_answered_with_the_reason,
            killed.test_a_replica_that_is_being_stopped_refuses_connections,
        ],
        ids=lambda test: test.__name__.removeprefix("test_"),
    )
    def test_killed_supervisors(self, test: Any, tmp_path: Path) -> None:
        test(tmp_path)

    def test_no_request_fails_while_models_change_under_load(self, agent: ScriptedAgent) -> None:
        rollout.test_no_request_fails_while_models_change_under_load(agent, 2)
