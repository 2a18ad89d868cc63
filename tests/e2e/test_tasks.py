"""Tasks in a real installation: run exactly once, whatever they do and whichever process dies, and on schedule."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.installations.installation import Installation, write_project
from harness.wait import has_ended, wait_until

TASK = """
    import ctypes, os, pathlib, time

    class Task:
        def __call__(self, config):
            folder = pathlib.Path(config["folder"])
            with (folder / "began").open("a") as file:
                file.write(config.get("name", "") + "\\n")
            print("working for", config["team"]["name"], flush=True)
            do = config.get("do")
            if do == "raise":
                raise ValueError("bad weights")
            if do == "crash":
                ctypes.string_at(0)
            if do == "allocate":
                memory = bytearray(300 * 1024**2)
            while do in ("allocate", "wait") and not (folder / "go").exists():
                time.sleep(0.01)
            return config["team"]
"""
CONFIG = """
    - name: train
      kind: TaskAPI
      definition:
        path: handler.py
        config: {{folder: "{folder}", team: {{name: core, size: 3}}}}
      compute: {{cpu: 0.1, mem_limit: 150Mi}}
"""


def submit(cortex: Installation, **config: Any) -> str:
    answer = cortex.post("/train", {"config": config})
    assert answer.status == 200, answer.body
    job_id: str = answer.json["job_id"]
    return job_id


def status(cortex: Installation, job: str) -> dict[str, Any]:
    found: dict[str, Any] = cortex.post(f"/train?jobID={job}", method="GET").json["job_status"]
    return found


def ended(cortex: Installation, job: str) -> dict[str, Any]:
    return wait_until(lambda: (found := status(cortex, job))["end_time"] and found, 30)


def kill_operator(cortex: Installation) -> None:
    pid = cortex.status()["operator"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid))


def test_a_task_runs_once_and_keeps_its_outcome(cortex: Installation, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", TASK, CONFIG.format(folder=tmp_path))
    assert "cortex submit train --watch" in cortex.cortex("deploy", project).stdout

    does = ("", "raise", "crash", "allocate")
    well, bad, crash, large = (submit(cortex, team={"name": "new"}, do=do, name=do) for do in does)
    assert ended(cortex, well)["status"] == "succeeded"
    results = cortex.cortex("get", "train", well, "--results").stdout
    assert json.loads(results)["result"] == {"name": "new", "size": 3}
    wait_until(lambda: "working for new" in cortex.cortex("logs", "train", well).stdout)

    found = ended(cortex, bad)
    assert (found["status"], found["message"]) == ("worker_error", "ValueError: bad weights")
    assert 'File "handler.py", line' in found["traceback"]
    assert "ValueError: bad weights" in cortex.cortex("get", "train", bad).stdout
    found = ended(cortex, crash)
    assert (found["status"], found["failed_attempts"]) == ("worker_error", 1)
    assert found["message"] == "the worker's process died: segmentation fault (SIGSEGV)"
    found = ended(cortex, large)
    assert found["status"] == "worker_oom"
    assert found["message"].startswith("the worker's process died: out of memory")

    table = cortex.cortex("get", "train").stdout
    assert all(word in table for word in ("task api", "task job id", well, "worker error"))
    assert sorted((tmp_path / "began").read_text().split("\n")[:-1]) == sorted(does)
    assert cortex.cortex("submit", "train", "--dry-run").stdout == "validations passed\n"
    refused = cortex.post("/train", {"workers": 2})
    assert (refused.status, refused.json["message"].partition(";")[0]) == (400, "workers: must be at most 1 (got 2)")


@pytest.mark.long
def test_a_task_survives_its_operator_and_is_not_run_again_after_a_power_cut(
    cortex: Installation, tmp_path: Path
) -> None:
    cortex.cortex("deploy", write_project(tmp_path / "project", TASK, CONFIG.format(folder=tmp_path)))
    job = submit(cortex, do="wait", name="first")
    wait_until(lambda: (tmp_path / "began").exists(), 30)
    kill_operator(cortex)
    cortex.up()
    (tmp_path / "go").touch()
    assert ended(cortex, job)["status"] == "succeeded"

    (tmp_path / "go").unlink()
    job = submit(cortex, do="wait", name="second")
    wait_until(lambda: "second" in (tmp_path / "began").read_text(), 30)
    processes = [psutil.Process(pid) for pid in cortex.pids("train")]
    supervisors = [psutil.Process(os.getsid(process.pid)) for process in processes]
    kill_operator(cortex)
    for process in [*supervisors, *processes]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker may end with its supervisor
            process.kill()
    cortex.up()
    found = ended(cortex, job)
    assert found["status"] == "worker_error"
    assert "what it had done by then is unknown" in found["message"]
    assert (tmp_path / "began").read_text() == "first\nsecond\n"

    stopped = submit(cortex, do="wait", name="third")
    wait_until(lambda: "third" in (tmp_path / "began").read_text(), 30)
    assert cortex.post(f"/train?jobID={stopped}", method="DELETE").json == {"message": f"stopped job {stopped}"}
    assert ended(cortex, stopped)["status"] == "stopped"
    (tmp_path / "go").touch()
    again = json.loads(cortex.cortex("submit", "train", "--retry-failed", stopped, "-o", "json").stdout)["job_id"]
    assert ended(cortex, again)["status"] == "succeeded"
    assert (tmp_path / "began").read_text() == "first\nsecond\nthird\nthird\n"
