"""Routes of AsyncAPIs on a real Unix socket, called like the gateway calls them."""

from __future__ import annotations

import gzip
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cortex.errors import BusyError, DatabaseUnavailableError
from cortex.jobs.spec import WorkloadView
from cortex.lifecycle import WorkloadStatus
from cortex.operator.http.async_routes import MAX_WAIT_S
from harness.jobs.jobs_server import JobsServer, jobs_server
from harness.wait import wait_until

GREET = {"x-cortex-api": "greet", "x-cortex-request-id": "r-1"}
OLDER = {**GREET, "x-cortex-api": "older"}


@pytest.fixture(scope="module")
def server() -> Iterator[JobsServer]:
    with jobs_server() as running:
        yield running


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b'{"a": 1}'),
        ("text/plain; charset=latin-1", b"gr\xfc\xdfe"),
        ("image/png", b"\x89\n\x00\x1b"),
    ],
)
def test_a_body_is_stored_unchanged(server: JobsServer, content_type: str, body: bytes) -> None:
    status, headers, answer = server.send("POST", "/greet", body, {**GREET, "content-type": content_type})
    assert (status, headers["content-type"]) == (202, "application/json")
    workload = server.workloads.added[-1]
    assert (headers["location"], headers["retry-after"]) == (f"/greet/{workload.id}", "1")
    assert json.loads(answer) == {"id": str(workload.id)}
    assert (workload.content_type, workload.body) == (content_type, body)


def test_a_compressed_body_is_stored_decompressed(server: JobsServer) -> None:
    headers = {**GREET, "content-type": "application/json", "content-encoding": "gzip"}
    assert server.send("POST", "/greet", gzip.compress(b'{"a": 1}'), headers)[0] == 202
    assert server.workloads.added[-1].body == b'{"a": 1}'
    assert server.send("POST", "/greet", b'{"a": 1}', headers)[0] == 400
    status, answered, _ = server.send("POST", "/greet", b"x", {**headers, "content-encoding": "br"})
    assert (status, answered["accept-encoding"]) == (415, "gzip, deflate")


def test_rejects_a_text_in_an_unknown_character_set(server: JobsServer) -> None:
    for content_type, status in (
        ("text/plain; charset=punycode", 415),
        ("multipart/form-data; boundary=X; charset=hex", 415),
        ("image/png; charset=binary", 202),
    ):
        assert server.send("POST", "/greet", b"x", {**GREET, "content-type": content_type})[0] == status


def test_errors_have_the_form_of_a_realtime_api(server: JobsServer) -> None:
    too_large = "the body is larger than 1048576 bytes; raise networking.max_body_size of the API"
    malformed = "malformed JSON: unexpected end of data: line 1 column 2"
    for status, body, content_type, error in (
        (413, bytes(1024 * 1024 + 1), "a/b", too_large),
        (400, b"[", "application/json", malformed),
        (400, b"[" + b" " * 70_000, "application/json", None),
    ):
        answered = server.send("POST", "/greet", body, {**GREET, "content-type": content_type})
        shown = json.loads(answered[2])
        assert (answered[0], answered[1]["content-type"], shown.keys()) == (
            status,
            "application/json",
            {"error", "request_id"},
        )
        assert shown["request_id"] == "r-1"
        assert error in (shown["error"], None)
    status, headers, answer = server.send("PUT", "/greet", b"1", GREET)
    assert (status, headers["allow"], json.loads(answer)["request_id"]) == (405, "POST", "r-1")


def test_files_of_older_generations_keep_their_responses(server: JobsServer) -> None:
    typed = {**OLDER, "content-type": "application/json"}
    status, headers, answer = server.send("POST", "/older", b"[", typed)
    assert (status, "location" in headers, "retry-after" in headers) == (200, False, False)
    assert json.loads(answer) == {"id": str(server.workloads.added[-1].id)}
    status, headers, answer = server.send("POST", "/older", b"1", OLDER)
    assert (status, headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert answer.startswith(b"error: the header Content-Type is missing; ")
    status, _, answer = server.send("GET", "/older/nope", None, {**OLDER, "x-cortex-job": "nope"})
    assert (status, answer) == (404, b"error: id nope not found")


@pytest.mark.parametrize(
    ("key", "status", "given"), [('"a b"', 202, "a b"), ("a", 202, "a"), ("", 400, None), ("x" * 256, 400, None)]
)
def test_a_submission_can_have_an_idempotency_key(server: JobsServer, key: str, status: int, given: str | None) -> None:
    assert server.send("POST", "/greet", b"1", {**GREET, "idempotency-key": key})[0] == status
    assert given in (server.workloads.keys[-1], None)


def test_a_body_needs_no_content_type(server: JobsServer) -> None:
    assert server.send("POST", "/greet", b'{"a": 1}', GREET)[0] == 202
    assert server.workloads.added[-1].content_type == ""


@pytest.mark.parametrize("error", [DatabaseUnavailableError("full"), BusyError("full")])
def test_a_database_failure_is_a_retryable_error(server: JobsServer, error: Exception) -> None:
    server.workloads.fails_with = error
    try:
        status, headers, answer = server.send("POST", "/greet", b"1", {**GREET, "content-type": "a/b"})
    finally:
        server.workloads.fails_with = None
    assert (status, headers["retry-after"], json.loads(answer)["error"]) == (503, "1", "full")


@pytest.mark.parametrize(
    ("status", "ended_at", "value", "shown"),
    [
        (WorkloadStatus.IN_QUEUE, None, b"", {"status": "in_queue"}),
        (WorkloadStatus.IN_PROGRESS, None, b"", {"status": "in_progress"}),
        (
            WorkloadStatus.COMPLETED,
            1.5,
            b'{"n": 12345678901234567890123}',
            {
                "status": "completed",
                "result": {"n": 12345678901234567890123},
                "timestamp": "1970-01-01T00:00:01.500+00:00",
            },
        ),
        (
            WorkloadStatus.FAILED,
            1.5,
            b"ValueError: bad",
            {"status": "failed", "error": "ValueError: bad", "timestamp": "1970-01-01T00:00:01.500+00:00"},
        ),
    ],
)
def test_returns_the_status_and_result_of_a_workload(
    server: JobsServer, status: WorkloadStatus, ended_at: float | None, value: bytes, shown: dict[str, object]
) -> None:
    name = uuid.uuid4()
    server.workloads.views[name] = WorkloadView(name, 1, status, 1.0, ended_at, value)
    code, headers, answer = server.send("GET", f"/greet/{name}", None, {**GREET, "x-cortex-job": str(name)})
    assert ("retry-after" in headers) is (ended_at is None)
    assert (code, json.loads(answer)) == (200, {"id": str(name), **shown})


@pytest.mark.parametrize("name", ["7d8a6f0e-3ad4-4f0c-9d4e-0d7c1d3f5a11", "nonsense", "%00"])
def test_an_unknown_workload_is_not_found(server: JobsServer, name: str) -> None:
    status, headers, answer = server.send("GET", f"/greet/{name}", None, {**GREET, "x-cortex-job": name})
    assert (status, headers["content-type"]) == (404, "application/json")
    assert json.loads(answer) == {"error": f"id {name} not found", "request_id": "r-1"}


@pytest.mark.parametrize(("wait", "seconds"), [("2.5", 2.5), ("0", 0.0), ("100000", MAX_WAIT_S)])
def test_a_caller_can_wait_up_to_the_limit(server: JobsServer, wait: str, seconds: float) -> None:
    name = str(uuid.uuid4())
    server.send("GET", f"/greet/{name}?wait={wait}", None, {**GREET, "x-cortex-job": name})
    assert server.workloads.waited[-1] == seconds


def test_callers_beyond_the_maximum_number_of_waiters_do_not_wait(
    server: JobsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortex.operator.http.async_routes.MAX_WAITING", 2)
    name = uuid.uuid4()
    server.workloads.views[name] = WorkloadView(name, 1, WorkloadStatus.IN_PROGRESS, 1.0, None, b"")

    def get_workload(wait: int) -> tuple[int, object]:
        status, _, answer = server.send("GET", f"/greet/{name}?wait={wait}", None, {**GREET, "x-cortex-job": str(name)})
        return status, json.loads(answer)

    present = (200, {"id": str(name), "status": "in_progress"})
    server.workloads.waited.clear()
    server.workloads.may_end.clear()
    with ThreadPoolExecutor() as pool:
        try:
            waiting = [pool.submit(get_workload, 30) for _ in range(2)]
            wait_until(lambda: server.workloads.waited == [30, 30])
            assert get_workload(31) == present
        finally:
            server.workloads.may_end.set()
        assert [one.result() for one in waiting] == [present] * 2
    assert get_workload(32) == present
    assert server.workloads.waited == [30, 30, 0, 32]


@pytest.mark.parametrize("wait", ["soon", "-1", "nan", "inf", ""])
def test_rejects_a_wait_that_is_not_a_number_of_seconds(server: JobsServer, wait: str) -> None:
    name = str(uuid.uuid4())
    status, _, answer = server.send("GET", f"/greet/{name}?wait={wait}", None, {**GREET, "x-cortex-job": name})
    assert status == 400
    assert json.loads(answer)["error"].startswith("wait: must be a number of seconds")


@pytest.mark.parametrize(
    ("method", "name", "allowed"), [("GET", None, "POST"), ("PUT", None, "POST"), ("DELETE", "x", "GET")]
)
def test_rejects_other_methods(server: JobsServer, method: str, name: str | None, allowed: str) -> None:
    headers = GREET if name is None else {**GREET, "x-cortex-job": name}
    status, answered, _ = server.send(method, "/greet", None, headers)
    assert (status, answered["allow"]) == (405, allowed)
