"""Real workers whose supervisor is killed: they answer their requests with that reason, and end."""

from __future__ import annotations

import json
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from harness.replicas.replicas import Answer, Replica, read, running_replica
from harness.wait import PATIENCE_S, has_ended, wait_until

pytestmark = pytest.mark.processes

HANDLER = """
    import asyncio, pathlib, time

    def enter(payload):
        pathlib.Path(payload["inside"]).touch()
        time.sleep(payload.get("sleep", 3600))

    class Handler:
        def __init__(self, config):
            while "gate" in config:
                time.sleep(0.01)

        def handle_post(self, payload):
            enter(payload)

        async def handle_put(self, payload):
            pathlib.Path(payload["inside"]).touch()
            await asyncio.sleep(3600)

        def handle_patch(self, payload):
            def stream():
                yield "begun "
                enter(payload)
            return stream()
"""
BATCHES = """
    import pathlib, time

    class Handler:
        def __init__(self, config):
            pass

        def batch_key(self, payload):
            pathlib.Path(payload["arrived"]).touch()

        def handle_post(self, payload):
            pathlib.Path(payload[0]["inside"]).touch()
            time.sleep(3600)
"""
REASON = "the supervisor of its replica died"
RAN, DID_NOT_RUN = (
    f"the process that handled this request ended: {REASON}",
    f"the process ended before it ran this request: {REASON}",
)


class Call:
    """A request that has reached user code, which does not return, when the constructor returns."""

    def __init__(
        self, pool: ThreadPoolExecutor, replica: Replica, folder: Path, name: str, method: str = "POST", index: int = 0
    ) -> None:
        inside = folder / f"{name}.inside"
        body: Any = json.dumps({"inside": str(inside), "arrived": str(folder / name)}).encode()
        self.answer: Future[Answer] = pool.submit(
            replica.request, body=body, method=method, index=index, request_id=f"id-{name}"
        )
        wait_until(inside.exists)


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


def test_every_running_request_is_answered_with_the_reason(tmp_path: Path) -> None:
    with running_replica(HANDLER, processes=2, threads=3) as replica, ThreadPoolExecutor() as pool:
        pids = [process.pid or 0 for process in replica.wait_ready().processes]
        for index in range(2):
            slow = {"inside": str(tmp_path / "slow"), "sleep": 0.05}
            assert replica.request(slow, index=index).status == 200  # calls move to a thread
        calls = {
            f"{index}-{number}": Call(pool, replica, tmp_path, f"{index}-{number}", method, index)
            for index in range(2)
            for number, method in enumerate(["POST", "POST", "PUT"])
        }
        kill_supervisor(replica)
        for name, call in calls.items():
            answer = call.answer.result(PATIENCE_S)
            assert (answer.status, answer.json) == (500, {"error": RAN, "request_id": f"id-{name}"})
        wait_until(lambda: all(map(has_ended, pids)))


def test_a_response_that_has_begun_is_broken_off(tmp_path: Path) -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        pid = replica.wait_ready().processes[0].pid or 0
        call = Call(pool, replica, tmp_path, "stream", "PATCH")
        kill_supervisor(replica)
        assert isinstance(call.answer.exception(PATIENCE_S), IncompleteRead)
        wait_until(lambda: has_ended(pid))


def test_members_of_a_batch_and_waiting_requests_are_answered(tmp_path: Path) -> None:
    with running_replica(BATCHES, max_batch_size=4, batch_interval_s=0.05) as replica, ThreadPoolExecutor() as pool:
        pid = replica.wait_ready().processes[0].pid or 0
        call = Call(pool, replica, tmp_path, "first")
        waiting = {tmp_path / f"waiting-{number}": replica.connection() for number in range(3)}
        for arrived, connection in waiting.items():
            body = json.dumps({"arrived": str(arrived)})
            connection.request("POST", "/", body, {"content-type": "application/json"})
            wait_until(arrived.exists)
        kill_supervisor(replica)
        assert call.answer.result(PATIENCE_S).json["error"] == RAN
        answers = [read(connection.getresponse(), 0) for connection in waiting.values()]
        assert {(answer.status, answer.json["error"]) for answer in answers} == {(503, DID_NOT_RUN)}
        assert {answer.headers["retry-after"] for answer in answers} == {"1"}
        wait_until(lambda: has_ended(pid))


def test_a_replica_that_is_being_stopped_refuses_connections(tmp_path: Path) -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        slow = pool.submit(replica.request, {"inside": str(tmp_path / "inside"), "sleep": 1})
        wait_until((tmp_path / "inside").exists)
        replica.command(command="stop", drain_s=20)
        wait_until(lambda: is_refused(replica))
        assert slow.result(PATIENCE_S).status == 200
        assert replica.process.wait(PATIENCE_S) == 0


def test_a_worker_that_is_not_ready_ends_at_once() -> None:
    with running_replica(HANDLER, config={"gate": True}) as replica:
        pid = wait_until(lambda: (status := replica.try_status()) and status.processes[0].pid) or 0
        kill_supervisor(replica)
        wait_until(lambda: has_ended(pid))
