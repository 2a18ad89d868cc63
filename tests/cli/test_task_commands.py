"""Commands for tasks and schedules: output and optional arguments."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cortex.cli.progress import JobSpeed, progress_line
from cortex.cli.tables.apis import apis_table
from cortex.cli.tables.jobs import JobProgress, is_task, outcome_line, schedule_lines, tasks_table
from cortex.jobs.http.view import JobView, job_json
from cortex.jobs.spec import JobCounts, JobOptions, JobOrigin, JobRecord
from cortex.lifecycle import ApiKind, JobStatus
from harness.installations.command_line import cortex
from harness.jobs.job_data import BEGAN
from harness.jobs.job_operator import Operator

pytestmark = pytest.mark.processes

NOW = BEGAN + timedelta(seconds=90)
_RECORD = JobRecord(
    id="7ffff0000000abcd",
    number=1,
    origin=JobOrigin("train", "a1", "s1", "r1", "p1", '{"name": "train", "kind": "TaskAPI"}', kind="TaskAPI"),
    options=JobOptions(workers=1, max_attempts=1),
    source={"kind": "task"},
    status=JobStatus.RUNNING,
    created_at=BEGAN.timestamp(),
    counts=JobCounts(batches=1, items=1),
)


def task(status: JobStatus = JobStatus.RUNNING, **changes: Any) -> dict[str, Any]:
    if status.is_over:
        changes.setdefault("ended_at", _RECORD.created_at + 20)
    return job_json(JobView(replace(_RECORD, status=status, **changes), "http://127.0.0.1:8888/train"))


def status(status: JobStatus = JobStatus.RUNNING, **changes: Any) -> dict[str, Any]:
    shown: dict[str, Any] = task(status, **changes)["job_status"]
    return shown


def test_apis_of_tasks_are_listed_with_their_running_and_latest_jobs() -> None:
    api = {
        "spec": {"name": "train"},
        "status": {"message": "live"},
        "running_jobs": 2,
        "latest_job_id": "7ff",
        "last_updated": BEGAN.isoformat(),
    }
    assert apis_table(ApiKind.TASK, "local", [api], NOW) == (
        ["env", "task api", "running jobs", "latest job id", "last update"],
        [["local", "train", "2", "7ff", "1m"]],
    )


def test_jobs_of_a_task_are_listed_without_batches() -> None:
    jobs = [status(JobStatus.WORKER_OOM), status()]
    headers, rows = tasks_table(jobs, NOW)
    assert headers == ["task job id", "status", "start time", "duration"]
    assert [row[1::2] for row in rows] == [["out of memory", "20s"], ["running", "1m 30s"]]
    several = status(options=JobOptions(workers=1, max_attempts=3), counts=JobCounts(1, 1, failed_attempts=2))
    assert tasks_table([several], NOW)[0][2] == "failed attempts"


def test_the_progress_of_a_task_is_its_status() -> None:
    assert is_task(status())
    assert JobProgress.of(status()).share == 0.0
    assert progress_line(status(), JobSpeed()) == "running"
    waiting = status(JobStatus.PENDING, message="a worker wants 4 cores")
    assert progress_line(waiting, JobSpeed()) == "pending, a worker wants 4 cores"


@pytest.mark.parametrize(
    ("end", "message", "shown"),
    [
        (JobStatus.SUCCEEDED, "", "job 7ffff0000000abcd succeeded in 20s"),
        (JobStatus.WORKER_ERROR, "ValueError: bad", "job 7ffff0000000abcd: worker error in 20s: ValueError: bad"),
        (JobStatus.TIMED_OUT, "timed out after 5 s", "job 7ffff0000000abcd: timed out in 20s: timed out after 5 s"),
    ],
)
def test_the_outcome_of_a_task_is_one_line(end: JobStatus, message: str, shown: str) -> None:
    assert outcome_line(status(end, message=message)) == shown


def test_a_schedule_is_shown_with_next_run_last_run_and_errors() -> None:
    schedule = {
        "cron": "0 3 * * *",
        "timezone": "UTC",
        "next_run": (NOW + timedelta(hours=2)).isoformat(),
        "last_run": BEGAN.isoformat(),
        "last_job_id": "7ff",
        "error": "workers: must be defined",
    }
    assert list(schedule_lines(schedule, NOW)) == [
        "schedule: 0 3 * * * (UTC)",
        "next run: 2026-03-01 14:01:30 UTC (in 2h 0m)",
        "last run: 2026-03-01 12:00:00 UTC (job 7ff)",
        "the last run was not submitted: workers: must be defined",
    ]
    skips = {"skipped_runs": 1, "last_skipped": BEGAN.isoformat(), "last_skipped_for": "7fe"}
    skipped = "last skipped: 2026-03-01 12:00:00 UTC (job 7fe had not ended"
    assert list(schedule_lines({**schedule, **skips, "error": ""}, NOW))[3:] == [f"{skipped})"]
    skips["skipped_runs"] = 1200
    assert list(schedule_lines({**schedule, **skips, "error": ""}, NOW))[3:] == [f"{skipped}; 1,200 so far)"]
    assert list(schedule_lines({**schedule, "next_run": None, "last_run": None, "error": ""}, NOW)) == [
        "schedule: 0 3 * * * (UTC)",
        "next run: never",
    ]


def test_only_a_task_is_submitted_without_a_submission(operator: Operator, home: Path) -> None:
    operator.respond("GET /v1/apis/sum", {"spec": {"name": "sum", "kind": "BatchAPI"}})
    done = cortex(home, "submit", "sum")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a submission is required" in done.stderr
    assert operator.bodies() == []

    operator.respond("GET /v1/apis/train", {"spec": {"name": "train", "kind": "TaskAPI"}})
    operator.respond("POST /v1/apis/train/jobs", status())
    done = cortex(home, "submit", "train")
    assert "submitted job 7ffff0000000abcd to train\n" in done.stdout, done.stderr
    assert operator.bodies() == [b"{}"]


@pytest.mark.parametrize("end", [JobStatus.STOPPED, JobStatus.TIMED_OUT, JobStatus.SUCCEEDED])
def test_a_task_that_did_not_succeed_is_shown_with_how_to_run_it_again(
    operator: Operator, home: Path, end: JobStatus
) -> None:
    operator.respond("GET /v1/apis/train/jobs/7ffff0000000abcd", task(end))
    done = cortex(home, "get", "train", "7ffff0000000abcd")
    hint = "`cortex submit train --retry-failed 7ffff0000000abcd` runs it again"
    assert (hint in done.stderr) is (end is not JobStatus.SUCCEEDED), done.stderr


def test_a_task_that_failed_is_shown_with_its_traceback_and_how_to_run_it_again(operator: Operator, home: Path) -> None:
    counts = JobCounts(1, 1, failed=1, failed_attempts=1)
    failed = task(
        JobStatus.WORKER_ERROR, message="ValueError: bad", traceback="Traceback …\nValueError: bad\n", counts=counts
    )
    operator.respond("GET /v1/apis/train/jobs/7ffff0000000abcd", failed)
    done = cortex(home, "get", "train", "7ffff0000000abcd")
    assert "status: worker error (ValueError: bad)" in done.stdout
    assert "Traceback …\nValueError: bad" in done.stdout
    assert "batches" not in done.stdout
    assert "`cortex submit train --retry-failed 7ffff0000000abcd` runs it again" in done.stderr
