"""CPU time of real processes, below a supervisor."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from cortex.engine.usage import CpuMeter
from cortex.worker.spec import ReplicaStatus
from harness.replicas.fleet import READY, STARTING, replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

#: A process with a child that keeps a core busy.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
#: A process that uses 0.2 s of CPU time, then sleeps.
BUSY_THEN_IDLE = """
import time
while time.process_time() < 0.2:
    pass
time.sleep(1000)
"""


@pytest.fixture
def supervisor() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True)
    yield process.pid
    subprocess.run(["kill", "--", f"-{process.pid}"], check=True)
    process.wait()


def spent(supervisor: int) -> float:
    """Return the CPU time of the children of a process."""
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process(supervisor).children())


def cores(meter: CpuMeter, *statuses: ReplicaStatus) -> dict[str, float]:
    return dict(asyncio.run(meter.cores(statuses)))


def test_counts_cpu_time_of_descendants_of_ready_replicas(supervisor: int) -> None:
    ready = replace(replica("a", READY).status, supervisor_pid=supervisor)
    starting = replace(replica("b", STARTING, name="other").status, supervisor_pid=supervisor)
    meter = CpuMeter()
    assert cores(meter, ready, starting) == {}  # CPU time before the first call does not count
    before = spent(supervisor)
    # The kernel counts in hundredths of a second, of which an interval without a wait might have few.
    wait_until(lambda: spent(supervisor) > before + 0.3, message="the child has used CPU time")
    assert 0 < cores(meter, ready, starting)["iris"] < 2
    assert "other" not in cores(meter, ready, starting)


def test_ignores_processes_that_have_ended() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    status = replace(replica("a", READY).status, supervisor_pid=gone.pid)
    meter = CpuMeter()
    cores(meter, status)
    assert cores(meter, status) == {"iris": 0.0}


def test_ignores_a_change_of_the_machines_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The boot time reported by the kernel changes with the clock.
    process = subprocess.Popen([sys.executable, "-c", BUSY_THEN_IDLE])
    try:
        wait_until(lambda: sum(psutil.Process(process.pid).cpu_times()[:2]) > 0.1)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        status = replace(replica("a", READY).status, supervisor_pid=process.pid)
        meter = CpuMeter()
        assert cores(meter, status) == {}
        began = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: began + 1)
        assert cores(meter, status) == {"iris": 0.0}
    finally:
        process.kill()
        process.wait()
