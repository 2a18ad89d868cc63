"""Real workers whose supervisor is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.replicas.replicas import Answer, Replica, UnixConnection, read, running_replica
from harness.wait import PATIENCE_S, has_ended, wait_until

pytestmark = pytest.mark.processes

HANDLER = """
    import asyncio, atexit, os, pathlib, subprocess, sys, time

    def begin(payload):
        print("in", payload.get("name"))
        if "inside" in payload:
            pathlib.Path(payload["inside"]).touch()

    def wait_for_go(payload):
        while "go" in payload and not pathlib.Path(payload["go"]).exists():
            time.sleep(0.01)

    class Handler:
        def __init__(self, config):
            atexit.register(print, "exit hook ran")
            while "gate" in config and not pathlib.Path(config["gate"]).exists():
                time.sleep(0.01)

        def handle_post(self, payload):
            begin(payload)
            if payload.get("do") == "stuck":
                time.sleep(3600)
            if payload.get("do") == "slow":
                time.sleep(0.05)
            wait_for_go(payload)
            print("x" * payload.get("print", 0))
            print("to stderr", file=sys.stderr)
            return {"pid": os.getpid(), "name": payload.get("name")}

        async def handle_put(self, payload):
            begin(payload)
            while not pathlib.Path(payload["go"]).exists():
                await asyncio.sleep(0.01)
            return {"pid": os.getpid(), "name": payload.get("name")}

        def handle_patch(self, payload):
            def stream():
                yield "begun "
                begin(payload)
                wait_for_go(payload)
                yield "done"
            return stream()
"""
BATCHES = """
    import os, pathlib, time

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            pathlib.Path(payload[0]["inside"]).touch()
            while not pathlib.Path(payload[0]["go"]).exists():
                time.sleep(0.01)
            return [{"pid": os.getpid(), "name": one["name"]} for one in payload]
"""


class Call:
    """A request that has reached user code when the constructor returns, and runs until `finish`."""

    def __init__(
        self, pool: ThreadPoolExecutor, replica: Replica, folder: Path, name: str, method: str = "POST", index: int = 0
    ) -> None:
        inside, self._go = folder / f"{name}.inside", folder / f"{name}.go"
        payload = {"name": name, "inside": str(inside), "go": str(self._go)}
        body: Any = json.dumps(payload).encode()
        self._answer: Future[Answer] = pool.submit(replica.request, body=body, method=method, index=index)
        wait_until(inside.exists)

    def finish(self) -> Answer:
        self._go.touch()
        return self._answer.result(PATIENCE_S)


def kill_supervisor(replica: Replica) -> None:
    replica.process.send_signal(signal.SIGKILL)
    replica.process.wait(PATIENCE_S)


def is_refused(replica: Replica) -> bool:
    connection = replica.connection()
    try:
        connection.connect()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # the listener was closed at this moment
        return False
    connection.close()
    return False


def post(connection: UnixConnection, body: bytes = b"{}") -> Answer:
    connection.request("POST", "/", body, {"content-type": "application/json"})
    return read(connection.getresponse(), time.monotonic())


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"], ids=["sync", "async", "stream"])
def test_requests_running_at_the_death_of_the_supervisor_are_finished(method: str, tmp_path: Path) -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        pid = replica.wait_ready().processes[0].pid
        assert pid is not None
        call = Call(pool, replica, tmp_path, "kept", method)
        kill_supervisor(replica)
        answer = call.finish()
        assert answer.status == 200
        assert answer.body == b"begun done" if method == "PATCH" else answer.json["pid"] == pid
        wait_until(lambda: has_ended(pid))
        assert "exit hook ran" in replica.log()


def test_every_process_and_thread_finishes(tmp_path: Path) -> None:
    with running_replica(HANDLER, processes=2, threads=3) as replica, ThreadPoolExecutor() as pool:
        pids = [process.pid or 0 for process in replica.wait_ready().processes]
        for index in range(2):
            assert replica.request({"do": "slow"}, index=index).status == 200  # calls move to a thread
        places = [(index, number) for index in range(2) for number in range(3)]
        calls = [Call(pool, replica, tmp_path, f"{index}-{number}", index=index) for index, number in places]
        kill_supervisor(replica)
        assert [call.finish().json["pid"] for call in calls] == [pids[index] for index, _ in places]
        wait_until(lambda: all(map(has_ended, pids)))


def test_a_running_batch_and_queued_requests_are_finished(tmp_path: Path) -> None:
    with running_replica(BATCHES, max_batch_size=4, batch_interval_s=0.05) as replica, ThreadPoolExecutor() as pool:
        pid = replica.wait_ready().processes[0].pid
        assert pid is not None
        first = Call(pool, replica, tmp_path, "first")
        (tmp_path / "rest.go").touch()
        body = b'{"name": "rest", "inside": "%b", "go": "%b"}'
        body %= os.fsencode(tmp_path / "rest.inside"), os.fsencode(tmp_path / "rest.go")
        replica.process.send_signal(signal.SIGSTOP)  # connections that it has just accepted would break
        waiting = [replica.connection() for _ in range(3)]
        for connection in waiting:
            connection.request("POST", "/", body, {"content-type": "application/json"})
        kill_supervisor(replica)
        assert first.finish().json == {"pid": pid, "name": "first"}
        assert [read(connection.getresponse(), 0).json["name"] for connection in waiting] == ["rest"] * 3
        wait_until(lambda: has_ended(pid))


def test_connections_waiting_at_the_socket_of_a_killed_supervisor_are_served(tmp_path: Path) -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        pid = replica.wait_ready().processes[0].pid
        assert pid is not None
        assert replica.request({"do": "slow"}).status == 200  # calls move to a thread
        call = Call(pool, replica, tmp_path, "inside")
        replica.process.send_signal(signal.SIGSTOP)  # it accepts no connections any more
        waiting = [replica.connection() for _ in range(3)]
        for connection in waiting:
            connection.request("POST", "/", b"{}", {"content-type": "application/json"})
        kill_supervisor(replica)
        wait_until(lambda: is_refused(replica))
        assert call.finish().json["pid"] == pid
        assert [read(connection.getresponse(), 0).json["pid"] for connection in waiting] == [pid] * 3
        wait_until(lambda: has_ended(pid))


def test_a_replica_that_is_being_stopped_refuses_connections(tmp_path: Path) -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        call = Call(pool, replica, tmp_path, "inside")
        replica.command(command="stop", drain_s=20)
        wait_until(lambda: is_refused(replica))
        assert call.finish().status == 200
        assert replica.process.wait(PATIENCE_S) == 0


def test_open_connections_are_still_served_and_output_is_logged(tmp_path: Path) -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        pid = replica.wait_ready().processes[0].pid
        assert pid is not None
        kept = replica.connection()
        assert post(kept).json["pid"] == pid
        # Keeps the worker busy however slow this test is: it ends after a moment without a request.
        call = Call(pool, replica, tmp_path, "inside", "PUT")
        kill_supervisor(replica)
        for number in range(20):
            body = b'{"name": "later-%d", "print": 20000}' % number  # more than the capacity of a pipe
            kept.request("POST", "/", body, {"content-type": "application/json"})
            answer = read(kept.getresponse(), 0)
            assert (answer.status, answer.json["pid"]) == (200, pid)
        assert call.finish().status == 200
        wait_until(lambda: has_ended(pid))
        log = replica.log()
        assert f"process {pid} lost its supervisor" in log
        assert [f"in later-{number}\n" in log for number in range(20)] == [True] * 20
        assert log.count("x" * 20000) == 20
        assert log.rstrip().endswith(f"process {pid} stopped")
        kept.close()


def test_a_worker_that_is_not_ready_ends_at_once(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with running_replica(HANDLER, config={"gate": str(gate)}) as replica:
        pid = wait_until(lambda: (status := replica.try_status()) and status.processes[0].pid)
        assert pid is not None
        kill_supervisor(replica)
        wait_until(lambda: has_ended(pid))
        assert "lost its supervisor" not in replica.log()


def test_a_call_that_never_returns_is_killed_after_its_time_limit(tmp_path: Path) -> None:
    with running_replica(HANDLER, timeout_s=5.0) as replica, ThreadPoolExecutor() as pool:
        pid = replica.wait_ready().processes[0].pid
        assert pid is not None
        assert replica.request({"do": "slow"}).status == 200  # calls move to a thread
        stuck = pool.submit(replica.request, {"do": "stuck", "inside": str(tmp_path / "inside")})
        wait_until((tmp_path / "inside").exists)
        kill_supervisor(replica)
        wait_until(lambda: has_ended(pid), timeout_s=30)
        assert isinstance(stuck.exception(PATIENCE_S), OSError)
        assert "in handle_post" in replica.log() or "lost its supervisor" in replica.log()
