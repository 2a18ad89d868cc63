"""The operator's side of one node: what is there, what changes, and the orders that it is given.

A link connects again for as long as it is wanted. A node that was silent for `SILENCE_S` counts as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tarfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cortex import __version__
from cortex.cluster.colocation import sockets_here
from cortex.cluster.framing import unpack
from cortex.cluster.placement import NodeAddress
from cortex.cluster.transport import Json, NodeAgentAwayError, Wire, WireError, connect
from cortex.cluster.validation import is_sound, on_node
from cortex.engine.logs import LogLine
from cortex.errors import CortexError
from cortex.replica.spec import Limits, ReplicaSpec, ReplicaStatus
from cortex.telemetry import Logger

#: Three beats of a node.
SILENCE_S = 3.0
#: A machine that refuses connections lives, and so do its replicas: the agent, which ended, may be started again.
AGENT_RESTART_S = 20.0
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 1.0
#: Silence is heard in parts: of a time in which this process stood still, only one passes unheard.
_LOOKS = 3
#: Names of folders are made of it.
_REPLICA_ID = re.compile(r"[a-z0-9][-a-z0-9]{0,127}")
_BULK_TIMEOUT_S = 600.0
#: What an agent that is to end is left for its last numbers.
_END_S = 3.0
#: Numbers of one replica are a few hundred kilobytes.
METRICS_TIMEOUT_S = 20.0
#: A node reads all lines before it sends the first; with `follow` it says something several times a second.
LINES_TIMEOUT_S = 60.0
FOLLOW_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Leader:
    """How nodes reach the operator, and which of several they are to obey."""

    host: str
    port: int
    epoch: int


@dataclass(frozen=True)
class OnNode:
    """A replica as its node tells of it; the paths of its spec are the node's."""

    spec: ReplicaSpec
    status: ReplicaStatus
    is_reserved: bool


class LinkOwner(Protocol):
    """Who is told what a node says."""

    def node_is_up(self, link: NodeLink) -> None:
        """Learn that a node told all that it has: `link.replicas`."""

    def node_is_lost(self, link: NodeLink, reason: str) -> None:
        """Learn that a node was silent for too long."""

    def replica_changed(self, link: NodeLink, replica_id: str) -> None:
        """Learn that a replica changed, came, or is there no more."""

    async def project_archive(self, project_hash: str) -> tuple[Path, str]:
        """Return a file with the archive of a project, and the archive's digest."""


class NodeLink:
    """One node. `startup`, then `shutdown`."""

    def __init__(self, address: NodeAddress, key: str, leader: Leader, owner: LinkOwner, logger: Logger) -> None:
        self.address = address
        self.home: Path | None = None  #: of the node's agent, once it has told
        self.replicas: dict[str, OnNode] = {}
        self.ended: set[str] = set()  #: replicas that are over, whose numbers are still there
        self.cores: dict[str, float] = {}  #: that the ready replicas of each API used lately
        self.is_up = False
        self.sockets_here: Path | None = None  #: where its replicas' sockets are, if this process can reach them
        self.problem = "it has not answered yet"  #: of the last time that it could not be followed
        self._key = key
        self._leader = leader
        self._owner = owner
        self._logger = logger
        self._refusal: str | None = None  #: what it said last, instead of what it has
        self._renewed = ""  #: the version of an agent that was told to end for it
        self._heard_at = time.monotonic()
        self._wire: Wire | None = None
        self._task: asyncio.Task[None] | None = None
        self._uploads: dict[str, asyncio.Task[None]] = {}

    def startup(self) -> None:
        """Begin to follow the node."""
        self._task = asyncio.create_task(self._run(), name=f"follow node {self.address.host}")

    async def shutdown(self) -> None:
        """Stop following it; nothing there changes."""
        tasks = [task for task in (self._task, *self._uploads.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def move(self, address: NodeAddress) -> None:
        """Follow the node where its agent is now."""
        self.address, before = address, self._task
        if before is not None:
            before.cancel()
            self._task = asyncio.create_task(self._run(before), name=f"follow node {address.host}")

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard of the node."""
        return time.monotonic() - self._heard_at

    # Orders. They are lost while the node is away: who gives them looks again once it is up.

    def start(self, spec: ReplicaSpec) -> None:
        """Have a replica started; its spec must be in terms of the node's home."""
        self._send({"command": "start", "spec": spec.to_json()})

    def stop(self, replica_id: str, drain_s: float) -> None:
        """Have a replica stopped."""
        self._send({"command": "stop", "id": replica_id, "drain_s": drain_s})

    def configure(self, replica_id: str, limits: Limits) -> None:
        """Have the limits of a replica changed."""
        message = {"timeout_s": limits.timeout_s, "max_body_bytes": limits.max_body_bytes}
        self._send({"command": "configure", "id": replica_id, **message})

    def forget(self, replica_id: str) -> None:
        """Have what is left of a replica removed."""
        self.ended.discard(replica_id)
        self._send({"command": "forget", "id": replica_id})

    async def end(self) -> None:
        """Have the agent end; its replicas must be gone. What they counted is awaited, for a while."""
        if self._wire is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    while self.ended:
                        await asyncio.sleep(_FIRST_RETRY_S)
        self._send({"command": "shutdown"})
        if self._wire is not None:
            with contextlib.suppress(WireError):
                await self._wire.drain()

    # Bulk, on connections of its own. Raises: WireError.

    async def fetch_metrics(self, replica_id: str) -> dict[str, bytes]:
        """Return the files in which a replica counts, by name."""
        request = {"purpose": "metrics", "id": replica_id}
        async with asyncio.timeout(METRICS_TIMEOUT_S), self._talk(request) as wire:
            size = int((await wire.receive() or {}).get("size", 0))
            data = b"".join([chunk async for chunk in wire.receive_bytes(size)])
        try:
            return await asyncio.to_thread(unpack, data)
        except tarfile.TarError as error:
            raise WireError(f"{self.address.host} sent numbers that can't be read: {error}") from error

    async def logs(
        self, folder: str, replica: str | None, tail: int | None, follow: bool
    ) -> AsyncGenerator[list[LogLine], None]:
        """Go through log lines of the node, some at a time; an empty list says that there are no others now."""
        request = {"purpose": "logs", "folder": folder, "replica": replica, "tail": tail, "follow": follow}
        async with self._talk(request) as wire:
            while (message := await self._next(wire, follow)) is not None:
                yield [LogLine(**line) for line in message.get("lines", ())]
                if message.get("end"):
                    return
        raise WireError(f"{self.address.host} broke off")

    async def access(
        self, api: str, request: str | None, tail: int, follow: bool
    ) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """Go through lines that the node's gateway wrote; see `gateway.access_source`."""
        asked = {"purpose": "access", "api": api, "request": request, "tail": tail, "follow": follow}
        found: list[Mapping[str, Any]] = []
        async with self._talk(asked) as wire:
            while (message := await self._next(wire, follow)) is not None:
                if message.get("end"):
                    return
                found += [{**fields, "gateway": self.address.host} for fields in message["lines"]]
                if not message["more"]:
                    yield found
                    found = []
        raise WireError(f"{self.address.host} broke off")

    async def _next(self, wire: Wire, follow: bool) -> Json | None:
        try:
            async with asyncio.timeout(FOLLOW_TIMEOUT_S if follow else LINES_TIMEOUT_S):
                return await wire.receive()
        except TimeoutError:
            raise WireError(f"{self.address.host} says nothing more") from None

    @contextlib.asynccontextmanager
    async def _talk(self, request: Json) -> AsyncIterator[Wire]:
        wire = await connect(self.address.host, self.address.port, self._key)
        try:
            wire.send(request)
            yield wire
        finally:
            wire.hang_up()

    # Following.

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._wire is not None:
            self._wire.send(dict(message))

    async def _run(self, before: asyncio.Task[None] | None = None) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                is_heard = await self._follow_once()
            except Exception as error:  # whatever one node says must not end that it is followed
                self._logger.error("node can't be followed", exc_info=error, node=self.address.host)
                self.problem, is_heard = f"{type(error).__name__}: {error}", False
                self._lost_if_silent(self.problem, SILENCE_S)
            retry_s = _FIRST_RETRY_S if is_heard else min(retry_s * 2, _MAX_RETRY_S)
            await asyncio.sleep(retry_s)

    async def _follow_once(self) -> bool:
        """Follow the node on one connection; tell whether it told all that it has."""
        is_heard, reason, patience_s = False, "it breaks off", SILENCE_S
        try:
            wire = await connect(self.address.host, self.address.port, self._key)
            try:
                is_heard = await self._follow(wire)
            finally:
                wire.close()
                self._wire = None
        except WireError as error:
            reason = str(error)
            if isinstance(error, NodeAgentAwayError):
                patience_s = AGENT_RESTART_S
        if not is_heard:
            self.problem = reason
            self._lost_if_silent(reason, patience_s)
        return is_heard

    async def _follow(self, wire: Wire) -> bool:
        leader = self._leader
        wire.send({"purpose": "control", "host": leader.host, "port": leader.port, "epoch": leader.epoch})
        self._wire = wire
        seen: set[str] = set()
        is_complete = False
        while True:
            try:
                message = await _receive(wire)
            except TimeoutError:
                self._lost_if_silent("it says nothing", SILENCE_S)
                return is_complete
            except WireError as error:
                self._logger.warning("node broke off", node=self.address.host, error=error)
                return is_complete
            if message is None:
                return is_complete
            if is_complete:
                self._heard_at = time.monotonic()
            name = str(message.get("id", ""))
            match message.get("event"):
                case "node":
                    self.home, self.sockets_here = Path(message["home"]), sockets_here(self.address.host, message)
                    self._refusal = None
                    self._renew(str(message.get("version")))
                case "replica":
                    seen.add(name)
                    self._on_replica(name, message, is_complete)
                case "gone":
                    seen.add(name)
                    self._on_gone(name, bool(message.get("is_left")), is_complete)
                case "complete":
                    for unseen in [other for other in self.replicas if other not in seen]:
                        del self.replicas[unseen]  # they ended meanwhile
                    is_complete = self.is_up = True
                    self._heard_at = time.monotonic()
                    self._owner.node_is_up(self)
                case "cores":
                    self.cores = {str(api): float(cores) for api, cores in message["cores"].items()}
                case "needs_project":
                    self._upload(str(message["project"]))
                case "refused":
                    if message.get("reason") != self._refusal:
                        self._refusal = message.get("reason")
                        self._logger.error("node refused", node=self.address.host, reason=self._refusal)
                    return is_complete

    def _renew(self, version: str) -> None:
        """Have an agent of another version end, once: it is started again as cortex is installed there by now."""
        if version == __version__:
            return
        if version == self._renewed:
            self._logger.warning("node has another version of cortex", node=self.address.host, version=version)
            return
        self._renewed = version
        self._logger.info("agent of another version ends", node=self.address.host, version=version)
        self._send({"command": "renew"})

    def _on_replica(self, name: str, message: Json, is_complete: bool) -> None:
        spec, status = ReplicaSpec.from_json(message["spec"]), ReplicaStatus.from_json(message["status"])
        if not _REPLICA_ID.fullmatch(name) or not name == spec.id == status.id:
            raise WireError(f"{self.address.host} tells of a replica {name!r}, which can't be")
        if not is_sound(status):
            raise WireError(f"{self.address.host} tells of replica {name!r} what can't be")
        self.replicas[name] = OnNode(spec, on_node(status, self.address.host), bool(message["is_reserved"]))
        if is_complete:
            self._owner.replica_changed(self, name)

    def _on_gone(self, name: str, is_left: bool, is_complete: bool) -> None:
        if not _REPLICA_ID.fullmatch(name):
            return  # of nobody's making
        self.replicas.pop(name, None)
        if is_left:
            self.ended.add(name)
        if is_complete:
            self._owner.replica_changed(self, name)

    def _lost_if_silent(self, reason: str, patience_s: float) -> None:
        """Give the node up, unless its agent has just ended: it is started again, and finds what runs."""
        if self.is_up and time.monotonic() - self._heard_at >= patience_s:
            self.is_up = False
            self._owner.node_is_lost(self, reason)

    # Projects.

    def _upload(self, project_hash: str) -> None:
        if project_hash not in self._uploads:
            task = asyncio.create_task(self._send_project(project_hash), name=f"send project to {self.address.host}")
            self._uploads[project_hash] = task
            task.add_done_callback(lambda _: self._uploads.pop(project_hash, None))

    async def _send_project(self, project_hash: str) -> None:
        try:
            archive, digest = await self._owner.project_archive(project_hash)
            size = archive.stat().st_size
            request = {"purpose": "project", "project": project_hash, "size": size, "digest": digest}
            async with asyncio.timeout(_BULK_TIMEOUT_S), self._talk(request) as wire:
                await wire.send_bytes(_chunks(archive))
                answer = await wire.receive() or {"error": "it broke off"}
            if "error" in answer:
                raise WireError(answer["error"])
        except (CortexError, OSError) as error:
            self._logger.error("project could not be sent", node=self.address.host, project=project_hash, error=error)
            self._send({"command": "no_project", "project": project_hash, "reason": str(error)})


async def _receive(wire: Wire) -> Json | None:
    """Return the next message. Raises: WireError; TimeoutError after `SILENCE_S` without any."""
    for _ in range(_LOOKS):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S / _LOOKS):
                return await wire.receive()
    raise TimeoutError


async def _chunks(path: Path, size: int = 1024 * 1024) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, size):
            yield chunk
