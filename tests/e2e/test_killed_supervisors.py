"""A supervisor that is killed under load: each of its requests is answered, and the replica is replaced at once."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from harness.installations.installation import Installation, write_project
from harness.wait import wait_until

HANDLER = """
    import pathlib, subprocess, time

    class Handler:
        def __init__(self, config):
            subprocess.Popen(["sleep", "1000"])

        def handle_post(self, payload):
            time.sleep(0.1)

        def handle_put(self, payload):
            pathlib.Path(payload["inside"]).touch()
            time.sleep(1000)
"""
CONFIG = """
    - name: {api}
      kind: RealtimeAPI
      handler: {{type: python, path: handler.py, processes_per_replica: {processes}, threads_per_process: 8}}
      autoscaling: {{min_replicas: {replicas}, max_replicas: {replicas}}}
"""
LOADED_S = 0.5
REASON = "the supervisor of its replica died"


def deploy(cortex: Installation, folder: Path, api: str, replicas: int, processes: int = 1) -> None:
    config = CONFIG.format(api=api, replicas=replicas, processes=processes)
    cortex.cortex("deploy", write_project(folder, HANDLER, config))


def processes_of(cortex: Installation, api: str) -> list[dict[str, Any]]:
    return [process for process in cortex.status()["replicas"] if process["api"] == api and process["state"] == "ready"]


def kill_a_supervisor(cortex: Installation, api: str, count: int) -> None:
    """Return once as many processes are ready again, and nothing of its session is left."""
    victim = min(process["supervisor_pid"] for process in processes_of(cortex, api))
    os.kill(victim, signal.SIGKILL)

    def is_replaced() -> bool:
        found = processes_of(cortex, api)
        return len(found) == count and victim not in {process["supervisor_pid"] for process in found}

    wait_until(is_replaced, timeout_s=60)
    wait_until(lambda: not any(session_of(pid) == victim for pid in psutil.pids()))


def check_answers(summary: dict[str, Any]) -> None:
    statuses = summary["statuses"]
    # A request that the gateway sends on an open connection as this is closed gets no answer: HTTP can't tell.
    assert statuses.pop("error", 0) <= 1, summary
    assert set(statuses) <= {"200", "500", "502", "503"}, summary
    assert all(REASON in failure["detail"] for failure in summary["failures"] if failure["status"] == "500"), summary


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_every_request_is_answered_when_one_of_two_is_killed(cortex: Installation, tmp_path: Path) -> None:
    deploy(cortex, tmp_path, "halved", replicas=2, processes=2)
    kills = 3
    with cortex.load("/halved", 80) as summary:
        for _ in range(kills):
            threading.Event().wait(LOADED_S)  # a load that must not be disturbed
            kill_a_supervisor(cortex, "halved", 4)
    check_answers(summary)
    assert summary["statuses"]["200"] >= summary["sent"] - 16 * kills, summary  # what was running
    assert summary["sent"] > 100


def test_running_requests_of_the_only_replica_are_answered_with_the_reason(
    cortex: Installation, tmp_path: Path
) -> None:
    deploy(cortex, tmp_path, "only", 1)
    with ThreadPoolExecutor() as pool, cortex.load("/only", 60) as summary:
        threading.Event().wait(LOADED_S)
        slow = [pool.submit(cortex.post, "/only", {"inside": str(tmp_path / str(n))}, method="PUT") for n in range(2)]
        wait_until(lambda: all((tmp_path / str(number)).exists() for number in range(2)))
        kill_a_supervisor(cortex, "only", 1)
        for future in slow:
            answer = future.result()
            assert (answer.status, answer.json["error"]) == (
                500,
                f"the process that handled this request ended: {REASON}",
            )
    # Until the next replica is ready, the gateway responds that there is none.
    check_answers(summary)
