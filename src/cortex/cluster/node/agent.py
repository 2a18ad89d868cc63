"""Agent of one node of a cluster: a process that hosts replicas and executes the operator's commands.

Run as `python -P -m cortex.cluster.node.agent --home DIR --host ADDRESS [--port N]`, with the cluster's credentials as
one line on standard input. The agent and its replicas outlive the process that started it, and the operator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cortex import __version__
from cortex.cluster.credentials import TlsIdentity, node_identity
from cortex.cluster.metrics_mirror import pack
from cortex.cluster.node.gateway import NodeGateway
from cortex.cluster.node.hosting import Hosting
from cortex.cluster.node.relay import NodeRelay
from cortex.cluster.node.start import IDENTITY_FILE, OVER, PROTOCOL, RESERVE_SOCKET
from cortex.cluster.transport import PeerConnection, listen
from cortex.engine.local import LocalEngine
from cortex.engine.logs import LocalLogs
from cortex.engine.model_agent import ModelAgent
from cortex.engine.usage import CpuMeter, resource_usage, usage_to_json
from cortex.errors import CortexError
from cortex.gateway.access_log import LocalAccess
from cortex.home import Home, write_private
from cortex.payloads.json_object import Json
from cortex.processes.codec import encode
from cortex.processes.identity import Identity
from cortex.processes.sockets import allow_descriptors
from cortex.telemetry import Logger, configure
from cortex.worker.spec import ReplicaSpec, RequestLimits

HEARTBEAT_S = 1.0
_MEASURE_S = 5.0
_CLEAN_S = 600.0
_DESCRIPTORS = 16_384
#: An operator with this much unread data is disconnected; it reconnects.
_MAX_UNREAD_BYTES = 64 * 1024 * 1024
#: Log lines per message.
_LINES_PER_MESSAGE = 500
_RESERVE_TIMEOUT_S = 10.0
_logger = Logger("cortex.node")
T = TypeVar("T")


@dataclass(eq=False)
class _OperatorSession:
    """The control connection of an operator."""

    connection: PeerConnection

    def send(self, message: Json) -> None:
        transport = self.connection.writer.transport
        if transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            transport.abort()  # `close` would wait until all of it was read
        self.connection.send(message)


class NodeAgent:
    """Hosts replicas; `Hosting` reports to it."""

    def __init__(self, home: Home, identity: TlsIdentity) -> None:
        self._home = home
        self._host = identity.host
        self._port = 0
        self._identity = identity
        self._engine = LocalEngine(home, os.environ, _logger)
        self._hosting = Hosting(home, identity.host, os.environ, self._engine, self, _logger)
        self._relay = NodeRelay(home.jobs_socket, identity)
        self._reservations = Reservations(home.sockets_dir / RESERVE_SOCKET, self._describe, self._reserved)
        self._model_agent = ModelAgent(home, os.environ, _logger)
        self._gateway = NodeGateway(home, identity.host, _logger)
        self._sessions: set[_OperatorSession] = set()
        self._epoch = 0
        self._stop = asyncio.Event()
        self._is_renewed = False  #: another agent is to start in its place

    async def run(self, port: int) -> None:
        """Serve until a signal or a command ends the agent. Raises: OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        await self._hosting.startup()
        await self._model_agent.startup(self._needs_model_agent)
        await self._relay.startup()
        await self._reservations.startup()
        await self._gateway.startup()
        server = await self._listen(port or _last_port(self._home))
        self._port = int(server.sockets[0].getsockname()[1])
        write_private(self._home.run_dir / IDENTITY_FILE, json.dumps(self._describe()))
        _logger.info("node started", host=self._host, port=self._port)
        tasks = [
            asyncio.create_task(self._send_heartbeats(), name="send heartbeats"),
            asyncio.create_task(self._measure(), name="measure"),
            asyncio.create_task(self._clean(), name="clean"),
            asyncio.create_task(self._model_agent.run(), name="keep model agent"),
        ]
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await self._relay.shutdown()
        if not self._is_renewed:  # when a connection just breaks, Ray's actors start the next agent
            await self._reservations.shutdown()
        await self._gateway.shutdown()
        # The model agent continues with the replicas that need it; without any, nothing would end it later.
        await (self._model_agent.shutdown() if self._needs_model_agent() else self._model_agent.stop())
        await self._hosting.shutdown()
        if not self._hosting.replicas() and not self._hosting.ended():
            shutil.rmtree(self._home.metrics_dir, ignore_errors=True)  # it may be outside of the home
        _logger.info("node stopped")

    async def _listen(self, port: int) -> asyncio.Server:
        """Listen on the port of the last agent, where operators look for this one; on any other if it is taken."""
        try:
            return await listen(self._serve, self._host, port, self._identity)
        except OSError:
            if not port:
                raise
            return await listen(self._serve, self._host, 0, self._identity)

    # Events for the operators that follow.

    def changed(self, replica_id: str) -> None:
        """Report a replica that has another status, or ended."""
        event = self._event(replica_id)
        if event["event"] == "gone":
            self._reservations.release(replica_id)
        self._publish(event)

    def _reserved(self, replica_id: str) -> None:
        """Report a change of a replica's reservation. A reservation precedes the start of its replica."""
        if replica_id in self._hosting.replicas():
            self._publish(self._event(replica_id))

    def needs_project(self, project_hash: str) -> None:
        """Request a project that replicas wait for."""
        self._publish({"event": "needs_project", "project": project_hash})

    def _event(self, replica_id: str) -> Json:
        found = self._hosting.replicas().get(replica_id)
        if found is None:
            return {"event": "gone", "id": replica_id, "is_left": replica_id in self._hosting.ended()}
        spec, status = found
        return {
            "event": "replica",
            "id": replica_id,
            "spec": spec.to_json(),
            "status": status.to_json(),
            "is_reserved": self._reservations.has(replica_id),
        }

    def _publish(self, event: Json) -> None:
        for session in list(self._sessions):
            session.send(event)

    async def _send_heartbeats(self) -> None:
        while True:
            self._publish({"event": "beat"})
            await asyncio.sleep(HEARTBEAT_S)

    async def _measure(self) -> None:
        meter = CpuMeter()
        while True:
            running = list(self._hosting.replicas().values())
            try:
                cores = dict(await meter.cores(status for _, status in running))
                usage = usage_to_json(await resource_usage(running, os.environ))
                self._publish({"event": "cores", "cores": cores, "usage": usage})
            except Exception as error:  # processes may end while they are measured
                _logger.warning("CPU and memory usage can't be measured", exc_info=error)
            await asyncio.sleep(_MEASURE_S)

    async def _clean(self) -> None:
        while True:
            try:
                await self._hosting.clean()
            except Exception as error:  # the next round tries again
                _logger.error("cleaning up failed", exc_info=error)
            await asyncio.sleep(_CLEAN_S)

    # Connections.

    async def _serve(self, connection: PeerConnection) -> None:
        try:
            first = await connection.receive()
            purpose = first and first.get("purpose")
            if first is None or not isinstance(purpose, str):
                return
            if purpose == "control":
                await self._follow_commands(connection, first)
            elif purpose == "project":
                await self._receive_project(connection, first)
            elif purpose == "metrics":
                await self._send_metrics(connection, str(first["id"]))
            elif purpose == "access":
                await self._send_access_log(connection, first)
            elif purpose == "gateway":
                await self._gateway.serve(connection, int(first["epoch"]))
            elif purpose == "logs":
                await self._send_logs(connection, first)
        except (CortexError, OSError, KeyError, TypeError, ValueError) as error:
            _logger.warning("connection of an operator ended", error=error)
        finally:
            connection.close()

    async def _follow_commands(self, connection: PeerConnection, first: Json) -> None:
        """Report all replicas and their changes to an operator, and execute its commands."""
        epoch = int(first["epoch"])
        if epoch < self._epoch:
            connection.send({"event": "refused", "reason": f"an operator of epoch {self._epoch} leads"})
            return
        for other in list(self._sessions) if epoch > self._epoch else ():
            other.connection.close()  # of an earlier leader
        self._epoch = epoch
        self._gateway.lead(epoch)
        self._relay.lead(str(first["host"]), int(first["port"]))
        session = _OperatorSession(connection)
        connection.send({"event": "node", **self._describe()})
        for name in [*self._hosting.replicas(), *self._hosting.ended()]:
            connection.send(self._event(name))
        connection.send({"event": "complete"})
        self._sessions.add(session)
        try:
            # The last commands of an earlier leader may still arrive: ignore them.
            while (message := await connection.receive()) is not None and epoch == self._epoch:
                try:
                    await self._execute(message)
                except Exception as error:  # of one replica; the others still need the operator
                    _logger.error("command failed", exc_info=error, command=message.get("command"))
        finally:
            self._sessions.discard(session)

    async def _execute(self, message: Json) -> None:
        match message.get("command"):
            case "start":
                spec = ReplicaSpec.from_json(message["spec"])
                self._hosting.start(replace(spec, gpu_ids=self._reservations.gpus(spec.id)))
            case "stop":
                await self._hosting.stop(str(message["id"]), float(message["drain_s"]))
            case "configure":
                await self._hosting.configure(str(message["id"]), RequestLimits.parse(message))
            case "no_project":
                self._hosting.fail_project(str(message["project"]), str(message["reason"]))
            case "forget":
                self._hosting.forget(str(message["id"]))
            case "shutdown":
                self._stop.set()
            case "renew":
                self._is_renewed = True
                self._stop.set()
            case unknown:
                _logger.warning("unknown command", command=unknown)

    async def _receive_project(self, connection: PeerConnection, first: Json) -> None:
        data = b"".join([chunk async for chunk in connection.receive_bytes(int(first["size"]))])
        try:
            await self._hosting.add_project(str(first["project"]), data, str(first["digest"]))
        except (CortexError, OSError) as error:
            connection.send({"error": f"the node can't unpack the project: {error}"})
        else:
            connection.send({"ok": True})
        await connection.drain()

    async def _send_metrics(self, connection: PeerConnection, replica_id: str) -> None:
        data = await asyncio.to_thread(pack, self._home.metrics_dir / Path(replica_id).name)
        connection.send({"size": len(data)})
        await connection.send_bytes(_single(data))

    async def _send_access_log(self, connection: PeerConnection, request: Json) -> None:
        name = request.get("request")
        lines = LocalAccess(self._home.logs_dir).access(
            str(request["api"]), None if name is None else str(name), int(request["tail"]), bool(request["follow"])
        )
        await _send_lines(connection, lines, lambda part, more: {"lines": part, "more": more})

    async def _send_logs(self, connection: PeerConnection, request: Json) -> None:
        tail = request["tail"]
        lines = LocalLogs(self._home.logs_dir).logs(
            str(request["folder"]), request.get("replica"), None if tail is None else int(tail), bool(request["follow"])
        )
        await _send_lines(connection, lines, lambda part, more: {"lines": encode(part)})

    # Its own description.

    def _describe(self) -> Json:
        identity = Identity.of(os.getpid())
        return {
            "host": self._host,
            "port": self._port,
            "version": __version__,
            "protocol": PROTOCOL,
            "pid": identity.pid,
            "identity": identity.to_json(),
            "home": str(self._home.path),
        }

    def _needs_model_agent(self) -> bool:
        return any(spec.model_agent_socket for spec, _ in self._hosting.replicas().values())


async def _send_lines(
    connection: PeerConnection,
    batches: AsyncGenerator[list[T], None],
    message: Callable[[Sequence[T], bool], Json],
) -> None:
    """Send log lines until they end or the operator closes the connection. Raises: PeerError.

    `message` is called with a part of a batch, and whether more parts of the batch follow.
    """
    async with contextlib.aclosing(batches):
        async for batch in batches:
            for start in range(0, max(len(batch), 1), _LINES_PER_MESSAGE):
                end = start + _LINES_PER_MESSAGE
                connection.send(message(batch[start:end], end < len(batch)))
                await connection.drain()
            if connection.reader.at_eof() or connection.writer.is_closing():
                return
    connection.send({"end": True})
    await connection.drain()


async def _single(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _last_port(home: Home) -> int:
    try:
        return int(json.loads((home.run_dir / IDENTITY_FILE).read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


class Reservations:
    """Reservations of resources, one per replica: each of Ray's actors keeps a connection open while it lives.

    When a replica ends, the agent sends `OVER` and closes the connection, and the actor ends. If the connection breaks
    without that, the agent has ended, and the actor starts it again.

    `describe` returns the agent's description; `on_change` gets the id of a changed replica.
    """

    def __init__(self, socket: Path, describe: Callable[[], dict[str, Any]], on_change: Callable[[str], None]) -> None:
        self._socket = socket
        self._describe = describe
        self._on_change = on_change
        self._writers: dict[str, StreamWriter] = {}
        self._gpus: dict[str, tuple[str, ...]] = {}
        self._server: asyncio.Server | None = None

    async def startup(self) -> None:
        """Start to listen."""
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._socket))
        self._socket.chmod(0o600)

    async def shutdown(self) -> None:
        """Stop listening, and release all reservations."""
        if self._server is not None:
            self._server.close()
        for name in list(self._writers):
            self.release(name)

    def has(self, replica_id: str) -> bool:
        """Return whether a replica's resources are reserved."""
        return replica_id in self._writers

    def gpus(self, replica_id: str) -> tuple[str, ...]:
        """Return the GPUs that are reserved for a replica, as for CUDA_VISIBLE_DEVICES."""
        return self._gpus.get(replica_id, ())

    def release(self, replica_id: str) -> None:
        """Release the reservation of a replica that ended."""
        writer = self._writers.pop(replica_id, None)
        self._gpus.pop(replica_id, None)
        if writer is not None:
            writer.write(OVER)
            writer.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        name = ""
        try:
            async with asyncio.timeout(_RESERVE_TIMEOUT_S):
                request = json.loads(await reader.readline())
                name, gpus = str(request["reserve"]), tuple(map(str, request.get("gpus", ())))
            self.release(name)  # of an earlier actor
            self._writers[name], self._gpus[name] = writer, gpus
            writer.write(json.dumps({"ok": True, **self._describe()}).encode() + b"\n")
            self._on_change(name)
            while await reader.read(1024):
                pass
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            pass
        finally:
            with contextlib.suppress(OSError):
                writer.close()
            if name and self._writers.get(name) is writer:
                del self._writers[name], self._gpus[name]
                self._on_change(name)


def main() -> None:
    """Run the agent of a node."""
    parser = argparse.ArgumentParser(prog="cortex.cluster.node.agent", description="Host replicas on this machine.")
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    try:
        identity = node_identity(sys.stdin.readline(), arguments.host)
    except ValueError:
        print("error: the cluster's credentials are expected on standard input", file=sys.stderr)
        sys.exit(2)
    allow_descriptors(_DESCRIPTORS)
    home = Home(arguments.home.absolute())
    home.create()
    configure(home.logs_dir / "node.log")
    asyncio.run(NodeAgent(home, identity).run(arguments.port))


if __name__ == "__main__":
    main()
