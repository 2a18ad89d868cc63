"""Sees to it that one agent runs on a node, out of reach of whoever wanted it: it outlives them.

Used by Ray's actors. Must stay light, and knows nothing of Ray. Run as a program, it starts another one that has no
parent and a session of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from cortex import __version__
from cortex.cluster.priority import Priority
from cortex.errors import EngineError
from cortex.home import Home
from cortex.processes.filelock import locked
from cortex.processes.identity import Identity

IDENTITY_FILE = "node.json"
RESERVE_SOCKET = "reserve"
#: What an agent says on a reservation's connection once the replica is over.
OVER = b'{"over": true}\n'
START_TIMEOUT_S = 30.0
RESERVE_TIMEOUT_S = 10.0
_POLL_S = 0.02
_CONNECT_TIMEOUT_S = 1.0
_LAST_WORDS_BYTES = 2000
#: What Ray changes for its workers only. The agent serves all replicas of the node, so it gets what Ray itself got.
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
    """What the agent of a node is started with. Holds a secret: it travels in messages, never in a command line."""

    cluster_id: str
    secret: str
    version: str  #: of the operator
    home: str = ""  #: folder on the node; empty: `CORTEX_NODE_HOME` there, or `~/.cortex/nodes`
    port: int = 0  #: of the agent; 0: any that is free

    def folder(self, host: str, environ: Mapping[str, str]) -> Path:
        """Return where the agent of this cluster on this node keeps everything."""
        base = self.home or environ.get("CORTEX_NODE_HOME") or "~/.cortex/nodes"
        return Path(base).expanduser().absolute() / self.cluster_id / host


@dataclass(frozen=True)
class RunningAgent:
    """An agent that answers."""

    host: str
    port: int
    version: str
    home: Home


def ensure_agent(
    start: NodeStart, host: str, environ: Mapping[str, str], priority: Priority | None = None
) -> RunningAgent:
    """Return the agent of this node, started if need be. Waits for others who do the same. Raises: EngineError.

    It gets a `priority` of its own, or ours.
    """
    if start.version != __version__:
        raise EngineError(
            f"the operator is cortex {start.version} and the Python of Ray has {__version__} there; "
            "install the same on all nodes"
        )
    return asyncio.run(_ensure_agent(start, host, environ, priority or Priority.of(os.getpid())))


def agent_environ(worker: Mapping[str, str], ray: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent from that of Ray's worker and that of Ray itself; without Ray's secrets."""
    kept = {name: value for name, value in worker.items() if not name.startswith("RAY_") and name not in _SET_BY_RAY}
    return kept | {name: ray[name] for name in _SET_BY_RAY if name in ray}


def is_over(connection: socket.socket) -> bool:
    """Wait until a reservation's connection ends; tell whether that is because its replica is over."""
    said = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(4096):
            said = (said + data)[-len(OVER) :]
    return said == OVER


def reserve(agent: RunningAgent, name: str, gpus: tuple[str, ...]) -> socket.socket:
    """Tell the agent that the resources of a replica are reserved.

    The connection says so for as long as it is open; the agent closes it once the replica is over. Raises: EngineError.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(RESERVE_TIMEOUT_S)
        connection.connect(str(agent.home.sockets_dir / RESERVE_SOCKET))
        connection.sendall(json.dumps({"reserve": name, "gpus": gpus}).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            received = connection.recv(4096)
            if not received:
                raise EngineError("the node agent takes no reservation")
            answer += received
        if not json.loads(answer).get("ok"):
            raise EngineError(f"the node agent takes no reservation: {answer.decode(errors='replace').strip()}")
        connection.settimeout(None)
        return connection
    except (OSError, ValueError, AttributeError) as error:
        connection.close()
        raise EngineError(f"the node agent can't be told of the reservation: {error}") from error
    except EngineError:
        connection.close()
        raise


async def _ensure_agent(start: NodeStart, host: str, environ: Mapping[str, str], priority: Priority) -> RunningAgent:
    home = Home(start.folder(host, environ))
    try:
        home.create()
        async with locked(home.run_dir / "node.lock"):
            return _running(home) or await _started(start, host, home, environ, priority)
    except OSError as error:
        raise EngineError(f"the node agent can't be started in {home.path}: {error}") from error


async def _started(
    start: NodeStart, host: str, home: Home, environ: Mapping[str, str], priority: Priority
) -> RunningAgent:
    output = home.run_dir / "node.output"
    command = [sys.executable, "-P", "-m", "cortex.cluster.node.agent", "--home", str(home.path), "--host", host]
    pid = _start_detached([*command, "--port", str(start.port)], output, start.secret, environ, priority)
    agent = Identity.of(pid) if _exists(pid) else None
    deadline = time.monotonic() + START_TIMEOUT_S
    while (running := _running(home)) is None:
        if agent is None or not agent.is_alive():
            raise EngineError(f"the node agent ended at its start: {_last_words(output)}")
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            raise EngineError(f"the node agent did not answer within {START_TIMEOUT_S:g} s; it was killed")
        await asyncio.sleep(_POLL_S)
    return running


def _start_detached(
    command: list[str], output: Path, secret: str, environ: Mapping[str, str], priority: Priority
) -> int:
    """Start a program that is nobody's child, and return its number: Ray kills the children of its workers."""
    numbers = map(str, astuple(priority))
    between = [sys.executable, "-P", "-m", "cortex.cluster.node.start", *numbers, str(output), *command]
    ended = subprocess.run(
        between, input=secret + "\n", capture_output=True, text=True, env=dict(environ), timeout=START_TIMEOUT_S
    )
    if ended.returncode != 0:
        raise EngineError(f"the node agent can't be started: {ended.stderr.strip()}")
    return int(ended.stdout)


def _running(home: Home) -> RunningAgent | None:
    try:
        told = json.loads((home.run_dir / IDENTITY_FILE).read_text())
        running = RunningAgent(str(told["host"]), int(told["port"]), str(told["version"]), home)
        identity = Identity.from_json(json.loads(told["identity"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return running if identity.is_alive() and _answers(running) else None


def _answers(agent: RunningAgent) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((agent.host, agent.port), _CONNECT_TIMEOUT_S):
        return True
    return False


def _exists(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def _last_words(output: Path) -> str:
    with contextlib.suppress(OSError):
        return output.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace").strip() or "it said nothing"
    return "it said nothing"


def main(arguments: list[str]) -> None:
    """Start a command that follows its priority and the file for its output, and say which process it is.

    It reads our standard input. With our end it is nobody's child.
    """
    niceness, oom_score, file, *command = arguments
    Priority(int(niceness), int(oom_score)).take()
    options: dict[str, Any] = {"start_new_session": True, "cwd": Path(file).parent}
    with Path(file).open("wb") as output:
        child = subprocess.Popen(command, stdin=sys.stdin, stdout=output, stderr=output, **options)
    print(child.pid)
    child.returncode = 0  # not ours to wait for


if __name__ == "__main__":
    main(sys.argv[1:])
