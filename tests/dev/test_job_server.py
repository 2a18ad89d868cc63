"""The routes of jobs in `cortex dev`: those of the operator, with jobs in the memory of the process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from cortex.dev.job_server import JobServer
from cortex.dev.local.jobs import JobsApi
from cortex.dev.local.project import LocalProject, spec_for_this_process
from cortex.home import Home
from harness.wait import wait_until

CONFIG = (
    "- name: sums\n  kind: BatchAPI\n  handler: {type: python, path: sums.py}\n  networking: {max_body_size: 1Ki}\n"
)
CODE = """
class Handler:
    def __init__(self, config):
        if "exits" in config: raise SystemExit("no license")
    def handle_batch(self, payload):
        if payload == ["wait"]:
            open("pipe").read()
            return "waited"
        return sum(payload)
"""


class Served:
    """A BatchAPI on two threads, as in its process."""

    def __init__(self, folder: Path) -> None:
        project = LocalProject.read(folder / "cortex.yaml", {})
        (api,) = project.diagnosis.apis
        spec = spec_for_this_process(project, api, Home(folder / "home"), {})
        self.loop = asyncio.new_event_loop()
        self.api = JobsApi(spec, api, {})
        self.api.load()
        self.server = JobServer(spec, self.api, self.loop)
        self.threads = [threading.Thread(target=each) for each in (self.loop.run_forever, self.server.run_jobs)]
        for each in self.threads:
            each.start()

    def call(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, Any]:
        ours, theirs = socket.socketpair()
        self.loop.call_soon_threadsafe(self.server.add, theirs, lambda connection: None)
        connection = HTTPConnection("sums")
        connection.sock = ours
        if path != "/sums" and not path.startswith("/sums?"):
            headers["x-cortex-endpoint"] = "/sums"
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        is_json = response.getheader("content-type") == "application/json"
        return response.status, json.loads(text) if is_json else text.decode()

    def status(self, job: str) -> str:
        return str(self.call("GET", f"/sums/{job}")[1]["job_status"]["status"])

    def close(self) -> None:
        self.server.stop()
        self.threads[1].join()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.threads[0].join()
        self.loop.close()
        self.api.close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    (tmp_path / "cortex.yaml").write_text(CONFIG)
    (tmp_path / "sums.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    made = Served(tmp_path)
    os.mkfifo("pipe")
    yield made
    made.close()


LINES = {"content-type": "application/x-ndjson"}


def test_lines_of_json_are_a_job(served: Served) -> None:
    lines = "\n".join(map(str, range(1000)))  # more than `max_body_size`, which is for other submissions
    status, job = served.call("POST", "/sums?workers=1&batch_size=600", lines, **LINES)
    assert (status, job["total_batch_count"]) == (200, 2)
    wait_until(lambda: served.status(job["job_id"]) == "succeeded")
    assert served.call("GET", f"/sums?jobID={job['job_id']}")[1]["results"] == [179700, 319800]
    assert served.call("POST", "/sums?workers=1", "[1]\n{", **LINES)[0] == 400


def test_a_dry_run_runs_nothing(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    body = json.dumps({"workers": 1, "item_list": {"items": [1], "batch_size": 1}})
    assert served.call("POST", "/sums?dryRun=true", body) == (200, "validations passed\n")
    assert served.call("POST", "/sums?dryRun=true", "{}")[0] == 400
    assert "job " not in capfd.readouterr().err


def test_a_stopped_job_ends_after_its_batch_and_one_that_waits_does_not_begin(served: Served) -> None:
    items = {"workers": 1, "item_list": {"items": ["wait", 1], "batch_size": 1}}
    first, second = (served.call("POST", "/sums", json.dumps(items))[1]["job_id"] for _ in range(2))
    wait_until(lambda: served.status(first) == "running")
    for job in (first, second):
        assert served.call("DELETE", f"/sums/{job}") == (200, {"message": f"stopped job {job}"})
        assert served.status(job) == "stopped"
    status, refused = served.call("DELETE", f"/sums?jobID={first}")
    assert (status, refused["kind"], refused["error"]) == (409, "conflict", "BatchAPI job has already been stopped")
    Path("pipe").write_text("")
    _, last = served.call("POST", "/sums", json.dumps({"workers": 1, "item_list": {"items": [1], "batch_size": 1}}))
    wait_until(lambda: served.status(last["job_id"]) == "succeeded")
    assert [served.call("GET", f"/sums/{job}")[1]["results"] for job in (first, second)] == [["waited"], []]
    assert served.status(first) == "stopped"


def test_a_constructor_that_exits_ends_its_job_only(served: Served) -> None:
    items: dict[str, Any] = {"workers": 1, "item_list": {"items": [1], "batch_size": 1}}
    _, job = served.call("POST", "/sums", json.dumps({**items, "config": {"exits": 1}}))
    wait_until(lambda: served.status(job["job_id"]) == "worker_error")
    _, last = served.call("POST", "/sums", json.dumps(items))
    wait_until(lambda: served.status(last["job_id"]) == "succeeded")


def test_options_without_effect_are_named(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    body = {"workers": 2, "output": "s3://bucket/x", "item_list": {"items": [1], "batch_size": 1}}
    _, job = served.call("POST", "/sums", json.dumps(body))
    ignored = "cortex dev ignores workers, output (GET the job for its results)"
    assert f"job {job['job_id']}: {ignored}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("GET", "/sums/none", "", 404, "there is no job none"),
        ("GET", "/sums", "", 400, "query param required: jobID; write <endpoint>?jobID=<job id>"),
        ("POST", "/sums?workers=1", "{}", 400, "query: "),
        ("POST", "/sums", '"' + "x" * 2000, 413, "the body is larger than 1024 bytes; raise networking.max_body_size"),
        ("PUT", "/sums", "", 405, "PUT is not a method of this path"),
    ],
)
def test_errors_have_the_form_of_the_operator(
    served: Served, method: str, path: str, body: str, status: int, error: str
) -> None:
    found, answer = served.call(method, path, body)
    assert (found, answer["message"][: len(error)]) == (status, error)
    assert answer.keys() == {"kind", "message", "error", "request_id"}
