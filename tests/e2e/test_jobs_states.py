"""Stops, timeouts, updates and deletions in each state of a job, and their effects on workers."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from harness.installations.batch_api import BatchApi
from harness.installations.installation import Installation, installation
from harness.wait import has_ended, wait_until

#: What the operator may use.
CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def silence() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def cortex(silence: str) -> Iterator[Installation]:
    names = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}
    with installation({"AWS_ENDPOINT_URL_S3": silence, **names}) as made:
        yield made


@pytest.fixture(scope="module")
def api(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> BatchApi:
    return BatchApi.deployed(cortex, tmp_path_factory.mktemp("batch"), "states")


@pytest.fixture(scope="module")
def whole(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> BatchApi:
    """An API each of whose workers requests the whole machine."""
    return BatchApi.deployed(cortex, tmp_path_factory.mktemp("whole"), "whole", cpu=CORES)


def enqueuing(api: BatchApi, timeout: int | None) -> str:
    job = api.accepted({"workers": 1, "file_path_lister": {"s3_paths": ["s3://bucket/"]}, "timeout": timeout})
    api.reached(job, "enqueuing")
    return job


def pending(api: BatchApi, timeout: int | None) -> str:
    """Submit a job while another one uses the whole machine."""
    holder = api.submit([{"do": "wait", "gate": "room"}], timeout=60)
    api.wait_for_notes(holder, "called")
    job = api.submit([1], timeout=timeout)
    api.reached(job, "pending")
    return job


def running(api: BatchApi, timeout: int | None) -> str:
    job = api.submit([1, {"do": "wait", "gate": "never"}, 3], timeout=timeout)
    api.wait_for_notes(job, "called", 2)
    assert api.status(job)["status"] == "running"
    return job


def completing(api: BatchApi, timeout: int | None) -> str:
    job = api.submit([{"do": "wait", "gate": "to-the-end"}, 2], timeout=timeout)
    api.wait_for_notes(job, "called")
    (api.notes / f"{job}.end").write_text("never")
    api.open("to-the-end")
    api.wait_for_notes(job, "completed")
    (api.notes / "to-the-end").unlink()
    assert api.status(job)["status"] == "running"
    return job


STATES: dict[str, Callable[[BatchApi, int | None], str]] = {
    "enqueuing": enqueuing,
    "pending": pending,
    "running": running,
    "completing": completing,
}


@pytest.mark.parametrize("state", STATES)
def test_job_is_stopped_in_any_state(state: str, api: BatchApi, whole: BatchApi) -> None:
    chosen = whole if state == "pending" else api
    job = STATES[state](chosen, None)
    reply = chosen.cortex.post(f"/{chosen.name}?jobID={job}", method="DELETE", body=b"")
    assert (reply.status, reply.json) == (200, {"message": f"stopped job {job}"})
    chosen.ended(job, "stopped", timeout_s=5)
    settled(chosen, job, state)
    again = chosen.cortex.post(f"/{chosen.name}?jobID={job}", method="DELETE", body=b"")
    assert again.status in (400, 409)
    assert again.json["message"] == "BatchAPI job has already been stopped"


@pytest.mark.parametrize("state", STATES)
def test_job_times_out_in_any_state(state: str, api: BatchApi, whole: BatchApi) -> None:
    chosen = whole if state == "pending" else api
    # On a loaded machine, a worker takes seconds to start, which count.
    timeout = 20 if state in ("running", "completing") else 5
    job = STATES[state](chosen, timeout)
    status = chosen.ended(job, "timed_out", timeout_s=15)
    assert f"timed out after {timeout} s" in status["message"]
    settled(chosen, job, state)


def test_upload_that_stalls_times_out(api: BatchApi) -> None:
    going_on = threading.Event()

    def chunks() -> Iterator[bytes]:
        yield b"1\n" * 1000
        going_on.wait(30)

    before = {each["job_status"]["job_id"] for each in api.client.list_jobs(api.name)}
    query = "workers=1&batch_size=10&timeout=1"
    connection = HTTPConnection("127.0.0.1", api.cortex.gateway_port, timeout=30)
    headers = {"content-type": "application/x-ndjson"}
    request = threading.Thread(
        target=lambda: connection.request("POST", f"/{api.name}?{query}", chunks(), headers, encode_chunked=True),
        daemon=True,
    )
    request.start()

    def statuses() -> list[str]:
        jobs = [each["job_status"] for each in api.client.list_jobs(api.name)]
        return [job["status"] for job in jobs if job["job_id"] not in before]

    wait_until(lambda: statuses() == ["timed_out"], 15, "the upload timed out")
    going_on.set()
    request.join()
    reply = connection.getresponse()
    assert reply.status == 409
    assert "timed out" in json.loads(reply.read())["message"]
    connection.close()


def settled(api: BatchApi, job: str, state: str) -> None:
    """Check a job that was ended: it has no running worker, no further calls, and the results it had."""
    pids = {int(note[-2]) for note in api.noted(job)}
    wait_until(lambda: all(map(has_ended, pids)), 20, f"workers {pids} of {job} are gone")
    calls = len(api.noted(job, "called"))
    assert calls == {"enqueuing": 0, "pending": 0, "running": 2, "completing": 2}[state]
    recorded = {"enqueuing": 0, "pending": 0, "running": (0, 1), "completing": 2}[state]
    assert len(api.results(job)) in (recorded if isinstance(recorded, tuple) else (recorded,))
    if state != "completing":
        assert api.noted(job, "completed") == []
    api.open("room")
    wait_until(lambda: not any(each["job_status"]["end_time"] is None for each in api.client.list_jobs(api.name)), 20)
    (api.notes / "room").unlink()


def test_job_that_waits_for_capacity_reports_it(whole: BatchApi) -> None:
    job = pending(whole, None)
    message = wait_until(lambda: whole.status(job)["message"])
    assert "cores" in message
    assert "starts once there is capacity" in message
    assert message in " ".join(whole.cortex.cortex("get", "whole", job).stdout.split())
    whole.open("room")
    status = whole.ended(job)
    assert status["message"] == ""
    (whole.notes / "room").unlink()


def test_jobs_of_several_apis_share_the_machine(whole: BatchApi, api: BatchApi, tmp_path: Path) -> None:
    half = BatchApi.deployed(whole.cortex, tmp_path, "half", cpu=CORES / 2)
    # It lasts until the second one is over, however long that takes.
    first = half.submit([{"do": "sleep", "s": 0.3, "unless": "second-is-over"}] * 300, workers=2)
    half.wait_for_notes(first, "constructed", 2)
    second = half.submit([{"do": "sleep", "s": 0.1}] * 5, workers=2)
    # The newer job gets a worker from the older one, which has two: both end, the newer one earlier.
    half.ended(second)
    assert half.status(first)["end_time"] is None
    half.open("second-is-over")
    half.ended(first)
    for job in (first, second):
        assert len(half.noted(job, "completed")) == 1


def test_job_continues_with_its_code_when_the_api_is_updated(cortex: Installation, tmp_path: Path) -> None:
    api = BatchApi.deployed(cortex, tmp_path, "updated", "1")
    old = api.submit([{"do": "wait", "gate": "updated"}, *range(50)], workers=2)
    api.wait_for_notes(old, "called")
    BatchApi.deployed(cortex, tmp_path, "updated", "2")
    new = api.submit([1, 2])
    api.ended(new)
    assert {each["version"] for line in api.results(new) for each in line["result"]} == {"2"}
    # Also in a process that starts after the update.
    for note in api.wait_for_notes(old, "constructed", 2):
        os.kill(int(note[-2]), 9)
    api.open("updated")
    api.ended(old)
    assert {each["version"] for line in api.results(old) for each in line["result"]} == {"1"}
    assert len(api.noted(old, "constructed")) > 2
    assert len(api.noted(old, "completed")) == 1


def test_deleting_an_api_deletes_its_jobs(cortex: Installation, tmp_path: Path) -> None:
    api = BatchApi.deployed(cortex, tmp_path, "deleted")
    job = api.submit([{"do": "wait", "gate": "never"}, 2], workers=2)
    notes = api.wait_for_notes(job, "called")
    cortex.cortex("delete", "deleted", "-f")
    assert cortex.post(f"/deleted?jobID={job}", method="GET").status == 404
    pids = {int(note[-2]) for note in [*notes, *api.noted(job, "constructed")]}
    wait_until(lambda: all(map(has_ended, pids)), 20)
    assert cortex.cortex("get", "deleted", job, check=False).returncode == 1
    # Once more after the workers have ended, whose supervisors write last.
    left = cortex.home / "logs" / "deleted" / job
    wait_until(lambda: not left.exists(), message=f"{left} is deleted")
    BatchApi.deployed(cortex, tmp_path, "deleted")
    assert api.client.list_jobs("deleted") == []
    api.ended(api.submit([1]))


def test_kind_of_an_api_cannot_be_changed_without_deleting_it(
    cortex: Installation, api: BatchApi, tmp_path: Path
) -> None:
    config = (api.folder / "project" / "cortex.yaml").read_text().replace("BatchAPI", "RealtimeAPI")
    folder = tmp_path / "realtime"
    folder.mkdir()
    (folder / "cortex.yaml").write_text(config)
    (folder / "handler.py").write_text(
        "class Handler:\n    def __init__(self, config): pass\n    def handle_post(self): pass\n"
    )
    done = cortex.cortex("deploy", folder, check=False)
    assert done.returncode == 2
    assert "BatchAPI" in done.stdout + done.stderr
