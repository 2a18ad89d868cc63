"""Commands for jobs against a real operator, including its restarts and interrupted uploads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.installations.batch_api import BatchApi
from harness.installations.command_line import CORTEX, cortex, environ
from harness.installations.installation import Installation, installation
from harness.wait import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def running() -> Iterator[Installation]:
    with installation() as made:
        yield made


@pytest.fixture
def api(running: Installation, tmp_path: Path) -> Iterator[BatchApi]:
    made = BatchApi.deployed(running, tmp_path, "watched")
    yield made
    cortex(running.home, "delete", "watched")


def started(api: BatchApi, *words: str | Path, stdin: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CORTEX, *map(str, words)],
        env=environ(api.cortex.home),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write(folder: Path, *items: object, **options: object) -> Path:
    file = folder / "job.json"
    file.write_text(json.dumps({"workers": 1, "item_list": {"items": items, "batch_size": 1}, **options}))
    return file


def jobs(api: BatchApi) -> list[str]:
    return [job["job_status"]["job_id"] for job in api.client.list_jobs(api.name)]


def test_a_watched_job_continues_across_an_operator_restart(api: BatchApi, tmp_path: Path) -> None:
    with started(api, "submit", "watched", write(tmp_path, {"do": "wait", "gate": "open"}), "-w") as process:
        assert process.stdout and process.stderr
        job = process.stdout.readline().split()[2]
        api.wait_for_notes(job, "called")
        os.kill(api.cortex.status()["operator"]["pid"], signal.SIGKILL)
        wait_until(lambda: "does not answer" in process.stderr.readline() if process.stderr else False)
        api.cortex.up()
        api.open("open")
        out, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert out.startswith(f"job {job} succeeded: 1 batch, 1 item in ")


def test_failed_batches_are_shown_and_retried_with_fixed_code(api: BatchApi, tmp_path: Path) -> None:
    file = write(tmp_path, {"do": "raise", "number": 7, "until": "1"}, 2, max_attempts=1)

    failed = cortex(api.cortex.home, "submit", "watched", file, "--watch")
    job = jobs(api)[0]
    shown = cortex(api.cortex.home, "get", "watched", job)
    letters = cortex(api.cortex.home, "get", "watched", job, "--dead-letters").stdout.splitlines()
    BatchApi.deployed(api.cortex, api.folder, "watched", version="2")
    again = cortex(api.cortex.home, "submit", "watched", "--retry-failed", job, "-w", "-o", "json")

    assert failed.returncode == 1
    assert "1 of 2 batches failed for good, with 1 item\n" in failed.stderr
    assert "  1 × ValueError: can't do 7 (first: item 1 of the input)" in failed.stderr
    assert "  1 × ValueError: can't do 7 (first: item 1 of the input)" in shown.stdout
    assert [json.loads(line)["error"] for line in letters] == ["ValueError: can't do 7"]
    assert again.returncode == 0
    assert json.loads(again.stdout)["job_status"]["items"] == {"total": 1, "succeeded": 1, "failed": 0}


def test_a_watched_job_shows_the_traceback_of_code_that_cannot_start(api: BatchApi, tmp_path: Path) -> None:
    done = cortex(api.cortex.home, "submit", "watched", write(tmp_path, 1, config={"broken": True}), "--watch")

    assert done.returncode == 1
    assert 'raise RuntimeError("no weights")' in done.stderr
    assert "worker error" in done.stderr
    assert "cortex logs watched" in done.stderr


def test_an_interrupted_upload_leaves_no_job(api: BatchApi) -> None:
    words = ["submit", "watched", "--items", "-", "--workers", "1", "--batch-size", "10"]
    with started(api, *words, stdin=subprocess.PIPE) as process:
        assert process.stdin
        process.stdin.write("1\n" * 100_000)
        process.stdin.flush()
        wait_until(lambda: jobs(api))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (130, "the upload was interrupted; no job was submitted\n")
    wait_until(lambda: not jobs(api))
    refused = cortex(api.cortex.home, *words, stdin='1\n2\n{"a":\n')
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: line 3 ")
    assert jobs(api) == []


def test_followed_logs_end_when_their_job_is_stopped(api: BatchApi, tmp_path: Path) -> None:
    file = write(tmp_path, {"do": "print", "text": "hello"}, {"do": "wait", "gate": "never"})
    answer = cortex(api.cortex.home, "submit", "watched", file, "-o", "json")
    job = json.loads(answer.stdout)["job_id"]
    with started(api, "logs", "watched", job, "-f") as process:
        assert process.stdout
        wait_until(lambda: "hello" in process.stdout.readline() if process.stdout else False, timeout_s=30)
        row = cortex(api.cortex.home, "get").stdout.splitlines()[1]
        stopped = cortex(api.cortex.home, "delete", "watched", job)
        process.communicate(timeout=60)

    assert process.returncode == 0
    assert row.split()[:4] == ["local", "watched", "1", job]
    assert (stopped.returncode, stopped.stdout) == (0, f"stopped job {job}\n")
    assert "stopped" in cortex(api.cortex.home, "get", "watched").stdout
    assert cortex(api.cortex.home, "delete", "watched", job).returncode == 1
    assert "`cortex logs watched JOB` shows the logs of one" in cortex(api.cortex.home, "logs", "watched").stderr
