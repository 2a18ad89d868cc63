"""Start of a node's agent, without Ray, by a process that may be killed at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from cortex import __version__
from cortex.cluster.credentials import ClusterCredentials
from cortex.cluster.node.start import (
    IDENTITY_FILE,
    NodeStart,
    Priority,
    RunningAgent,
    agent_environ,
    ensure_agent,
    is_over,
    reserve,
)
from cortex.errors import EngineError
from cortex.home import Home
from cortex.processes.daemon import kill_session
from cortex.processes.identity import Identity
from harness.wait import wait_until

pytestmark = pytest.mark.processes

HOST = "127.0.0.1"
SECRET = ClusterCredentials("a secret of this test", "127.0.0.1", 0).for_nodes
ASK = """
import json, os, sys
from cortex.cluster.node.start import NodeStart, ensure_agent
agent = ensure_agent(NodeStart(**json.loads(sys.stdin.readline())), "127.0.0.1", os.environ)
print(agent.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[NodeStart]:
    start = NodeStart("0123456789ab", SECRET, __version__, home=str(tmp_path / "nodes"))
    yield start
    with contextlib.suppress(OSError):
        kill_session(identity(start))
    shutil.rmtree(Home(start.folder(HOST, {})).metrics_dir, ignore_errors=True)  # it may be outside of the home


def identity(start: NodeStart) -> Identity:
    told = json.loads((start.folder(HOST, {}) / "run" / IDENTITY_FILE).read_text())
    return Identity.from_json(json.loads(told["identity"]))


def test_the_agent_has_the_requested_priority(start: NodeStart) -> None:
    ours = Priority.of(os.getpid())
    wanted = Priority(min(ours.niceness + 2, 19), min(ours.oom_score + 50, 1000))
    ensure_agent(start, HOST, os.environ, wanted)
    assert Priority.of(identity(start).pid) == wanted
    assert Priority.of(os.getpid()) == ours


def test_concurrent_calls_start_one_agent(start: NodeStart) -> None:
    found: list[RunningAgent] = []
    askers = [
        threading.Thread(target=lambda: found.append(ensure_agent(start, HOST, os.environ)), daemon=True)
        for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(found) == 4
    assert {agent.port for agent in found} == {found[0].port}
    assert found[0].version == __version__


def test_the_agent_outlives_its_starter_and_has_no_parent(start: NodeStart) -> None:
    asker = subprocess.Popen(
        [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert asker.stdin is not None and asker.stdout is not None
    asker.stdin.write(json.dumps(asdict(start)) + "\n")
    asker.stdin.flush()
    port = int(asker.stdout.readline())
    agent = identity(start)
    assert os.getsid(agent.pid) == agent.pid, "a session of its own"
    os.killpg(asker.pid, signal.SIGKILL)
    asker.communicate()
    assert agent.is_alive()
    assert ensure_agent(start, HOST, os.environ).port == port


def test_a_dead_agent_is_restarted(start: NodeStart) -> None:
    ensure_agent(start, HOST, os.environ)
    first = identity(start)
    kill_session(first)
    wait_until(lambda: not first.is_alive())
    ensure_agent(start, HOST, os.environ)
    assert identity(start) != first


def test_an_agent_of_another_protocol_version_is_replaced(start: NodeStart) -> None:
    ensure_agent(start, HOST, os.environ)
    first = identity(start)
    file = start.folder(HOST, {}) / "run" / IDENTITY_FILE
    described = json.loads(file.read_text())
    del described["protocol"]
    file.write_text(json.dumps(described))
    ensure_agent(start, HOST, os.environ)
    assert not first.is_alive()
    assert identity(start) != first


def test_credentials_are_in_no_command_line_and_no_environment(start: NodeStart) -> None:
    ensure_agent(start, HOST, os.environ)
    process = Path(f"/proc/{identity(start).pid}")
    shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    assert json.loads(SECRET)["key"].encode() not in shown


def test_a_reservation_lasts_as_long_as_its_connection(start: NodeStart) -> None:
    agent = ensure_agent(start, HOST, os.environ)
    first = reserve(agent, "iris-1", ())
    second = reserve(agent, "iris-1", ())
    assert is_over(first), "another actor holds it now"
    first.close()
    kill_session(identity(start))
    assert not is_over(second), "the agent was killed"
    second.close()


def test_another_version_is_refused(start: NodeStart) -> None:
    newer = NodeStart(start.cluster_id, SECRET, "99.0.0", home=start.home)
    with pytest.raises(EngineError, match="operator is cortex 99.0.0 and the Python of Ray has"):
        ensure_agent(newer, HOST, os.environ)


def test_the_output_of_an_agent_that_exits_at_startup_is_reported(start: NodeStart) -> None:
    nobody = NodeStart(start.cluster_id, "", start.version, home=start.home)
    with pytest.raises(EngineError, match="exited during startup: .*credentials are expected"):
        ensure_agent(nobody, HOST, os.environ)


def test_a_folder_that_can_not_be_created_is_reported(start: NodeStart, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=f"can't be started in {tmp_path / 'file'}"):
        ensure_agent(NodeStart("c", SECRET, __version__, home=str(tmp_path / "file")), HOST, os.environ)


def test_the_agent_gets_the_environment_of_the_node_without_rays_variables() -> None:
    worker = {"PATH": "/bin", "RAY_AUTH_TOKEN": "token", "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    ray = {"PATH": "/other", "RAY_AUTH_TOKEN": "token", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert agent_environ(worker, ray) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_the_default_folder_comes_from_the_nodes_environment() -> None:
    start = NodeStart("c", SECRET, __version__)
    assert start.folder("10.0.0.2", {"CORTEX_NODE_HOME": "/data"}) == Path("/data/c/10.0.0.2")
    assert start.folder("10.0.0.2", {}) == Path.home() / ".cortex/nodes/c/10.0.0.2"
