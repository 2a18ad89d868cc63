"""A gateway on a node: HAProxy, fed by the operator over a connection of its own.

It serves on with the last table while the operator is away, and while the node's agent is: the next agent adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cortex.cluster.transport import Json, Wire, WireError
from cortex.errors import GatewayError
from cortex.gateway.addresses import numeric
from cortex.gateway.config import GatewaySettings
from cortex.gateway.haproxy import Gateway
from cortex.gateway.routes import RoutingTable
from cortex.gateway.stats import BackendStats
from cortex.gateway.table_json import table_from_json, table_to_json
from cortex.home import Home, write_private
from cortex.telemetry import Logger

#: How often the operator is told what the gateway does if that changed, and that it lives if not.
TELL_S = 0.25
BEAT_S = 1.0
#: How often it is made sure that the gateway runs.
CHECK_S = 1.0
_WANTED_FILE = "node-gateway.json"
_COUNTS_ID_FILE = "counts-id"


@dataclass(frozen=True)
class NodeGatewaySettings:
    """How the gateway of a node listens."""

    host: str
    port: int
    certificate: str = field(default="", repr=False)  #: PEM, with chain and key; "": plain HTTP

    def to_json(self) -> Json:
        """Return what its constructor takes."""
        return asdict(self)


class NodeGateway:
    """The gateway of one node, if it is to have one. `startup`, then `serve` for each operator, then `shutdown`."""

    def __init__(self, home: Home, logger: Logger) -> None:
        self._home = home
        self._logger = logger
        self._file = home.run_dir / _WANTED_FILE
        self._gateway: Gateway | None = None
        self._settings: NodeGatewaySettings | None = None
        self._table = RoutingTable()
        self._is_up = False
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._session: Wire | None = None
        self._epoch = 0
        self._obeying: set[asyncio.Task[None]] = set()
        self._remembered = ""
        self._told_error = ""

    async def startup(self) -> None:
        """Adopt the gateway that was wanted last, or start it anew."""
        try:
            wanted = json.loads(self._file.read_text())
            settings, table = NodeGatewaySettings(**wanted["settings"]), table_from_json(wanted["table"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._logger.warning("the gateway that ran here last is left alone until the operator comes", error=error)
        else:
            self._settings, self._table = settings, table
        self._task = asyncio.create_task(self._keep(), name="keep gateway")

    async def shutdown(self) -> None:
        """Let go of the gateway: it serves on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.shutdown()

    async def serve(self, wire: Wire, epoch: int) -> None:
        """Do what an operator says, until it is gone or another one comes. Raises: WireError."""
        if epoch < self._epoch:
            wire.send({"event": "refused", "reason": f"an operator of epoch {self._epoch} leads"})
            return
        self.lead(epoch)
        if self._session is not None:
            self._session.close()  # of before, not known to be broken yet
        self._session = wire
        wire.send({"event": "gateway", "counts": _counts_id(self._home.run_dir / "gateway")})
        telling = asyncio.create_task(self._tell(wire), name="tell of gateway")
        try:
            while (message := await wire.receive()) is not None and self._session is wire:
                # What is begun is finished also where the operator goes meanwhile: a half-started HAProxy helps nobody.
                task = asyncio.create_task(self._answer(wire, message), name="obey as gateway")
                self._obeying.add(task)
                task.add_done_callback(self._obeying.discard)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            if self._session is wire:
                self._session = None

    def lead(self, epoch: int) -> None:
        """Learn which operator leads: those of before are obeyed no more."""
        if epoch > self._epoch:
            self._epoch = epoch
            if self._session is not None:
                self._session.close()
                self._session = None

    # What the operator says.

    async def _answer(self, wire: Wire, message: Json) -> None:
        number = message.get("number")
        try:
            answer = await self._obey(message)
        except GatewayError as error:
            answer = {"error": str(error)}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            answer = {"error": f"what was sent can't be read, the node may run another version of cortex: {error!r}"}
        except Exception as error:  # whatever it is, it must be told
            self._logger.error("gateway does not obey", exc_info=error)
            answer = {"error": f"{type(error).__name__}: {error}"}
        wire.send({"number": number, **answer})

    async def _obey(self, message: Json) -> Json:
        match message["command"]:
            case "serve":
                settings = NodeGatewaySettings(**message["settings"])
                table = _of_node(table_from_json(message["table"]), settings.host, self._home)
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
                await self._let_go()
            self._settings, self._table = settings, table
            if self._is_up and self._gateway is not None:
                await self._gateway.apply(table)
                self._remember()
            else:
                await self._bring_up()

    async def _end(self) -> None:
        async with self._lock:
            is_there = self._settings is not None or self._file.exists()
            gateway = self._gateway or Gateway(self._home, GatewaySettings())
            self._file.unlink(missing_ok=True)
            self._remembered = ""
            self._settings, self._gateway, self._is_up, self._table = None, None, False, RoutingTable()
            if is_there:
                await gateway.stop()
                self._logger.info("gateway ended")

    # Keeping it.

    async def _keep(self) -> None:
        while True:
            try:
                await self._keep_once()
            except Exception as error:  # whatever it is, it must be tried again
                if str(error) != self._told_error:
                    expected = isinstance(error, GatewayError)
                    self._logger.error("gateway can't be kept running", None if expected else error, error=error)
                self._told_error = str(error)
            else:
                self._told_error = ""
            await asyncio.sleep(CHECK_S)

    async def _keep_once(self) -> None:
        async with self._lock:
            if self._settings is None:
                return
            if self._is_up and self._gateway is not None:
                await self._gateway.ensure_running()
                self._remember()
            else:
                await self._bring_up()

    async def _bring_up(self) -> None:
        """Adopt or start HAProxy with the newest table: nobody reaches it before it has that. Raises: GatewayError."""
        assert self._settings is not None
        await self._let_go()
        settings = self._settings
        self._gateway = Gateway(
            self._home, GatewaySettings(settings.host, settings.port, certificate=settings.certificate)
        )
        await self._gateway.startup(self._table)
        self._is_up = True
        self._remember()

    async def _let_go(self) -> None:
        self._is_up = False
        if self._gateway is not None:
            await self._gateway.shutdown()
            self._gateway = None

    def _remember(self) -> None:
        """Keep what is served, for the agent after us."""
        assert self._settings is not None
        text = json.dumps({"settings": self._settings.to_json(), "table": table_to_json(self._table)})
        if text != self._remembered:
            with contextlib.suppress(OSError):  # a full disk; it is tried again with each look
                write_private(self._file, text)
                self._remembered = text

    # Telling.

    async def _tell(self, wire: Wire) -> None:
        """Tell what the gateway does as soon as that changes, and now and then that it lives."""
        loop = asyncio.get_running_loop()
        told: dict[str, BackendStats] = {}
        told_at = 0.0
        while not wire.writer.is_closing():
            stats = await self._stats()
            if stats != told or loop.time() - told_at >= BEAT_S:
                told, told_at = stats, loop.time()
                wire.send({"event": "stats", "apis": {name: each.to_json() for name, each in stats.items()}})
                with contextlib.suppress(WireError):  # whoever receives notices
                    await wire.drain()
            await asyncio.sleep(TELL_S)

    async def _stats(self) -> dict[str, BackendStats]:
        gateway = self._gateway
        if gateway is None or not self._is_up:
            return {}
        try:
            return await gateway.stats()
        except GatewayError:  # it is being replaced
            return {}


def _of_node(table: RoutingTable, host: str, home: Home) -> RoutingTable:
    """Return the table with the paths of this node: what is the operator's to answer goes through its relay."""
    table = table.seen_from({numeric(host) or host: home.sockets_dir})
    return replace(
        table,
        backends=tuple(
            replace(backend, jobs_socket=str(home.jobs_socket)) if backend.jobs_socket else backend
            for backend in table.backends
        ),
    )


def _counts_id(folder: Path) -> str:
    """Return which counts these are: others begin anew."""
    file = folder / _COUNTS_ID_FILE
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if known := file.read_text():
            return known
    made = secrets.token_hex(8)
    write_private(file, made)
    return made
