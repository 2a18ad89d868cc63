"""The agent of one node of a cluster: a process that hosts replicas and does what the operator says.

Run as `python -P -m cortex.cluster.node.agent --home DIR --host ADDRESS [--port N]`, with the cluster's secret as one
line on standard input. It and its replicas outlive whoever started it, and the operator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from cortex import __version__
from cortex.cluster.certificate import own_certificate
from cortex.cluster.framing import pack
from cortex.cluster.node.gateway import NodeGateway
from cortex.cluster.node.hosting import Hosting
from cortex.cluster.node.logs import send_access, send_logs
from cortex.cluster.node.relay import JOBS, LISTINGS, NodeRelay
from cortex.cluster.node.reservations import Reservations
from cortex.cluster.node.start import IDENTITY_FILE, RESERVE_SOCKET
from cortex.cluster.transport import MAX_LINE_BYTES, Json, Wire, accept, derived
from cortex.engine.cpu import CpuMeter
from cortex.engine.local import LocalEngine
from cortex.engine.model_agent import ModelAgent
from cortex.errors import CortexError
from cortex.home import Home, write_private
from cortex.processes.identity import Identity
from cortex.processes.sockets import allow_descriptors
from cortex.replica.spec import Limits, ReplicaSpec
from cortex.telemetry import Logger, configure

#: How often the operator is told that the node lives.
BEAT_S = 1.0
#: How often it is told how many cores replicas use.
MEASURE_S = 5.0
_CLEAN_S = 600.0
_DESCRIPTORS = 16_384
#: An operator that reads nothing for so long has lost us; it will connect again.
_MAX_UNREAD_BYTES = 64 * 1024 * 1024
_logger = Logger("cortex.node")


@dataclass(eq=False)
class _Session:
    """An operator that follows."""

    wire: Wire

    def send(self, message: Json) -> None:
        if self.wire.writer.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.wire.writer.transport.abort()  # to close it would wait until all of that was read
        self.wire.send(message)


class NodeAgent:
    """Hosts replicas; implements `hosting.Listener`."""

    def __init__(self, home: Home, host: str, secret: str) -> None:
        self._home = home
        self._host = host
        self._port = 0
        self._key = derived(secret, "node")
        self._engine = LocalEngine(home, os.environ, _logger)
        self._hosting = Hosting(home, host, os.environ, self._engine, self, _logger)
        relayed = {JOBS: home.jobs_socket, LISTINGS: home.listings_socket}
        self._relay = NodeRelay(relayed, derived(secret, "operator"))
        self._reservations = Reservations(home.sockets_dir / RESERVE_SOCKET, self._describe, self._reserved)
        self._model_agent = ModelAgent(home, os.environ, _logger, is_node=True)
        self._gateway = NodeGateway(home, _logger)
        self._sessions: set[_Session] = set()
        self._epoch = 0
        self._stop = asyncio.Event()
        self._is_renewed = False  #: it ends for another agent to start in its place

    async def run(self, port: int) -> None:
        """Serve until told to stop. Raises: OSError if the port is taken."""
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
            asyncio.create_task(self._beat(), name="beat"),
            asyncio.create_task(self._measure(), name="measure"),
            asyncio.create_task(self._clean(), name="clean"),
            asyncio.create_task(self._model_agent.run(), name="keep model agent"),
        ]
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await self._relay.shutdown()
        if not self._is_renewed:  # the actors start the next agent, unless told that their replicas are over
            await self._reservations.shutdown()
        await self._gateway.shutdown()
        # With replicas that go on, their models' agent does; after the last one, nobody would end it.
        await (self._model_agent.shutdown() if self._needs_model_agent() else self._model_agent.stop())
        await self._hosting.shutdown()
        if not self._hosting.replicas() and not self._hosting.ended():
            shutil.rmtree(self._home.metrics_dir, ignore_errors=True)  # it may be outside of the home
        _logger.info("node stopped")

    async def _listen(self, port: int) -> asyncio.Server:
        """Listen where the agent before did, so that those who knew it find this one; elsewhere if that is taken."""
        try:
            return await asyncio.start_server(self._serve, self._host, port, limit=MAX_LINE_BYTES)
        except OSError:
            if not port:
                raise
            return await asyncio.start_server(self._serve, self._host, 0, limit=MAX_LINE_BYTES)

    # What changes is told to every operator that follows.

    def changed(self, replica_id: str) -> None:
        """Learn that a replica has another status, or is there no more."""
        event = self._event(replica_id)
        if event["event"] == "gone":
            self._reservations.release(replica_id)
        self._tell(event)

    def _reserved(self, replica_id: str) -> None:
        """Learn that a replica's resources are reserved, which is before it is started, or are so no more."""
        if replica_id in self._hosting.replicas():
            self._tell(self._event(replica_id))

    def needs_project(self, project_hash: str) -> None:
        """Learn that replicas wait for a project."""
        self._tell({"event": "needs_project", "project": project_hash})

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

    def _tell(self, event: Json) -> None:
        for session in list(self._sessions):
            session.send(event)

    async def _beat(self) -> None:
        while True:
            self._tell({"event": "beat"})
            await asyncio.sleep(BEAT_S)

    async def _measure(self) -> None:
        meter = CpuMeter()
        while True:
            running = [status for _, status in self._hosting.replicas().values()]
            try:
                self._tell({"event": "cores", "cores": dict(await meter.cores(running))})
            except Exception as error:  # processes come and go while they are looked at
                _logger.warning("cores can't be measured", exc_info=error)
            await asyncio.sleep(MEASURE_S)

    async def _clean(self) -> None:
        while True:
            try:
                await self._hosting.clean()
            except Exception as error:  # it must be tried again
                _logger.error("cleaning up failed", exc_info=error)
            await asyncio.sleep(_CLEAN_S)

    # Connections.

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        wire = await accept(reader, writer, self._key)
        if wire is None:
            return
        try:
            first = await wire.receive()
            purpose = first and first.get("purpose")
            if first is None or not isinstance(purpose, str):
                return
            if purpose == "control":
                await self._follow(wire, first)
            elif purpose == "project":
                await self._take_project(wire, first)
            elif purpose == "metrics":
                await self._send_metrics(wire, str(first["id"]))
            elif purpose == "access":
                await send_access(wire, self._home.logs_dir, first)
            elif purpose == "gateway":
                await self._gateway.serve(wire, int(first["epoch"]))
            elif purpose == "logs":
                await send_logs(wire, self._home.logs_dir, first)
        except (CortexError, OSError, KeyError, TypeError, ValueError) as error:
            _logger.warning("connection of an operator ended", error=error)
        finally:
            wire.close()

    async def _follow(self, wire: Wire, first: Json) -> None:
        """Tell an operator all that is here and what changes, and do what it says."""
        epoch = int(first["epoch"])
        if epoch < self._epoch:
            wire.send({"event": "refused", "reason": f"an operator of epoch {self._epoch} leads"})
            return
        for other in list(self._sessions) if epoch > self._epoch else ():
            other.wire.close()  # it led before
        self._epoch = epoch
        self._gateway.lead(epoch)
        self._relay.lead(str(first["host"]), int(first["port"]))
        session = _Session(wire)
        wire.send({"event": "node", **self._describe()})
        for name in [*self._hosting.replicas(), *self._hosting.ended()]:
            wire.send(self._event(name))
        wire.send({"event": "complete"})
        self._sessions.add(session)
        try:
            # Of one who led before, what it said last may still come.
            while (message := await wire.receive()) is not None and epoch == self._epoch:
                try:
                    await self._obey(message)
                except Exception as error:  # of one replica: it must not keep the operator from all others
                    _logger.error("order failed", exc_info=error, command=message.get("command"))
        finally:
            self._sessions.discard(session)

    async def _obey(self, message: Json) -> None:
        match message.get("command"):
            case "start":
                spec = ReplicaSpec.from_json(message["spec"])
                self._hosting.start(replace(spec, gpu_ids=self._reservations.gpus(spec.id)))
            case "stop":
                await self._hosting.stop(str(message["id"]), float(message["drain_s"]))
            case "configure":
                limits = Limits(float(message["timeout_s"]), int(message["max_body_bytes"]))
                await self._hosting.configure(str(message["id"]), limits)
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

    async def _take_project(self, wire: Wire, first: Json) -> None:
        data = b"".join([chunk async for chunk in wire.receive_bytes(int(first["size"]))])
        try:
            await self._hosting.add_project(str(first["project"]), data, str(first["digest"]))
        except (CortexError, OSError) as error:
            wire.send({"error": f"it can't be unpacked on the node: {error}"})
        else:
            wire.send({"ok": True})
        await wire.drain()

    async def _send_metrics(self, wire: Wire, replica_id: str) -> None:
        data = await asyncio.to_thread(pack, self._home.metrics_dir / Path(replica_id).name)
        wire.send({"size": len(data)})
        await wire.send_bytes(_once(data))

    # About itself.

    def _describe(self) -> Json:
        identity = Identity.of(os.getpid())
        return {
            "host": self._host,
            "port": self._port,
            "version": __version__,
            "pid": identity.pid,
            "identity": identity.to_json(),
            "home": str(self._home.path),
        }

    def _needs_model_agent(self) -> bool:
        return any(spec.model_agent_socket for spec, _ in self._hosting.replicas().values())


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _last_port(home: Home) -> int:
    try:
        return int(json.loads((home.run_dir / IDENTITY_FILE).read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def main() -> None:
    """Run the agent of a node."""
    parser = argparse.ArgumentParser(prog="cortex.cluster.node.agent", description="Host replicas on this machine.")
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    secret = sys.stdin.readline().strip()
    if not secret:
        print("error: the cluster's secret is expected on standard input", file=sys.stderr)
        sys.exit(2)
    allow_descriptors(_DESCRIPTORS)
    home = Home(arguments.home.absolute())
    home.create()
    configure(home.logs_dir / "node.log")
    own_certificate()  # whatever keeps it from being made shows here, and not as strangers who connect
    asyncio.run(NodeAgent(home, arguments.host, secret).run(arguments.port))


if __name__ == "__main__":
    main()
