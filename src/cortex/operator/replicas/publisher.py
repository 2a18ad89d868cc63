"""Brings the newest routing table to the gateway, one at a time, and says which one is in force."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Protocol

from cortex.errors import GatewayError
from cortex.gateway.routes import RoutingTable
from cortex.telemetry import Logger

#: How long to wait after the gateway refused a table.
_RETRY_S = 0.5
#: After so long without success it is told: a gateway that is started anew takes less.
TOLD_AFTER_S = 3.0
#: A table that is not in force by then is late; most are after some milliseconds.
LATE_AFTER_S = 0.3


class Gateway(Protocol):
    """What the control plane needs of the gateway."""

    async def apply(self, table: RoutingTable) -> None:
        """Put a table in force; returns once it is. Raises: GatewayError."""

    async def drained(self, names: Collection[str]) -> set[str]:
        """Return those of `names` that are in force no more and empty. Raises: GatewayError."""


class RoutePublisher:
    """Applies tables in the order in which they were published; those overtaken by a newer one are skipped.

    `on_change` is called each time a table has come in force or was refused.
    """

    def __init__(
        self,
        gateway: Gateway,
        on_change: Callable[[], None],
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._on_change = on_change
        self._logger = logger
        self._clock = clock
        self._due_since: float | None = None  #: since when a newer table waits than the one in force
        self._failing_since: float | None = None
        self._error = ""
        self._table: RoutingTable | None = None
        self._published = 0
        self._applied = 0
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        """Tell whether the newest table is in force."""
        return self._applied == self._published

    @property
    def is_late(self) -> bool:
        """Tell whether the newest table has waited longer than usual, or was refused."""
        if self._failing_since is not None:
            return True
        return self._due_since is not None and self._clock() - self._due_since > LATE_AFTER_S

    @property
    def failure(self) -> str:
        """Say why routes can't come in force, once that has gone on for a while; else empty."""
        is_long = self._failing_since is not None and self._clock() - self._failing_since >= TOLD_AFTER_S
        return self._error if is_long else ""

    def publish(self, table: RoutingTable) -> None:
        """Put `table` in force soon. The same table again costs nothing."""
        if table != self._table:
            self._table = table
            self.publish_again()

    def publish_again(self) -> None:
        """Apply the newest table once more, because the gateway may have lost it."""
        if self._due_since is None:
            self._due_since = self._clock()
        self._published += 1
        self._wake.set()

    async def applied(self) -> None:
        """Wait until what is the newest table now, or a newer one, is in force."""
        wanted = self._published
        async with self._changed:
            await self._changed.wait_for(lambda: self._applied >= wanted)

    async def run(self) -> None:
        """Apply tables until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            number, table = self._published, self._table
            if table is None:
                continue
            try:
                await self._gateway.apply(table)
            except Exception as error:  # whatever it is, routes must be tried again
                expected = isinstance(error, GatewayError)
                self._logger.error("routes could not be applied", None if expected else error, error=error)
                self._error = str(error) or type(error).__name__
                if self._failing_since is None:
                    self._failing_since = self._clock()
                self._on_change()
                self._wake.set()
                await asyncio.sleep(_RETRY_S)
                continue
            self._failing_since = None
            self._due_since = None if number == self._published else self._clock()
            async with self._changed:
                self._applied = number
                self._changed.notify_all()
            self._on_change()
