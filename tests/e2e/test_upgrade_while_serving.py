"""`cortex upgrade` from an earlier commit, under load: no request fails, no workload, item or run is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import venv
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.installations.installation import CORTEX, ROOT, Installation, write_project
from harness.ports import free_port
from harness.wait import has_ended, wait_until

pytestmark = pytest.mark.long

#: The version from which to upgrade; `CORTEX_UPGRADE_FROM` sets another commit.
BEFORE = os.environ.get("CORTEX_UPGRADE_FROM", "HEAD~100")
OLD_VERSION = "0.0.9"
#: Items of the batch job, and workloads that wait before the upgrade.
ITEMS, QUEUED = 400, 40
SOURCE = """
    import time

    class Handler:
        def __init__(self, config):
            self.pause_s = config.get("pause_s", 0)

        def handle_post(self, payload):
            return payload

        def handle_async(self, payload):
            time.sleep(self.pause_s)
            return payload

        def handle_batch(self, payload):
            time.sleep(self.pause_s)
            return payload
"""
TYPED = """
from dataclasses import dataclass

@dataclass
class Point:
    x: int

class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload: Point):
        return {"x": payload.x}
"""
SERVER = """
import http.server, sys

class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
TASK = """
class Task:
    def __call__(self, config):
        return "done"
"""
CONFIG = """
    - name: echo
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      compute: {cpu: 50m}
    - name: typed
      kind: RealtimeAPI
      handler: {type: python, path: typed.py}
      compute: {cpu: 50m}
    - name: both
      kind: TrafficSplitter
      apis: [{name: echo, weight: 50}, {name: typed, weight: 50}]
    - name: keyed
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {auth: api_key}
      compute: {cpu: 50m}
    - name: server
      kind: RealtimeAPI
      handler: {type: command, command: [python, server.py, $PORT]}
      readiness: /
      compute: {cpu: 50m}
    - name: later
      kind: AsyncAPI
      handler: {type: python, path: handler.py, config: {pause_s: 0.2}}
      compute: {cpu: 50m}
    - name: many
      kind: BatchAPI
      handler: {type: python, path: handler.py, config: {pause_s: 0.1}}
      compute: {cpu: 50m}
    - name: often
      kind: TaskAPI
      definition: {path: task.py}
      schedule: "* * * * *"
      compute: {cpu: 50m}
"""


@pytest.fixture(scope="module")
def old_program() -> Iterator[tuple[str, ...]]:
    """The command line of the earlier commit, in an environment of its own with the packages of this one."""
    with tempfile.TemporaryDirectory(prefix="cx-old-") as name:
        folder = Path(name)
        packed = subprocess.run(["git", "-C", ROOT, "archive", BEFORE, "src"], capture_output=True, check=False)
        if packed.returncode:
            pytest.skip(f"the commit {BEFORE} is not in this clone")
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        venv.create(folder / "env", symlinks=True)
        packages = next((folder / "env" / "lib").glob("python*/site-packages"))
        # Not the site-packages with the editable install, whose own .pth files have no effect here.
        (packages / "old.pth").write_text(f"{folder / 'src'}\n{sysconfig.get_path('purelib')}\n")
        metadata = packages / f"cortex_serving-{OLD_VERSION}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cortex-serving\nVersion: {OLD_VERSION}\n")
        yield (str(folder / "env" / "bin" / "python"), "-m", "cortex.cli.main")


@pytest.fixture
def old(old_program: tuple[str, ...], tmp_path: Path) -> Iterator[Installation]:
    """An installation of the earlier commit."""
    with tempfile.TemporaryDirectory(prefix="cx-") as home:
        made = Installation(Path(home), free_port(), free_port(), program=old_program)
        ports = ("--gateway-port", str(made.gateway_port), "--operator-port", str(made.operator_port))
        try:
            made.cortex("up", *ports)
            yield made
        finally:
            replace(made, program=tuple(CORTEX)).down()


class Callers:
    """Calls of each API, one after the other, until stopped."""

    def __init__(self, cortex: Installation, key: str) -> None:
        self._cortex = cortex
        self._key = key
        self._stop = threading.Event()
        self.failures: list[tuple[str, object]] = []
        self.calls: Counter[str] = Counter()

    def call(self, path: str) -> None:
        while not self._stop.is_set():
            try:
                answer = self._cortex.post(path, {"x": 1}, x_api_key=self._key)
                outcome = (answer.status, answer.json)
            except OSError as error:
                outcome = (0, repr(error))
            self.calls[path] += 1
            if outcome != (200, {"x": 1}):
                self.failures.append((path, outcome))
            self._stop.wait(0.05)  # a bounded rate

    def submit(self, into: list[str]) -> None:
        while len(into) < QUEUED or not self._stop.is_set():
            answer = self._cortex.post("/later", {"number": len(into)})
            if answer.status != 200:
                self.failures.append(("/later", (answer.status, answer.body)))
                break
            into.append(answer.json["id"])
            if len(into) >= QUEUED:
                self._stop.wait(0.2)

    def stop(self) -> None:
        self._stop.set()


def test_an_upgrade_fails_no_request_and_loses_nothing(old: Installation, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", SOURCE, CONFIG)
    (project / "typed.py").write_text(TYPED)
    (project / "server.py").write_text(SERVER)
    (project / "task.py").write_text(TASK)
    old.cortex("deploy", project, timeout_s=300)
    key = old.client.create_key("shop")["key"]
    job = _submit(old)
    new = replace(old, program=tuple(CORTEX))
    callers, workloads = Callers(old, key), list[str]()
    before = old.status()
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(callers.call, f"/{name}") for name in ("echo", "typed", "both", "keyed", "server")]
        running.append(pool.submit(callers.submit, workloads))
        try:
            wait_until(lambda: len(workloads) >= QUEUED, 60)
            with old.load("/echo", 50) as load:
                planned = new.cortex("upgrade", "--dry-run").stdout
                assert old.status()["operator"] == before["operator"], "a dry run changes nothing"
                done = new.cortex("upgrade", timeout_s=400)
        finally:
            callers.stop()
        for each in running:
            each.result()
    after = new.status()
    assert (callers.failures, load["failures"]) == ([], []), done.stdout
    assert min(callers.calls.values()) > 5
    assert before["operator"]["version"] == OLD_VERSION
    assert after["operator"]["version"] != OLD_VERSION and after["gateway"]["pid"] == before["gateway"]["pid"]
    serving = {"echo", "typed", "keyed", "server", "later"}
    assert all(f"replace the replicas of {name}" in planned for name in serving)
    supervisors = [{r["supervisor_pid"] for r in seen["replicas"] if r["api"] in serving} for seen in (before, after)]
    assert not supervisors[0] & supervisors[1], done.stdout + done.stderr
    assert "has taken over" in done.stdout
    again = new.cortex("upgrade")
    assert again.stdout.strip() == f"version {after['operator']['version']} runs already; nothing to replace"
    assert new.status()["operator"] == after["operator"]
    (backup,) = (new.home / "backups").iterdir()
    assert {file.name for file in backup.iterdir()} == {"state.db", "jobs.db"}

    ended = wait_until(lambda: (status := _status(new, job))["status"] != "running" and status, 120)
    assert (ended["status"], ended["batch_metrics"]["succeeded"]) == ("succeeded", ITEMS)
    assert len(workloads) > QUEUED
    results = [wait_until(lambda id=id: _result(new, id), 120) for id in workloads]  # type: ignore[misc]
    assert results == [{"number": number} for number in range(len(workloads))]
    assert new.get("often")["spec"]["schedule"]["cron"] == "* * * * *"


def _submit(cortex: Installation) -> str:
    submission = {"workers": 1, "item_list": {"items": list(range(ITEMS)), "batch_size": 1}}
    answer = cortex.post("/many", submission)
    assert answer.status == 200, answer.body
    return str(answer.json["job_id"])


def _status(cortex: Installation, job: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(cortex.cortex("get", "many", job, "-o", "json").stdout)["job_status"]
    return status


def _result(cortex: Installation, id: str) -> object:
    found = cortex.post(f"/later/{id}", method="GET").json
    return found["status"] == "completed" and found["result"]


def test_the_old_version_serves_on_if_the_new_one_dies_as_it_starts(old: Installation, tmp_path: Path) -> None:
    old.cortex("deploy", write_project(tmp_path / "project", SOURCE, CONFIG.split("    - name: typed")[0]))
    before = old.status()

    def kill_the_new_one() -> None:
        wait_until(lambda: has_ended(before["operator"]["pid"]), 60)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_new = process.cmdline()[:4] == [sys.executable, "-P", "-m", "cortex.operator.main"]
                if is_new and process.environ().get("CORTEX_HOME") == str(old.home):
                    process.kill()

    with ThreadPoolExecutor() as pool, old.load("/echo", 50) as load:
        killing = pool.submit(kill_the_new_one)
        done = replace(old, program=tuple(CORTEX)).cortex("upgrade", check=False)
        killing.result()
    after = old.status()
    assert done.returncode == 1 and f"version {OLD_VERSION} runs again" in done.stderr, done.stdout + done.stderr
    assert load["failures"] == []
    assert (after["operator"]["version"], after["replicas"]) == (OLD_VERSION, before["replicas"])


def test_the_old_version_runs_again_if_a_signal_ends_the_upgrade(old: Installation) -> None:
    environ = {**os.environ, "CORTEX_HOME": str(old.home)}
    with subprocess.Popen([*CORTEX, "upgrade"], env=environ, stdout=subprocess.PIPE, text=True) as upgrading:
        assert upgrading.stdout is not None
        assert any(line.startswith("stopping the operator") for line in upgrading.stdout)
        upgrading.send_signal(signal.SIGTERM)
    assert upgrading.returncode == 128 + signal.SIGTERM
    assert old.status()["operator"]["version"] == OLD_VERSION
