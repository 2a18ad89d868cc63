"""`cortex submit` against an HTTP server in the role of the operator."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cortex.lifecycle import JobStatus
from harness.installations.command_line import CORTEX, cortex, environ
from harness.installations.terminal import on_terminal
from harness.jobs.job_data import JOB_ID, job, letter, status
from harness.jobs.job_operator import DONE, SUBMISSION, Operator

pytestmark = pytest.mark.processes

Run = Callable[..., "subprocess.CompletedProcess[str]"]


# Submitting.


def test_a_submission_is_sent_and_the_next_commands_are_shown(operator: Operator, home: Path, file: Path) -> None:
    done = cortex(home, "submit", "sum", file)
    from_stdin = cortex(home, "submit", "sum", "-", stdin=file.read_text())
    as_json = cortex(home, "submit", "sum", file, "--workers", "7", "-o", "json")

    lines = f"submitted job {JOB_ID} to sum (100 batches)\n  cortex get sum {JOB_ID} --watch\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, lines, "")
    assert (from_stdin.returncode, from_stdin.stdout) == (0, lines)
    assert (as_json.returncode, json.loads(as_json.stdout)["job_id"]) == (0, JOB_ID)
    assert list(map(json.loads, operator.bodies())) == [SUBMISSION, SUBMISSION, {**SUBMISSION, "workers": 7}]


def test_items_come_from_a_file_or_a_pipe_with_or_without_a_submission(
    operator: Operator, home: Path, tmp_path: Path
) -> None:
    items, options = tmp_path / "items.ndjson", tmp_path / "options.json"
    items.write_text("1\n2\n3\n")
    options.write_text('{"workers": 2, "batch_size": 5, "config": {"a": 1}}')
    bare = "POST /v1/apis/sum/jobs?workers=3&batch_size=2"
    full = "POST /v1/apis/sum/jobs?workers=2&batch_size=5&config=%7B%22a%22%3A+1%7D"
    operator.respond(bare, status(JobStatus.PENDING))
    operator.respond(full, status(JobStatus.PENDING))

    assert cortex(home, "submit", "sum", "--items", items, "--workers", "3", "--batch-size", "2").returncode == 0
    assert cortex(home, "submit", "sum", options, "--items", "-", stdin=items.read_text()).returncode == 0
    assert [f"{method} {path}" for method, path, _, _ in operator.requests] == [bare, full]
    assert operator.bodies() == [b"1\n2\n3\n"] * 2


@pytest.mark.parametrize(
    ("text", "count"), [("[1, 2, 3]\n", 3), ('\n[{"a": 1}]', 1), ("[1]\n[2]\n", 0), ("[]\n", 0), ('{"a": [1, 2]}\n', 0)]
)
def test_a_file_with_one_array_is_one_item_with_a_note(
    operator: Operator, home: Path, tmp_path: Path, text: str, count: int
) -> None:
    (tmp_path / "array.json").write_text(text)
    operator.respond("POST /v1/apis/sum/jobs?workers=1", status(JobStatus.PENDING))
    operator.respond("POST /v1/apis/sum/jobs?workers=1&dryRun=true", b"validations passed\n")
    words = ["--workers", "1"]

    done = cortex(home, "submit", "sum", "--items", "array.json", *words, cwd=tmp_path)
    piped = cortex(home, "submit", "sum", "--items", "-", *words, stdin=text)

    elements = "1 element" if count == 1 else f"{count} elements"
    fix = "for one item per element, write each into a line of its own, as `jq -c '.[]'` does"
    for result, name in ((done, "array.json"), (piped, "standard input")):
        note = f"{name} holds one array of {elements}, which is one item; {fix}\n" if count else ""
        assert (result.returncode, result.stderr) == (0, note)
    assert operator.bodies() == [text.encode()] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"workers": 1,\n  "config": }', "job.json:2:13: not JSON: expecting value"),
        ("", "job.json:1:1: not JSON: expecting value"),
        ("[1]", "job.json: a submission must be a JSON object"),
        ("[" * 100_000, "job.json: nested too deeply"),
        (b"\xff", "job.json: not JSON: byte 1 is not UTF-8"),
        (None, "job.json: can't be read: no such file or directory"),
    ],
)
def test_a_submission_that_can_not_be_read_is_bad_input(
    operator: Operator, home: Path, tmp_path: Path, text: str | bytes | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "job.json").write_bytes(text if isinstance(text, bytes) else text.encode())

    done = cortex(home, "submit", "sum", "job.json", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert operator.requests == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-", "--items", "-"], "standard input can't contain both"),
        (["job.json", "--batch-size", "2"], "--batch-size requires --items"),
        (["job.json", "--retry-failed", "a"], "--retry-failed can be combined only with"),
        (["--retry-failed", "a", "--dry-run"], "--retry-failed can be combined only with"),
        (["job.json", "--wotch"], "did you mean --watch?"),
        (["job.json", "--items", "nope.ndjson"], "nope.ndjson: can't be read: no such file or directory"),
        (["job.json", "--items", "."], ".: can't be read: is a directory"),
        (["job.json", "--items", "job.json"], "item_list.items can't be combined with uploaded items"),
    ],
)
def test_rejects_options_that_can_not_be_combined(
    operator: Operator, home: Path, file: Path, words: list[str], message: str
) -> None:
    done = cortex(home, "submit", "sum", *words, cwd=file.parent)

    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert operator.requests == []


@pytest.mark.parametrize("words", [["-"], ["--items", "-", "--workers", "1"]])
def test_a_closed_standard_input_is_bad_input(home: Path, words: list[str]) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *CORTEX, "submit", "sum", *words]

    done = subprocess.run(command, env=environ(home), capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (2, "error: standard input is closed\n")


def test_errors_of_the_operator_are_printed_unchanged(operator: Operator, home: Path, file: Path) -> None:
    operator.respond("POST /v1/apis/sum/jobs", (400, 'workers: must be at least 1 (got 0); write "workers": 1'))
    refused = cortex(home, "submit", "sum", file)
    operator.respond("POST /v1/apis/sum/jobs", (404, "sum is not deployed"))
    unknown = cortex(home, "submit", "sum", file)

    assert refused.returncode == 2
    assert refused.stderr == 'error: workers: must be at least 1 (got 0); write "workers": 1\n'
    assert (unknown.returncode, unknown.stderr) == (1, "error: sum is not deployed\n")
    operator.respond("GET /v1/apis", [{"spec": {"name": name}} for name in ("sums", "iris")])
    similar = cortex(home, "submit", "sum", file)
    assert (similar.returncode, similar.stderr) == (1, "error: sum is not deployed; did you mean sums?\n")


def test_without_an_operator_nothing_is_submitted(tmp_path: Path, file: Path) -> None:
    done = cortex(tmp_path / "nothing", "submit", "sum", file)

    assert done.returncode == 1
    assert done.stderr == "error: no operator runs on this machine; start it with `cortex up`\n"


def test_a_dry_run_prints_the_files_that_a_job_would_read(operator: Operator, home: Path, file: Path) -> None:
    operator.respond("POST /v1/apis/sum/jobs?dryRun=true", b"s3://a/1\ns3://a/2\nvalidations passed\n")
    done = cortex(home, "submit", "sum", file, "--dry-run")
    as_json = cortex(home, "submit", "sum", file, "--dry-run", "-o", "json")
    operator.respond("POST /v1/apis/sum/jobs?dryRun=true", b"s3://a/1\nno s3 files match search criteria\n")
    refused = cortex(home, "submit", "sum", file, "--dry-run")

    assert (done.returncode, done.stdout) == (0, "s3://a/1\ns3://a/2\nvalidations passed\n")
    assert json.loads(as_json.stdout) == {"lines": done.stdout.splitlines()}
    assert (refused.returncode, refused.stderr) == (2, "error: no s3 files match search criteria\n")


def test_dead_letters_are_submitted_again(operator: Operator, home: Path) -> None:
    operator.respond(f"POST /v1/apis/sum/jobs/{JOB_ID}/retry?workers=4", status(JobStatus.PENDING))
    operator.respond(f"POST /v1/apis/sum/jobs/{JOB_ID}/retry", (409, "the job has no dead letters"))

    done = cortex(home, "submit", "sum", "--retry-failed", JOB_ID, "--workers", "4")
    none = cortex(home, "submit", "sum", "--retry-failed", JOB_ID)

    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"submitted job {JOB_ID} to sum (100 batches)")
    assert (none.returncode, none.stderr) == (1, "error: the job has no dead letters\n")


# Watching.


def test_a_watched_job_prints_progress_lines_and_sets_the_exit_code(operator: Operator, home: Path, file: Path) -> None:
    operator.respond(
        f"GET /v1/apis/sum/jobs/{JOB_ID}", job(JobStatus.ENQUEUING), job(succeeded=3), job(succeeded=9), DONE
    )

    done = cortex(home, "submit", "sum", file, "--watch")

    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"submitted job {JOB_ID} to sum (100 batches)",
        f"job {JOB_ID} succeeded: 100 batches, 1,000 items in 20s",
    ]
    assert done.stderr.splitlines() == [
        f"{JOB_ID}: enqueuing, 100 batches so far",
        f"{JOB_ID}: running 3 %, 3 of 100 batches",
    ]


def test_a_watched_job_prints_why_it_is_pending(operator: Operator, home: Path, file: Path) -> None:
    waits, more = (job(JobStatus.PENDING, message=f"waits for {number} cores") for number in (3, 2))
    unknown = job(JobStatus.PENDING)  # as between two attempts to build an environment
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", unknown, waits, unknown, waits, more, unknown, more, DONE)

    done = cortex(home, "submit", "sum", file, "--watch")

    assert done.stderr.splitlines() == [
        f"{JOB_ID}: pending, 100 batches",
        f"{JOB_ID}: pending, 100 batches, waits for 3 cores",
        f"{JOB_ID}: pending, 100 batches, waits for 2 cores",
    ]


def test_a_watched_job_as_json_is_one_document(operator: Operator, home: Path, file: Path) -> None:
    done = cortex(home, "submit", "sum", file, "--watch", "-o", "json")
    got = cortex(home, "get", "sum", JOB_ID, "-w", "-o", "json")

    assert (done.returncode, json.loads(done.stdout)) == (0, DONE)
    assert (got.returncode, json.loads(got.stdout)) == (0, DONE)


def test_a_watched_job_that_fails_prints_the_reason(operator: Operator, home: Path, file: Path) -> None:
    failed = job(
        JobStatus.WORKER_ERROR, message="ValueError: bad weights", traceback="Traceback\nValueError: bad weights\n"
    )
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", job(succeeded=3), failed)

    done = cortex(home, "submit", "sum", file, "--watch")

    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        "Traceback",
        "ValueError: bad weights",
        f"error: job {JOB_ID}: worker error in 20s: ValueError: bad weights",
        f"`cortex logs sum {JOB_ID}` shows the output of its workers",
    ]


def test_a_watched_job_without_workers_refers_to_no_worker_logs(operator: Operator, home: Path, file: Path) -> None:
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", job(JobStatus.ENQUEUE_FAILED, message="no s3 files match"))

    done = cortex(home, "submit", "sum", file, "--watch")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("no s3 files match")
    assert "cortex logs" not in done.stderr


def test_a_watched_job_with_dead_letters_shows_their_errors(operator: Operator, home: Path, file: Path) -> None:
    ended = job(JobStatus.COMPLETED_WITH_FAILURES, succeeded=98, failed=2, failed_items=20, failed_attempts=6)
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", ended)
    letters = [letter(3, "KeyError: 'x'"), letter(7, "KeyError: 'x'")]
    operator.respond(
        f"GET /v1/apis/sum/jobs/{JOB_ID}/dead-letters", "".join(json.dumps(row) + "\n" for row in letters).encode()
    )

    done = cortex(home, "submit", "sum", file, "--watch")

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: job {JOB_ID} completed with failures in 20s: 2 of 100 batches failed for good, with 20 items",
        "  2 × KeyError: 'x' (first: items 31 to 40 of the input)",
        f"`cortex get sum {JOB_ID} --dead-letters` prints the failed batches with tracebacks",
        f"`cortex submit sum --retry-failed {JOB_ID}` runs it again",
    ]


def test_an_interrupted_watch_reports_that_the_job_continues(operator: Operator, home: Path, file: Path) -> None:
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", job(succeeded=3))
    command = [*CORTEX, "submit", "sum", str(file), "--watch"]
    with subprocess.Popen(command, env=environ(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert b"3 of 100 batches" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (
        130,
        f"the job continues; `cortex get sum {JOB_ID}` shows its status\n".encode(),
    )


def test_an_upload_shows_its_progress_on_a_terminal(operator: Operator, home: Path, tmp_path: Path) -> None:
    operator.respond("POST /v1/apis/sum/jobs?workers=1", status(JobStatus.PENDING))
    items = tmp_path / "items.ndjson"
    items.write_bytes(b"1234567\n" * (1 << 20))

    shown = on_terminal(home, "submit", "sum", "--items", str(items), "--workers", "1", TERM="xterm")

    assert "\r\x1b[Kuploading: 0 of 8 MiB (" in shown
    assert f"\r\x1b[Ksubmitted job {JOB_ID} to sum (100 batches)\r\n" in shown


def test_an_interrupted_upload_reports_that_no_job_was_submitted(operator: Operator, home: Path) -> None:
    command = [*CORTEX, "submit", "sum", "--items", "-", "--workers", "1"]
    with subprocess.Popen(
        command, env=environ(home), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        process.stdin.write(b"1\n")
        process.stdin.flush()
        operator.part_came.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)

    assert (process.returncode, out) == (130, b"")
    assert err == b"the upload was interrupted; no job was submitted\n"


def test_a_watch_waits_while_the_operator_restarts(operator: Operator, home: Path, file: Path) -> None:
    answered = operator.answer
    looks = 0

    def away_at_first(handler: BaseHTTPRequestHandler) -> None:
        nonlocal looks
        looks += handler.command == "GET"
        if handler.command == "GET" and looks < 3:
            handler.connection.close()
        else:
            answered(handler)

    operator.answering = away_at_first

    done = cortex(home, "submit", "sum", file, "--watch")

    assert done.returncode == 0
    assert done.stderr == "the operator does not answer; waiting for it\n"


def test_a_watched_job_shows_a_progress_bar_on_a_terminal(operator: Operator, home: Path, file: Path) -> None:
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", job(succeeded=50), DONE)

    shown = on_terminal(home, "submit", "sum", str(file), "--watch", TERM="xterm", LC_ALL="C.UTF-8")

    assert "\r\x1b[Krunning ██████████░░░░░░░░░░ 50 %, 50 of 100 batches" in shown
    assert shown.endswith(f"\r\x1b[Kjob {JOB_ID} succeeded: 100 batches, 1,000 items in 20s\r\n")
