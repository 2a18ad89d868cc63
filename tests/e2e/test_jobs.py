"""A user's steps with jobs: deploy, submit, inspect, read the results; by HTTP and with the client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.installations.batch_api import BatchApi
from harness.installations.installation import Installation, write_project
from harness.wait import wait_until


@pytest.fixture(scope="module")
def api(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> BatchApi:
    return BatchApi.deployed(cortex, tmp_path_factory.mktemp("batch"), "batch")


def test_job_by_http(api: BatchApi) -> None:
    reply = api.post({"workers": 2, "item_list": {"items": list(range(10)), "batch_size": 3}, "config": {"a": 1}})
    assert reply.status == 200, reply
    assert reply.json["api_name"] == "batch"
    assert (reply.json["kind"], reply.json["workers"], reply.json["config"]) == ("BatchAPI", 2, {"a": 1})
    job = reply.json["job_id"]
    status = api.ended(job)
    assert status["total_batch_count"] == 4
    assert status["batch_metrics"]["succeeded"] == 4
    assert status["batch_metrics"]["average_time_per_batch"] >= 0
    assert status["batches_in_queue"] == 0
    assert [line["items"] for line in api.results(job)] == [3, 3, 3, 1]
    assert [line["first_item"] for line in api.results(job)] == [0, 3, 6, 9]
    assert api.returned(job) == list(range(10))
    assert len(api.noted(job, "called")) == 4
    assert len(api.noted(job, "completed")) == 1
    older = api.cortex.post(f"/batch/{job}", method="GET")
    assert older.json["job_status"]["status"] == "succeeded"
    assert api.cortex.url("/batch") == older.json["endpoint"]
    refused = api.cortex.post(f"/batch?jobID={job}", method="DELETE", body=b"")
    assert refused.status in (400, 409)
    assert refused.json["message"] == "cannot stop BatchAPI job because it is not in progress"
    for path in ("/batch?jobID=nothing", "/batch/nothing"):
        unknown = api.cortex.post(path, method="GET")
        assert (unknown.status, unknown.json["message"]) == (404, "unable to find BatchAPI job nothing (batch api)")


def test_uploads_any_number_of_lines(api: BatchApi, tmp_path: Path) -> None:
    items = tmp_path / "items.ndjson"
    items.write_text("".join(f"{number}\n" for number in range(20_000)))
    reply = api.post(None, "?workers=2&batch_size=100", body=items.read_bytes(), content_type="application/x-ndjson")
    assert reply.status == 200, reply
    jobs = [reply.json["job_id"]]
    jobs.append(api.client.submit_job("batch", {"workers": 2, "batch_size": 100}, items=items)["job_id"])
    for job in jobs:
        assert api.ended(job)["total_batch_count"] == 200
        assert api.returned(job) == list(range(20_000))
    refused = api.post(None, "?workers=2", body=b'1\n{"a":\n3\n', content_type="application/x-ndjson")
    assert refused.status == 400
    assert "line 2" in refused.json["message"]


SEEN = """
    class Handler:
        def __init__(self, config, job_spec):
            self.config, self.job_spec = config, job_spec

        def handle_batch(self, payload, batch_id):
            return {"config": self.config, "job_spec": self.job_spec, "batch_id": batch_id, "payload": payload}
"""
SEEN_CONFIG = """
    - name: seen
      kind: BatchAPI
      handler:
        type: python
        path: handler.py
        config: {labels: {a: 1, b: 2}, size: 3}
"""


def test_code_sees_the_merged_config_and_the_job_as_documented(cortex: Installation, tmp_path: Path) -> None:
    write_project(tmp_path / "project", SEEN, SEEN_CONFIG)
    cortex.cortex("deploy", tmp_path / "project")
    api = BatchApi(cortex, "seen", tmp_path)
    job = api.submit([{"x": None}, "é"], batch_size=2, config={"labels": {"b": 3}, "more": [1]}, timeout=100)
    api.ended(job)
    line = api.results(job)[0]
    seen = line["result"]
    assert seen["config"] == {"labels": {"a": 1, "b": 3}, "size": 3, "more": [1]}
    assert seen["payload"] == [{"x": None}, "é"]
    assert seen["batch_id"] == line["batch_id"]
    expected = {
        "job_id": job,
        "api_name": "seen",
        "kind": "BatchAPI",
        "config": {"labels": {"b": 3}, "more": [1]},
        "workers": 1,
        "timeout": 100,
        "total_batch_count": 1,
    }
    assert {name: seen["job_spec"].get(name) for name in expected} == expected
    assert seen["job_spec"]["start_time"]


def test_failed_batch_is_retried_and_becomes_a_dead_letter_that_a_fixed_version_can_retry(
    cortex: Installation, tmp_path: Path
) -> None:
    api = BatchApi.deployed(cortex, tmp_path, "mended")
    bad = {"do": "raise", "number": 5, "until": "1"}
    job = api.submit([1, 2, 3, 4, bad, 6], workers=2, batch_size=2, max_attempts=2)
    status = api.ended(job, "completed_with_failures")
    assert status["batch_metrics"] | {"average_time_per_batch": 0, "avg_time_per_batch": 0} == {
        "succeeded": 2,
        "failed": 1,
        "average_time_per_batch": 0,
        "avg_time_per_batch": 0,
    }
    assert (status["failed_attempts"], status["dead_letters"]) == (2, 1)
    assert api.returned(job) == [1, 2, 3, 4]
    (letter,) = api.dead_letters(job)
    assert (letter["seq"], letter["first_item"], letter["items"], letter["attempts"]) == (2, 4, 2, 2)
    assert letter["payload"] == [bad, 6]
    assert letter["error"] == "ValueError: can't do 5"
    assert 'File "handler.py"' in letter["traceback"]
    assert len([note for note in api.noted(job, "called") if note[1] == letter["batch_id"]]) == 2
    shown = cortex.cortex("get", "mended", job, "--dead-letters").stdout
    assert json.loads(shown.splitlines()[0]) == letter
    BatchApi.deployed(cortex, tmp_path, "mended", version="2")
    done = json.loads(cortex.cortex("submit", "mended", "--retry-failed", job, "-o", "json").stdout)
    again = done["job_id"]
    assert api.ended(again)["total_batch_count"] == 1
    assert api.returned(again) == [bad, 6]
    assert len(api.noted(job, "completed")) == len(api.noted(again, "completed")) == 1


def test_bad_items_are_isolated_and_their_neighbours_succeed(api: BatchApi) -> None:
    bad = [{"do": "raise", "number": number} for number in (3, 11)]
    items = [bad[0] if number == 3 else bad[1] if number == 11 else number for number in range(16)]
    job = api.submit(items, workers=2, batch_size=8, max_attempts=1, isolate_failures=True)
    status = api.ended(job, "completed_with_failures")
    assert status["items"] == {"total": 16, "succeeded": 14, "failed": 2}
    letters = api.dead_letters(job)
    assert sorted(letter["first_item"] for letter in letters) == [3, 11]
    assert all(letter["items"] == 1 for letter in letters)
    good = [each["item"] for line in api.results(job) for each in line["result"]]
    assert sorted(good) == [number for number in range(16) if number not in (3, 11)]
    by_place = {line["first_item"]: line["result"][0]["item"] for line in api.results(job)}
    assert all(place == item for place, item in by_place.items())


def test_death_of_the_process_counts_as_an_attempt_and_is_reported(api: BatchApi) -> None:
    items = [1, {"do": "exit"}, 3, {"do": "null dereference"}, {"do": "sleep", "s": 60}]
    job = api.submit(items, workers=3, max_attempts=2, batch_timeout=4)
    status = api.ended(job, "completed_with_failures", timeout_s=60)
    assert (status["failed_attempts"], status["batch_metrics"]["succeeded"]) == (6, 2)
    letters = {letter["payload"][0]["do"]: letter["error"] for letter in api.dead_letters(job)}
    assert letters == {
        "exit": "the worker's process died: exited with code 3",
        "null dereference": "the worker's process died: segmentation fault (SIGSEGV)",
        "sleep": "the worker's process died: timed out after 4 s",
    }
    assert api.returned(job) == [1, 3]


def test_constructor_that_raises_ends_the_job_with_its_traceback(api: BatchApi) -> None:
    job = api.submit([1], config={"broken": True})
    status = api.ended(job, "worker_error", timeout_s=60)
    assert "RuntimeError: no weights" in status["message"] + status["traceback"]
    assert 'File "handler.py"' in status["traceback"]
    assert "no weights" in api.cortex.cortex("get", "batch", job).stdout
    assert api.noted(job, "completed") == []


def test_completion_hook_that_raises_is_a_worker_error_and_is_not_repeated(api: BatchApi) -> None:
    job = api.submit([{"do": "wait", "gate": "raise-at-end"}])
    api.wait_for_notes(job, "called")
    (api.notes / f"{job}.end").write_text("raise")
    api.open("raise-at-end")
    status = api.ended(job, "worker_error")
    assert "the end can't be done" in status["message"]
    assert len(api.noted(job, "completed")) == 1
    assert len(api.results(job)) == 1


class Webhook:
    """Records webhook calls; refuses the first one."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, str], Any]] = []
        outer = self

        class Receiver(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.told.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(204 if len(outer.told) > 1 else 503)
                self.end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    made = Webhook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_results_are_written_to_the_output_and_the_webhook_is_called(
    api: BatchApi, webhook: Webhook, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{webhook.server.server_port}/hook"
    bad = {"do": "raise", "number": 1}
    refused = api.post({"workers": 1, "item_list": {"items": [1]}, "output": "/proc/nowhere"})
    assert (refused.status, "/proc/nowhere" in refused.json["message"]) == (400, True), refused
    job = api.submit([1, bad, 3], max_attempts=1, output=str(tmp_path / "out"), webhook=url)
    api.ended(job, "completed_with_failures")
    folder = tmp_path / "out" / job
    assert {path.name for path in folder.iterdir()} == {"part-00000.ndjson", "dead-letters.ndjson", "_SUCCESS"}
    lines = [json.loads(line) for line in (folder / "part-00000.ndjson").read_text().splitlines()]
    assert lines == api.results(job)
    assert json.loads((folder / "dead-letters.ndjson").read_text()) == api.dead_letters(job)[0]
    wait_until(lambda: len(webhook.told) >= 2, 20)
    headers, body = webhook.told[1]
    assert headers["x-cortex-job-id"] == job
    assert (body["job_status"]["job_id"], body["job_status"]["status"]) == (job, "completed_with_failures")
    assert any(line.endswith("; trying again in 2 s") for line in api.client.job_logs("batch", job))


def test_logs_of_all_workers_are_in_one_place(api: BatchApi) -> None:
    items = [{"do": "print", "text": f"printed {number}"} for number in range(3)]
    job = api.submit([*items, {"do": "exit"}], workers=2, max_attempts=1)
    api.ended(job, "completed_with_failures")

    def log() -> str:
        return api.cortex.cortex("logs", "batch", job).stdout

    text = wait_until(lambda: all(f"printed {number}" in log() for number in range(3)) and log())
    assert "exited with code 3" in text
    assert list(api.client.job_logs("batch", job))
