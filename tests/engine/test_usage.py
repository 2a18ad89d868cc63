"""CPU time and memory of real processes below a supervisor, and the output of `nvidia-smi`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.engine.usage import (
    GpuUsage,
    RecentUsage,
    ResourceUsage,
    parse_gpu_usage,
    resource_usage,
    usage_from_json,
    usage_to_json,
)
from cortex.processes.memory import MemoryUse
from harness.replicas.fleet import READY, replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

MIB = 1024 * 1024
#: A process whose first child uses CPU time and ends, and whose second child holds 64 MiB.
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"])
subprocess.run([sys.executable, "-c", "held = b'x' * (64 << 20); print(1, flush=True); import time; time.sleep(1000)"])
"""


@pytest.fixture
def supervisor() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    subprocess.run(["kill", "--", f"-{process.pid}"], check=True)
    process.wait()
    process.stdout.close()


def measured(
    pid: int, gpu_ids: tuple[str, ...] = (), environ: Mapping[str, str] = os.environ
) -> dict[str, ResourceUsage]:
    running = replica("a", READY)
    pair = (replace(running.spec, gpu_ids=gpu_ids), replace(running.status, supervisor_pid=pid))
    return asyncio.run(resource_usage([pair], environ))


def test_counts_all_processes_below_the_supervisor_and_those_that_ended(supervisor: int) -> None:
    usage = wait_until(lambda: measured(supervisor)["a"])
    assert usage.api == "iris"
    assert usage.cpu_s >= 0.3
    assert 64 * MIB < usage.memory.resident_bytes < 300 * MIB
    assert 64 * MIB < usage.memory.private_bytes <= usage.memory.proportional_bytes <= usage.memory.resident_bytes
    assert usage.memory.proportional_bytes == usage.memory.private_bytes + usage.memory.shared_bytes


def test_a_replica_whose_supervisor_ended_is_left_out() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert measured(gone.pid) == {}


def test_the_gpus_of_a_replica_are_read_from_the_driver(supervisor: int, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" >> "$0.log"\necho "GPU-1, 2048, 35"\necho "GPU-2, 1, 0"\n')
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert measured(supervisor, (), environ)["a"].gpus == ()
    assert not Path(f"{program}.log").exists(), "no replica has a GPU"
    assert measured(supervisor, ("GPU-1",), environ)["a"].gpus == (GpuUsage("GPU-1", 2048 * MIB, 0.35),)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert measured(supervisor, ("GPU-1",), environ)["a"].gpus == ()


def test_gpus_without_numbers_are_left_out() -> None:
    text = "GPU-1, 100, 7\nGPU-2, [N/A], [N/A]\n\nFailed to initialize NVML\n"
    assert parse_gpu_usage(text) == {"GPU-1": GpuUsage("GPU-1", 100 * MIB, 0.07)}


def test_usage_survives_the_round_trip_through_json() -> None:
    usage = {
        "a": ResourceUsage("iris", 1.5, MemoryUse(7, 6, 5), (GpuUsage("GPU-1", 1, 0.5),)),
        "b": ResourceUsage("sum", 0.0, MemoryUse(1)),
    }
    assert usage_from_json(json.loads(json.dumps(usage_to_json(usage)))) == usage


def test_a_measurement_is_reused_for_a_time_in_proportion_to_its_own() -> None:
    now, measured = 0.0, 0

    async def measure() -> dict[str, ResourceUsage]:
        nonlocal now, measured
        now, measured = now + 0.5, measured + 1
        return {f"iris-{measured}": ResourceUsage("iris", 1.0, MemoryUse())}

    recent = RecentUsage(measure, lambda: now)

    async def scenario() -> list[str]:
        nonlocal now
        found = [*await recent.get()]
        now += 9.9
        found += [*(await recent.get()), *(await recent.get())]
        now += 0.2
        return [*found, *await recent.get()]

    assert asyncio.run(scenario()) == ["iris-1", "iris-1", "iris-1", "iris-2"]
