from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_local import engine_of, is_ready, make_spec, status, until

from cortex.engine.local import LocalEngine
from cortex.engine.zygotes import _FORK_TIMEOUT_S, Zygotes
from cortex.home import Home
from cortex.processes.identity import Identity
from cortex.worker.spec import ReplicaSpec
from harness.wait import PATIENCE_S, has_ended

pytestmark = pytest.mark.processes

ZYGOTE = [sys.executable, "-P", "-m", "cortex.supervisor.zygote"]
#: An engine that starts a zygote, prints its pid once it has imported its modules, and runs until it is killed.
OPERATOR = """
import asyncio, os, sys
from cortex.engine.zygotes import Zygotes

async def main():
    zygotes = Zygotes(os.environ)
    zygote = zygotes.start(sys.executable)
    await zygote.has_imported.wait()
    print(zygote.process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for zygotes that are slow because the machine is busy: supervisors would be started without them."""
    for name in ("_IMPORT_TIMEOUT_S", "_FORK_TIMEOUT_S"):
        monkeypatch.setattr(f"cortex.engine.zygotes.{name}", PATIENCE_S)


@contextmanager
def impatience() -> Iterator[None]:
    """Wait for zygotes as operators do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cortex.engine.zygotes._FORK_TIMEOUT_S", _FORK_TIMEOUT_S)
        yield


@contextmanager
def zygotes_of(environ: Mapping[str, str], **settings: float) -> Iterator[Zygotes]:
    zygotes = Zygotes(environ, **settings)
    try:
        yield zygotes
    finally:
        zygotes.shutdown()


async def supervisor_of(engine: LocalEngine, spec: ReplicaSpec) -> psutil.Process:
    await engine.start(spec)
    return await supervisor_once_ready(engine, spec)


async def supervisor_once_ready(engine: LocalEngine, spec: ReplicaSpec) -> psutil.Process:
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


async def test_a_start_does_not_wait_for_a_hung_zygote_and_the_next_one_has_another(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        first = await supervisor_of(engine, spec_of(home, tmp_path, 1))
        hung = parent_of(first)
        hung.suspend()
        spec = spec_of(home, tmp_path, 2)
        with impatience():
            began = time.monotonic()
            await engine.start(spec)
            assert time.monotonic() - began < 8  # a second, on an idle machine
        second = await supervisor_once_ready(engine, spec)
        assert parent_of(second).pid == os.getpid()
        assert not hung.is_running()
        third = await supervisor_of(engine, spec_of(home, tmp_path, 3))
        assert parent_of(third).cmdline() == ZYGOTE
        assert first.is_running()


async def test_starts_that_meet_a_hung_zygote_together_leave_its_successor_alone(tmp_path: Path) -> None:
    with zygotes_of(os.environ) as zygotes:
        assert await fork(zygotes, tmp_path, lambda identity: None)
        hung = zygotes.start(sys.executable).process
        os.kill(hung.pid, signal.SIGSTOP)
        with impatience():
            forked = await asyncio.gather(*(fork(zygotes, tmp_path, lambda identity: None) for _ in range(3)))
        assert forked == [False] * 3
        successor = zygotes.start(sys.executable).process
        assert successor.pid != hung.pid
        assert await fork(zygotes, tmp_path, lambda identity: None)
        assert zygotes.start(sys.executable).process is successor


async def test_a_zygote_that_dies_while_it_imports_delays_no_start(tmp_path: Path) -> None:
    with zygotes_of(os.environ) as zygotes:
        forking = asyncio.create_task(fork(zygotes, tmp_path, lambda identity: None))
        await asyncio.sleep(0)  # it has started the zygote
        zygotes.start(sys.executable).process.kill()
        assert not await forking


async def test_a_zygote_ends_after_a_while_without_a_start(tmp_path: Path) -> None:
    with zygotes_of(os.environ, idle_s=0.5) as zygotes:
        process = zygotes.start(sys.executable).process
        await until(lambda: process.returncode is not None)
        assert zygotes.start(sys.executable).process.pid != process.pid


async def test_a_zygote_ends_if_its_operator_is_killed(tmp_path: Path) -> None:
    operator = subprocess.Popen([sys.executable, "-c", OPERATOR], stdout=subprocess.PIPE, text=True)
    try:
        assert operator.stdout is not None
        zygote = int(await asyncio.to_thread(operator.stdout.readline))
        assert not has_ended(zygote)
    finally:
        operator.kill()
        operator.communicate()
    await until(lambda: has_ended(zygote))


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
