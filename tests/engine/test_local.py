from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cortex import __version__
from cortex.dev.api_process import environment_of_processes
from cortex.engine.local import KILL_AFTER_S, SPEC_FILE, LocalEngine, replica_environ
from cortex.errors import EngineError
from cortex.home import Home
from cortex.lifecycle import ProcessState
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaSpec, ReplicaStatus
from harness.replicas.specs import replica_spec
from harness.wait import SLACK, has_ended

pytestmark = pytest.mark.processes

HANDLER = """
import os
class Handler:
    def __init__(self, config):
        print("ready with", os.environ.get("COLOUR"), "home", os.getcwd())
    def handle_post(self, payload):
        return payload
"""


@asynccontextmanager
async def engine_of(home: Home, stop_all: bool = True, **environ: str) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(home, {**os.environ, **environ}, Logger("test"))
    await engine.startup(lambda: None)
    try:
        yield engine
    finally:
        if stop_all:
            for replica in list(engine.replicas()):
                await engine.stop(replica, 0)
            await until(lambda: not engine.replicas())
        await engine.shutdown()


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s * SLACK
    while not condition():
        assert time.monotonic() < deadline, "not true in time"
        await asyncio.sleep(0.01)


def make_spec(home: Home, tmp_path: Path, code: str = HANDLER, name: str = "iris-aaaaaaaa-000001") -> ReplicaSpec:
    project = tmp_path / "project"
    project.mkdir(exist_ok=True)
    (project / "handler.py").write_text(code)
    return replica_spec(
        id=name,
        api="iris",
        revision="a" * 64,
        project_dir=str(project),
        python=sys.executable,
        run_dir=str(home.replicas_dir / name),
        sockets=(str(home.sockets_dir / f"{name[-6:]}-0"),),
        control_socket=str(home.sockets_dir / f"{name[-6:]}-c"),
        log_path=str(home.logs_dir / "iris" / f"{name}.log"),
        env={"COLOUR": "blue"},
        timeout_s=5.0,
    )


def status(engine: LocalEngine, spec: ReplicaSpec) -> ReplicaStatus | None:
    return engine.replicas()[spec.id][1] if spec.id in engine.replicas() else None


def is_ready(engine: LocalEngine, spec: ReplicaSpec) -> bool:
    found = status(engine, spec)
    return found is not None and found.is_ready


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60 * SLACK))  # type: ignore[arg-type]


async def test_a_replica_starts_reports_changes_and_stops_without_leaving_files(home: Home, tmp_path: Path) -> None:
    changes: list[int] = []
    async with engine_of(home) as engine:
        engine._on_change = lambda: changes.append(1)
        spec = make_spec(home, tmp_path)
        await engine.start(spec)
        first = status(engine, spec)
        assert first is not None and first.processes[0].state is ProcessState.STARTING
        await until(lambda: is_ready(engine, spec))
        assert changes
        await engine.stop(spec.id, 5)
        await until(lambda: not engine.replicas())
        await until(lambda: not Path(spec.run_dir).exists())
        assert not Path(spec.control_socket).exists()
        assert "ready with blue" in Path(spec.log_path).read_text()


async def test_replicas_outlive_their_engine_and_are_adopted_with_the_same_pids(home: Home, tmp_path: Path) -> None:
    spec = make_spec(home, tmp_path)
    async with engine_of(home, stop_all=False) as engine:
        await engine.start(spec)
        await until(lambda: is_ready(engine, spec))
        before = status(engine, spec)
    async with engine_of(home) as engine:
        running = replace(spec, version=__version__, environment=sys.prefix)
        assert engine.replicas()[spec.id] == (running, before)
        assert before is not None
        assert {(shown["version"], shown["environment"]) for shown in before.describe_processes()} == {
            (__version__, sys.prefix)
        }


async def test_a_running_replica_whose_spec_can_not_be_read_is_ended(home: Home, tmp_path: Path) -> None:
    spec = make_spec(home, tmp_path)
    async with engine_of(home, stop_all=False) as engine:
        await engine.start(spec)
        await until(lambda: is_ready(engine, spec))
        before = status(engine, spec)
    assert before is not None
    (home.replicas_dir / spec.id / "spec.json").write_text('{"id": 1}')
    async with engine_of(home) as engine:
        assert not engine.replicas()
        await until(lambda: not psutil.pid_exists(before.supervisor_pid))
        assert not (home.replicas_dir / spec.id).exists()


async def test_a_replica_with_a_slow_supervisor_is_adopted_with_its_status(home: Home, tmp_path: Path) -> None:
    spec = make_spec(home, tmp_path)
    async with engine_of(home, stop_all=False) as engine:
        await engine.start(spec)
        await until(lambda: is_ready(engine, spec))
        before = status(engine, spec)
    assert before is not None
    os.kill(before.supervisor_pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(3, os.kill, before.supervisor_pid, signal.SIGCONT)
    async with engine_of(home) as engine:
        assert status(engine, spec) == before


async def test_a_replica_whose_supervisor_is_killed_disappears_with_all_its_processes(
    home: Home, tmp_path: Path
) -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '1000'])\n" + HANDLER
    async with engine_of(home) as engine:
        spec = make_spec(home, tmp_path, code)
        await engine.start(spec)
        await until(lambda: is_ready(engine, spec))
        found = status(engine, spec)
        assert found is not None
        session = [pid for pid in psutil.pids() if _session(pid) == found.supervisor_pid]
        assert len(session) >= 3  # and perhaps one of housekeeping
        os.kill(found.supervisor_pid, signal.SIGKILL)
        await until(lambda: not engine.replicas())
        await until(lambda: all(map(has_ended, session)))
        await until(lambda: not Path(spec.run_dir).exists())
        died = f"the supervisor, process {found.supervisor_pid}, died: its processes end"
        assert died in Path(spec.log_path).read_text()


async def test_replicas_that_died_while_no_engine_ran_are_cleaned_up(home: Home, tmp_path: Path) -> None:
    spec = make_spec(home, tmp_path)
    async with engine_of(home, stop_all=False) as engine:
        await engine.start(spec)
        await until(lambda: is_ready(engine, spec))
        found = status(engine, spec)
    assert found is not None
    os.kill(found.supervisor_pid, signal.SIGKILL)
    await until(lambda: has_ended(found.supervisor_pid))
    half_written = home.replicas_dir / "iris-aaaaaaaa-000002"
    half_written.mkdir()
    (half_written / SPEC_FILE).write_text('{"id": "iri')
    async with engine_of(home) as engine:
        assert engine.replicas() == {}
        await until(lambda: list(home.replicas_dir.iterdir()) == [])
        assert not Path(spec.sockets[0]).exists()


async def test_a_replica_that_does_not_stop_in_time_is_killed(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        spec = make_spec(home, tmp_path)
        await engine.start(spec)
        await until(lambda: is_ready(engine, spec))
        found = status(engine, spec)
        assert found is not None
        os.kill(found.supervisor_pid, signal.SIGSTOP)
        started = time.monotonic()
        await engine.stop(spec.id, 0)
        await until(lambda: not engine.replicas(), timeout_s=KILL_AFTER_S + 5)
        assert time.monotonic() - started >= KILL_AFTER_S


async def test_a_stop_before_the_supervisor_listens_is_not_lost(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        spec = make_spec(home, tmp_path)
        await engine.start(spec)
        await engine.stop(spec.id, 1)
        await until(lambda: not engine.replicas(), timeout_s=KILL_AFTER_S)


async def test_a_failed_start_reports_the_users_error(home: Home, tmp_path: Path) -> None:
    code = HANDLER.replace("print(", "raise ValueError('bad weights')\n        print(")
    async with engine_of(home) as engine:
        spec = make_spec(home, tmp_path, code)
        await engine.start(spec)

        def failure() -> str:
            found = status(engine, spec)
            process = found.processes[0] if found else None
            return process.failure.message if process and process.failure else ""

        await until(failure)
        assert failure() == "ValueError: bad weights"


async def test_a_missing_interpreter_is_an_error_and_leaves_no_files(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        spec = replace(make_spec(home, tmp_path), python="/no/such/python")
        with pytest.raises(EngineError, match="/no/such/python"):
            await engine.start(spec)
        assert engine.replicas() == {}
        assert not Path(spec.run_dir).exists()


async def test_output_of_a_supervisor_that_cannot_start_is_in_the_replicas_log(home: Home, tmp_path: Path) -> None:
    async with engine_of(home) as engine:
        spec = replace(make_spec(home, tmp_path), env={"PYTHONHOME": "/nowhere"})
        await engine.start(spec)
        await until(lambda: not engine.replicas())
        log = Path(spec.log_path)
        await until(lambda: log.exists() and "encodings" in log.read_text())


def test_replicas_inherit_the_environment_without_secrets() -> None:
    environ = {
        "HTTPS_PROXY": "http://proxy",
        "AWS_ACCESS_KEY_ID": "id",
        "CORTEX_TOKEN": "secret",
        "CORTEX_OPERATOR_TOKEN": "secret",
        "CORTEX_DATABASE": "postgresql://u:secret@h/d",
        "CORTEX_API_KEY": "secret",
        "CORTEX_DEV": "1",
        "CORTEX_HOME": "/home",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    inherited = {"HTTPS_PROXY": "http://proxy", "AWS_ACCESS_KEY_ID": "id", "CORTEX_HOME": "/home"}
    assert replica_environ(environ) == inherited
    in_dev = {**inherited, "PYTHONDONTWRITEBYTECODE": "1", "CORTEX_DEV": "1"}
    assert environment_of_processes(environ) == in_dev


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
