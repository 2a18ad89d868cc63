"""Processes are killed while WebSockets and streams of an application or a command are open.

Each client gets the end of its connection with a reason, and can connect again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from harness.installations.installation import Installation, write_project
from harness.installations.long_connections import CONFIG, SOURCE, LongConnections
from harness.wait import wait_until

pytestmark = pytest.mark.long

WEBSOCKETS, STREAMS = 100, 10
#: The same application in a server of its own.
COMMAND = """
    - name: long
      kind: RealtimeAPI
      handler: {type: command, command: [uvicorn, handler:app, --port, $PORT, --log-level, warning]}
      networking: {timeout: 20s}
"""


def pids(cortex: Installation, victim: str) -> list[int]:
    """Return the processes that a test kills."""
    (replica,) = (each for each in cortex.status()["replicas"] if each["api"] == "long")
    gateway = psutil.Process(cortex.status()["gateway"]["pid"])
    workers = [child.pid for child in gateway.children(recursive=True)]
    return {
        "worker": lambda: [replica["pid"]],
        "proxy": lambda: [psutil.Process(replica["pid"]).ppid()],
        "supervisor": lambda: [replica["supervisor_pid"]],
        "gateway": lambda: [gateway.pid, *workers],
        "gateway's master": lambda: [gateway.pid],
        "gateway's worker": lambda: workers,
        "operator": lambda: [cortex.status()["operator"]["pid"]],
    }[victim]()


def deploy(cortex: Installation, folder: Path, config: str) -> None:
    cortex.cortex("deploy", "-y", write_project(folder, SOURCE, config.replace("20s", "3s")))
    wait_until(lambda: len(cortex.pids("long")) == 1 and None not in cortex.pids("long"))


def opens(cortex: Installation) -> bool:
    with LongConnections(cortex) as again:
        again.open(streams=0, websockets=1)
        return not again.ended


@pytest.mark.parametrize(
    ("config", "victim", "reason"),
    [
        (CONFIG, "worker", "1011>, reason='killed"),
        (CONFIG, "supervisor", "1011>, reason='the supervisor of its replica died'"),
        (CONFIG, "gateway", "1006>"),
        (CONFIG, "gateway's master", "1006>"),
        (CONFIG, "gateway's worker", "1006>"),
        (COMMAND, "worker", "1011>, reason='killed"),
        (COMMAND, "proxy", "1011>, reason='killed"),
        (COMMAND, "supervisor", "1011>, reason='the supervisor of its replica died'"),
        (COMMAND, "gateway", "1006>"),
    ],
)
def test_all_connections_of_a_killed_process_end(
    cortex: Installation, config: str, victim: str, reason: str, tmp_path: Path
) -> None:
    deploy(cortex, tmp_path, config)
    with LongConnections(cortex) as connections:
        connections.open(STREAMS, WEBSOCKETS)
        for pid in pids(cortex, victim):
            with contextlib.suppress(ProcessLookupError):  # the gateway's workers end with their master
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(connections.ended) == STREAMS + WEBSOCKETS, timeout_s=10)
        websockets = [ended for ended in connections.ended if ended.startswith("websocket")]
        assert len(websockets) == WEBSOCKETS
        assert all(reason in ended for ended in websockets), websockets[:3]
    wait_until(lambda: opens(cortex), timeout_s=10)


@pytest.mark.parametrize("config", [CONFIG, COMMAND], ids=["application", "command"])
def test_no_connection_of_a_killed_operator_ends(cortex: Installation, config: str, tmp_path: Path) -> None:
    deploy(cortex, tmp_path, config)
    with LongConnections(cortex) as connections:
        connections.open(STREAMS, WEBSOCKETS)
        for pid in pids(cortex, "operator"):
            os.kill(pid, signal.SIGKILL)
        connections.progress()
        cortex.up()
        connections.progress()
        assert not connections.ended


def test_an_update_of_a_command_closes_websockets_after_its_timeout(cortex: Installation, tmp_path: Path) -> None:
    deploy(cortex, tmp_path, COMMAND)
    with LongConnections(cortex) as connections:
        connections.open(streams=0, websockets=WEBSOCKETS)
        changed = COMMAND.replace("warning]}", "warning], env: {A: b}}")
        cortex.cortex("deploy", "-y", write_project(tmp_path, SOURCE, changed.replace("20s", "3s")))
        wait_until(lambda: len(connections.ended) == WEBSOCKETS, timeout_s=10)
        assert all("1012>" in ended for ended in connections.ended), connections.ended[:3]
    assert opens(cortex)


def test_a_command_beyond_its_memory_limit_closes_websockets_with_the_cause(
    cortex: Installation, tmp_path: Path
) -> None:
    source = (
        SOURCE
        + """
    @app.get("/allocate")
    def allocate():
        import time

        app.state.data = [bytes(range(256)) * 4096 for _ in range(400)]
        time.sleep(60)  # the limit is checked at intervals
    """
    )
    limited = COMMAND.replace("      networking", "      compute: {mem: 200Mi, mem_limit: 300Mi}\n      networking")
    cortex.cortex("deploy", "-y", write_project(tmp_path, source, limited))
    with LongConnections(cortex) as connections:
        connections.open(streams=0, websockets=WEBSOCKETS)
        error = cortex.post("/long/allocate", method="GET")
        assert (error.status, "out of memory" in error.json["error"]) == (500, True), error
        wait_until(lambda: len(connections.ended) == WEBSOCKETS, timeout_s=10)
        assert all("1011>, reason='out of memory" in ended for ended in connections.ended), connections.ended[:3]
    wait_until(lambda: opens(cortex), timeout_s=10)
