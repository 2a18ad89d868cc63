"""An AsyncAPI through its HTTP interface."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cortex.home import Home
from harness.installations.installation import Installation, installation, write_project
from harness.wait import wait_until

SOURCE = """
    import os, signal
    class Handler:
        def __init__(self, config):
            self.greeting = config["greeting"]
        def handle_async(self, payload, request_id):
            if isinstance(payload, dict):
                if payload.get("raise"):
                    raise ValueError(payload["raise"])
                if payload.get("die"):
                    os.kill(os.getpid(), signal.SIGSEGV)
                if payload.get("die_once") and not os.path.exists(payload["die_once"]):
                    open(payload["die_once"], "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                if payload.get("list"):
                    return [1]
                if "wait_for" in payload:
                    open(payload["wait_for"] + ".started", "w").close()
                    while not os.path.exists(payload["wait_for"]):
                        pass
            shown = payload.hex() if isinstance(payload, bytes) else payload
            return {"greeting": self.greeting, "payload": shown, "id": request_id, "pid": os.getpid()}
"""
CONFIG = """
    - name: greet
      kind: AsyncAPI
      handler:
        type: python
        path: handler.py
        config: {{greeting: {greeting}}}
      autoscaling: {{min_replicas: 2}}
"""


@pytest.fixture(scope="module")
def greeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installation() as made:
        deploy(made, tmp_path_factory.mktemp("greet"), "hello")
        yield made


def deploy(made: Installation, folder: Path, word: str) -> None:
    made.cortex("deploy", "-y", write_project(folder, SOURCE, CONFIG.format(greeting=word)) / "cortex.yaml")


def send(made: Installation, payload: Any = None, **given: Any) -> str:
    reply = made.post("/greet", payload, **given)
    assert reply.status == 202, reply.body
    return str(reply.json["id"])


def result(made: Installation, name: str) -> Any:
    """Wait until a workload is over, and return it."""

    def over() -> Any:
        reply = made.post(f"/greet/{name}?wait=20", method="GET")
        assert reply.status == 200, reply.body
        return reply.json if reply.json["status"] in ("completed", "failed") else None

    return wait_until(over, 20)


def test_workloads_are_accepted_and_run_after_the_socket_of_the_operator_was_deleted(greeting: Installation) -> None:
    Home(greeting.home).jobs_socket.unlink()
    sent = wait_until(lambda: (reply := greeting.post("/greet", 7)).status == 202 and reply)
    assert sent
    assert result(greeting, sent.json["id"])["status"] == "completed"


def test_payload_is_decoded_by_its_content_type(greeting: Installation) -> None:
    sent = [({"a": [1]}, {}), (None, {"body": "grüße".encode(), "content_type": "text/plain"})]
    sent += [(None, {"body": b"\x00\n\x1b\xff", "content_type": "image/png"})]
    form = "application/x-www-form-urlencoded"  # what curl sends unless told otherwise
    sent += [(None, {"body": body, "content_type": form}) for body in (b'{"a": 1}', b"a=1")]
    names = [send(greeting, payload, **given) for payload, given in sent]
    answers = [result(greeting, name) for name in names]
    assert [answer["status"] for answer in answers] == ["completed"] * 5
    shown = [answer["result"]["payload"] for answer in answers]
    assert shown == [{"a": [1]}, "grüße", "000a1bff", {"a": 1}, b"a=1".hex()]
    assert [answer["result"]["id"] for answer in answers] == names == [answer["id"] for answer in answers]


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"raise": "bad weights"}, "ValueError: bad weights"),
        ({"list": 1}, "the result of a workload must be a dict, but it is a list"),
        ({"die": 1}, "the worker's process died: segmentation fault (SIGSEGV)"),
    ],
)
def test_failed_workload_reports_its_error(greeting: Installation, payload: Any, error: str) -> None:
    name = send(greeting, payload)
    answer = result(greeting, name)
    assert (answer["status"], answer["error"]) == ("failed", error)
    wait_until(lambda: f"workload {name}" in greeting.cortex("logs", "greet").stdout)


def test_a_submission_with_a_key_can_be_sent_again(greeting: Installation) -> None:
    name = send(greeting, 7, idempotency_key="k")
    assert result(greeting, name)["status"] == "completed"
    assert send(greeting, 7, idempotency_key="k") == name
    assert greeting.post("/greet", 8, idempotency_key="k").status == 409


def test_malformed_json_is_refused(greeting: Installation) -> None:
    reply = greeting.post("/greet", body=b"{")
    assert (reply.status, reply.json.keys()) == (400, {"error", "request_id"})
    assert reply.json["error"].startswith("malformed JSON: ")


def test_workload_whose_process_dies_is_retried(greeting: Installation, tmp_path: Path) -> None:
    answer = result(greeting, send(greeting, {"die_once": str(tmp_path / "died")}))
    assert answer["status"] == "completed"
    assert (tmp_path / "died").exists()


def test_workloads_survive_the_death_of_the_operator(greeting: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    inside, waiting = send(greeting, {"wait_for": str(gate)}), [send(greeting, {"n": n}) for n in range(5)]
    wait_until(Path(f"{gate}.started").exists)
    operator = psutil.Process(greeting.status()["operator"]["pid"])
    os.kill(operator.pid, signal.SIGKILL)
    operator.wait(10)
    gate.touch()
    greeting.up()
    assert [result(greeting, name)["status"] for name in (inside, *waiting)] == ["completed"] * 6


def test_an_operator_that_is_asked_to_stop_logs_no_error(greeting: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    inside = send(greeting, {"wait_for": str(gate)})
    wait_until(Path(f"{gate}.started").exists)
    log = greeting.home / "logs" / "operator.log"
    before = len(log.read_text())
    operator = psutil.Process(greeting.status()["operator"]["pid"])
    operator.terminate()
    operator.wait(30)
    assert "error" not in log.read_text()[before:].lower()
    gate.touch()
    greeting.up()
    assert result(greeting, inside)["status"] == "completed"


def test_update_finishes_running_workloads(greeting: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    inside = send(greeting, {"wait_for": str(gate)})
    wait_until(Path(f"{gate}.started").exists)
    deploy(greeting, tmp_path / "new", "good day")
    assert result(greeting, send(greeting, {}))["result"]["greeting"] == "good day"
    gate.touch()
    assert result(greeting, inside)["result"]["greeting"] == "hello"


def test_is_shown_like_a_realtime_api(greeting: Installation) -> None:
    shown = greeting.get("greet")
    assert shown["spec"]["kind"] == "AsyncAPI"
    assert shown["status"]["replica_counts"]["requested"] == 2
    assert shown["open_workloads"] == 0
    assert greeting.cortex("get").stdout.split()[:3] == ["env", "async", "api"]


def test_deleting_an_api_deletes_its_workloads(greeting: Installation, tmp_path: Path) -> None:
    name = send(greeting, {})
    assert result(greeting, name)["status"] == "completed"
    greeting.cortex("delete", "greet", "-f")
    assert greeting.post(f"/greet/{name}", method="GET").status == 404
    deploy(greeting, tmp_path / "again", "hello")
    reply = greeting.post(f"/greet/{name}", method="GET")
    assert (reply.status, reply.json["error"]) == (404, f"id {name} not found")
