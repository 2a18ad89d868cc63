"""Client of one node agent, at the operator: follows the state of the node and sends commands.

A client reconnects for as long as it runs. A node that is silent for `SILENCE_S`, or longer if its heartbeats were late
before, is lost; a node that refuses connections has `AGENT_RESTART_S`, because its replicas run on while its agent
restarts.

Ids and addresses from a node are validated before they get into paths and routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import os
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex import __version__
from cortex.cluster.credentials import TlsIdentity
from cortex.cluster.node.start import RESERVE_SOCKET
from cortex.cluster.placement import NodeAddress
from cortex.cluster.transport import PeerConnection, PeerError, PeerNotListeningError, connect
from cortex.engine.logs import LogLine
from cortex.engine.usage import ResourceUsage, usage_from_json
from cortex.errors import CortexError
from cortex.gateway.addresses import host_of, is_address, numeric
from cortex.home import Home
from cortex.payloads.json_object import Json
from cortex.processes.backoff import Backoff
from cortex.processes.codec import decode
from cortex.processes.identity import Identity
from cortex.processes.sockets import peer_of
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaSpec, ReplicaStatus, RequestLimits

if TYPE_CHECKING:
    from cortex.cluster.engine import ClusterEngine

#: Three heartbeats of a node.
SILENCE_S = 3.0
AGENT_RESTART_S = 20.0
_BACKOFF = Backoff(0.1, 1.0)
#: Silence is measured in several waits, so that a pause of this process consumes one of them at most.
_WAIT_S = 1.0
#: On a busy machine heartbeats are late: a node may be silent for this multiple of the longest recent silence.
_TOLERATED_DELAY = 2.5
MAX_SILENCE_S = 15.0
#: How much of a recent silence counts a second later.
_DECAY = 0.95
#: Ids become names of folders.
_REPLICA_ID = re.compile(r"[a-z0-9][-a-z0-9]{0,127}")
_UPLOAD_TIMEOUT_S = 600.0
#: How long to wait for the last metrics of a node before its agent ends.
_END_S = 3.0
#: The metrics of one replica are a few hundred kilobytes.
METRICS_TIMEOUT_S = 20.0
#: A node reads all lines before it sends the first; with `follow` it sends something several times per second.
LINES_TIMEOUT_S = 60.0
FOLLOW_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LeaderAddress:
    """Address of the operator, and its epoch: nodes obey the highest."""

    host: str
    port: int
    epoch: int


@dataclass(frozen=True)
class NodeReplica:
    """A replica as its node reports it; the paths of its spec are the node's."""

    spec: ReplicaSpec
    status: ReplicaStatus
    is_reserved: bool


class Silence:
    """Silence of a node, and how much of it means that the node is lost."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._longest_s = 0.0  #: of recent silences; older ones count less

    def reset(self, now: float) -> None:
        """Start anew when the node is back: the time that it was away is no late heartbeat."""
        self._heard_at, self._longest_s = now, 0.0

    def hear(self, now: float) -> None:
        """Record a message."""
        passed_s = now - self._heard_at
        self._longest_s = max(passed_s, self._longest_s * _DECAY**passed_s)
        self._heard_at = now

    def duration_s(self, now: float) -> float:
        """Return the seconds since the last message."""
        return now - self._heard_at

    @property
    def limit_s(self) -> float:
        """A longer silence means that the node is lost."""
        return min(max(SILENCE_S, _TOLERATED_DELAY * self._longest_s), MAX_SILENCE_S)


class NodeClient:
    """Client of one node. `startup`, then `shutdown`."""

    def __init__(
        self,
        address: NodeAddress,
        identity: TlsIdentity,
        leader: LeaderAddress,
        observer: ClusterEngine,
        logger: Logger,
    ) -> None:
        self.address = address
        self.home: Path | None = None  #: of the agent; None until it has connected
        self.replicas: dict[str, NodeReplica] = {}
        self.ended: set[str] = set()  #: replicas that ended and whose metrics are still on the node
        self.cores: dict[str, float] = {}  #: recent CPU usage of the ready replicas of each API
        self.usage: dict[str, ResourceUsage] = {}  #: recent use of each replica
        self.is_up = False
        self.local_sockets_dir: Path | None = None  #: its replicas' sockets, if the node is this machine
        self.problem = "it has not answered yet"  #: of the last failed connection
        self._identity = identity
        self._leader = leader
        self._observer = observer
        self._logger = logger
        self._refusal: str | None = None  #: the reason of the last "refused" event
        self._renewed = ""  #: version of the agent that was ordered to restart
        self._silence = Silence(time.monotonic())
        self._connection: PeerConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._uploads: dict[str, asyncio.Task[None]] = {}

    def startup(self) -> None:
        """Start to follow the node."""
        self._task = asyncio.create_task(self._run(), name=f"follow node {self.address.host}")

    async def shutdown(self) -> None:
        """Stop following the node; nothing changes there."""
        tasks = [task for task in (self._task, *self._uploads.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def move(self, address: NodeAddress) -> None:
        """Follow the node at the new address of its agent."""
        self.address, before = address, self._task
        if before is not None:
            before.cancel()
            self._task = asyncio.create_task(self._run(before), name=f"follow node {address.host}")

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the node."""
        return self._silence.duration_s(time.monotonic())

    # Commands. They are lost while the node is away; the caller compares and repeats them once it is up.

    def start(self, spec: ReplicaSpec) -> None:
        """Start a replica. The spec must have the paths of the node's home."""
        self._send({"command": "start", "spec": spec.to_json()})

    def stop(self, replica_id: str, drain_s: float) -> None:
        """Stop a replica."""
        self._send({"command": "stop", "id": replica_id, "drain_s": drain_s})

    def configure(self, replica_id: str, limits: RequestLimits) -> None:
        """Change the limits of a replica."""
        self._send({"command": "configure", "id": replica_id, **asdict(limits)})

    def forget(self, replica_id: str) -> None:
        """Delete the files of a replica that ended."""
        self.ended.discard(replica_id)
        self._send({"command": "forget", "id": replica_id})

    async def end(self) -> None:
        """End the agent, after its last metrics were fetched or `_END_S` passed. No replica may run there."""
        if self._connection is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    while self.ended:
                        await asyncio.sleep(_BACKOFF.first_s)
        self._send({"command": "shutdown"})
        if self._connection is not None:
            with contextlib.suppress(PeerError):
                await self._connection.drain()

    # Bulk data, each on a connection of its own. Raises: PeerError.

    async def fetch_metrics(self, replica_id: str) -> bytes:
        """Return the metrics folder of a replica as `metrics_mirror.pack` packed it."""
        request = {"purpose": "metrics", "id": replica_id}
        async with asyncio.timeout(METRICS_TIMEOUT_S), self._request(request) as connection:
            size = int((await connection.receive() or {}).get("size", 0))
            return b"".join([chunk async for chunk in connection.receive_bytes(size)])

    async def logs(
        self, folder: str, replica: str | None, tail: int | None, follow: bool
    ) -> AsyncGenerator[list[LogLine], None]:
        """Yield batches of log lines; an empty batch marks the current end of the log."""
        request = {"purpose": "logs", "folder": folder, "replica": replica, "tail": tail, "follow": follow}
        async with self._request(request) as connection:
            while (message := await self._next_lines(connection, follow)) is not None:
                yield decode(list[LogLine], message.get("lines", []))
                if message.get("end"):
                    return
        raise PeerError(f"{self.address.host} closed the connection")

    async def access(
        self, api: str, request: str | None, tail: int, follow: bool
    ) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """Yield batches of the access log of the node's gateway; see `LocalAccess.access`."""
        message_out = {"purpose": "access", "api": api, "request": request, "tail": tail, "follow": follow}
        found: list[Mapping[str, Any]] = []
        async with self._request(message_out) as connection:
            while (message := await self._next_lines(connection, follow)) is not None:
                if message.get("end"):
                    return
                found += [{**fields, "gateway": self.address.host} for fields in message["lines"]]
                if not message["more"]:
                    yield found
                    found = []
        raise PeerError(f"{self.address.host} closed the connection")

    async def _next_lines(self, connection: PeerConnection, follow: bool) -> Json | None:
        try:
            async with asyncio.timeout(FOLLOW_TIMEOUT_S if follow else LINES_TIMEOUT_S):
                return await connection.receive()
        except TimeoutError:
            raise PeerError(f"{self.address.host} stopped sending lines") from None

    @contextlib.asynccontextmanager
    async def _request(self, request: Json) -> AsyncIterator[PeerConnection]:
        connection = await connect(self.address.host, self.address.port, self._identity)
        try:
            connection.send(request)
            yield connection
        finally:
            connection.abort()

    # Following.

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._connection is not None:
            self._connection.send(dict(message))

    async def _run(self, before: asyncio.Task[None] | None = None) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        failures = 0
        while True:
            try:
                is_complete = await self._follow_once()
            except Exception as error:  # an invalid message must not end the loop
                self._logger.error("following node failed", exc_info=error, node=self.address.host)
                self.problem, is_complete = f"{type(error).__name__}: {error}", False
                self._lose_if_silent(self.problem, SILENCE_S)
            failures = 0 if is_complete else failures + 1
            await asyncio.sleep(_BACKOFF.delay_s(failures + 1))

    async def _follow_once(self) -> bool:
        """Follow the node on one connection. Return whether it reported all of its replicas."""
        is_complete, reason, patience_s = False, "it closes connections", SILENCE_S
        try:
            connection = await connect(self.address.host, self.address.port, self._identity)
            try:
                is_complete = await self._follow(connection)
            finally:
                connection.close()
                self._connection = None
        except PeerError as error:
            reason = str(error)
            if isinstance(error, PeerNotListeningError):
                patience_s = AGENT_RESTART_S
        if not is_complete:
            self.problem = reason
            self._lose_if_silent(reason, patience_s)
        return is_complete

    async def _follow(self, connection: PeerConnection) -> bool:
        leader = self._leader
        connection.send({"purpose": "control", "host": leader.host, "port": leader.port, "epoch": leader.epoch})
        self._connection = connection
        seen: set[str] = set()
        is_complete = False
        while True:
            try:
                message = await _receive(connection, self._silence.limit_s)
            except TimeoutError:
                self._lose_if_silent("it sends no heartbeats", SILENCE_S)
                return is_complete
            except PeerError as error:
                self._logger.warning("connection to node broke", node=self.address.host, error=error)
                return is_complete
            if message is None:
                return is_complete
            if is_complete:
                self._silence.hear(time.monotonic())
            name = str(message.get("id", ""))
            match message.get("event"):
                case "node":
                    self.home = Path(message["home"])
                    self.local_sockets_dir = local_sockets_dir(self.address.host, message)
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
                        del self.replicas[unseen]  # they ended while the node was away
                    is_complete = self.is_up = True
                    self._silence.reset(time.monotonic())
                    self._observer.node_is_up(self)
                case "cores":
                    self.cores = {str(api): float(cores) for api, cores in message["cores"].items()}
                    self.usage = usage_from_json(message.get("usage", {}))  # agents of older versions send none
                case "needs_project":
                    self._upload(str(message["project"]))
                case "refused":
                    if message.get("reason") != self._refusal:
                        self._refusal = message.get("reason")
                        self._logger.error("node refused the connection", node=self.address.host, reason=self._refusal)
                    return is_complete

    def _renew(self, version: str) -> None:
        """Restart an agent of another version, once, with the version that is installed on the node now."""
        if version == __version__:
            return
        if version == self._renewed:
            self._logger.warning("node has another version of cortex", node=self.address.host, version=version)
            return
        self._renewed = version
        self._logger.info("agent of another version is restarted", node=self.address.host, version=version)
        self._send({"command": "renew"})

    def _on_replica(self, name: str, message: Json, is_complete: bool) -> None:
        spec, status = ReplicaSpec.from_json(message["spec"]), ReplicaStatus.from_json(message["status"])
        if not _REPLICA_ID.fullmatch(name) or not name == spec.id == status.id:
            raise PeerError(f"{self.address.host} reported a replica with the invalid id {name!r}")
        self.replicas[name] = NodeReplica(
            spec, sanitize_status(status, self.address.host), bool(message["is_reserved"])
        )
        if is_complete:
            self._observer.replica_changed(self, name)

    def _on_gone(self, name: str, is_left: bool, is_complete: bool) -> None:
        if not _REPLICA_ID.fullmatch(name):
            return
        self.replicas.pop(name, None)
        if is_left:
            self.ended.add(name)
        if is_complete:
            self._observer.replica_changed(self, name)

    def _lose_if_silent(self, reason: str, patience_s: float) -> None:
        if self.is_up and self.silent_s >= max(patience_s, self._silence.limit_s):
            self.is_up = False
            self._observer.node_is_lost(self, reason)

    # Projects.

    def _upload(self, project_hash: str) -> None:
        if project_hash not in self._uploads:
            task = asyncio.create_task(self._send_project(project_hash), name=f"send project to {self.address.host}")
            self._uploads[project_hash] = task
            task.add_done_callback(lambda _: self._uploads.pop(project_hash, None))

    async def _send_project(self, project_hash: str) -> None:
        try:
            archive, digest = await self._observer.project_archive(project_hash)
            size = archive.stat().st_size
            request = {"purpose": "project", "project": project_hash, "size": size, "digest": digest}
            async with asyncio.timeout(_UPLOAD_TIMEOUT_S), self._request(request) as connection:
                await connection.send_bytes(_chunks(archive))
                answer = await connection.receive() or {"error": "the node closed the connection"}
            if "error" in answer:
                raise PeerError(answer["error"])
        except (CortexError, OSError) as error:
            self._logger.error("sending project failed", node=self.address.host, project=project_hash, error=error)
            self._send({"command": "no_project", "project": project_hash, "reason": str(error)})


def sanitize_status(status: ReplicaStatus, host: str) -> ReplicaStatus:
    """Return a status without addresses that are not on the node: gateways would connect to them."""
    own = numeric(host)

    def is_own(address: str) -> bool:
        return is_address(address) and own in (host_of(address), None)

    processes = (each if is_own(each.socket) else replace(each, socket="", near="") for each in status.processes)
    return replace(status, processes=tuple(processes), node=host)


def local_sockets_dir(host: str, node: Mapping[str, Any]) -> Path | None:
    """Return the folder with the sockets of a node's replicas if this process can reach them, else None.

    They are reachable if `host` is an address of this machine and the agent that the node's message describes, a
    process of our user, listens at the reservation socket there. Containers that share a network or folders with us
    may meet only one of the conditions.
    """
    try:
        folder = Home(Path(node["home"])).sockets_dir
        agent = Identity.from_json(json.loads(node["identity"]))
        is_local = _is_own_address(host) and _listens(agent, folder / RESERVE_SOCKET)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return folder if is_local else None


def _is_own_address(host: str) -> bool:
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return False
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            return False
    return True


def _listens(process: Identity, path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)  # a full backlog must not block the event loop
        sock.connect(str(path))
        peer = peer_of(sock)
    if peer is None or peer.uid != os.geteuid() or peer.pid <= 0:
        return False
    return Identity.of(peer.pid).is_same(process)


async def _receive(connection: PeerConnection, limit_s: float) -> Json | None:
    """Return the next message. Raises: PeerError; TimeoutError after `limit_s` without a message."""
    for _ in range(math.ceil(limit_s / _WAIT_S)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                return await connection.receive()
    raise TimeoutError


async def _chunks(path: Path, size: int = 1024 * 1024) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, size):
            yield chunk
