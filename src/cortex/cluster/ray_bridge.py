"""Speaks with Ray for the operator, in a process of its own: Ray's library ends its process when Ray is away too long.

Only it, and `ray_token.py` for it, import Ray. Commands come as lines of JSON on standard input, the first of them
`connect`; events leave as lines of JSON on standard output. It keeps nothing: what is reserved are actors that
outlive it.
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
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cortex import __version__
from cortex.cluster.node.start import NodeStart, RunningAgent, agent_environ, ensure_agent, is_over, reserve
from cortex.cluster.priority import Priority
from cortex.cluster.ray_token import check_token
from cortex.errors import CortexError
from cortex.processes.identity import Identity

#: A share of a node group small enough for a thousand replicas on a node.
GROUP_SHARE = 0.001
TURN_S = 0.2
LIST_S = 0.5
RESOURCES_S = 1.0
#: Actors that were there before are asked where they are; those that don't answer in time are told of later.
_ADOPT_S = 2.0
_READ_TIMEOUT_S = 2.0
#: An agent that ends again and again is not started more often than that.
_AGENT_PAUSE_S = 0.5
#: One that is being killed closes its ends one after the other, and may seem to live for so long.
_AGENT_DYING_S = 3.0

#: What Ray says of each worker.
_OF_NODE = re.compile(r"\bip=([0-9a-fA-F.:]+)")

Json = dict[str, Any]
_untyped: Any = ray  #: those of its functions that have no annotations


class Reservation:
    """Ray's actor for one replica: while it lives, what the replica wants of its node is not given to others."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._host = ""
        self._start: Json = {}
        self._gpus: tuple[str, ...] = ()
        self._connection: socket.socket | None = None
        self._answer: Json = {}

    def where(self, start: Json) -> Json:
        """Return the node and the address of its agent, started if need be; or `problem`."""
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
        of_ray = os.getppid()
        environ = agent_environ(os.environ, _environ_of(of_ray))
        agent = ensure_agent(NodeStart(**self._start), self._host, environ, Priority.of(of_ray))
        self._connection = reserve(agent, self._name, self._gpus)
        return agent

    def _watch_agent(self) -> None:
        """Start the agent again whenever it ends, and end with the replica."""
        while self._connection is not None and not is_over(self._connection):
            agent = self._reserve_again()
            if agent is None:
                break  # the operator learns that nothing is reserved here, and asks for it again
            if (agent.host, agent.port) != (self._answer["host"], self._answer["port"]):
                break  # likewise: it is told the new address then
            time.sleep(_AGENT_PAUSE_S)
        os.kill(os.getpid(), signal.SIGTERM)  # as Ray itself ends its workers; what was reserved is free then

    def _reserve_again(self) -> RunningAgent | None:
        """Reserve with whichever agent there is, or is started; None if that can't be had."""
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
    """One that is wanted, and the question that it has not answered yet."""

    handle: Any
    question: Any = None
    is_placed: bool = False


class Bridge:
    """Reserves, gives up, and tells what changes, in turns that wait for no node."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._commands: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._actors: dict[str, _Actor] = {}
        self._namespace = ""
        self._start: Json = {}
        self._actor_class: Any = ray.remote(Reservation)
        self._listed_at = self._counted_at = 0.0
        self._raylet: Identity | None = None

    def read(self, lines: TextIO) -> None:
        """Take commands until there are no more, then end the process: the operator is gone."""
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                self._commands.put(json.loads(line))
        os._exit(0)

    def run(self) -> None:
        """Connect, then serve for ever. Raises: what Ray raises when it is away."""
        first = self._commands.get()
        assert first is not None
        self._connect(first)
        self._adopt()
        while True:
            self._obey()
            self._hear()
            now = time.monotonic()
            if now - self._listed_at >= LIST_S:
                self._listed_at = now
                self._look_for_deaths()
            if now - self._counted_at >= RESOURCES_S:
                self._counted_at = now
                if self._raylet is not None and not self._raylet.is_alive():
                    # What is created through it would be lost as soon as the head notices, though all seems well.
                    raise ConnectionError("Ray's process on this machine ended")
                self._tell("resources", **_resources())

    def tell_away(self, error: BaseException) -> None:
        """Say why there will be no more events."""
        self._tell("away", reason=_first_line(error))

    def _connect(self, settings: Json) -> None:
        self._namespace = settings["namespace"]
        self._start = settings["start"]
        check_token(settings["address"])
        ray.init(address=settings["address"], namespace=self._namespace, log_to_driver=False)
        self._raylet = _own_raylet()

    def _adopt(self) -> None:
        for name in ray.util.list_named_actors():
            with contextlib.suppress(ValueError):  # it has just ended
                self._ask(name, _Actor(ray.get_actor(name, namespace=self._namespace)))
        deadline = time.monotonic() + _ADOPT_S
        asked = [actor.question for actor in self._actors.values()]
        while asked and time.monotonic() < deadline:
            _, asked = ray.wait(asked, num_returns=len(asked), timeout=TURN_S)
        self._tell("connected", names=list(self._actors))
        self._hear()

    def _obey(self) -> None:
        """Do what the operator says, waiting a moment for it."""
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
            return self._tell("created", name=name)
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
            options["scheduling_strategy"] = "SPREAD"  # a node that is lost takes few; GPUs are better kept together
        if command["node_id"]:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(command["node_id"], soft=False)
        try:
            self._ask(name, _Actor(self._actor_class.options(**options).remote(name)))
        except (ValueError, ray.exceptions.RayError) as error:
            return self._tell("lost", name=name, reason=_first_line(error))
        return self._tell("created", name=name)

    def _remove(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            self._kill(actor)
        self._tell("removed", name=name)

    def _ask(self, name: str, actor: _Actor) -> None:
        actor.question = actor.handle.where.remote(self._start)
        self._actors[name] = actor

    def _hear(self) -> None:
        """Take the answers that are there."""
        asked = {actor.question: name for name, actor in self._actors.items() if actor.question is not None}
        if not asked:
            return
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for question in ready:
            self._take_answer(asked[question], question)

    def _take_answer(self, name: str, question: Any) -> None:
        actor = self._actors[name]
        actor.question = None
        try:
            answer = ray.get(question, timeout=_READ_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            actor.question = question
        except ray.exceptions.RayError as error:
            del self._actors[name]
            self._kill(actor)
            self._tell("lost", name=name, reason=_reason(error))
        else:
            if "problem" in answer:
                del self._actors[name]
                self._kill(actor)
                self._tell("lost", name=name, reason=answer["problem"])
            elif not actor.is_placed:
                actor.is_placed = True
                self._tell("placed", name=name, **answer)

    def _look_for_deaths(self) -> None:
        """Ask those again that Ray lists no more: the answer says what they died of."""
        listed = set(ray.util.list_named_actors())
        for name, actor in self._actors.items():
            if actor.is_placed and actor.question is None and name not in listed:
                actor.question = actor.handle.where.remote(self._start)

    def _kill(self, actor: _Actor) -> None:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(actor.handle)

    def _tell(self, event: str, **fields: Any) -> None:
        self._output.write(json.dumps({"event": event, **fields}) + "\n")
        self._output.flush()


def _own_raylet() -> Identity | None:
    """Return Ray's process on this machine; None where it can't be known, or where Ray is only reached from afar."""
    node = getattr(_untyped._private.worker.global_worker, "node", None)
    if node is None or not hasattr(socket, "SO_PEERCRED"):
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(node.raylet_socket_name)
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return Identity.of(struct.unpack("3i", peer)[0])
    return None


def _resources() -> Json:
    nodes = {}
    for node in _untyped.nodes():
        if node["Alive"]:
            amounts = node["Resources"]
            groups = [name for name in amounts if not _is_of_ray(name)]
            nodes[node["NodeID"]] = {**_amounts(amounts), "host": node["NodeManagerAddress"], "node_groups": groups}
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


def _is_of_ray(resource: str) -> bool:
    return resource in ("CPU", "GPU", "memory", "object_store_memory") or resource.startswith(("node:", "accelerator_"))


def _reason(error: Exception) -> str:
    text = str(error)
    if "No module named 'cortex" in text:
        node = _OF_NODE.search(text)
        where = f"node {node[1]}" if node else "a node"
        return f"{where}: cortex is not installed in the Python of Ray there; install {__version__}, as the operator's"
    because = [line.strip() for line in text.splitlines() if "dead because" in line or "died because" in line]
    # What follows the first sentence are guesses.
    return because[0].partition(". ")[0] if because else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    said = " ".join(str(error).split()) if lines[0].endswith(":") else lines[0]  # else it would end before it says what
    return said if isinstance(error, CortexError) else f"{type(error).__name__}: {said}"


def _environ_of(pid: int) -> dict[str, str]:
    try:
        parts = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (part.partition("=") for part in parts if part)}


def main() -> None:
    """Serve one operator."""
    # Whatever Ray prints must not get among the events.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bridge = Bridge(output)
    threading.Thread(target=bridge.read, args=(sys.stdin,), name="read", daemon=True).start()
    try:
        bridge.run()
    except BaseException as error:
        with contextlib.suppress(OSError):
            bridge.tell_away(error)
        os._exit(1)  # not through Ray's own end, which may wait for a cluster that is away


if __name__ == "__main__":
    # By its name: a node imports the actor's class from there, instead of being sent the code of this program.
    importlib.import_module("cortex.cluster.ray_bridge").main()
