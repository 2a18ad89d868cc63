"""Streams and WebSockets outlive deploys of other APIs and reloads of the gateway."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from harness.installations.installation import ECHO_CONFIG, ECHO_SOURCE, Installation, write_project
from harness.installations.long_connections import CONFIG, SOURCE, LongConnections

pytestmark = pytest.mark.long

DEPLOYS = 30
CONNECTIONS = 50
MAX_GROWTH_BYTES = 300 * 1024 * 1024


def test_streams_and_websockets_outlive_deploys_of_neighbours(cortex: Installation, tmp_path: Path) -> None:
    cortex.cortex("deploy", write_project(tmp_path / "long", SOURCE, CONFIG))
    cortex.cortex("deploy", write_project(tmp_path / "echo", ECHO_SOURCE, ECHO_CONFIG))
    gateway = psutil.Process(cortex.status()["gateway"]["pid"])
    before = memory_bytes(gateway)
    with LongConnections(cortex) as connections, cortex.load("/echo", 50) as summary:
        connections.open(CONNECTIONS - 10, CONNECTIONS - 10)
        for number in range(DEPLOYS):
            if number < 10:
                connections.open(1, 1)
            deploy_neighbour(cortex, tmp_path / "neighbour", number)
            if number % 10 == 9:
                os.kill(gateway.pid, signal.SIGUSR2)
        connections.progress()
        assert connections.ended == []
        assert len(connections.received) == 2 * CONNECTIONS
        assert memory_bytes(gateway) - before < MAX_GROWTH_BYTES
    assert set(summary["statuses"]) == {"200"}, summary


def deploy_neighbour(cortex: Installation, folder: Path, number: int) -> None:
    """Deploy a new API, then new code of it, then another limit; the first and the last make the gateway reload."""
    name, step = f"neighbour-{number // 3}", number % 3
    config = ECHO_CONFIG.replace("echo", name) + f"      networking: {{timeout: {61 if step == 2 else 60}s}}\n"
    cortex.cortex("deploy", "-y", write_project(folder, f"{ECHO_SOURCE}\n    STEP = {min(step, 1)}\n", config))


def memory_bytes(gateway: psutil.Process) -> int:
    """Return the memory of HAProxy's master and its workers, without what they share counted twice."""
    found = 0
    for process in (gateway, *gateway.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # the worker of an earlier reload ended just now
            found += process.memory_full_info().pss
    return found
