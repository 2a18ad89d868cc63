"""Brings the newest routing table to the gateway, one at a time, and says which one is in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from cortex.errors import GatewayError
from cortex.gateway.routes import RoutingTable
from cortex.telemetry import Logger

#: How long to wait after the gateway refused a table.
_RETRY_S = 0.5


class Gateway(Protocol):
    """What the control plane needs of the gateway."""

    async def apply(self, table: RoutingTable) -> None:
        """Put a table in force; returns once it is. Raises: GatewayError."""

    async def drained(self, names: Collection[str]) -> set[str]:
        """Return those of `names` that are in force no more and empty. Raises: GatewayError."""


class RoutePublisher:
    """Applies tables in the order in which they were published; those overtaken by a newer one are skipped.

    `on_applied` is called each time a table has come in force.
    """

    def __init__(self, gateway: Gateway, on_applied: Callable[[], None], logger: Logger) -> None:
        self._gateway = gateway
        self._on_applied = on_applied
        self._logger = logger
        self._table: RoutingTable | None = None
        self._published = 0
        self._applied = 0
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        """Tell whether the newest table is in force."""
        return self._applied == self._published

    def publish(self, table: RoutingTable) -> None:
        """Put `table` in force soon. The same table again costs nothing."""
        if table != self._table:
            self._table = table
            self.publish_again()

    def publish_again(self) -> None:
        """Apply the newest table once more, because the gateway may have lost it."""
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
                self._wake.set()
                await asyncio.sleep(_RETRY_S)
                continue
            async with self._changed:
                self._applied = number
                self._changed.notify_all()
            self._on_applied()
