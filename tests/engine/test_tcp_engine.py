"""A local engine whose replicas listen on TCP, like on a cluster node."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from test_local import engine_of, is_ready, make_spec, run, status, until

from cortex.engine.local import LocalEngine
from cortex.home import Home
from cortex.lifecycle import ProcessState
from cortex.worker.spec import ReplicaSpec
from harness.replicas.replicas import TcpConnection

pytestmark = pytest.mark.processes


@pytest.fixture
def spec(home: Home, tmp_path: Path) -> ReplicaSpec:
    return replace(make_spec(home, tmp_path), listen_host="127.0.0.1", gateway_secret="5ec2e7")


def address(engine: LocalEngine, spec: ReplicaSpec) -> str:
    found = status(engine, spec)
    assert found is not None
    return found.processes[0].socket


def answer(address: str) -> int:
    connection = TcpConnection(address, "5ec2e7")
    connection.request("POST", "/", b"1", {"content-type": "application/json"})
    code = connection.getresponse().status
    connection.close()
    return code


def test_an_address_is_known_from_the_first_status_on(home: Home, spec: ReplicaSpec) -> None:
    async def scenario() -> None:
        async with engine_of(home, stop_all=False) as engine:
            await engine.start(spec)
            assert address(engine, spec) == ""
            await until(lambda: is_ready(engine, spec))
            before, started = address(engine, spec), engine.replicas()[spec.id][0]
            assert answer(before) == 200
        async with engine_of(home) as engine:
            assert engine.replicas()[spec.id][0] == started
            assert address(engine, spec) == before
            assert answer(before) == 200

    run(scenario)


def test_killed_workers_return_at_their_address_and_killed_supervisors_do_not(home: Home, spec: ReplicaSpec) -> None:
    async def scenario() -> None:
        async with engine_of(home) as engine:
            await engine.start(spec)
            await until(lambda: is_ready(engine, spec))
            before, found = address(engine, spec), status(engine, spec)
            assert found is not None
            os.kill(found.processes[0].pid or 0, signal.SIGKILL)
            await until(lambda: (now := status(engine, spec)) and now.processes[0].restarts == 1 and now.is_ready)
            assert address(engine, spec) == before
            assert answer(before) == 200
            os.kill(found.supervisor_pid, signal.SIGKILL)
            await until(lambda: not engine.replicas())
            with pytest.raises(ConnectionError):
                answer(before)

    run(scenario)


def test_a_stopped_replica_leaves_no_open_port_and_no_files(home: Home, spec: ReplicaSpec) -> None:
    async def scenario() -> None:
        async with engine_of(home) as engine:
            await engine.start(spec)
            await until(lambda: is_ready(engine, spec))
            before = address(engine, spec)
            await engine.stop(spec.id, 5)
            await until(lambda: not engine.replicas())
            with pytest.raises(ConnectionError):
                answer(before)
            await until(lambda: not Path(spec.run_dir).exists())
            assert list(home.sockets_dir.iterdir()) == []

    run(scenario)


def test_an_unavailable_address_is_reported_to_the_engine(home: Home, spec: ReplicaSpec) -> None:
    async def scenario() -> None:
        async with engine_of(home) as engine:
            elsewhere = replace(spec, listen_host="192.0.2.1")
            await engine.start(elsewhere)
            await until(lambda: (found := status(engine, elsewhere)) and found.processes[0].failure)
            found = status(engine, elsewhere)
            assert found is not None
            assert found.processes[0].state is ProcessState.BACKING_OFF
            assert found.processes[0].failure is not None
            assert "can't listen on 192.0.2.1" in found.processes[0].failure.message

    run(scenario)
