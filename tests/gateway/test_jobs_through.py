"""Submissions through a real gateway to the real application behind the jobs socket."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cortex.home import Home
from harness.jobs.jobs_server import LIMITS, JobsServer, jobs_server
from harness.servers.upstream import backend, run, table, world

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("curl") is None and "CI" not in os.environ, reason="there is no curl"),
]

SUBMISSION = json.dumps({"workers": 1, "item_list": {"items": [1, 2, 3], "batch_size": 2}})


def through(home: Home, test: Callable[[JobsServer, int], None]) -> None:
    """Run a test in a thread, with the gateway's port."""

    async def scenario(server: JobsServer) -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("sum", jobs_socket=str(server.path))))
            await asyncio.to_thread(test, server, w.port)

    with jobs_server() as server:
        run(scenario(server))


def curl(port: int, target: str, *options: str | Path, stdin: bytes = b"") -> tuple[int, str, dict[str, str]]:
    """Return status, body and headers of a response to curl."""
    command = ["curl", "-sS", "--max-time", "120", "-D", "/dev/stderr", *options, f"http://127.0.0.1:{port}{target}"]
    done = subprocess.run(list(map(os.fspath, command)), input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    head = done.stderr.decode().replace("\r", "").strip().split("\n\n")[-1].splitlines()
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
    return int(head[0].split()[1]), done.stdout.decode(), headers


def test_a_job_is_submitted_queried_and_stopped(home: Home) -> None:
    def test(server: JobsServer, port: int) -> None:
        status, body, headers = curl(port, "/sum", "-d", SUBMISSION)
        assert status == 200
        assert headers["x-cortex-request-id"]
        job = json.loads(body)["job_id"]
        for path in (f"/sum?jobID={job}", f"/sum/{job}"):
            status, body, _ = curl(port, path)
            assert (status, json.loads(body)["job_status"]["job_id"]) == (200, job)
        assert curl(port, f"/sum/{job}", "-X", "DELETE")[0] == 200
        status, body, headers = curl(port, f"/sum?jobID={job}")
        assert (status, json.loads(body)["request_id"]) == (404, headers["x-cortex-request-id"])

    through(home, test)


@pytest.mark.parametrize("options", [("-H", "expect: 100-continue"), ("-H", "expect:")])
def test_a_file_of_lines_is_uploaded(home: Home, tmp_path: Path, options: tuple[str, str]) -> None:
    lines = tmp_path / "items.jsonl"
    lines.write_text("".join(f"{number}\n" for number in range(400_000)))
    assert lines.stat().st_size > LIMITS.max_body_bytes

    def test(server: JobsServer, port: int) -> None:
        target = "/sum?workers=1&batch_size=100"
        kind = ("-H", "content-type: application/x-ndjson", "-X", "POST")
        for source in (("-T", lines), ("-T", "-"), ("--data-binary", f"@{lines}")):
            status, body, _ = curl(port, target, *kind, *options, *source, stdin=lines.read_bytes())
            assert (status, json.loads(body)["total_batch_count"]) == (200, 4000)

    through(home, test)


@pytest.mark.parametrize("options", [(), ("-H", "expect:"), ("-H", "expect:", "-H", "transfer-encoding: chunked")])
def test_an_upload_refused_before_its_end_gets_the_reason(home: Home, tmp_path: Path, options: tuple[str, ...]) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"{" + b" " * 20_000_000 + b"\n")

    def test(server: JobsServer, port: int) -> None:
        status, body, _ = curl(port, "/sum", *options, "--data-binary", f"@{large}")
        assert (status, json.loads(body)["kind"]) == (413, "too_large")
        kind = ("-H", "content-type: application/x-ndjson")
        status, body, _ = curl(port, "/sum?workers=1", *kind, *options, "--data-binary", f"@{large}")
        assert (status, json.loads(body)["kind"]) == (400, "bad_submission")
        assert not server.jobs.records

    through(home, test)
