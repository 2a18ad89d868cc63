"""Processes of an API with `preload` are killed under load: only the requests inside a killed worker fail."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from harness.installations.installation import Installation, write_project
from harness.wait import has_ended, wait_until

HANDLER = """
    import os, time

    class Handler:
        def __init__(self, config):
            self.fork_server = os.getpid()
            self.weights = bytearray(os.urandom(1)) * 60_000_000

        def after_fork(self):
            self.pid = os.getpid()

        def handle_post(self, payload):
            time.sleep(0.02)
            return {"pid": os.getpid(), "forked": self.pid, "fork server": self.fork_server}
"""
CONFIG = """
    - name: shared
      kind: RealtimeAPI
      handler: {type: python, path: handler.py, processes_per_replica: 2, preload: true}
      autoscaling: {min_replicas: 2, max_replicas: 2}
"""
LOADED_S = 0.5


def ready(cortex: Installation) -> list[dict[str, Any]]:
    return [each for each in cortex.status()["replicas"] if each["api"] == "shared" and each["state"] == "ready"]


def kill(cortex: Installation, pid: int, gone: list[int]) -> None:
    """Kill a process under load, and wait until all four workers are there, without those in `gone`."""
    threading.Event().wait(LOADED_S)  # a load that must not be disturbed
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid))

    def is_complete() -> bool:
        pids = {process["pid"] for process in ready(cortex)}
        return len(pids) == 4 and not pids & set(gone)

    wait_until(is_complete, timeout_s=60)


@pytest.mark.long
def test_only_requests_inside_a_killed_worker_fail(cortex: Installation, tmp_path: Path) -> None:
    cortex.cortex("deploy", write_project(tmp_path, HANDLER, CONFIG))
    answer = cortex.post("/shared", {}).json
    assert answer["pid"] == answer["forked"] != answer["fork server"]
    with cortex.load("/shared", 80) as summary:
        worker = ready(cortex)[0]["pid"]
        kill(cortex, worker, [worker])
        fork_server = cortex.post("/shared", {}).json["fork server"]
        kill(cortex, fork_server, [])
        for process in ready(cortex):  # those of the dead fork server, too: the next one is started for them
            kill(cortex, process["pid"], [process["pid"]])
        supervisor = ready(cortex)[0]["supervisor_pid"]
        lost = [each["pid"] for each in ready(cortex) if each["supervisor_pid"] == supervisor]
        kill(cortex, supervisor, lost)
    killed_workers, of_supervisor = 5, 16  # connections: those of its two workers
    statuses = summary["statuses"]
    assert set(statuses) <= {"200", "500", "502", "503"}, summary
    assert summary["sent"] - statuses["200"] <= killed_workers + of_supervisor, summary
    assert summary["sent"] > 200

    api = cortex.get("shared")
    assert len(api["memory"]) == 2
    for each in api["memory"]:
        assert each["shared_bytes"] > 60_000_000
        assert each["proportional_bytes"] == each["shared_bytes"] + each["private_bytes"] < 200_000_000
    assert "  shared  " in cortex.cortex("get", "shared").stdout
