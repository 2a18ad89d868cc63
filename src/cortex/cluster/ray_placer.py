"""Placer on Ray, through a process of its own (`ray_bridge.py`) that is restarted whenever it exits.

Reservations survive that, and the death of Ray's head: while Ray is away, the last known state stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cortex.cluster.node.start import NodeStart
from cortex.cluster.placement import (
    ClusterResources,
    NodeAddress,
    Placement,
    Resources,
    choose_group,
)
from cortex.payloads.json_object import Json
from cortex.processes.backoff import Backoff
from cortex.processes.codec import decode
from cortex.telemetry import Logger

STARTUP_TIMEOUT_S = 20.0
#: The bridge sends an event each second. After this much silence Ray counts as away, and
AWAY_AFTER_S = 5.0
#: after this much the bridge is restarted.
RESTART_AFTER_S = 30.0
CONNECT_TIMEOUT_S = 60.0
#: Ray's library takes some seconds to start on a busy machine.
_SLOW_START_S = 10.0
_PROBE_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 3.0
_BACKOFF = Backoff(0.5, 5.0)
_CLIENT_PORT = 10001
_PORT = 6379
#: One line lists all reservations.
_MAX_LINE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class _Request:
    """A request for resources."""

    resources: Resources
    node_id: str
    preferred: str = ""
    is_confirmed: bool = False  #: Ray has created its actor


class RayPlacer:
    """Reservations in one namespace of a Ray cluster.

    `address` is `host:port` of the head if the operator's machine is part of the cluster, else `ray://host:10001`.
    `prefix` is prepended to the command of the bridge; tests start it in other namespaces.
    """

    def __init__(
        self,
        address: str,
        start: NodeStart,
        environ: Mapping[str, str],
        log_file: Path,
        logger: Logger,
        prefix: Sequence[str] = (),
    ) -> None:
        self._on_change: Callable[[], None] = lambda: None
        self._address = address
        self._start = start
        self._environ = environ
        self._log_file = log_file
        self._logger = logger
        self._prefix = prefix
        self._wanted: dict[str, _Request] = {}
        self._placements: dict[str, Placement] = {}
        self._removed: set[str] = set()  #: not confirmed by Ray yet
        self._resources: ClusterResources | None = None
        self._reason = "Ray has not answered yet"
        self._process: Process | None = None
        self._is_connected = False  #: the bridge has sent "connected"
        self._has_tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_available(self) -> bool:
        """True while Ray answers."""
        return not self._reason

    @property
    def reason(self) -> str:
        """Reason why Ray does not answer; empty while it does."""
        return self._reason

    @property
    def bridge_pid(self) -> int | None:
        """Pid of the bridge; None while it does not run."""
        return self._process.pid if self._process is not None else None

    def placements(self) -> dict[str, Placement]:
        """Return all requests and reservations by name."""
        return dict(self._placements)

    def resources(self) -> ClusterResources | None:
        """Return the resources of the cluster; None while Ray is away."""
        return self._resources

    async def startup(self, on_change: Callable[[], None]) -> None:
        """Find existing reservations, for `STARTUP_TIMEOUT_S` at most."""
        self._on_change = on_change
        self._task = asyncio.create_task(self._run(), name="ray")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                await self._has_tried.wait()

    async def shutdown(self) -> None:
        """Stop without releasing any reservation."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def place(self, name: str, resources: Resources, node_id: str = "", preferred: str = "") -> None:
        """Request resources on the node `node_id` only, or on any node: `preferred` if it has them free."""
        known = self._placements.get(name)
        if known is not None and known.state != "lost":
            return
        self._removed.discard(name)
        self._wanted[name] = _Request(resources, node_id, preferred)
        self._placements[name] = Placement(name, "pending", None, time.monotonic())
        self._send_place(name)
        self._on_change()

    async def remove(self, name: str) -> None:
        """Release a reservation or cancel a request."""
        if self._placements.pop(name, None) is None:
            return
        self._wanted.pop(name, None)
        self._removed.add(name)
        self._send({"do": "remove", "name": name})
        self._on_change()

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                reason = await self._probe() or await self._run_bridge()
            except Exception as error:  # nothing is placed without this loop
                expected = isinstance(error, OSError | ValueError)
                self._logger.error("bridge to Ray failed", None if expected else error, error=error)
                reason = f"the bridge to Ray can't be run: {error}"
            failures = 0 if self._is_connected else failures + 1
            self._is_connected = False
            self._set_away(reason)
            self._has_tried.set()
            await asyncio.sleep(_BACKOFF.delay_s(failures))

    async def _probe(self) -> str:
        """Return why Ray can't be reached, or "". Cheaper than with Ray's library, which takes seconds to start."""
        parts = urlsplit(self._address if "://" in self._address else f"//{self._address}")
        port = parts.port or (_CLIENT_PORT if parts.scheme == "ray" else _PORT)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except TimeoutError:
            return self._unreachable(f"no answer within {_PROBE_TIMEOUT_S:g} s")
        except OSError as error:
            number = error.errno or 0  # below zero if a name can't be resolved
            return self._unreachable(os.strerror(number).lower() if number > 0 else error.strerror or str(error))
        writer.close()
        return ""

    def _unreachable(self, why: str) -> str:
        where = f"the head of Ray at {self._address}"
        return f"{where} can't be reached: {why}; check --ray-address, and that Ray runs there"

    async def _run_bridge(self) -> str:
        """Run the bridge until it exits. Return the reason."""
        command = [*self._prefix, sys.executable, "-P", "-m", "cortex.cluster.ray_bridge"]
        with self._log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=dict(self._environ),
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        self._process = process
        try:
            namespace = f"cortex-{self._start.cluster_id}"
            self._send({"address": self._address, "namespace": namespace, "start": asdict(self._start)})
            return await self._follow(process)
        finally:
            self._process = None
            await _end(process)

    async def _follow(self, process: Process) -> str:
        assert process.stdout is not None
        reason = f"the bridge to Ray exited; see {self._log_file}"
        silent_s = 0.0
        while True:
            try:
                async with asyncio.timeout(AWAY_AFTER_S):
                    line = await process.stdout.readline()
            except TimeoutError:
                silent_s += AWAY_AFTER_S
                message = self._silence(silent_s)
                if self._is_connected or silent_s >= _SLOW_START_S:
                    self._set_away(message)
                if silent_s >= (RESTART_AFTER_S if self._is_connected else CONNECT_TIMEOUT_S):
                    return message
                continue
            if not line:
                return reason
            silent_s = 0.0
            event = json.loads(line)
            if event["event"] == "away":
                reason = f"Ray at {self._address}: {event['reason']}"
            else:
                self._on_event(event)

    def _silence(self, silent_s: float) -> str:
        message = f"Ray at {self._address} has not answered for {silent_s:g} s"
        if self._is_connected or self._address.startswith("ray://"):
            return message
        # The head's port is open, but Ray's library waits silently for a node on this machine.
        return f"{message}; if this machine is not a node of the cluster, make it one or use --ray-address ray://HOST:10001"

    def _on_event(self, event: Json) -> None:
        match event["event"]:
            case "connected":
                self._on_connected(event["names"])
            case "created":
                self._confirm(event["name"])
            case "removed":
                self._removed.discard(event["name"])
            case "placed":
                self._confirm(event["name"])
                node = NodeAddress(event["node_id"], event["host"], event["port"])
                self._change(event["name"], "placed", node, gpus=tuple(event["gpus"]))
            case "lost":
                self._change(event["name"], "lost", None, event["reason"])
            case "resources":
                self._on_resources(event)

    def _on_connected(self, names: list[str]) -> None:
        """Compare the existing actors with the known placements; the head may have lost some or created others."""
        self._logger.info("connected to Ray", address=self._address, reservations=len(names))
        self._is_connected = True
        for name in names:
            if name in self._removed:
                self._send({"do": "remove", "name": name})
            elif name not in self._placements:
                self._placements[name] = Placement(name, "pending", None, time.monotonic())
            self._confirm(name)
        self._removed &= set(names)
        for name, placement in list(self._placements.items()):
            if name in names or placement.state == "lost":
                continue
            if name in self._wanted and not self._wanted[name].is_confirmed:
                self._send_place(name)
            else:
                self._change(name, "lost", None, "Ray's head has lost it")

    def _on_resources(self, event: Json) -> None:
        found = decode(ClusterResources, event)
        self._has_tried.set()  # existing actors have had `_ADOPT_S` to answer
        if found != self._resources or self._reason:
            self._resources = found
            self._reason = ""
            self._on_change()

    def _confirm(self, name: str) -> None:
        if name in self._wanted:
            self._wanted[name] = replace(self._wanted[name], is_confirmed=True)

    def _change(
        self, name: str, state: Any, node: NodeAddress | None, reason: str = "", gpus: tuple[str, ...] = ()
    ) -> None:
        known = self._placements.get(name)
        if known is None:
            return
        found = Placement(name, state, node or known.node, known.since, reason, gpus or known.gpus)
        if found != known:
            self._placements[name] = replace(found, since=time.monotonic())
            self._on_change()

    def _set_away(self, reason: str) -> None:
        if not self._reason or not self._has_tried.is_set():
            self._logger.warning("Ray does not answer", reason=reason)
        if reason != self._reason:
            self._reason = reason
            self._resources = None
            self._on_change()

    def _send_place(self, name: str) -> None:
        wanted = self._wanted[name]
        resources = asdict(wanted.resources)
        del resources["node_groups"]
        group = choose_group(wanted.resources, self._resources)
        if self._is_connected:
            nodes = {"node_id": wanted.node_id, "preferred": wanted.preferred}
            self._send({"do": "place", "name": name, "group": group, **nodes, **resources})

    def _send(self, command: Json) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(command).encode() + b"\n")


async def _end(process: Process) -> None:
    """End the bridge: it exits at the end of its standard input."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
            return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
