"""JSON of jobs: fields under both of their names, and without secrets."""

from __future__ import annotations

import json
from dataclasses import replace

from cortex.jobs.http.view import JobView, WorkerCounts, job_json, jobs_json, spec_json, submitted_json
from cortex.jobs.spec import JobCounts, JobOptions, JobOrigin, JobRecord
from cortex.lifecycle import JobStatus

SPEC = {"name": "sum", "kind": "BatchAPI", "handler": {"path": "sum.py", "env": {"KEY": "secret"}}}
RECORD = JobRecord(
    id="68ad3f6c5cbb5c00",
    number=1,
    origin=JobOrigin("sum", "a1", "s1", "r1", "p1", json.dumps(SPEC)),
    options=JobOptions(workers=2, config={"x": 1}, timeout_s=60),
    source={"item_list": {"batch_size": 2}},
    status=JobStatus.RUNNING,
    created_at=1_700_000_000.0,
    started_at=1_700_000_001.5,
    counts=JobCounts(batches=10, items=20, succeeded=4, succeeded_items=8, failed=1, failed_items=2, seconds=2.0),
)
VIEW = JobView(RECORD, "http://localhost:8888/sum", WorkerCounts(pending=1, running=1))


def test_a_job_contains_its_api_endpoint_and_status() -> None:
    shown = job_json(VIEW)
    assert shown["endpoint"] == "http://localhost:8888/sum"
    status = shown["job_status"]
    assert (status["job_id"], status["api_name"], status["kind"]) == ("68ad3f6c5cbb5c00", "sum", "BatchAPI")
    assert (status["status"], status["batches_in_queue"], status["total_batch_count"]) == ("running", 5, 10)
    assert status["start_time"] == status["created_time"] == "2023-11-14T22:13:20+00:00"
    assert status["predictor_id"] == status["handler_id"] == "r1"
    assert status["batch_metrics"] == {
        "succeeded": 4, "failed": 1, "average_time_per_batch": 0.5, "avg_time_per_batch": 0.5
    }  # fmt: skip
    assert status["worker_counts"] == {
        "pending": 1, "initializing": 0, "running": 1, "succeeded": 0, "failed": 0, "stalled": 0, "unknown": 0
    }  # fmt: skip
    assert status["items"] == {"total": 20, "succeeded": 8, "failed": 2}
    assert status["end_time"] is None


def test_values_of_environment_variables_are_hidden() -> None:
    shown = job_json(VIEW)
    assert shown["api_spec"]["handler"] == {"path": "sum.py", "env": {"KEY": "********"}}
    assert "secret" not in json.dumps(shown)


def test_callers_of_an_endpoint_see_no_configuration_of_the_api() -> None:
    shown = job_json(VIEW, is_owner=False)
    assert shown["api_spec"] == {"name": "sum", "kind": "BatchAPI"}
    assert shown["job_status"] == job_json(VIEW)["job_status"]


def test_secrets_of_a_submission_are_hidden_from_readers_but_not_from_its_code() -> None:
    config = {"password": "hunter2", "url": "postgres://u:s3cret@h/d", "args": ["--token", "t0ken-1"], "n": 1}
    record = replace(
        RECORD,
        options=replace(RECORD.options, config=config),
        message="no login with hunter2",
        traceback="ConnectionError: postgres://u:s3cret@h/d",
    )
    shown = json.dumps([job_json(replace(VIEW, record=record)), submitted_json(record)])
    assert not any(secret in shown for secret in ("hunter2", "s3cret", "t0ken-1"))
    assert '"n": 1' in shown and "no login with ********" in shown
    assert spec_json(record)["config"] == config


def test_an_ended_job_has_no_batches_in_its_queue() -> None:
    over = replace(RECORD, status=JobStatus.STOPPED, ended_at=1_700_000_009.0)
    status = job_json(replace(VIEW, record=over))["job_status"]
    assert (status["status"], status["batches_in_queue"]) == ("stopped", 0)
    assert status["end_time"] == "2023-11-14T22:13:29+00:00"


def test_the_workers_of_an_ended_job_are_those_that_constructed_the_class() -> None:
    ended = replace(RECORD, status=JobStatus.SUCCEEDED)

    def counts(record: JobRecord) -> tuple[int, int]:
        found = WorkerCounts.at_end(record)
        return found.succeeded, found.failed

    assert counts(replace(ended, counts=JobCounts(workers=3))) == (3, 0)
    assert counts(ended) == (1, 0)  # stored by a version that did not count them
    assert counts(replace(ended, status=JobStatus.STOPPED)) == (0, 0)
    failed = replace(ended, status=JobStatus.WORKER_ERROR)
    assert counts(failed) == (0, 0)
    assert counts(replace(failed, origin=replace(failed.origin, kind="TaskAPI"))) == (0, 1)


def test_a_completing_job_is_reported_as_running() -> None:
    assert (
        job_json(replace(VIEW, record=replace(RECORD, status=JobStatus.COMPLETING)))["job_status"]["status"]
        == "running"
    )


def test_a_list_contains_the_same_json_as_single_jobs() -> None:
    assert jobs_json([VIEW]) == [job_json(VIEW)]


def test_a_submission_returns_its_options() -> None:
    assert spec_json(RECORD).items() <= job_json(VIEW)["job_status"].items()
    assert spec_json(RECORD)["config"] == {"x": 1}
