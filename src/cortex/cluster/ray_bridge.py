"""Bridge between the operator and Ray, a process of its own because Ray's library exits its process when Ray is away.

Only this module imports Ray. Commands arrive as JSON lines on standard input, the first with the settings of the
connection; events leave as JSON lines on standard output. The bridge has no state of its own: reservations are
detached actors of Ray that outlive it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import grpc
import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cortex import __version__
from cortex.cluster.node.start import (
    NodeStart,
    Priority,
    RunningAgent,
    agent_environ,
    ensure_agent,
    is_over,
    reserve,
)
from cortex.errors import CortexError, TokenError
from cortex.payloads.json_object import Json
from cortex.processes.identity import Identity
from cortex.processes.sockets import peer_of

#: Share of a node group's resource that one reservation takes: small enough for a thousand replicas per node.
GROUP_SHARE = 0.001
TURN_S = 0.2
LIST_S = 0.5
RESOURCES_S = 1.0
#: At startup, existing actors have this long to answer before "connected" is sent; later answers follow as events.
_ADOPT_S = 2.0
_READ_TIMEOUT_S = 2.0
#: Pause between restarts of an agent that exits again and again.
_AGENT_PAUSE_S = 0.5
#: A dying agent closes its sockets one after the other and may accept connections for this long.
_AGENT_DYING_S = 3.0
_TOKEN_TIMEOUT_S = 3.0
#: Ray's label for the failure domain of a node: `ray start --labels`.
_ZONE_LABEL = "ray.io/availability-zone"
#: Read-only calls that Ray's head and its client server answer only with a valid token.
_HEAD_CALL, _CLIENT_SERVER_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive", "/ray.rpc.RayletDriver/ClusterInfo"
#: The node in Ray's messages about workers.
_NODE_IP = re.compile(r"\bip=([0-9a-fA-F.:]+)")

_untyped: Any = ray  #: for its functions without annotations


class Reservation:
    """Ray's actor for one replica: while it lives, Ray reserves the replica's resources on its node."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._host = ""
        self._start: Json = {}
        self._gpus: tuple[str, ...] = ()
        self._connection: socket.socket | None = None
        self._answer: Json = {}

    def where(self, start: Json) -> Json:
        """Return the node and the address of its agent, which is started if necessary; or `problem`."""
        if self._connection is not None:
            return self._answer
        self._start, self._host = start, _untyped.util.get_node_ip_address()
        self._gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        try:
            agent = self._reserve()
        except (CortexError, OSError, ValueError, TypeError) as error:
            return {"problem": f"node {self._host}: {error}"}
        self._answer = {
            "node_id": ray.get_runtime_context().get_node_id(),
            "host": agent.host,
            "port": agent.port,
            "version": __version__,
            "gpus": self._gpus,
        }
        threading.Thread(target=self._watch_agent, name="watch agent", daemon=True).start()
        return self._answer

    def _reserve(self) -> RunningAgent:
        raylet = os.getppid()
        environ = agent_environ(os.environ, _environ_of(raylet))
        agent = ensure_agent(NodeStart(**self._start), self._host, environ, Priority.of(raylet))
        self._connection = reserve(agent, self._name, self._gpus)
        return agent

    def _watch_agent(self) -> None:
        """Restart the agent whenever it exits; end the actor when the replica has ended."""
        while self._connection is not None and not is_over(self._connection):
            agent = self._reserve_again()
            if agent is None:
                break  # the operator sees a lost reservation, and requests it again
            if (agent.host, agent.port) != (self._answer["host"], self._answer["port"]):
                break  # likewise; the next actor returns the new address
            time.sleep(_AGENT_PAUSE_S)
        os.kill(os.getpid(), signal.SIGTERM)  # as Ray ends its workers; this frees the resources

    def _reserve_again(self) -> RunningAgent | None:
        """Reserve with the running agent, or start one. Return None after `_AGENT_DYING_S` of failures."""
        deadline = time.monotonic() + _AGENT_DYING_S
        while True:
            try:
                return self._reserve()
            except Exception:
                if time.monotonic() > deadline:
                    return None
            time.sleep(_AGENT_PAUSE_S)


@dataclass
class _Actor:
    """An actor, and the reference to its pending answer."""

    handle: Any
    pending: Any = None
    is_placed: bool = False


class RayBridge:
    """Event loop that creates and kills actors and reports changes. It never blocks on a single node."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._commands: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._actors: dict[str, _Actor] = {}
        self._namespace = ""
        self._start: Json = {}
        self._actor_class: Any = ray.remote(Reservation)
        self._listed_at = self._measured_at = 0.0
        self._raylet: Identity | None = None

    def read(self, lines: TextIO) -> None:
        """Queue commands until standard input ends, then exit: the operator has ended."""
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                self._commands.put(json.loads(line))
        os._exit(0)

    def run(self) -> None:
        """Connect, then serve forever. Raises: any exception of Ray's library when Ray is away."""
        first = self._commands.get()
        assert first is not None
        self._connect(first)
        self._adopt()
        while True:
            self._execute_commands()
            self._read_answers()
            now = time.monotonic()
            if now - self._listed_at >= LIST_S:
                self._listed_at = now
                self._find_dead_actors()
            if now - self._measured_at >= RESOURCES_S:
                self._measured_at = now
                if self._raylet is not None and not self._raylet.is_alive():
                    # Ray seems well until the head notices, but actors that are created now would be lost.
                    raise ConnectionError("Ray's process on this machine ended")
                self._send("resources", **_resources())

    def send_away(self, error: BaseException) -> None:
        """Send the reason for the end of the bridge."""
        self._send("away", reason=_first_line(error))

    def _connect(self, settings: Json) -> None:
        self._namespace = settings["namespace"]
        self._start = settings["start"]
        check_token(settings["address"])
        ray.init(address=settings["address"], namespace=self._namespace, log_to_driver=False)
        self._raylet = _local_raylet()

    def _adopt(self) -> None:
        for name in ray.util.list_named_actors():
            with contextlib.suppress(ValueError):  # it has just ended
                self._request_place(name, _Actor(ray.get_actor(name, namespace=self._namespace)))
        deadline = time.monotonic() + _ADOPT_S
        pending = [actor.pending for actor in self._actors.values()]
        while pending and time.monotonic() < deadline:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=TURN_S)
        self._send("connected", names=list(self._actors))
        self._read_answers()

    def _execute_commands(self) -> None:
        """Execute all queued commands; wait up to `TURN_S` for the first."""
        timeout = TURN_S
        while True:
            try:
                command = self._commands.get(timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.001
            assert command is not None
            if command["do"] == "place":
                self._place(command)
            elif command["do"] == "remove":
                self._remove(command["name"])

    def _place(self, command: Json) -> None:
        name = command["name"]
        if name in self._actors:
            return self._send("created", name=name)
        options: Json = {
            "name": name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": command["cpu"],
            "num_gpus": command["gpu"],
            "resources": {command["group"]: GROUP_SHARE} if command["group"] else {},
        }
        if command["memory_bytes"]:
            options["memory"] = command["memory_bytes"]
        if not command["gpu"]:
            options["scheduling_strategy"] = "SPREAD"  # so that a lost node takes few replicas; GPUs are packed
        if command["preferred"]:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                command["preferred"], soft=True, _spill_on_unavailable=True
            )
        if command["node_id"]:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(command["node_id"], soft=False)
        try:
            self._request_place(name, _Actor(self._actor_class.options(**options).remote(name)))
        except (ValueError, ray.exceptions.RayError) as error:
            return self._send("lost", name=name, reason=_first_line(error))
        return self._send("created", name=name)

    def _remove(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            self._kill(actor)
        self._send("removed", name=name)

    def _request_place(self, name: str, actor: _Actor) -> None:
        actor.pending = actor.handle.where.remote(self._start)
        self._actors[name] = actor

    def _read_answers(self) -> None:
        pending = {actor.pending: name for name, actor in self._actors.items() if actor.pending is not None}
        if not pending:
            return
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for reference in ready:
            self._read_answer(pending[reference], reference)

    def _read_answer(self, name: str, reference: Any) -> None:
        actor = self._actors[name]
        actor.pending = None
        try:
            answer = ray.get(reference, timeout=_READ_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            actor.pending = reference
        except ray.exceptions.RayError as error:
            del self._actors[name]
            self._kill(actor)
            self._send("lost", name=name, reason=_reason(error))
        else:
            if "problem" in answer:
                del self._actors[name]
                self._kill(actor)
                self._send("lost", name=name, reason=answer["problem"])
            elif not actor.is_placed:
                actor.is_placed = True
                self._send("placed", name=name, **answer)

    def _find_dead_actors(self) -> None:
        """Ask actors again that Ray does not list any more: the error has the cause of death."""
        listed = set(ray.util.list_named_actors())
        for name, actor in self._actors.items():
            if actor.is_placed and actor.pending is None and name not in listed:
                actor.pending = actor.handle.where.remote(self._start)

    def _kill(self, actor: _Actor) -> None:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(actor.handle)

    def _send(self, event: str, **fields: Any) -> None:
        self._output.write(json.dumps({"event": event, **fields}) + "\n")
        self._output.flush()


def check_token(address: str) -> None:
    """Check that Ray at `HOST:PORT`, or its client server at `ray://HOST:PORT`, accepts our token.

    Ray's library would retry for half a minute and report only that it failed. All other errors are left to it.
    Raises: TokenError.
    """
    is_client = address.startswith("ray://")
    try:
        with _channel(urlsplit(address).netloc if is_client else address) as channel:
            channel.unary_unary(_CLIENT_SERVER_CALL if is_client else _HEAD_CALL)(b"", timeout=_TOKEN_TIMEOUT_S)
    except ImportError:
        return  # a version of Ray without tokens
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise TokenError(_token_advice()) from None
    except ray.exceptions.AuthenticationError:
        raise TokenError(
            "RAY_AUTH_MODE=token is set and there is no token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH for "
            "`cortex up`, or write the token to ~/.ray/auth_token"
        ) from None


def _channel(target: str) -> Any:
    """Connect with the token and the certificates that Ray's library would use."""
    from ray._private.grpc_utils import init_grpc_channel  # noqa: PLC0415 - a private module that may move

    make: Any = init_grpc_channel
    return make(target)


def _token_advice() -> str:
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return (
            "it requires a token: set RAY_AUTH_MODE=token for `cortex up`, and the token of Ray's head in "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        )
    source = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), "")
    where = f"of {source}" if source else "in ~/.ray/auth_token"
    return f"it rejects the token {where}: `cortex up` needs the token that `ray start` had on the head"


def _local_raylet() -> Identity | None:
    """Return Ray's process on this machine; None if it is unknown, or if we use Ray's client server."""
    node = getattr(_untyped._private.worker.global_worker, "node", None)
    if node is None:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(node.raylet_socket_name)
        peer = peer_of(client)
        return Identity.of(peer.pid) if peer is not None else None
    return None


def _resources() -> Json:
    nodes = {}
    for node in _untyped.nodes():
        if node["Alive"]:
            amounts = node["Resources"]
            groups = [name for name in amounts if not _is_builtin(name)]
            where = {"host": node["NodeManagerAddress"], "zone": node.get("Labels", {}).get(_ZONE_LABEL, "")}
            nodes[node["NodeID"]] = {**_amounts(amounts), **where, "node_groups": groups}
    return {
        "total": _amounts(_untyped.cluster_resources()),
        "free": _amounts(_untyped.available_resources()),
        "nodes": nodes,
    }


def _amounts(resources: Json) -> Json:
    return {
        "cpu": float(resources.get("CPU", 0.0)),
        "memory_bytes": int(resources.get("memory", 0)),
        "gpu": int(resources.get("GPU", 0)),
    }


def _is_builtin(resource: str) -> bool:
    return resource in ("CPU", "GPU", "memory", "object_store_memory") or resource.startswith(("node:", "accelerator_"))


def _reason(error: Exception) -> str:
    text = str(error)
    if "No module named 'cortex" in text:
        node = _NODE_IP.search(text)
        where = f"node {node[1]}" if node else "a node"
        return f"{where}: cortex is not installed in the Python of Ray there; install {__version__}, as the operator's"
    because = [line.strip() for line in text.splitlines() if "dead because" in line or "died because" in line]
    # After the first sentence, Ray lists guesses.
    return because[0].partition(". ")[0] if because else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    message = " ".join(str(error).split()) if lines[0].endswith(":") else lines[0]  # the next line has the cause
    return message if isinstance(error, CortexError) else f"{type(error).__name__}: {message}"


def _environ_of(pid: int) -> dict[str, str]:
    try:
        parts = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (part.partition("=") for part in parts if part)}


def main() -> None:
    """Serve one operator."""
    # Events get a descriptor of their own; what Ray prints goes to standard error.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bridge = RayBridge(output)
    threading.Thread(target=bridge.read, args=(sys.stdin,), name="read", daemon=True).start()
    try:
        bridge.run()
    except BaseException as error:
        with contextlib.suppress(OSError):
            bridge.send_away(error)
        os._exit(1)  # Ray's own exit handlers may wait for a cluster that is away


if __name__ == "__main__":
    # Import by name, so that nodes import the actor's class from there and don't get the code of `__main__`.
    importlib.import_module("cortex.cluster.ray_bridge").main()
