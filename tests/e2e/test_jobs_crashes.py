"""Kills while jobs run: of the operator, of workers, of everything at once. Nothing is lost and nothing doubled."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.installations.batch_api import BatchApi
from harness.installations.installation import Installation
from harness.wait import has_ended, wait_until

ITEMS = 300


def pause(seconds: float) -> None:
    """Let a job run for a while; the test is that it is not disturbed."""
    threading.Event().wait(seconds)


@pytest.fixture
def api(cortex: Installation, tmp_path: Path, request: pytest.FixtureRequest) -> BatchApi:
    return BatchApi.deployed(cortex, tmp_path, f"crash-{request.node.name[5:25].replace('_', '-').strip('-')}")


def slow_items(count: int = ITEMS, seconds: float = 0.03) -> list[Any]:
    return [{"do": "sleep", "s": seconds, "number": number} for number in range(count)]


def check_whole(api: BatchApi, job: str, count: int = ITEMS) -> None:
    """Check that every item was returned once, and that the completion hook ran once."""
    status = api.ended(job, timeout_s=90)
    assert [item["number"] for item in api.returned(job)] == list(range(count))
    assert status["items"]["succeeded"] == count
    assert len(api.noted(job, "completed")) == 1


def operator_of(cortex: Installation) -> int:
    pid: int = cortex.status()["operator"]["pid"]
    return pid


def kill_operator(cortex: Installation, pid: int | None = None) -> None:
    pid = pid or operator_of(cortex)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid))


def progress(api: BatchApi, job: str, calls: int) -> None:
    api.wait_for_notes(job, "called", calls)


def last_leased(cortex: Installation) -> int:
    """Return the highest number of a batch that a worker holds."""
    with closing(sqlite3.connect(cortex.home / "jobs.db")) as database:
        (last,) = database.execute("SELECT max(last) FROM leases").fetchone()
    return -1 if last is None else int(last)


def test_killed_operator_costs_no_batch_an_attempt(cortex: Installation, api: BatchApi) -> None:
    operator = operator_of(cortex)
    # Each worker waits inside a batch, so that they hold leases of others when the operator ends, however late.
    waiting = [{"do": "wait", "gate": "killed", "number": number} for number in range(60, ITEMS)]
    job = api.submit([*slow_items(60), *waiting], workers=3)
    api.wait_for_notes(job, "constructed", 3)
    progress(api, job, 63)
    wait_until(lambda: last_leased(cortex) >= 63)
    kill_operator(cortex, operator)
    api.open("killed")
    progress(api, job, 64)  # workers continue with their leased batches
    refused = api.post({"workers": 1, "item_list": {"items": [1]}})
    assert refused.status == 503
    assert "operator" in refused.json["message"]
    cortex.up()
    check_whole(api, job)
    assert api.status(job)["failed_attempts"] == 0
    assert len(api.noted(job, "called")) == ITEMS
    assert len(api.noted(job, "constructed")) == 3


def test_killed_workers_cost_the_batches_inside_them_an_attempt(cortex: Installation, api: BatchApi) -> None:
    job = api.submit(slow_items(), workers=3, max_attempts=10)
    for round_ in range(6):
        progress(api, job, 20 * (round_ + 1))
        with suppress(ProcessLookupError):  # the last one was killed in the round before
            os.kill(int(api.noted(job, "called")[-1][-2]), signal.SIGKILL)  # it runs that batch, or just ran it
    check_whole(api, job)
    assert 1 <= api.status(job)["failed_attempts"] <= 6
    assert "killed" in cortex.cortex("logs", api.name, job).stdout


def test_killed_supervisors_of_workers_are_replaced(cortex: Installation, api: BatchApi) -> None:
    job = api.submit(slow_items(), workers=2, max_attempts=10)
    progress(api, job, 20)
    for pid in cortex.pids(api.name):
        os.kill(os.getsid(pid), signal.SIGKILL)
    check_whole(api, job)


def test_completion_hook_runs_once_although_the_operator_is_killed_during_it(
    cortex: Installation, api: BatchApi
) -> None:
    job = api.submit([{"do": "wait", "gate": "to-the-end"}, 2], workers=2)
    api.wait_for_notes(job, "called", 2)
    (api.notes / f"{job}.end").write_text("end")
    api.open("to-the-end")
    api.wait_for_notes(job, "completed")
    kill_operator(cortex)
    cortex.up()
    api.reached(job, "running")
    pause(1)
    kill_operator(cortex)
    api.open("end")  # it ends while no operator runs
    pause(0.5)
    cortex.up()
    api.ended(job)
    assert len(api.noted(job, "completed")) == 1


def test_completion_hook_whose_process_dies_runs_again(cortex: Installation, api: BatchApi) -> None:
    job = api.submit([{"do": "wait", "gate": "to-the-end"}], workers=1)
    api.wait_for_notes(job, "called")
    (api.notes / f"{job}.end").write_text("end")
    api.open("to-the-end")
    ((_, pid, _),) = api.wait_for_notes(job, "completed")
    os.kill(int(pid), signal.SIGKILL)
    api.wait_for_notes(job, "completed", 2)
    api.open("end")
    status = api.ended(job)
    assert len(api.noted(job, "completed")) == 2
    assert status["failed_attempts"] == 0


def test_completion_hook_whose_constructor_fails_after_a_crash_is_a_worker_error(
    cortex: Installation, api: BatchApi
) -> None:
    job = api.submit([{"do": "wait", "gate": "to-the-end"}], workers=1)
    api.wait_for_notes(job, "called")
    (api.notes / f"{job}.end").write_text("end")
    api.open("to-the-end")
    ((_, pid, _),) = api.wait_for_notes(job, "completed")
    (api.notes / f"{job}.broken").touch()
    os.kill(int(pid), signal.SIGKILL)
    message = api.ended(job, "worker_error")["message"]
    assert message == "on_job_complete can't run, because no worker can start: RuntimeError: no weights"
    assert len(api.noted(job, "constructed")) == 4


@pytest.mark.long
def test_job_that_the_next_version_cannot_read_fails_and_delays_no_other(
    cortex: Installation, api: BatchApi, request: pytest.FixtureRequest
) -> None:
    job, other = (api.submit(slow_items(30, 0.5), workers=1) for _ in range(2))
    for each in (job, other):
        progress(api, each, 2)
    cortex.down()
    request.addfinalizer(cortex.up)
    with closing(sqlite3.connect(cortex.home / "jobs.db")) as database, database:
        where = "number = (SELECT number FROM jobs WHERE id = ?)"
        (origin,) = database.execute(f"SELECT origin FROM job_inputs WHERE {where}", (job,)).fetchone()
        changed = json.dumps({**json.loads(origin), "spec": '{"name": "it had other fields then"}'})
        database.execute(f"UPDATE job_inputs SET origin = ? WHERE {where}", (changed, job))
    cortex.up()
    check_whole(api, other, 30)
    lines = cortex.cortex("logs", api.name, job).stdout
    assert "its API can't be read by this version" in lines
    with closing(sqlite3.connect(cortex.home / "jobs.db")) as database:
        assert database.execute("SELECT status FROM jobs WHERE id = ?", (job,)).fetchone() == ("unexpected_error",)


@pytest.mark.long
def test_next_operator_continues_enqueuing(cortex: Installation, api: BatchApi, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number in range(40):
        lines = "".join(f'{{"number": {number * 5000 + line}}}\n' for line in range(5000))
        (files / f"{number:03}.ndjson").write_text(lines)
    source = {"paths": [f"{files}/"], "batch_size": 500}
    job = api.accepted({"workers": 2, "delimited_files": source})
    kill_operator(cortex)
    cortex.up()
    status = api.ended(job, timeout_s=60)
    assert status["total_batch_count"] == 400
    numbers = Counter(item["number"] for item in api.returned(job))
    assert len(numbers) == 200_000
    assert set(numbers.values()) == {1}


def processes(cortex: Installation) -> list[psutil.Process]:
    """All processes of an installation, found by its folder in their command lines and environments."""
    home = str(cortex.home)
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and (
                home in " ".join(process.cmdline()) or process.environ().get("CORTEX_HOME") == home
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found
