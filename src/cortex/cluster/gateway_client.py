"""Client of the gateway of one node, at the operator: sends the newest routing table, receives statistics.

A client reconnects for as long as it runs. Callers never wait longer than `PATIENCE_S` for a gateway that is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from cortex.cluster.credentials import TlsIdentity
from cortex.cluster.node.gateway import NodeGatewaySettings
from cortex.cluster.node_client import SILENCE_S
from cortex.cluster.placement import NodeAddress
from cortex.cluster.transport import PeerConnection, PeerError, connect
from cortex.gateway.routes import RoutingTable, table_to_json
from cortex.gateway.statistics import BackendStats
from cortex.payloads.json_object import Json
from cortex.processes.backoff import Backoff
from cortex.processes.codec import decode
from cortex.telemetry import Logger

#: How long callers wait for a gateway that was in time so far; after a timeout they don't wait for it at all.
PATIENCE_S = 2.0
#: Starting a gateway takes seconds; after this time the command is sent again.
_SERVE_TIMEOUT_S = 60.0
_BACKOFF = Backoff(0.1, 1.0)

Stats = Mapping[str, BackendStats]


class GatewayClient:
    """Client of one gateway. `startup`, then `shutdown`. `address` returns the node's agent, if it is known."""

    def __init__(
        self,
        host: str,
        address: Callable[[], NodeAddress | None],
        identity: TlsIdentity,
        epoch: int,
        on_stats: Callable[[GatewayClient, str, Stats], None],
        logger: Logger,
    ) -> None:
        self.host = host
        self.reason = "it was not reached yet"  #: why it lacks the newest table; empty while it serves that
        self.stats: Stats = {}  #: the last statistics; empty while it is away
        self._address = address
        self._identity = identity
        self._epoch = epoch
        self._on_stats = on_stats
        self._logger = logger
        self._wanted: tuple[int, NodeGatewaySettings, RoutingTable] | None = None
        self._offered = asyncio.Event()
        self._in_force = asyncio.Condition()
        self._version = 0  #: of the newest table that is in force there
        self._is_late = True
        self._connection: PeerConnection | None = None
        self._pending: dict[int, asyncio.Future[Json]] = {}
        self._last_request = 0
        self._counts = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def answers(self) -> bool:
        """True while the gateway is connected and answered its last request in time."""
        return self._connection is not None and not self._is_late

    def startup(self) -> None:
        """Start to update the gateway."""
        self._task = asyncio.create_task(self._run(), name=f"update gateway {self.host}")

    async def shutdown(self) -> None:
        """Stop updating the gateway; it continues to serve."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def offer(self, version: int, settings: NodeGatewaySettings, table: RoutingTable) -> None:
        """Set the table to serve from now on; a higher version is newer."""
        self._wanted = (version, settings, table)
        self._offered.set()

    async def serves(self, version: int) -> None:
        """Wait up to `PATIENCE_S` until a table of this or a newer version is in force."""
        try:
            async with asyncio.timeout(PATIENCE_S), self._in_force:
                await self._in_force.wait_for(lambda: self._version >= version or not self.answers)
        except TimeoutError:
            self._set_failed("it takes too long to serve the newest routes")

    async def drained(self, names: Collection[str]) -> set[str] | None:
        """Return those servers in `names` that have no requests and get none; None without an answer in time."""
        if not self.answers:
            return None
        try:
            answer = await self._request({"command": "drained", "names": sorted(names)}, PATIENCE_S)
        except PeerError as error:
            self._set_failed(str(error))
            self._offered.set()  # its answer to the table makes it count again
            return None
        return set(answer["drained"])

    async def end(self) -> None:
        """End the gateway, with the requests inside it. Raises: PeerError if it does not confirm."""
        await self.shutdown()
        connection = await self._connect()
        listening = asyncio.create_task(self._listen(connection))
        try:
            self._connection = connection
            await self._request({"command": "end"}, _SERVE_TIMEOUT_S)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            self._disconnect(connection)

    # The connection.

    async def _run(self) -> None:
        failures = 0
        while True:
            connection = None
            try:
                connection = await self._connect()
                failures = 0
                self._connection, self._version = connection, 0
                await self._update_while_connected(connection)
            except PeerError as error:
                self._set_failed(str(error))
            finally:
                if connection is not None:
                    self._disconnect(connection)
                    await self._notify_waiting()
            failures += 1
            await asyncio.sleep(_BACKOFF.delay_s(failures))

    async def _connect(self) -> PeerConnection:
        address = self._address()
        if address is None:
            raise PeerError("no agent of cortex runs on its node yet")
        connection = await connect(address.host, address.port, self._identity)
        connection.send({"purpose": "gateway", "epoch": self._epoch})
        return connection

    async def _update_while_connected(self, connection: PeerConnection) -> None:
        updating = asyncio.create_task(self._update())
        listening = asyncio.create_task(self._listen(connection))
        try:
            await asyncio.wait((updating, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (updating, listening):
                task.cancel()
            results = await asyncio.gather(listening, updating, return_exceptions=True)  # the cause comes first
        for result in results:
            if isinstance(result, Exception):
                raise result if isinstance(result, PeerError) else PeerError(f"{type(result).__name__}: {result}")

    async def _listen(self, connection: PeerConnection) -> None:
        try:
            await self._receive_all(connection)
        finally:
            for request in self._pending.values():
                if not request.done():
                    request.set_exception(PeerError("it is not connected"))

    async def _receive_all(self, connection: PeerConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await connection.receive()
            except TimeoutError:
                raise PeerError("it sends no heartbeats") from None
            if message is None:
                raise PeerError("it closed the connection")
            match message.get("event"):
                case "gateway":
                    self._counts = str(message["counts"])
                case "stats":
                    self.stats = decode(dict[str, BackendStats], message["apis"])
                    self._on_stats(self, self._counts, self.stats)
                case "refused":
                    raise PeerError(str(message.get("reason")))
                case _:
                    request = self._pending.pop(int(message.get("number") or 0), None)
                    if request is not None and not request.done():
                        request.set_result(message)

    async def _update(self) -> None:
        """Send each newest table, one at a time; tables that were replaced meanwhile are skipped."""
        self._offered.set()  # the gateway may have lost its table
        while True:
            await self._offered.wait()
            self._offered.clear()
            if self._wanted is None:
                continue
            version, settings, table = self._wanted
            message = {"command": "serve", "settings": settings.to_json(), "table": table_to_json(table)}
            try:
                await self._request(message, _SERVE_TIMEOUT_S)
            except _RefusedError as error:
                self._set_failed(str(error))
                await self._notify_waiting()
                await asyncio.sleep(_BACKOFF.max_s)
                self._offered.set()
                continue
            self._version = version
            if self._wanted[0] == version:
                self._set_current()
            await self._notify_waiting()

    async def _request(self, message: Json, timeout_s: float) -> Json:
        connection = self._connection
        if connection is None:
            raise PeerError("it is not connected")
        self._last_request += 1
        number = self._last_request
        request: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._pending[number] = request
        connection.send({**message, "number": number})
        try:
            async with asyncio.timeout(timeout_s):
                answer = await request
        except TimeoutError:
            raise PeerError("it does not answer in time") from None
        finally:
            self._pending.pop(number, None)
        if "error" in answer:
            raise _RefusedError(str(answer["error"]))
        return answer

    def _disconnect(self, connection: PeerConnection) -> None:
        connection.close()
        self._connection = None
        self.stats = {}

    async def _notify_waiting(self) -> None:
        async with self._in_force:
            self._in_force.notify_all()

    def _set_current(self) -> None:
        if self.reason:
            self._logger.info("gateway of a node serves the newest routes", node=self.host)
        self.reason, self._is_late = "", False

    def _set_failed(self, reason: str) -> None:
        if not self.reason:
            self._logger.warning("gateway of a node serves older routes", node=self.host, reason=reason)
        self.reason, self._is_late = reason, True


class _RefusedError(PeerError):
    """The gateway answered with an error."""
