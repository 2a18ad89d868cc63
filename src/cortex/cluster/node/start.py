"""Start of the agent of a node, once per node, as a detached process that outlives Ray's actors.

Ray's actors import this module, so it must stay light and independent of Ray. Run as a program, it starts a command
without a parent and in a session of its own, because Ray kills the children of its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from cortex import __version__
from cortex.errors import EngineError, InputError
from cortex.home import Home
from cortex.processes.daemon import output_tail, start_detached
from cortex.processes.filelock import locked
from cortex.processes.identity import Identity
from cortex.processes.jsonl import encode, receive_line

#: Version of the protocol between operator and agent; an agent of another one is replaced.
PROTOCOL = 3
IDENTITY_FILE = "node.json"
RESERVE_SOCKET = "reserve"
#: Last line that an agent sends on a reservation's connection once the replica has ended.
OVER = b'{"over": true}\n'
START_TIMEOUT_S = 30.0
RESERVE_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_CONNECT_TIMEOUT_S = 1.0
_OOM_FILE = "oom_score_adj"
#: Variables that Ray changes for its workers. The agent serves all replicas of the node and gets Ray's own values.
_SET_BY_RAY = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NEURON_RT_VISIBLE_CORES",
    "OMP_NUM_THREADS",
    "PYTHONBREAKPOINT",
    "ROCR_VISIBLE_DEVICES",
    "SPT_NOENV",
)


@dataclass(frozen=True)
class NodeStart:
    """Settings of the agent of a node. The credentials are secret: send them in messages, never in a command line."""

    cluster_id: str
    credentials: str  #: `ClusterCredentials.for_nodes`
    version: str  #: of the operator
    home: str = ""  #: folder on the node; empty: its `CORTEX_NODE_HOME`, or `~/.cortex/nodes`
    port: int = 0  #: of the agent; 0: any free port

    def folder(self, host: str, environ: Mapping[str, str]) -> Path:
        """Return the home of this cluster's agent on a node."""
        base = self.home or environ.get("CORTEX_NODE_HOME") or "~/.cortex/nodes"
        return Path(base).expanduser().absolute() / self.cluster_id / host


@dataclass(frozen=True)
class RunningAgent:
    """An agent that accepts connections."""

    host: str
    port: int
    version: str
    home: Home


@dataclass(frozen=True)
class Priority:
    """Scheduling and OOM priority of a process. Ray lowers both for its workers."""

    niceness: int  #: -20 (favoured) to 19
    oom_score: int  #: -1000 (killed last) to 1000

    @classmethod
    def of(cls, pid: int) -> Priority:
        """Return the priority of a process. Raises: OSError."""
        return cls(os.getpriority(os.PRIO_PROCESS, pid), int(Path(f"/proc/{pid}/{_OOM_FILE}").read_text()))

    def apply(self) -> None:
        """Set the priority of this process, as far as its user may: only root can lower its niceness."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{_OOM_FILE}").write_text(str(self.oom_score))


def ensure_agent(
    start: NodeStart, host: str, environ: Mapping[str, str], priority: Priority | None = None
) -> RunningAgent:
    """Return the agent of this node; start it, by default with our priority, if it does not run.

    Concurrent calls on a node start one agent. Raises: EngineError.
    """
    if start.version != __version__:
        raise EngineError(
            f"the operator is cortex {start.version} and the Python of Ray has {__version__} there; "
            "install the same on all nodes"
        )
    return asyncio.run(_ensure_agent(start, host, environ, priority or Priority.of(os.getpid())))


def agent_environ(worker: Mapping[str, str], ray: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent, given those of Ray's worker and of Ray itself, without Ray's secrets."""
    kept = {name: value for name, value in worker.items() if not name.startswith("RAY_") and name not in _SET_BY_RAY}
    return kept | {name: ray[name] for name in _SET_BY_RAY if name in ray}


def is_over(connection: socket.socket) -> bool:
    """Wait until a reservation's connection ends. Return True if its replica ended, False if the agent did."""
    received = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(4096):
            received = (received + data)[-len(OVER) :]
    return received == OVER


def reserve(agent: RunningAgent, name: str, gpus: tuple[str, ...]) -> socket.socket:
    """Register a replica's reservation with the agent. It lasts until the returned connection is closed.

    The agent closes the connection once the replica has ended. Raises: EngineError.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(RESERVE_TIMEOUT_S)
        connection.connect(str(agent.home.sockets_dir / RESERVE_SOCKET))
        connection.sendall(encode({"reserve": name, "gpus": gpus}))
        answer = receive_line(connection)
        if not answer:
            raise EngineError("the node agent refused the reservation")
        if not json.loads(answer).get("ok"):
            raise EngineError(f"the node agent refused the reservation: {answer.decode(errors='replace').strip()}")
        connection.settimeout(None)
        return connection
    except (OSError, ValueError, AttributeError) as error:
        connection.close()
        raise EngineError(f"the reservation can't be sent to the node agent: {error}") from error
    except EngineError:
        connection.close()
        raise


async def _ensure_agent(start: NodeStart, host: str, environ: Mapping[str, str], priority: Priority) -> RunningAgent:
    home = Home(start.folder(host, environ))
    try:
        home.check()
        home.create()
        async with locked(home.run_dir / "node.lock"):
            await _end_outdated_agent(home)
            return _running_agent(home) or await _start_agent(start, host, home, environ, priority)
    except (OSError, InputError) as error:
        raise EngineError(f"the node agent can't be started in {home.path}: {error}") from error


async def _end_outdated_agent(home: Home) -> None:
    """End a running agent whose protocol no operator of this version understands. Its replicas run on."""
    try:
        described = json.loads((home.run_dir / IDENTITY_FILE).read_text())
        if described.get("protocol") == PROTOCOL:
            return
        agent = Identity.from_json(json.loads(described["identity"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    number = signal.SIGTERM
    while agent.is_alive():
        with contextlib.suppress(OSError):
            os.kill(agent.pid, number)
        await asyncio.sleep(_POLL_S)
        if time.monotonic() > deadline:
            number = signal.SIGKILL


async def _start_agent(
    start: NodeStart, host: str, home: Home, environ: Mapping[str, str], priority: Priority
) -> RunningAgent:
    output = home.run_dir / "node.output"
    command = [sys.executable, "-P", "-m", "cortex.cluster.node.agent", "--home", str(home.path), "--host", host]
    pid = _start_detached([*command, "--port", str(start.port)], output, start.credentials, environ, priority)
    agent = Identity.of(pid) if _exists(pid) else None
    deadline = time.monotonic() + START_TIMEOUT_S
    while (running := _running_agent(home)) is None:
        if agent is None or not agent.is_alive():
            raise EngineError(f"the node agent exited during startup: {output_tail(output) or 'it printed nothing'}")
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            raise EngineError(f"the node agent did not answer within {START_TIMEOUT_S:g} s; it was killed")
        await asyncio.sleep(_POLL_S)
    return running


def _start_detached(
    command: list[str], output: Path, credentials: str, environ: Mapping[str, str], priority: Priority
) -> int:
    """Start a program that is not our child, through `main`. Return its pid."""
    numbers = map(str, astuple(priority))
    launcher = [sys.executable, "-P", "-m", "cortex.cluster.node.start", *numbers, str(output), *command]
    finished = subprocess.run(
        launcher, input=credentials + "\n", capture_output=True, text=True, env=dict(environ), timeout=START_TIMEOUT_S
    )
    if finished.returncode != 0:
        raise EngineError(f"the node agent can't be started: {finished.stderr.strip()}")
    return int(finished.stdout)


def _running_agent(home: Home) -> RunningAgent | None:
    try:
        described = json.loads((home.run_dir / IDENTITY_FILE).read_text())
        running = RunningAgent(str(described["host"]), int(described["port"]), str(described["version"]), home)
        identity = Identity.from_json(json.loads(described["identity"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return running if identity.is_alive() and _accepts_connections(running) else None


def _accepts_connections(agent: RunningAgent) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((agent.host, agent.port), _CONNECT_TIMEOUT_S):
        return True
    return False


def _exists(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def main(arguments: list[str]) -> None:
    """Start a command and print its pid. Arguments: niceness, OOM score, output file, command.

    The command inherits our standard input. It has no parent once we exit.
    """
    niceness, oom_score, file, *command = arguments
    Priority(int(niceness), int(oom_score)).apply()
    with Path(file).open("wb") as output:
        child = start_detached(command, output=output, input_=sys.stdin, cwd=Path(file).parent)
    print(child.pid)
    child.returncode = 0  # no warning about a child that still runs


if __name__ == "__main__":
    main(sys.argv[1:])
