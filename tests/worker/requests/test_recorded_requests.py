"""Recordings of real workers: classes, routes, streams, applications; disks that are missing or full."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex.recording.files import Recording
from harness.replicas.replicas import new_request_id, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

CLASS = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            if payload == "fail":
                raise ValueError("no")
            return {"twice": 2 * payload}

        def handle_get(self):
            yield "one "
            yield "two"
"""
APPLICATION = """
    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        for part in (b'{"path": "%b",' % scope["path"].encode(), b' "bytes": %d}' % len(body)):
            await send({"type": "http.response.body", "body": part, "more_body": part[0:1] == b"{"})
"""


def fields(folder: Path) -> dict[str, Any]:
    return {"record_share": 1.0, "record_max_bytes": 16 * 1024**2, "record_to": str(folder)}


def lines(folder: Path, count: int) -> list[dict[str, Any]]:
    """Return the exchanges, once there are so many."""

    def read() -> list[dict[str, Any]]:
        texts = [path.read_text() for path in folder.rglob("*.ndjson")]
        complete = [text[: text.rfind("\n") + 1] for text in texts]  # a line may be in the middle of being written
        found = [json.loads(line) for text in complete for line in text.splitlines()[1:]]
        return found if len(found) >= count else []

    return wait_until(read, message=f"{count} recorded requests")


def test_calls_errors_and_streams_of_a_class_are_recorded(tmp_path: Path) -> None:
    with running_replica(CLASS, **fields(tmp_path)) as replica:
        replica.wait_ready()
        ids = [new_request_id() for _ in range(4)]
        replica.request(4, path="/api?a=1", request_id=ids[0])
        replica.request("fail", request_id=ids[1])
        replica.request(method="GET", request_id=ids[2], headers={"x-cortex-info": "1"})  # of /info: not recorded
        replica.request(method="GET", request_id=ids[3])
        good, failed, stream = lines(tmp_path, 3)
    assert [each["id"] for each in (good, failed, stream)] == [ids[0], ids[1], ids[3]]
    assert (good["query"], good["status"], good["request"]["json"]) == ("a=1", 200, 4)
    assert good["response"]["json"] == {"twice": 8}
    assert good["duration_ms"] >= good["handler_ms"] > 0
    assert (failed["status"], failed["response"]["json"]["request_id"]) == (500, ids[1])
    assert (stream["method"], stream["response"]["text"], stream["stream"]) == ("GET", "one two", True)


@pytest.mark.parametrize("size", [5, 700_000])
def test_requests_of_an_application_are_recorded_with_the_parts_of_their_bodies(tmp_path: Path, size: int) -> None:
    with running_replica(APPLICATION, type="asgi", app="app", **fields(tmp_path)) as replica:
        replica.wait_ready()
        answer = replica.request(
            body=b"x" * size,
            path="/api/v1/items",
            headers={"x-cortex-endpoint": "/api", "content-type": "text/plain"},
        )
        assert answer.json["bytes"] == size
        [found] = lines(tmp_path, 1)
    assert (found["path"], found["status"]) == ("/v1/items", 201)
    assert found["request"] == {"content_type": "text/plain", "text": "x" * size}
    assert found["response"] == {
        "content_type": "application/json",
        "json": {"path": answer.json["path"], "bytes": size},
    }


def test_a_worker_that_is_killed_leaves_a_recording_that_can_be_read(tmp_path: Path) -> None:
    with running_replica(CLASS, **fields(tmp_path)) as replica:
        pid = replica.wait_ready().processes[0].pid
        assert pid is not None
        for number in range(20):
            replica.request(number)
        lines(tmp_path, 20)
        os.kill(pid, 9)
        wait_until(lambda: (status := replica.status()).is_ready and status.processes[0].pid != pid)
        replica.request(20)
        lines(tmp_path, 21)
    recording = Recording.open(tmp_path)
    assert len(recording.files) == 2
    assert len(list(recording.exchanges())) == 21


def test_a_missing_disk_stops_recording_and_not_serving(tmp_path: Path) -> None:
    with running_replica(CLASS, **fields(tmp_path / "missing" / "disk")) as replica:
        replica.wait_ready()
        assert {replica.request(number).status for number in range(10)} == {200}
        wait_until(lambda: "recording of requests" in replica.log())
        assert {replica.request(number).status for number in range(10)} == {200}
        log = replica.log()
    assert log.count("recording of requests") == 1
    assert "stopped: No such file or directory; requests are served as before" in log


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this machine mounts nothing: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.long
def test_a_full_disk_stops_recording_and_not_serving(small_disk: Path) -> None:
    with running_replica(CLASS, **fields(small_disk)) as replica:
        replica.wait_ready()
        payload = "x" * 40_000
        for _ in range(40):
            assert replica.request(payload).json == {"twice": 2 * payload}
        wait_until(lambda: "recording of requests" in replica.log())
        assert {replica.request(payload).status for _ in range(40)} == {200}
        log = replica.log()
    assert log.count("recording of requests") == 1
    assert "stopped: No space left on device; requests are served as before" in log
    recording = Recording.open(small_disk)
    assert sum(1 for _ in recording.exchanges()) > 3  # each line is complete
    assert not any(file.has_unfinished_line() for file in recording.files)
