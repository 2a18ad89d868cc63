from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from test_local import engine_of, is_ready, make_spec, run, until

from cortex.errors import ComputeUnavailableError
from cortex.home import Home
from cortex.worker.spec import ReplicaSpec

pytestmark = pytest.mark.processes

HANDLER = """
import os
class Handler:
    def __init__(self, config):
        print("sees", repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
    def handle_post(self, payload):
        return payload
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a PATH with a fake `nvidia-smi` that lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '0, GPU-a\\n1, GPU-b\\n'\n")
    program.chmod(0o755)
    return f"{program.parent}:/usr/bin:/bin"


def spec_of(home: Home, tmp_path: Path, gpu: int, number: int = 1, code: str = HANDLER) -> ReplicaSpec:
    return replace(make_spec(home, tmp_path, code, f"iris-aaaaaaaa-00000{number}"), gpu=gpu)


def test_processes_of_a_killed_supervisor_hold_their_gpus_until_they_have_ended(
    home: Home, tmp_path: Path, path: str
) -> None:
    async def scenario() -> None:
        go, held = tmp_path / "go", tmp_path / "held"
        # It holds the interpreter lock, so it can't end by itself, and is killed.
        code = f"""
import ctypes, pathlib, threading, time
def hold():
    while not pathlib.Path({str(go)!r}).exists():
        time.sleep(0.01)
    pathlib.Path({str(held)!r}).touch()
    ctypes.PyDLL(None).sleep(600)
threading.Thread(target=hold, daemon=True).start()
"""
        first, second = (spec_of(home, tmp_path, 2, number, code + HANDLER) for number in (1, 2))
        async with engine_of(home, PATH=path) as engine:
            await engine.start(first)
            await until(lambda: is_ready(engine, first))
            go.touch()
            await until(held.exists)
            os.kill(engine.replicas()[first.id][1].supervisor_pid, signal.SIGKILL)
            await until(lambda: not engine.replicas())
            with pytest.raises(ComputeUnavailableError):
                await engine.start(second)
            await until(lambda: not Path(first.run_dir).exists())
            go.unlink()
            await engine.start(second)
            await until(lambda: is_ready(engine, second))

    run(scenario)


def test_replicas_keep_different_gpus_across_an_engine_restart_and_release_them(
    home: Home, tmp_path: Path, path: str
) -> None:
    async def scenario() -> None:
        first, second, third = (spec_of(home, tmp_path, 1, number) for number in (1, 2, 3))
        async with engine_of(home, stop_all=False, PATH=path) as engine:
            await asyncio.gather(engine.start(first), engine.start(second))
            await until(lambda: is_ready(engine, first) and is_ready(engine, second))
        async with engine_of(home, PATH=path) as engine:
            assert engine.replicas()[first.id][0].gpu_ids == ("GPU-a",)
            assert engine.replicas()[second.id][0].gpu_ids == ("GPU-b",)
            with pytest.raises(ComputeUnavailableError):
                await engine.start(third)
            assert not Path(third.run_dir).exists()
            await engine.stop(first.id, 0)
            await until(lambda: first.id not in engine.replicas())
            await engine.start(third)
            await until(lambda: is_ready(engine, third))
            assert engine.replicas()[third.id][0].gpu_ids == ("GPU-a",)
            await until(lambda: "sees 'GPU-a'" in Path(third.log_path).read_text())
            await until(lambda: "sees 'GPU-b'" in Path(second.log_path).read_text())

    run(scenario)


def test_a_replica_without_a_gpu_request_sees_none(home: Home, tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        spec = spec_of(home, tmp_path, 0)
        async with engine_of(home, PATH=path) as engine:
            await engine.start(spec)
            await until(lambda: is_ready(engine, spec))
            await until(lambda: "sees ''" in Path(spec.log_path).read_text())

    run(scenario)
