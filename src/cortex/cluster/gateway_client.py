"""The operator's side of the gateway of one node: brings it the newest table, asks it, hears what it does.

A link connects again for as long as it is wanted. Nobody waits for a gateway that does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from cortex.cluster.node.gateway import NodeGatewaySettings
from cortex.cluster.node_client import SILENCE_S
from cortex.cluster.placement import NodeAddress
from cortex.cluster.transport import Json, Wire, WireError, connect
from cortex.gateway.routes import RoutingTable
from cortex.gateway.stats import BackendStats
from cortex.gateway.table_json import table_to_json
from cortex.telemetry import Logger

#: How long others wait for a gateway that answers, each time: from then on they go on without it.
PATIENCE_S = 2.0
#: A gateway that is started takes seconds; one that takes longer than this is asked anew.
_SERVE_TIMEOUT_S = 60.0
_RETRY_S = 1.0
_FIRST_RETRY_S = 0.1

Stats = Mapping[str, BackendStats]


class GatewayLink:
    """One gateway. `startup`, then `shutdown`. `address` tells where the agent of its node is, if that is known."""

    def __init__(
        self,
        host: str,
        address: Callable[[], NodeAddress | None],
        key: str,
        epoch: int,
        on_stats: Callable[[GatewayLink, str, Stats], None],
        logger: Logger,
    ) -> None:
        self.host = host
        self.reason = "it was not reached yet"  #: why it has not the newest table; empty while it has
        self.stats: Stats = {}  #: what it told last; nothing while it is away
        self._address = address
        self._key = key
        self._epoch = epoch
        self._on_stats = on_stats
        self._logger = logger
        self._wanted: tuple[int, NodeGatewaySettings, RoutingTable] | None = None
        self._offered = asyncio.Event()
        self._in_force = asyncio.Condition()
        self._number = 0  #: of the newest table that is in force there
        self._is_late = True
        self._wire: Wire | None = None
        self._questions: dict[int, asyncio.Future[Json]] = {}
        self._asked = 0
        self._counts = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def answers(self) -> bool:
        """Tell whether others should wait for it: it has answered whatever it was asked last, in time."""
        return self._wire is not None and not self._is_late

    def startup(self) -> None:
        """Begin to feed it."""
        self._task = asyncio.create_task(self._run(), name=f"feed gateway {self.host}")

    async def shutdown(self) -> None:
        """Feed it no longer; it serves on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def offer(self, number: int, settings: NodeGatewaySettings, table: RoutingTable) -> None:
        """Say what it is to serve from now on; a higher number is newer."""
        self._wanted = (number, settings, table)
        self._offered.set()

    async def serves(self, number: int) -> None:
        """Wait until a table, or a newer one, is in force there; not for long."""
        try:
            async with asyncio.timeout(PATIENCE_S), self._in_force:
                await self._in_force.wait_for(lambda: self._number >= number or not self.answers)
        except TimeoutError:
            self._fails("it takes too long to serve the newest routes")

    async def drained(self, names: Collection[str]) -> set[str] | None:
        """Return those of `names` in which no request of its is or will be; None if it does not answer in time."""
        if not self.answers:
            return None
        try:
            answer = await self._ask({"command": "drained", "names": sorted(names)}, PATIENCE_S)
        except WireError as error:
            self._fails(str(error))
            self._offered.set()  # it counts again once it has answered to that
            return None
        return set(answer["drained"])

    async def end(self) -> None:
        """Have the gateway end; requests inside it too. Raises: WireError if it does not say that it has."""
        await self.shutdown()
        wire = await self._connect()
        listening = asyncio.create_task(self._listen(wire))
        try:
            self._wire = wire
            await self._ask({"command": "end"}, _SERVE_TIMEOUT_S)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            self._hang_up(wire)

    # The connection.

    async def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            wire = None
            try:
                wire = await self._connect()
                retry_s = _FIRST_RETRY_S
                self._wire, self._number = wire, 0
                await self._feed_while_it_speaks(wire)
            except WireError as error:
                self._fails(str(error))
            finally:
                if wire is not None:
                    self._hang_up(wire)
                    await self._tell_waiting()
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _RETRY_S)

    async def _connect(self) -> Wire:
        address = self._address()
        if address is None:
            raise WireError("no agent of cortex runs on its node yet")
        wire = await connect(address.host, address.port, self._key)
        wire.send({"purpose": "gateway", "epoch": self._epoch})
        return wire

    async def _feed_while_it_speaks(self, wire: Wire) -> None:
        feeding = asyncio.create_task(self._feed())
        listening = asyncio.create_task(self._listen(wire))
        try:
            await asyncio.wait((feeding, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (feeding, listening):
                task.cancel()
            results = await asyncio.gather(listening, feeding, return_exceptions=True)  # the cause comes first
        for result in results:
            if isinstance(result, Exception):
                raise result if isinstance(result, WireError) else WireError(f"{type(result).__name__}: {result}")

    async def _listen(self, wire: Wire) -> None:
        try:
            await self._listen_on(wire)
        finally:
            for question in self._questions.values():
                if not question.done():
                    question.set_exception(WireError("it is away"))

    async def _listen_on(self, wire: Wire) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await wire.receive()
            except TimeoutError:
                raise WireError("it says nothing") from None
            if message is None:
                raise WireError("it hung up")
            match message.get("event"):
                case "gateway":
                    self._counts = str(message["counts"])
                case "stats":
                    self.stats = {name: BackendStats.from_json(each) for name, each in message["apis"].items()}
                    self._on_stats(self, self._counts, self.stats)
                case "refused":
                    raise WireError(str(message.get("reason")))
                case _:
                    question = self._questions.pop(int(message.get("number") or 0), None)
                    if question is not None and not question.done():
                        question.set_result(message)

    async def _feed(self) -> None:
        """Bring it each newest table, one at a time; those overtaken meanwhile are skipped."""
        self._offered.set()  # it may have lost what it had
        while True:
            await self._offered.wait()
            self._offered.clear()
            if self._wanted is None:
                continue
            number, settings, table = self._wanted
            message = {"command": "serve", "settings": settings.to_json(), "table": table_to_json(table)}
            try:
                await self._ask(message, _SERVE_TIMEOUT_S)
            except _RefusedError as error:
                self._fails(str(error))
                await self._tell_waiting()
                await asyncio.sleep(_RETRY_S)
                self._offered.set()
                continue
            self._number = number
            if self._wanted[0] == number:
                self._is_fine()
            await self._tell_waiting()

    async def _ask(self, message: Json, timeout_s: float) -> Json:
        wire = self._wire
        if wire is None:
            raise WireError("it is away")
        self._asked += 1
        number = self._asked
        question: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._questions[number] = question
        wire.send({**message, "number": number})
        try:
            async with asyncio.timeout(timeout_s):
                answer = await question
        except TimeoutError:
            raise WireError("it does not answer in time") from None
        finally:
            self._questions.pop(number, None)
        if "error" in answer:
            raise _RefusedError(str(answer["error"]))
        return answer

    def _hang_up(self, wire: Wire) -> None:
        wire.close()
        self._wire = None
        self.stats = {}

    # How it is.

    async def _tell_waiting(self) -> None:
        async with self._in_force:
            self._in_force.notify_all()

    def _is_fine(self) -> None:
        if self.reason:
            self._logger.info("gateway of a node serves the newest routes", node=self.host)
        self.reason, self._is_late = "", False

    def _fails(self, reason: str) -> None:
        if not self.reason:
            self._logger.warning("gateway of a node serves what it had", node=self.host, reason=reason)
        self.reason, self._is_late = reason, True


class _RefusedError(WireError):
    """It answered that it can't."""
