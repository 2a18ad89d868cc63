"""Job routes of the operator; authentication is tested with all routes of the operator."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from cortex.engine.log_writer import STDOUT, LogWriter
from cortex.engine.logs import LocalLogs
from cortex.errors import ConflictError
from cortex.jobs.http.view import JobView
from cortex.jobs.spec import JobRecord
from cortex.lifecycle import JobStatus
from cortex.operator.http.app import add_error_handlers
from cortex.operator.http.job_routes import job_routes
from cortex.telemetry import Logger
from harness.connections import UnixConnection
from harness.jobs.jobs_server import MemoryJobs, serve_app
from harness.wait import wait_until

SUBMISSION = json.dumps({"workers": 1, "item_list": {"items": [1, 2, 3], "batch_size": 2}})


class MemoryJobService(MemoryJobs):
    """Jobs in memory with the additional methods that the operator's routes call."""

    def __init__(self, logs: Path) -> None:
        super().__init__()
        self.logs = logs
        self.get_calls = 0

    async def get(self, api: str, job_id: str) -> JobView:
        self.get_calls += 1
        return await super().get(api, job_id)

    async def list(self, api: str, limit: int) -> list[JobView]:
        self._require_api(api)
        return [await self.get(api, job_id) for job_id in sorted(self.records, reverse=True)[:limit]]

    async def retry_failed(self, api: str, job_id: str, workers: int | None) -> JobRecord:
        record = self._require(api, job_id)
        if workers == 7:
            raise ConflictError(f"job {job_id} has no dead letters")
        options = record.options if workers is None else replace(record.options, workers=workers)
        return replace(record, id="new", options=options)

    async def results(self, api: str, job_id: str) -> AsyncIterator[bytes]:
        self._require(api, job_id)
        for number in range(3):
            yield b'{"seq":%d}\n' % number

    async def dead_letters(self, api: str, job_id: str) -> AsyncIterator[bytes]:
        self._require(api, job_id)
        return
        yield b""

    def end(self, job_id: str) -> None:
        self.records[job_id] = replace(self.records[job_id], status=JobStatus.SUCCEEDED)


class OperatorClient:
    """A client of the served routes."""

    def __init__(self, path: Path, jobs: MemoryJobService) -> None:
        self.path, self.jobs = path, jobs

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = UnixConnection(self.path)
        try:
            connection.request(method, f"/v1/apis{path}", body, headers)
            response = connection.getresponse()
            data = response.read()
            is_json = response.headers["content-type"] == "application/json"
            return response.status, json.loads(data) if is_json else data.decode()
        finally:
            connection.close()

    def submit(self) -> str:
        status, job = self.call("POST", "/sum/jobs", SUBMISSION)
        assert status == 200
        return str(job["job_id"])


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorClient]:
    jobs = MemoryJobService(tmp_path)
    app = FastAPI()
    add_error_handlers(app, Logger("test"))
    app.include_router(job_routes(jobs, lambda: [LocalLogs(tmp_path)]))

    @app.get("/v1/apis/full")
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with serve_app(app) as path:
        yield OperatorClient(path, jobs)


def test_a_job_is_submitted_listed_read_and_stopped(operator: OperatorClient) -> None:
    first, second = operator.submit(), operator.submit()
    listed = operator.call("GET", "/sum/jobs")[1]
    assert [job["job_status"]["job_id"] for job in listed] == [second, first]
    assert len(operator.call("GET", "/sum/jobs?limit=1")[1]) == 1
    assert operator.call("GET", f"/sum/jobs/{first}") == (200, listed[1])
    assert operator.call("DELETE", f"/sum/jobs/{first}") == (200, {"message": f"stopped job {first}"})
    assert operator.call("GET", f"/sum/jobs/{first}") == (
        404, {"error": f"unable to find BatchAPI job {first} (sum api)", "code": "not_found"}
    )  # fmt: skip


def test_a_full_disk_is_named_and_worth_another_try(operator: OperatorClient) -> None:
    status, error = operator.call("GET", "/full")
    assert (status, error["code"]) == (503, "database_unavailable")
    assert "the disk of the operator is full; free some space" in error["error"]


def test_json_lines_are_uploaded(operator: OperatorClient) -> None:
    headers = {"content-type": "application/x-ndjson"}
    status, job = operator.call("POST", "/sum/jobs?workers=1&batch_size=2", iter([b"1\n2", b"\n3\n"]), **headers)
    assert (status, job["total_batch_count"]) == (200, 2)
    assert operator.jobs.batches[job["job_id"]] == [b"[1,2]", b"[3]"]


def test_a_dry_run_stores_nothing(operator: OperatorClient) -> None:
    status, text = operator.call("POST", "/sum/jobs?dryRun=true", SUBMISSION)
    assert (status, text.splitlines()[-1]) == (200, "validations passed")
    assert not operator.jobs.records


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/sum/jobs", "{", 400, "bad_submission"),
        ("POST", "/sum/jobs", " " * (1024 * 1024 + 1), 413, "too_large"),
        ("POST", "/sum/jobs?dryRun=perhaps", SUBMISSION, 400, "bad_input"),
        ("POST", "/other/jobs", SUBMISSION, 404, "not_found"),
        ("GET", "/other/jobs", None, 404, "not_found"),
        ("GET", "/sum/jobs?limit=0", None, 400, "bad_input"),
        ("GET", "/sum/jobs/1/results", None, 404, "not_found"),
        ("GET", "/sum/jobs/1/dead-letters", None, 404, "not_found"),
        ("GET", "/sum/jobs/1/logs", None, 404, "not_found"),
        ("GET", "/sum/jobs/..%2f..%2fetc/logs", None, 404, "not_found"),
        ("POST", "/sum/jobs/1/retry", None, 404, "not_found"),
        ("POST", "/sum/jobs/1/retry?workers=many", None, 400, "bad_input"),
        ("POST", "/sum/jobs/1/retry?workers=0", None, 400, "bad_submission"),
        ("POST", "/sum/jobs/1/retry?worker=2", None, 400, "bad_submission"),
        ("POST", "/sum/jobs?dryrun=true", SUBMISSION, 400, "bad_submission"),
        ("POST", "/sum/jobs/1/retry?workers=10001", None, 400, "bad_submission"),
        ("PUT", "/sum/jobs", None, 405, "method_not_allowed"),
    ],
)
def test_errors_have_a_code(
    operator: OperatorClient, method: str, path: str, body: str | None, status: int, code: str
) -> None:
    answer = operator.call(method, path, body)
    assert (answer[0], answer[1]["code"]) == (status, code)
    assert answer[1]["error"]


def test_a_retry_has_the_same_limit_of_workers_as_a_submission(operator: OperatorClient) -> None:
    submission = SUBMISSION.replace('"workers": 1', '"workers": 10001')
    assert submission != SUBMISSION
    job = operator.submit()
    told = operator.call("POST", f"/sum/jobs/{job}/retry?workers=10001")
    assert told == operator.call("POST", "/sum/jobs", submission)


def test_results_and_dead_letters_are_json_lines(operator: OperatorClient) -> None:
    job = operator.submit()
    assert operator.call("GET", f"/sum/jobs/{job}/results") == (200, '{"seq":0}\n{"seq":1}\n{"seq":2}\n')
    assert operator.call("GET", f"/sum/jobs/{job}/dead-letters") == (200, "")


def test_dead_letters_are_retried(operator: OperatorClient) -> None:
    job = operator.submit()
    status, again = operator.call("POST", f"/sum/jobs/{job}/retry?workers=3")
    assert (status, again["job_id"], again["workers"], again["message"]) == (200, "new", 3, "submitted job new")
    assert operator.call("POST", f"/sum/jobs/{job}/retry?workers=7")[0] == 409


def test_logs_are_read_per_worker_and_as_a_tail(operator: OperatorClient, tmp_path: Path) -> None:
    job = operator.submit()
    assert operator.call("GET", f"/sum/jobs/{job}/logs") == (200, "")
    for worker in ("sum-1", "sum-2"):
        writer = LogWriter(tmp_path / "sum" / job / f"{worker}.log")
        writer.feed(0, STDOUT, f"one of {worker}\ntwo of {worker}\n".encode())
        writer.close()
    everything = operator.call("GET", f"/sum/jobs/{job}/logs")[1].splitlines()
    assert [line.split(" ", 1)[1] for line in everything] == [
        "1 one of sum-1", "1 two of sum-1", "2 one of sum-2", "2 two of sum-2"
    ]  # fmt: skip
    assert operator.call("GET", f"/sum/jobs/{job}/logs?tail=1")[1].endswith(" 2 two of sum-2\n")
    assert len(operator.call("GET", f"/sum/jobs/{job}/logs?replica=sum-1")[1].splitlines()) == 2
    assert operator.call("GET", f"/sum/jobs/{job}/logs?replica=../x")[0] == 400


def test_followed_logs_end_with_the_job(operator: OperatorClient, tmp_path: Path) -> None:
    job = operator.submit()
    writer = LogWriter(tmp_path / "sum" / job / "sum-1.log")
    writer.line(0, STDOUT, "begun")
    answers: list[tuple[int, str]] = []
    following = threading.Thread(
        target=lambda: answers.append(operator.call("GET", f"/sum/jobs/{job}/logs?follow=1")), daemon=True
    )
    following.start()
    writer.line(0, STDOUT, "going on")
    assert not answers
    writer.line(0, STDOUT, "ended")
    operator.jobs.end(job)
    wait_until(lambda: answers)
    following.join()
    status, text = answers[0]
    assert (status, [line.rsplit(" ", 1)[1] for line in text.splitlines()]) == (200, ["begun", "on", "ended"])
    writer.close()


def test_followed_logs_end_when_the_job_is_deleted(operator: OperatorClient, tmp_path: Path) -> None:
    job = operator.submit()
    writer = LogWriter(tmp_path / "sum" / job / "sum-1.log")
    writer.line(0, STDOUT, "begun")
    answers: list[tuple[int, str]] = []
    following = threading.Thread(
        target=lambda: answers.append(operator.call("GET", f"/sum/jobs/{job}/logs?follow=1")), daemon=True
    )
    following.start()
    wait_until(lambda: operator.jobs.get_calls > 1)  # the response has started
    del operator.jobs.records[job]
    wait_until(lambda: answers)
    following.join()
    assert (answers[0][0], answers[0][1].endswith(" begun\n")) == (200, True)
    writer.close()
