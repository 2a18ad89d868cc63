"""Gateway of a node: an HAProxy whose routing table the operator sends over a connection of its own.

It serves its last table while the operator or the node's agent is away; the next agent adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cortex.cluster.transport import PeerConnection, PeerError
from cortex.errors import GatewayError
from cortex.gateway.addresses import numeric
from cortex.gateway.config import GatewaySettings
from cortex.gateway.haproxy import HaproxyGateway
from cortex.gateway.routes import RoutingTable, table_from_json, table_to_json
from cortex.gateway.statistics import BackendStats
from cortex.home import Home, write_private
from cortex.payloads.json_object import Json
from cortex.processes.codec import encode
from cortex.telemetry import Logger

#: Interval of statistics that changed, and of those that did not, which serve as heartbeats.
STATS_S = 0.25
HEARTBEAT_S = 1.0
CHECK_S = 1.0
_WANTED_FILE = "node-gateway.json"
_COUNTS_ID_FILE = "counts-id"


@dataclass(frozen=True)
class NodeGatewaySettings:
    """Listening address and certificate of a node's gateway."""

    host: str  #: on which it listens: the node's, or all addresses
    port: int
    certificate: str = field(default="", repr=False)  #: PEM, with chain and key; "": plain HTTP

    def to_json(self) -> Json:
        """Return the arguments of the constructor."""
        return asdict(self)


class NodeGateway:
    """The gateway of one node, if it has one. `startup`, then `serve` for each operator, then `shutdown`."""

    def __init__(self, home: Home, host: str, logger: Logger) -> None:
        self._home = home
        self._host = host
        self._logger = logger
        self._file = home.run_dir / _WANTED_FILE
        self._gateway: HaproxyGateway | None = None
        self._settings: NodeGatewaySettings | None = None
        self._table = RoutingTable()
        self._is_up = False
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._session: PeerConnection | None = None
        self._epoch = 0
        self._executing: set[asyncio.Task[None]] = set()
        self._saved = ""
        self._logged_error = ""

    async def startup(self) -> None:
        """Load the last settings and table, and start to keep the gateway running."""
        try:
            wanted = json.loads(self._file.read_text())
            settings, table = NodeGatewaySettings(**wanted["settings"]), table_from_json(wanted["table"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._logger.warning("the last gateway's settings can't be read; waiting for the operator", error=error)
        else:
            self._settings, self._table = settings, table
        self._task = asyncio.create_task(self._keep(), name="keep gateway")

    async def shutdown(self) -> None:
        """Stop watching the gateway; it continues to serve."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.shutdown()

    async def serve(self, connection: PeerConnection, epoch: int) -> None:
        """Execute the commands of an operator until it disconnects or another one connects. Raises: PeerError."""
        if epoch < self._epoch:
            connection.send({"event": "refused", "reason": f"an operator of epoch {self._epoch} leads"})
            return
        self.lead(epoch)
        if self._session is not None:
            self._session.close()  # of an earlier connection that may be broken
        self._session = connection
        connection.send({"event": "gateway", "counts": _counts_id(self._home.run_dir / "gateway")})
        reporting = asyncio.create_task(self._report(connection), name="report gateway statistics")
        try:
            while (message := await connection.receive()) is not None and self._session is connection:
                # Commands finish even if the operator disconnects: HAProxy must not be left half started.
                task = asyncio.create_task(self._answer(connection, message), name="execute gateway command")
                self._executing.add(task)
                task.add_done_callback(self._executing.discard)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            if self._session is connection:
                self._session = None

    def lead(self, epoch: int) -> None:
        """Ignore operators of earlier epochs from now on."""
        if epoch > self._epoch:
            self._epoch = epoch
            if self._session is not None:
                self._session.close()
                self._session = None

    # Commands of the operator.

    async def _answer(self, connection: PeerConnection, message: Json) -> None:
        number = message.get("number")
        try:
            answer = await self._execute(message)
        except GatewayError as error:
            answer = {"error": str(error)}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            answer = {"error": f"invalid command; the node may run another version of cortex: {error!r}"}
        except Exception as error:  # the operator must get an answer
            self._logger.error("gateway command failed", exc_info=error)
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.send({"number": number, **answer})

    async def _execute(self, message: Json) -> Json:
        match message["command"]:
            case "serve":
                settings = NodeGatewaySettings(**message["settings"])
                table = _localize(table_from_json(message["table"]), self._host, self._home)
                await self._serve_table(settings, table)
                return {}
            case "drained":
                async with self._lock:
                    names = [str(name) for name in message["names"]]
                    return {"drained": sorted(await self._gateway.drained(names)) if self._gateway else names}
            case "end":
                await self._end()
                return {}
            case unknown:
                raise ValueError(f"unknown command {unknown!r}")

    async def _serve_table(self, settings: NodeGatewaySettings, table: RoutingTable) -> None:
        async with self._lock:
            if settings != self._settings:
                await self._detach()
            self._settings, self._table = settings, table
            if self._is_up and self._gateway is not None:
                await self._gateway.apply(table)
                self._save()
            else:
                await self._bring_up()

    async def _end(self) -> None:
        async with self._lock:
            is_there = self._settings is not None or self._file.exists()
            gateway = self._gateway or HaproxyGateway(self._home, GatewaySettings())
            self._file.unlink(missing_ok=True)
            self._saved = ""
            self._settings, self._gateway, self._is_up, self._table = None, None, False, RoutingTable()
            if is_there:
                await gateway.stop()
                self._logger.info("gateway ended")

    # Keeping the gateway running.

    async def _keep(self) -> None:
        while True:
            try:
                await self._keep_once()
            except Exception as error:  # try again in the next round
                if str(error) != self._logged_error:
                    expected = isinstance(error, GatewayError)
                    self._logger.error("gateway can't be kept running", None if expected else error, error=error)
                self._logged_error = str(error)
            else:
                self._logged_error = ""
            await asyncio.sleep(CHECK_S)

    async def _keep_once(self) -> None:
        async with self._lock:
            if self._settings is None:
                return
            if self._is_up and self._gateway is not None:
                await self._gateway.ensure_running()
                self._save()
            else:
                await self._bring_up()

    async def _bring_up(self) -> None:
        """Adopt or start HAProxy, which listens once it has the newest table. Raises: GatewayError."""
        assert self._settings is not None
        await self._detach()
        settings = self._settings
        self._gateway = HaproxyGateway(
            self._home, GatewaySettings(settings.host, settings.port, certificate=settings.certificate)
        )
        await self._gateway.startup(self._table)
        self._is_up = True
        self._save()

    async def _detach(self) -> None:
        self._is_up = False
        if self._gateway is not None:
            await self._gateway.shutdown()
            self._gateway = None

    def _save(self) -> None:
        """Save settings and table for the next agent."""
        assert self._settings is not None
        text = json.dumps({"settings": self._settings.to_json(), "table": table_to_json(self._table)})
        if text != self._saved:
            with contextlib.suppress(OSError):  # a full disk; the next check tries again
                write_private(self._file, text)
                self._saved = text

    # Statistics.

    async def _report(self, connection: PeerConnection) -> None:
        """Send statistics when they change, and as heartbeats."""
        loop = asyncio.get_running_loop()
        sent: dict[str, BackendStats] = {}
        sent_at = 0.0
        while not connection.writer.is_closing():
            stats = await self._stats()
            if stats != sent or loop.time() - sent_at >= HEARTBEAT_S:
                sent, sent_at = stats, loop.time()
                connection.send({"event": "stats", "apis": encode(stats)})
                with contextlib.suppress(PeerError):  # `serve` notices it
                    await connection.drain()
            await asyncio.sleep(STATS_S)

    async def _stats(self) -> dict[str, BackendStats]:
        gateway = self._gateway
        if gateway is None or not self._is_up:
            return {}
        try:
            return await gateway.stats()
        except GatewayError:  # HAProxy restarts
            return {}


def _localize(table: RoutingTable, host: str, home: Home) -> RoutingTable:
    """Return the table with the paths of this node; requests for the operator go through the node's relay."""
    table = table.with_local_sockets({numeric(host) or host: home.sockets_dir})
    return replace(
        table,
        operator_socket=str(home.jobs_socket) if table.operator_socket else "",
        backends=tuple(
            replace(backend, jobs_socket=str(home.jobs_socket)) if backend.jobs_socket else backend
            for backend in table.backends
        ),
    )


def _counts_id(folder: Path) -> str:
    """Return the id of the counters in this folder, which start at 0."""
    file = folder / _COUNTS_ID_FILE
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if known := file.read_text():
            return known
    made = secrets.token_hex(8)
    write_private(file, made)
    return made
