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

GREET = {"x-cortex-api": "greet"}


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
    assert (status, headers["content-type"]) == (200, "application/json")
    workload = server.workloads.added[-1]
    assert json.loads(answer) == {"id": str(workload.id)}
    assert (workload.content_type, workload.body) == (content_type, body)


def test_a_compressed_body_is_stored_decompressed(server: JobsServer) -> None:
    headers = {**GREET, "content-type": "application/json", "content-encoding": "gzip"}
    assert server.send("POST", "/greet", gzip.compress(b'{"a": 1}'), headers)[0] == 200
    assert server.workloads.added[-1].body == b'{"a": 1}'
    assert server.send("POST", "/greet", b'{"a": 1}', headers)[0] == 400
    status, answered, _ = server.send("POST", "/greet", b"x", {**headers, "content-encoding": "br"})
    assert (status, answered["accept-encoding"]) == (415, "gzip, deflate")


def test_rejects_a_text_in_an_unknown_character_set(server: JobsServer) -> None:
    for content_type, status in (
        ("text/plain; charset=punycode", 415),
        ("multipart/form-data; boundary=X; charset=hex", 415),
        ("image/png; charset=binary", 200),
    ):
        assert server.send("POST", "/greet", b"x", {**GREET, "content-type": content_type})[0] == status


def test_rejects_a_body_without_a_content_type(server: JobsServer) -> None:
    status, headers, answer = server.send("POST", "/greet", b"1", GREET)
    assert (status, headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert answer.startswith(b"error: the header Content-Type is missing; ")


def test_rejects_a_body_over_the_limit(server: JobsServer) -> None:
    status, _, answer = server.send("POST", "/greet", bytes(1024 * 1024 + 1), {**GREET, "content-type": "a/b"})
    assert (status, answer) == (
        413,
        b"error: the body is larger than 1048576 bytes; raise networking.max_body_size of the API",
    )


@pytest.mark.parametrize("error", [DatabaseUnavailableError("full"), BusyError("full")])
def test_a_database_failure_is_a_retryable_error(server: JobsServer, error: Exception) -> None:
    server.workloads.fails_with = error
    try:
        status, headers, answer = server.send("POST", "/greet", b"1", {**GREET, "content-type": "a/b"})
    finally:
        server.workloads.fails_with = None
    assert (status, headers["retry-after"], answer) == (503, "1", b"error: full")


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
    code, _, answer = server.send("GET", f"/greet/{name}", None, {**GREET, "x-cortex-job": str(name)})
    assert (code, json.loads(answer)) == (200, {"id": str(name), **shown})


@pytest.mark.parametrize("name", ["7d8a6f0e-3ad4-4f0c-9d4e-0d7c1d3f5a11", "nonsense", "%00"])
def test_an_unknown_workload_is_not_found(server: JobsServer, name: str) -> None:
    status, headers, answer = server.send("GET", f"/greet/{name}", None, {**GREET, "x-cortex-job": name})
    assert (status, headers["content-type"]) == (404, "text/plain; charset=utf-8")
    assert answer.decode() == f"error: id {name} not found"


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
    assert answer.startswith(b"error: wait: must be a number of seconds")


@pytest.mark.parametrize(
    ("method", "name", "allowed"), [("GET", None, "POST"), ("PUT", None, "POST"), ("DELETE", "x", "GET")]
)
def test_rejects_other_methods(server: JobsServer, method: str, name: str | None, allowed: str) -> None:
    headers = GREET if name is None else {**GREET, "x-cortex-job": name}
    status, answered, _ = server.send(method, "/greet", None, headers)
    assert (status, answered["allow"]) == (405, allowed)
