"""Job routes of users on a real Unix socket, called like the gateway calls them."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from cortex.errors import BusyError, StorageError
from cortex.jobs.intake.request_body import RequestMemory
from harness.connections import UnixConnection
from harness.jobs.jobs_server import LIMITS, JobsServer, jobs_server
from harness.wait import PATIENCE_S, wait_until

LINES = {"content_type": "application/x-ndjson"}


@pytest.fixture
def server() -> Iterator[JobsServer]:
    with jobs_server() as running:
        yield running


def submission(**changes: Any) -> str:
    return json.dumps({"workers": 1, "item_list": {"items": [1, 2, 3], "batch_size": 2}, **changes})


def test_a_submission_returns_its_job(server: JobsServer) -> None:
    status, job = server.as_user("POST", body=submission(config={"x": 1}, timeout=60))
    assert (status, job["api_name"], job["kind"], job["workers"]) == (200, "sum", "BatchAPI", 1)
    assert (job["config"], job["timeout"], job["total_batch_count"]) == ({"x": 1}, 60, 2)
    assert job["message"] == f"submitted job {job['job_id']}"
    assert server.jobs.batches[job["job_id"]] == [b"[1,2]", b"[3]"]


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "text/plain", ""])
def test_the_content_type_of_a_submission_does_not_matter(server: JobsServer, kind: str) -> None:
    assert server.as_user("POST", body=submission(), content_type=kind)[0] == 200


@pytest.mark.parametrize("lines", [False, True])
def test_a_compressed_submission_is_decompressed(server: JobsServer, lines: bool) -> None:
    query, body, kind = ("?workers=1&batch_size=2", "1\n2\n3\n", LINES) if lines else ("", submission(), {})
    packed = gzip.compress(body.encode(), mtime=0)
    status, job = server.as_user("POST", query, body=packed, content_encoding="gzip", **kind)
    assert status == 200, job
    assert server.jobs.batches[job["job_id"]] == [b"[1,2]", b"[3]"]
    for sent, coding, refused in (
        (packed[:-4], "gzip", 400),
        (body.encode(), "gzip", 400),
        (packed, "br", 415),
        (gzip.compress(b" " * 20_000_000), "gzip", 413),
    ):
        assert server.as_user("POST", query, body=sent, content_encoding=coding, **kind)[0] == refused
    assert len(server.jobs.records) == 1


def test_a_submission_is_decoded_by_its_character_set(server: JobsServer) -> None:
    body = submission(config={"x": "é"})
    for charset, status in (("utf-16", 200), ("punycode", 415)):
        sent = body.encode("utf-16")
        assert server.as_user("POST", body=sent, content_type=f"application/json; charset={charset}")[0] == status


@pytest.mark.parametrize("form", ["?jobID={}", "/{}"])
def test_a_job_is_read_and_stopped_with_both_url_forms(server: JobsServer, form: str) -> None:
    job_id = server.as_user("POST", body=submission())[1]["job_id"]
    headers = {"x_cortex_job": job_id} if form[0] == "/" else {}
    status, job = server.as_user("GET", form.format(job_id), **headers)
    assert (status, job["job_status"]["job_id"], job["job_status"]["status"]) == (200, job_id, "pending")
    assert set(job) == {"job_status", "endpoint", "api_spec"}
    assert "swordfish" not in json.dumps(job)
    assert server.as_user("DELETE", form.format(job_id), **headers) == (200, {"message": f"stopped job {job_id}"})
    status, refusal = server.as_user("GET", form.format(job_id), **headers)
    assert (status, refusal["message"]) == (404, f"unable to find BatchAPI job {job_id} (sum api)")


@pytest.mark.parametrize(
    ("method", "query", "headers", "status", "message"),
    [
        ("GET", "", {}, 400, "query param required: jobID; write <endpoint>?jobID=<job id>"),
        ("DELETE", "?jobID=", {}, 400, "query param required: jobID; write <endpoint>?jobID=<job id>"),
        ("GET", "?jobID=1", {}, 404, "unable to find BatchAPI job 1 (sum api)"),
        ("DELETE", "/1", {"x_cortex_job": "1"}, 404, "unable to find BatchAPI job 1 (sum api)"),
        ("GET", "?jobID=1", {"x_cortex_api": "other"}, 404, "other is not deployed"),
        ("POST", "", {"x_cortex_api": "other"}, 404, "other is not deployed"),
        ("PUT", "", {}, 405, "PUT is not a method of this path, which has POST, GET, DELETE"),
        ("POST", "/1", {"x_cortex_job": "1"}, 405, "POST is not a method of this path, which has GET, DELETE"),
        ("POST", "?dryRun=perhaps", {}, 400, "dryRun: must be true or false (got perhaps); write dryRun=true"),
        ("POST", "?dryrun=true", {}, 400, 'query: key "dryrun" is not supported; did you mean "dryRun"?'),
    ],
)
def test_errors_have_one_form(
    server: JobsServer, method: str, query: str, headers: dict[str, str], status: int, message: str
) -> None:
    answer, body = server.as_user(method, query, **headers)
    assert (answer, body["message"], body["error"], body["request_id"]) == (status, message, message, "r-1")
    assert body["kind"]


def test_a_wrong_method_gets_the_list_of_allowed_methods(server: JobsServer) -> None:
    assert server.send("PATCH", "/sum", headers={"x-cortex-api": "sum"})[1]["allow"] == "POST, GET, DELETE"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", ""),
        ("{", ""),
        ("[]", ""),
        (b"\xff\xfe", ""),
        (b"\x00" * 100, ""),
        ("[" * 100_000, ""),
        (gzip.compress(b"{}", mtime=0), ""),
        ('{"workers": 1}', "specify exactly one of the following keys"),
        (submission(workers=0), "workers"),
    ],
)
def test_rejects_an_invalid_body_and_stores_nothing(server: JobsServer, body: str | bytes, words: str) -> None:
    status, answer = server.as_user("POST", body=body)
    assert status == 400
    assert answer["kind"] == "bad_submission"
    assert words in answer["message"]
    assert not server.jobs.records


def test_rejects_a_body_over_the_limit_before_it_is_complete(server: JobsServer) -> None:
    size = LIMITS.max_body_bytes + 1
    connection = UnixConnection(server.path)
    connection.putrequest("POST", "/sum")
    connection.putheader("x-cortex-api", "sum")
    connection.putheader("content-length", str(size))
    connection.endheaders()
    response = connection.getresponse()  # nothing of the body was sent
    assert response.status == 413
    message = json.loads(response.read())["message"]
    assert message.startswith(f"the body is larger than {size - 1} bytes; raise networking.max_body_size")
    connection.close()

    def endless() -> Iterator[bytes]:
        for _ in range(2 * size // 65536):
            yield b" " * 65536

    assert server.as_user("POST", body=endless())[0] == 413
    assert not server.jobs.records


def test_uploads_lines_beyond_the_body_limit(server: JobsServer) -> None:
    count = 200_000
    lines = b"".join(b"%d\n" % number for number in range(count))
    assert len(lines) > LIMITS.max_body_bytes
    pieces = [lines[start : start + 100_001] for start in range(0, len(lines), 100_001)]
    status, job = server.as_user("POST", "?workers=2&batch_size=100&config=%7B%22x%22:1%7D", iter(pieces), **LINES)
    assert (status, job["workers"], job["config"], job["total_batch_count"]) == (200, 2, {"x": 1}, count // 100)
    items = [item for payload in server.jobs.batches[job["job_id"]] for item in json.loads(payload)]
    assert items == list(range(count))


def test_rejects_an_invalid_line_and_stores_nothing(server: JobsServer) -> None:
    status, answer = server.as_user("POST", "?workers=1", b'1\n{"a":\n3\n', **LINES)
    assert (status, answer["kind"]) == (400, "bad_submission")
    assert "line 2" in answer["message"]
    assert not server.jobs.records


def _send_half(server: JobsServer, connection: socket.socket, kind: str) -> None:
    connection.connect(str(server.path))
    head = f"POST /sum?workers=1 HTTP/1.1\r\nhost: x\r\nx-cortex-api: sum\r\ncontent-type: {kind}\r\n"
    connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n4\r\n1\n2\n\r\n".encode())


def test_an_upload_whose_client_disconnects_stores_nothing(server: JobsServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        _send_half(server, connection, "application/x-ndjson")
        wait_until(lambda: server.jobs.uploads == 1)
    wait_until(lambda: server.jobs.uploads == 0)
    assert server.as_user("POST", body=submission())[1]["job_id"] == f"{0:016x}"


def test_a_submission_whose_client_disconnects_stores_nothing(server: JobsServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        _send_half(server, connection, "application/json")
    assert server.as_user("POST", body=submission())[1]["job_id"] == f"{0:016x}"


@pytest.mark.parametrize("kind", ["application/json", "application/jsonl; charset=utf-8"])
def test_sends_100_continue_to_a_client_that_expects_it(server: JobsServer, kind: str) -> None:
    query, body = ("?workers=1", b"1\n2\n") if "jsonl" in kind else ("", submission().encode())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(server.path))
        head = f"POST /sum{query} HTTP/1.1\r\nhost: x\r\nx-cortex-api: sum\r\ncontent-type: {kind}\r\n"
        connection.sendall(f"{head}expect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        response = HTTPResponse(connection)
        response.begin()
        assert response.status == 200


def test_sends_413_instead_of_100_continue_for_a_body_over_the_limit(server: JobsServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(server.path))
        connection.sendall(
            b"POST /sum HTTP/1.1\r\nhost: x\r\nx-cortex-api: sum\r\nexpect: 100-continue\r\n"
            b"content-length: 99999999\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


class TestDryRun:
    def test_lists_the_files_and_stores_nothing(self, server: JobsServer) -> None:
        body = submission(item_list=None, file_path_lister={"s3_paths": ["s3://bucket"], "batch_size": 1})
        body = json.dumps({key: value for key, value in json.loads(body).items() if value is not None})
        expected = "s3://bucket/a\ns3://bucket/b\nvalidations passed\n"
        assert server.as_user("POST", "?dryRun=true", body) == (200, expected)
        assert not server.jobs.records

    def test_lists_many_files(self, server: JobsServer) -> None:
        server.jobs.paths = [f"s3://bucket/{number}" for number in range(1001)]
        assert server.as_user("POST", "?dryRun=1", submission())[1].splitlines() == [
            *server.jobs.paths, "validations passed"
        ]  # fmt: skip

    def test_an_error_is_plain_text(self, server: JobsServer) -> None:
        status, text = server.as_user("POST", "?dryRun=true", submission(workers=0))
        assert status == 400
        assert "workers" in text

    def test_an_error_during_the_listing_ends_the_response(self, server: JobsServer) -> None:
        server.jobs.paths = [f"s3://bucket/{number}" for number in range(1000)]

        async def listed(api: str, submission: object, *, is_trusted: bool) -> Any:
            for path in server.jobs.paths:
                yield path
            raise StorageError("s3://bucket can't be read")

        server.jobs.dry_run = listed  # type: ignore[method-assign]
        status, text = server.as_user("POST", "?dryRun=true", submission())
        assert (status, text.splitlines()[-1]) == (200, "s3://bucket can't be read")
        server.jobs.paths = ["s3://bucket/1"]
        assert server.as_user("POST", "?dryRun=true", submission()) == (400, "s3://bucket can't be read\n")

    def test_checks_uploaded_lines(self, server: JobsServer) -> None:
        assert server.as_user("POST", "?workers=1&dryRun=true", b"1\n2\n", **LINES)[0] == 200
        status, text = server.as_user("POST", "?workers=1&dryRun=true", b"1\n{\n", **LINES)
        assert status == 400
        assert "line 2" in text
        assert not server.jobs.records


def test_an_internal_error_reveals_no_details(server: JobsServer) -> None:
    server.jobs.fails_with = RuntimeError("secret")
    status, answer = server.as_user("POST", body=submission())
    assert (status, answer["kind"]) == (500, "internal")
    assert "secret" not in json.dumps(answer)


def test_request_memory_is_limited_across_submissions() -> None:
    memory = RequestMemory(100)
    with memory.share() as first:
        first.acquire(60)
        with memory.share() as second:
            second.acquire(40)
            with pytest.raises(BusyError):
                second.acquire(1)
            with pytest.raises(BusyError):
                first.acquire(1)
        first.acquire(1000)  # a single submission is limited only by its API
        with memory.share() as third, pytest.raises(BusyError):
            third.acquire(1)
    with memory.share() as fourth:
        fourth.acquire(100)
