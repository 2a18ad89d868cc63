"""Processes are killed while a hundred WebSockets are open: each client is told, and can connect again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from harness.installations.installation import Installation, write_project
from harness.installations.long_connections import CONFIG, SOURCE, LongConnections
from harness.wait import wait_until

pytestmark = pytest.mark.long

WEBSOCKETS = 100


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("worker", "1011>, reason='killed"),
        ("supervisor", "1012>, reason='the service restarts'"),
        ("gateway", "1006>"),
    ],
)
def test_all_websockets_of_a_killed_process_are_closed(
    cortex: Installation, victim: str, reason: str, tmp_path: Path
) -> None:
    cortex.cortex("deploy", "-y", write_project(tmp_path, SOURCE, CONFIG.replace("20s", "3s")))
    with LongConnections(cortex) as connections:
        connections.open(streams=0, websockets=WEBSOCKETS)
        (replica,) = (each for each in cortex.status()["replicas"] if each["api"] == "long")
        gateway = psutil.Process(cortex.status()["gateway"]["pid"])
        pids = {
            "worker": [replica["pid"]],
            "supervisor": [replica["supervisor_pid"]],
            "gateway": [gateway.pid, *(child.pid for child in gateway.children(recursive=True))],
        }
        for pid in pids[victim]:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(connections.ended) == WEBSOCKETS, timeout_s=10)
        assert all(reason in ended for ended in connections.ended), connections.ended[:3]

    def opens() -> bool:
        with LongConnections(cortex) as again:
            again.open(streams=0, websockets=1)
            return not again.ended

    wait_until(opens, timeout_s=10)
