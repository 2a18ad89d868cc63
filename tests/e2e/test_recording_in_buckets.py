"""Record into a real bucket, replay from there, and serve on while the bucket does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.installations.installation import Installation, installation, write_project
from harness.servers.buckets import BUCKET
from harness.servers.s3 import SwiftServer
from harness.wait import wait_until

SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return payload
"""
#: An object is written with each mebibyte, and not after 30 seconds.
CONFIG = f"""
    - name: echo
      kind: RealtimeAPI
      handler: {{type: python, path: handler.py}}
      networking:
        record: {{share: 100%, max_cpu: 100%, max_size: 16Mi, to: "s3://{BUCKET}/recordings"}}
"""
REQUESTS, TEXT = 60, "x" * 20_000


@pytest.fixture
def recorded(swift: SwiftServer, tmp_path: Path) -> Iterator[Installation]:
    """An API that records into the bucket."""
    with installation(swift.environ) as cortex:
        cortex.cortex("deploy", write_project(tmp_path / "project", SOURCE, CONFIG))
        yield cortex


def send(cortex: Installation) -> set[int]:
    return {cortex.post("/echo", {"number": number, "text": TEXT}).status for number in range(REQUESTS)}


def recording_of(cortex: Installation) -> dict[str, Any]:
    found: dict[str, Any] = cortex.get("echo")["recording"]
    return found


@pytest.mark.long
def test_a_recording_in_a_bucket_is_replayed_and_a_bucket_that_is_away_stops_nothing(
    recorded: Installation, swift: SwiftServer, tmp_path: Path
) -> None:
    assert send(recorded) == {200}
    wait_until(lambda: recording_of(recorded)["recorded"] == REQUESTS)
    swift.go_down()
    try:
        assert send(recorded) == {200}
        wait_until(lambda: sum(recording_of(recorded)["unrecorded"].values()) > 0)
        assert send(recorded) == {200}
        shown = recorded.cortex("get", "echo").stdout
        assert "not recorded: " in shown and "`cortex logs` shows why" in shown
        wait_until(lambda: "recording of requests to s3://" in recorded.cortex("logs", "echo").stdout)
    finally:
        swift.come_back()
    written = recording_of(recorded)["recorded"]
    assert REQUESTS <= written < 3 * REQUESTS
    recorded.cortex("delete", "echo")  # writes the rest
    folder = tmp_path / "project"

    def replayed() -> str:
        run = recorded.cortex("replay", f"s3://{BUCKET}/recordings/echo", "--against", f"{folder}/", check=False)
        return run.stdout if run.returncode == 0 else ""

    assert f"all {written} answers are the same" in wait_until(replayed, 60)
