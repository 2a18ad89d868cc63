"""Upgrade in place: a home of version 0.1.0, from before the modules were reorganized, is started by this version.

`fixtures/home_0_1_0/home.tar.gz` was written by that version: `project/` was deployed and called, three jobs, a task
and a workload ran, one API key was created, and `cortex down` ended it.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import TESTS
from harness.installations.installation import Installation, served
from harness.ports import free_port
from harness.wait import wait_until

OLD = TESTS / "fixtures" / "home_0_1_0"
KEY = "ck_3116b97497_VZRv7tNTtncJg1o16yK6ydlGq6HauE_NteUZKxYVj-4"
GOOD_JOB, BAD_JOB, TASK, WORKLOAD = (
    "671594efe88c13ff",
    "671594efe0f42fff",
    "671594ee717366ff",
    "f75138dd-d442-4d59-a706-c88a9dc457cf",
)


@pytest.fixture(scope="module")
def upgraded() -> Iterator[Installation]:
    home = Path(tempfile.mkdtemp(prefix="cx-"))
    with tarfile.open(OLD / "home.tar.gz") as archive:
        archive.extractall(home)
    made = Installation(home, free_port(), free_port())
    try:
        made.up()
        yield made
    finally:
        made.down()
        shutil.rmtree(home, ignore_errors=True)


def test_apis_serve_again(upgraded: Installation) -> None:
    assert served(upgraded, "/tracked", {"number": 5}).json == 15
    reply = wait_until(lambda: (sent := upgraded.post("/echo", {"a": 1}, x_api_key=KEY)).status != 503 and sent)
    assert reply.json == {"a": 1}
    assert upgraded.post("/echo", {"a": 1}).status == 401


def test_jobs_and_their_results_are_kept(upgraded: Installation) -> None:
    assert _job_status(upgraded, "sums", GOOD_JOB)["status"] == "succeeded"
    lines = upgraded.cortex("get", "sums", GOOD_JOB, "--results").stdout.splitlines()
    assert [json.loads(line)["result"] for line in lines] == [3, 7, 5]
    bad = _job_status(upgraded, "sums", BAD_JOB)
    assert (bad["status"], bad["dead_letters"]) == ("completed_with_failures", 1)
    assert "a bad item" in upgraded.cortex("get", "sums", BAD_JOB, "--dead-letters").stdout
    assert _job_status(upgraded, "nightly", TASK)["status"] == "succeeded"


def _job_status(upgraded: Installation, api: str, job: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(upgraded.cortex("get", api, job, "-o", "json").stdout)["job_status"]
    return status


def test_workloads_and_predictions_are_kept(upgraded: Installation) -> None:
    workload = upgraded.post(f"/words/{WORKLOAD}", method="GET").json
    assert (workload["status"], workload["result"]) == ("completed", {"words": 3})
    assert "predictions so far" in upgraded.cortex("get", "tracked").stdout


def test_the_same_project_is_up_to_date(upgraded: Installation) -> None:
    project = upgraded.home / "same-project"
    shutil.copytree(OLD / "project", project)
    before = wait_until(lambda: upgraded.pids("tracked"))
    upgraded.cortex("deploy", project)
    assert upgraded.pids("tracked") == before, "an unchanged API keeps its replicas"


def test_a_new_job_runs_on_the_old_database(upgraded: Installation) -> None:
    submission = upgraded.home / "job.json"
    submission.write_text(json.dumps({"workers": 1, "item_list": {"items": [1, 2, 3], "batch_size": 3}}))
    assert upgraded.cortex("submit", "sums", submission, "--watch").returncode == 0
