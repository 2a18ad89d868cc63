"""`cortex up --foreground --stop-all`, as process 1 of a PID namespace where that is possible."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.connections import KeptConnection
from harness.installations.installation import CORTEX, Installation, write_project
from harness.ports import free_port
from harness.wait import PATIENCE_S, wait_until

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
SOURCE = """
    import subprocess, time

    class Handler:
        def __init__(self, config):
            print("constructed", flush=True)

        def handle_post(self, payload):
            if payload.get("orphan"):  # `sleep` loses its parent and ends later
                subprocess.run(["sh", "-c", "sleep 0.2 & exit"], check=True)
            time.sleep(payload.get("s", 0.02))
            return payload
"""
CONFIG = """
    - name: echo
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      compute: {cpu: 100m}
"""


class Foreground:
    """One `cortex up --foreground --stop-all`."""

    def __init__(self, home: Path, *flags: str) -> None:
        is_possible = os.geteuid() == 0 and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
        self.namespace = NAMESPACE if is_possible else ()
        self.cortex = Installation(home, free_port(), free_port())
        ports = ["--gateway-port", str(self.cortex.gateway_port), "--operator-port", str(self.cortex.operator_port)]
        self.output = home.parent / "output"
        # Read by another file object: one that is shared has one position, and reading would move where is written.
        with self.output.open("w") as output:
            self.started = subprocess.Popen(
                [*self.namespace, *CORTEX, "up", "--foreground", "--stop-all", *ports, *flags],
                env=self.cortex.environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_until_up(self) -> None:
        wait_until(self.answers, message="the operator answers")
        if self.namespace:
            self.cortex.prefix = ("nsenter", "--target", str(self.process.pid), "--pid", "--mount")

    @property
    def process(self) -> psutil.Process:
        """The process that gets the signals of a container."""
        started = psutil.Process(self.started.pid)
        return started.children()[0] if self.namespace else started

    def operator(self) -> psutil.Process:
        (found,) = [child for child in self.process.children() if "cortex.operator.main" in child.cmdline()]
        return found

    def answers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.cortex.operator_port, timeout=10)
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().status == 200
        except OSError:
            assert self.started.poll() is None, self.lines()
            return False
        finally:
            connection.close()

    def lines(self) -> list[str]:
        """Return the lines so far; the last one may be written just now."""
        return self.output.read_text().rpartition("\n")[0].splitlines()


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder:
        yield Path(folder) / "home"


@pytest.fixture
def foreground(request: pytest.FixtureRequest, home: Path) -> Iterator[Foreground]:
    made = Foreground(home, *getattr(request, "param", ()))
    try:
        made.wait_until_up()
        yield made
    finally:
        if made.started.poll() is None:
            made.process.send_signal(signal.SIGTERM)
            made.started.wait(PATIENCE_S)


def test_everything_runs_restarts_is_reaped_drains_and_ends(foreground: Foreground, tmp_path: Path) -> None:
    cortex = foreground.cortex
    if foreground.namespace:
        (status,) = [
            line for line in Path(f"/proc/{foreground.process.pid}/status").read_text().splitlines() if "NSpid" in line
        ]
        assert status.split()[-1] == "1"
    cortex.cortex("deploy", write_project(tmp_path / "project", SOURCE, CONFIG))

    # An operator that is killed is started again, while the replica serves.
    first = foreground.operator()
    first.kill()
    assert cortex.post("/echo", {"orphan": 1}).status == 200
    wait_until(lambda: foreground.process.children() and not first.is_running(), message="the operator is reaped")
    wait_until(foreground.answers, message="the next operator answers")

    # Orphans are reaped: children of the process that have ended do not stay.
    wait_until(lambda: not zombies(foreground.process), message="no zombie is left")

    # Requests in progress, queued or on open connections get responses.
    port = cortex.gateway_port
    clients = [*(KeptConnection(port, "/echo") for _ in range(4)), KeptConnection(port, "/echo", s=1.5)]
    for client in clients:
        client.start()
    wait_until(lambda: all(client.answers for client in clients), message="every client got a response")
    members = foreground.process.children(recursive=True)
    foreground.process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join(PATIENCE_S)
    assert [client.failure for client in clients] == [None] * len(clients)
    assert {status for client in clients for status, _ in client.answers} == {200}

    assert foreground.started.wait(PATIENCE_S) == 0
    assert not [process for process in members if process.is_running()]
    assert not (cortex.home / "run" / "operator.json").exists()
    check_lines([json.loads(line) for line in foreground.lines()])


def load_of(cortex: Installation, api: str = "echo") -> tuple[int, int]:
    metrics = json.loads(cortex.cortex("get", api, "-o", "json").stdout)["metrics"]
    return metrics["in_flight"], metrics["queued"]


APPLICATION = """

    async def app(scope, receive, send):
        if scope["type"] == "http":
            if scope["method"] == "POST":
                await asyncio.sleep(3600)
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body"})
"""
OF_APPLICATION = """
    - name: app
      kind: RealtimeAPI
      handler: {type: asgi, path: handler.py, app: app}
      compute: {cpu: 100m}
"""


@pytest.mark.parametrize("foreground", [("--drain", "1")], indirect=True)
def test_requests_that_outlast_the_drain_time_are_answered_with_the_reason(
    foreground: Foreground, tmp_path: Path
) -> None:
    cortex = foreground.cortex
    source = SOURCE.replace("import subprocess", "import asyncio, subprocess") + APPLICATION
    cortex.cortex("deploy", write_project(tmp_path / "project", source, CONFIG + OF_APPLICATION))
    assert cortex.post("/app", method="GET").status == 200  # the gateway's connection stays open
    with ThreadPoolExecutor() as pool:
        of_application = pool.submit(cortex.post, "/app", {})
        inside, queued = (pool.submit(cortex.post, "/echo", {"s": PATIENCE_S}) for _ in range(2))
        wait_until(lambda: load_of(cortex) == (1, 1), message="one request runs, and one waits")
        wait_until(lambda: load_of(cortex, "app") == (1, 0), message="one request is in the application")
        foreground.process.send_signal(signal.SIGTERM)
        answers = sorted((each.result(PATIENCE_S) for each in (inside, queued)), key=lambda answer: answer.status)
    assert [(answer.status, answer.json["error"]) for answer in answers] == [
        (500, "the process that handled this request died: stopped before the call was finished"),
        (503, "the service stopped before this request could run"),
    ]
    answer = of_application.result(PATIENCE_S)
    reason = "the process that handled this request ended: stopped before the call was finished"
    assert (answer.status, answer.json["error"]) == (500, reason)
    assert foreground.started.wait(PATIENCE_S) == 0


def check_lines(lines: list[dict[str, Any]]) -> None:
    found = {(line["source"], line.get("api"), line.get("message")) for line in lines}
    assert found >= {
        ("operator", None, "operator started"),
        ("replica", "echo", "constructed"),
        ("up", None, "the operator ended; starting it again"),
        ("operator", None, "operator stopped"),
        ("up", None, "stopped"),
    }
    assert "gateway" in {line["source"] for line in lines}
    assert all(line["time"] for line in lines)


def zombies(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children():
        with suppress(psutil.NoSuchProcess):  # it was reaped just now
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def test_an_operator_that_can_not_start_ends_with_its_error(home: Path) -> None:
    foreground = Foreground(home, "--host", "203.0.113.1")
    assert foreground.started.wait(PATIENCE_S) == 1
    assert "the operator can't listen on 203.0.113.1" in foreground.lines()[0]


def test_down_ends_the_foreground_process(foreground: Foreground) -> None:
    foreground.cortex.down()
    assert foreground.started.wait(PATIENCE_S) == 0


@contextmanager
def deploying(home: Path, project: Path) -> Iterator[Foreground]:
    foreground = Foreground(home, "--deploy", str(project))
    try:
        foreground.wait_until_up()
        yield foreground
    finally:
        foreground.process.send_signal(signal.SIGTERM)
        assert foreground.started.wait(PATIENCE_S) == 0


def wait_for_line(foreground: Foreground, beginning: str) -> None:
    def is_printed() -> bool:
        return any(json.loads(line)["message"].startswith(beginning) for line in foreground.lines())

    wait_until(is_printed, message=f"a line begins with {beginning}")


def test_a_project_is_deployed_at_the_start_and_updated_at_the_next(home: Path, tmp_path: Path) -> None:
    with deploying(home, write_project(tmp_path / "project", SOURCE, CONFIG)) as foreground:
        wait_for_line(foreground, "echo is live")
        assert foreground.cortex.cortex("status", "--ready").stderr == ""
        assert foreground.cortex.post("/readyz", method="GET").status == 200
        assert foreground.cortex.post("/echo", {"s": 0}).json == {"s": 0}
    changed = SOURCE.replace("return payload", "return {'version': 2}")
    with deploying(home, write_project(tmp_path / "project", changed, CONFIG)) as foreground:
        wait_for_line(foreground, "echo is live")
        assert foreground.cortex.post("/echo", {"s": 0}).json == {"version": 2}


def test_a_project_that_can_not_start_is_logged_and_not_ready(home: Path, tmp_path: Path) -> None:
    source = SOURCE.replace('print("constructed", flush=True)', 'raise OSError("no weights")')
    with deploying(home, write_project(tmp_path / "project", source, CONFIG)) as foreground:
        wait_for_line(foreground, "echo failed to become live: ")
        done = foreground.cortex.cortex("status", "--ready", check=False)
        assert (done.returncode, done.stderr) == (1, "error: echo is not ready: error\n")
        assert foreground.cortex.post("/readyz", method="GET").json == {"ready": False, "not_ready": ["echo"]}


def test_a_project_with_mistakes_starts_nothing(home: Path, tmp_path: Path) -> None:
    config = CONFIG.replace("RealtimeAPI", "RealTimeAPI")
    project = write_project(tmp_path / "project", SOURCE, config)
    foreground = Foreground(home, "--deploy", str(project))
    assert foreground.started.wait(PATIENCE_S) == 2
    assert f"{project}/cortex.yaml:3:" in foreground.lines()[0]
    assert not (home / "run").exists()


@pytest.mark.long
def test_a_project_that_the_operator_refuses_ends_everything(home: Path, tmp_path: Path) -> None:
    config = CONFIG.replace("cpu: 100m", "cpu: 9999")
    foreground = Foreground(home, "--deploy", str(write_project(tmp_path / "project", SOURCE, config)))
    assert foreground.started.wait(PATIENCE_S) == 2
    (error,) = [line for line in map(json.loads, foreground.lines()) if "was not deployed" in line["message"]]
    assert "9999: this machine has" in error["message"]
