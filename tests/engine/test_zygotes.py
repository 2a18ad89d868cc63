from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_local import engine_of, is_ready, make_spec, status, until

from cortex.engine.local import LocalEngine
from cortex.engine.zygotes import Zygotes
from cortex.home import Home
from cortex.processes.identity import Identity
from cortex.replica.spec import ReplicaSpec
from harness.wait import has_ended

pytestmark = pytest.mark.processes

ZYGOTE = [sys.executable, "-P", "-m", "cortex.supervisor.zygote"]


@contextmanager
def zygotes_of(environ: Mapping[str, str]) -> Iterator[Zygotes]:
    zygotes = Zygotes(environ)
    try:
        yield zygotes
    finally:
        zygotes.shutdown()


async def supervisor_of(engine: LocalEngine, spec: ReplicaSpec) -> psutil.Process:
    await engine.start(spec)
    await until(lambda: is_ready(engine, spec))
    found = status(engine, spec)
    assert found is not None
    return psutil.Process(found.supervisor_pid)


def parent_of(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


def spec_of(home: Home, tmp_path: Path, number: int) -> ReplicaSpec:
    return make_spec(home, tmp_path, name=f"iris-aaaaaaaa-00000{number}")


async def test_replicas_of_one_interpreter_are_forked_from_one_process(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        first = await supervisor_of(engine, spec_of(home, tmp_path, 1))
        second = await supervisor_of(engine, spec_of(home, tmp_path, 2))
        assert parent_of(first) == parent_of(second)
        assert parent_of(first).cmdline() == ZYGOTE


async def test_a_forked_supervisor_looks_like_one_that_was_started(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        spec = spec_of(home, tmp_path, 1)
        supervisor = await supervisor_of(engine, spec)
        command = [sys.executable, "-P", "-m", "cortex.supervisor.supervisor", f"{spec.run_dir}/spec.json"]
        assert " ".join(supervisor.cmdline()) == " ".join(command)
        assert os.getsid(supervisor.pid) == supervisor.pid
        assert supervisor.cwd() == spec.project_dir
        assert {Path(f"/proc/{supervisor.pid}/fd/{number}").readlink() for number in (1, 2)} == {
            Path(spec.run_dir) / "output"
        }
        assert "ready with blue" in Path(spec.log_path).read_text()


async def test_replicas_survive_the_death_of_the_process_that_forked_them(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        spec = spec_of(home, tmp_path, 1)
        supervisor = await supervisor_of(engine, spec)
        zygote = parent_of(supervisor)
        zygote.kill()
        await until(lambda: not zygote.is_running())  # reaped
        other = await supervisor_of(engine, spec_of(home, tmp_path, 2))
        assert parent_of(other) != zygote
        assert is_ready(engine, spec)
        assert supervisor.is_running()


async def test_a_forked_supervisor_that_ends_is_reaped(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        spec = spec_of(home, tmp_path, 1)
        supervisor = await supervisor_of(engine, spec)
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: not engine.replicas())
        await until(lambda: not supervisor.is_running())


async def test_variables_that_an_interpreter_reads_at_its_start_get_one_of_its_own(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        spec = replace(spec_of(home, tmp_path, 1), env={"COLOUR": "blue", "PYTHONUTF8": "1"})
        supervisor = await supervisor_of(engine, spec)
        assert parent_of(supervisor).pid == os.getpid()
        assert "ready with blue" in Path(spec.log_path).read_text()


async def test_the_process_that_forks_ends_with_its_engine(home: Home, tmp_path: Path) -> None:
    spec = spec_of(home, tmp_path, 1)
    async with engine_of(home, stop_all=False) as engine:
        supervisor = await supervisor_of(engine, spec)
        zygote = parent_of(supervisor)
    assert not zygote.is_running()
    async with engine_of(home) as engine:
        assert is_ready(engine, spec)
        assert supervisor.is_running()


async def test_a_supervisor_does_not_run_if_its_identity_cannot_be_recorded(tmp_path: Path) -> None:
    recorded: list[int] = []

    def fail(identity: Identity) -> None:
        recorded.append(identity.pid)
        raise OSError("no space left on device")

    with zygotes_of(os.environ) as zygotes:
        assert not await fork(zygotes, tmp_path, fail)
        (pid,) = recorded
        await until(lambda: has_ended(pid))
    assert (tmp_path / "output").read_text() == ""


async def test_output_of_a_forked_supervisor_that_fails_is_in_its_file(tmp_path: Path) -> None:
    with zygotes_of(os.environ) as zygotes:
        assert await fork(zygotes, tmp_path, lambda identity: None)
        await until(lambda: "No such file or directory: '/no/spec.json'" in (tmp_path / "output").read_text())


async def fork(zygotes: Zygotes, tmp_path: Path, record: Callable[[Identity], None]) -> bool:
    command = [sys.executable, "-P", "-m", "cortex.supervisor.supervisor", "/no/spec.json"]
    with (tmp_path / "output").open("wb") as output:
        return await asyncio.wait_for(
            zygotes.fork(command, record, output=output, cwd=str(tmp_path), env=os.environ), 60
        )
