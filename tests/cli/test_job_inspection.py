"""`cortex get`, `logs` and `delete` of jobs against an HTTP server in the role of the operator."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cortex.lifecycle import ApiKind, JobStatus
from harness.installations.command_line import CORTEX, cortex, environ
from harness.jobs.job_data import JOB_ID, api, job, letter, status
from harness.jobs.job_operator import Operator

pytestmark = pytest.mark.processes

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_get_shows_a_table_for_each_kind(operator: Operator, home: Path) -> None:
    operator.respond("GET /v1/apis", [api("iris"), api("sum", ApiKind.BATCH, running_jobs=1, latest_job_id=JOB_ID)])
    both = cortex(home, "get").stdout.splitlines()
    operator.respond("GET /v1/apis", [api("sum", ApiKind.BATCH)])
    only = cortex(home, "get").stdout.splitlines()

    assert both[0].split()[:4] == ["env", "realtime", "api", "status"]
    assert both[1].split()[:3] == ["test", "iris", "live"]
    assert both[2] == ""
    assert " ".join(both[3].split()) == "env batch api running jobs latest job id last update"
    assert both[4].split()[:4] == ["test", "sum", "1", JOB_ID]
    assert len(only) == 2


def test_get_of_an_api_lists_its_latest_jobs(operator: Operator, home: Path) -> None:
    jobs = [status(succeeded=5), status(JobStatus.STOPPED)]
    operator.respond(
        "GET /v1/apis/sum", api("sum", ApiKind.BATCH, batch_job_statuses=jobs, running_jobs=1, latest_job_id=JOB_ID)
    )
    operator.respond("GET /v1/apis/new", api("new", ApiKind.BATCH, batch_job_statuses=[]))

    shown = cortex(home, "get", "sum").stdout
    empty = cortex(home, "get", "new").stdout

    assert [line.split()[:3] for line in shown.splitlines()[4:6]] == [
        [JOB_ID, "running", "5/100"],
        [JOB_ID, "stopped", "0/100"],
    ]
    assert shown.endswith("\nendpoint: http://127.0.0.1:8888/sum\n")
    assert "no jobs yet; `cortex submit new JOB.json` submits one" in empty


def test_get_of_a_job_shows_its_status_batches_workers_and_failures(operator: Operator, home: Path) -> None:
    ended = job(
        JobStatus.COMPLETED_WITH_FAILURES,
        succeeded=98,
        failed=2,
        failed_attempts=6,
        results=98,
        seconds=9.8,
        message="why",
    )
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", ended)
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/dead-letters", json.dumps(letter(3, "KeyError: 'x'")).encode())

    done = cortex(home, "get", "sum", JOB_ID)

    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[:2] == [f"job id: {JOB_ID}", "status: completed with failures (why)"]
    assert lines[lines.index("batches") + 2].split() == ["100", "98", "2", "6", "98", "100", "ms", "1000"]
    assert lines[lines.index("workers") + 1].split() == ["requested", "running", "succeeded"]
    assert "endpoint: http://127.0.0.1:8888/sum" in lines
    assert "  1 × KeyError: 'x' (first: items 31 to 40 of the input)" in lines
    assert f"cortex submit sum --retry-failed {JOB_ID}" in done.stderr
    assert f"cortex get sum {JOB_ID} --results" in done.stderr
    assert json.loads(cortex(home, "get", "sum", JOB_ID, "-o", "json").stdout) == ended


def test_get_of_a_failed_job_shows_the_users_traceback(operator: Operator, home: Path) -> None:
    failed = job(JobStatus.WORKER_ERROR, message="ValueError: bad", traceback="Traceback\nValueError: bad\n")
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", failed)

    shown = cortex(home, "get", "sum", JOB_ID)
    watched = cortex(home, "get", "sum", JOB_ID, "-w")

    assert "status: worker error (ValueError: bad)" in shown.stdout
    assert "\nTraceback\nValueError: bad\n" in shown.stdout
    assert (shown.returncode, watched.returncode) == (0, 1)
    assert watched.stdout == shown.stdout


def test_every_command_reports_an_unknown_job(operator: Operator, home: Path) -> None:
    message = "unable to find BatchAPI job nope (sum api)"
    for method, tail in (("GET", ""), ("GET", "/results"), ("GET", "/logs?follow=false"), ("DELETE", "")):
        operator.respond(f"{method} /v1/apis/sum/jobs/nope{tail}", (404, message))

    for words in (["get"], ["get", "-w"], ["get", "--results"], ["logs"], ["delete"]):
        done = cortex(home, words[0], "sum", "nope", *words[1:])
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {message}\n"), words


def test_results_and_dead_letters_are_printed_unchanged(operator: Operator, home: Path) -> None:
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/results", b'{"seq": 0}\n{"seq": 1}\n')
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/dead-letters", b'{"seq": 2}\n')

    assert cortex(home, "get", "sum", JOB_ID, "--results").stdout == '{"seq": 0}\n{"seq": 1}\n'
    assert cortex(home, "get", "sum", JOB_ID, "--dead-letters").stdout == '{"seq": 2}\n'
    misused = cortex(home, "get", "sum", "--results")
    assert misused.returncode == 2
    assert "`cortex get API JOB --results`" in misused.stderr


def test_a_pipe_closed_by_its_reader_is_no_error(operator: Operator, home: Path) -> None:
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/results", b'{"seq": 0}\n' * 500_000)
    command = f"{shlex.join(CORTEX)} get sum {JOB_ID} --results | head -1"

    done = subprocess.run(["sh", "-c", command], env=environ(home), capture_output=True, text=True, timeout=60)

    assert (done.stdout, done.stderr) == ('{"seq": 0}\n', "")


def test_results_and_uploads_are_streamed_in_blocks(operator: Operator, home: Path, tmp_path: Path) -> None:
    line = b'{"seq": 0, "result": "' + b"x" * 1000 + b'"}\n'
    many = line * 100_000  # 100 MB
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/results", many)
    operator.respond("POST /v1/apis/sum/jobs?workers=1", status(JobStatus.PENDING))
    (tmp_path / "items.ndjson").write_bytes(many)
    code = "import sys; from cortex.cli.main import main; main(sys.argv[1:]); "
    code += "sys.stderr.write(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"

    for words in (["get", "sum", JOB_ID, "--results"], ["submit", "sum", "--items", "items.ndjson", "--workers", "1"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=environ(home), capture_output=True, timeout=60
        )
        assert int(done.stderr) < 60 * 1024, words  # KiB; the interpreter alone has half of it
    assert len(operator.bodies()[0]) == len(many)


def test_logs_of_a_job_are_printed_and_a_job_is_stopped_once(operator: Operator, home: Path) -> None:
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/logs?follow=false&tail=5", b"one\ntwo\n")
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/logs?follow=true", b"three\n")
    operator.respond(
        f"DELETE /v1/apis/sum/jobs/{JOB_ID}",
        {"message": f"stopped job {JOB_ID}"},
        (409, "BatchAPI job has already been stopped"),
    )

    assert cortex(home, "logs", "sum", JOB_ID, "--tail", "5").stdout == "one\ntwo\n"
    assert cortex(home, "logs", "sum", JOB_ID, "-f").stdout == "three\n"
    stopped = cortex(home, "delete", "sum", JOB_ID)
    again = cortex(home, "delete", "sum", JOB_ID)
    assert (stopped.returncode, stopped.stdout) == (0, f"stopped job {JOB_ID}\n")
    assert (again.returncode, again.stderr) == (1, "error: BatchAPI job has already been stopped\n")


def test_empty_logs_are_explained(operator: Operator, home: Path) -> None:
    logged, silent, splitter = api("logged"), api("silent"), api("split")
    logged["spec"] |= {"networking": {"access_log": True}}
    splitter["spec"] |= {"kind": "TrafficSplitter"}
    for each in (logged, silent, splitter):
        path = f"GET /v1/apis/{each['spec']['name']}"
        operator.respond(path, each)
        operator.respond(f"{path}/logs?follow=false&access=true", b"")
        operator.respond(f"{path}/logs?follow=false&request=1-2", b"")

    def told(name: str, *options: str) -> str:
        done = cortex(home, "logs", name, *options)
        assert (done.returncode, done.stdout) == (0, "")
        return done.stderr

    assert told("logged", "--access") == "the access log has no request to logged yet\n"
    assert (
        told("silent", "--access")
        == "silent has no access log; set networking.access_log: true and deploy to enable it\n"
    )
    assert "is a TrafficSplitter and has no logs" in told("split", "--access")
    operator.respond("GET /v1/apis/silent/logs?follow=false", b"")
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/logs?follow=false", b"")
    assert told("silent") == "silent has written no log yet\n"
    assert told("sum", JOB_ID) == f"job {JOB_ID} has written no log yet\n"
    assert told("silent", "--request", "1-2").startswith("the log has no lines of request 1-2; ")
    operator.respond("GET /v1/apis/silent/logs?follow=false&replica=nope", b"")
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}/logs?follow=false&replica=nope", b"")
    assert told("silent", "--replica", "nope").startswith("no replica nope has written a log")
    assert f"each line of `cortex logs sum {JOB_ID}` begins" in told("sum", JOB_ID, "--replica", "nope")


def test_incomplete_logs_are_reported_as_incomplete(operator: Operator, home: Path) -> None:
    operator.respond("GET /v1/apis/long", api("long"))
    path = "GET /v1/apis/long/logs?follow=false"
    operator.respond(path, b"line\n" * 999, b"line\n" * 1000)
    operator.respond(f"{path}&tail=1000", b"line\n" * 1000)

    assert cortex(home, "logs", "long").stderr == ""
    assert cortex(home, "logs", "long").stderr == "only the last 1,000 lines are shown; use --tail N for more\n"
    assert cortex(home, "logs", "long", "--tail", "1000").stderr == ""
