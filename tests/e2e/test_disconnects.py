"""Clients that disconnect, through a real gateway: directly, through a splitter, and while no replica runs yet."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.installations.installation import Installation, write_project
from harness.wait import wait_until

HANDLER = """
    import pathlib, time

    import cortex

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            folder = pathlib.Path(payload["folder"])
            (folder / "started").touch()
            while not (payload["asks"] and cortex.cancelled()):
                time.sleep(0.01)
            (folder / "cancelled").touch()
"""
CONFIG = """
    - name: direct
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {access_log: true}
      autoscaling: {max_replicas: 1}
    - name: cold
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {access_log: true}
      autoscaling: {min_replicas: 0, init_replicas: 0, max_replicas: 1}
    - name: strict
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {access_log: true, on_disconnect: kill}
      autoscaling: {max_replicas: 1}
    - name: split
      kind: TrafficSplitter
      apis: [{name: direct, weight: 100}]
"""


@pytest.fixture(scope="module")
def deployed(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("project")
    write_project(folder, HANDLER, CONFIG)
    cortex.cortex("deploy", folder)
    return cortex


def call_and_disconnect(cortex: Installation, endpoint: str, folder: Path, asks: bool) -> None:
    body = json.dumps({"folder": str(folder), "asks": asks}).encode()
    with socket.create_connection(("127.0.0.1", cortex.gateway_port)) as client:
        head = f"POST {endpoint} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until((folder / "started").exists, timeout_s=30)


def access_log(cortex: Installation, api: str) -> list[dict[str, Any]]:
    complete = (cortex.home / "logs" / "access.log").read_text().rpartition("\n")[0]  # the last line may be unfinished
    return [line for line in map(json.loads, complete.splitlines()) if line["api"] == api]


@pytest.mark.parametrize(("endpoint", "api"), [("/direct", "direct"), ("/split", "direct"), ("/cold", "cold")])
def test_a_call_is_cancelled_and_logged_as_499(deployed: Installation, endpoint: str, api: str, tmp_path: Path) -> None:
    call_and_disconnect(deployed, endpoint, tmp_path, asks=True)
    wait_until((tmp_path / "cancelled").exists)
    line = wait_until(lambda: next((line for line in access_log(deployed, api) if line["path"] == endpoint), None))
    assert (line["status"], line["termination"][0]) == (499, "C")


def test_with_kill_the_process_of_a_call_that_continues_ends(deployed: Installation, tmp_path: Path) -> None:
    def process() -> Any:
        return next(found for found in deployed.status()["replicas"] if found["api"] == "strict")

    before = process()["pid"]
    call_and_disconnect(deployed, "/strict", tmp_path, asks=False)
    after = wait_until(lambda: (found := process())["last_death"] and found)
    assert after["pid"] != before
    assert after["last_death"]["cause"] == "client disconnected"
