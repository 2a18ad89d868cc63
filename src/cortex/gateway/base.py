"""What the control plane needs of the gateway, be that one HAProxy or several that serve the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from cortex.gateway.routes import RoutingTable
from cortex.gateway.stats import BackendStats


class AnyGateway(Protocol):
    """Follows the routing table. What it runs serves on while nobody follows it."""

    @property
    def pid(self) -> int | None:
        """HAProxy's master process beside the operator."""

    async def startup(self, table: RoutingTable) -> None:
        """Take over what runs, or start it. Raises: GatewayError."""

    async def apply(self, table: RoutingTable) -> None:
        """Put a table in force; returns once it is. Repeating it changes nothing. Raises: GatewayError."""

    def use_certificate(self, pem: str) -> None:
        """Serve another certificate, with chain and key, soon."""

    async def drained(self, names: Collection[str]) -> set[str]:
        """Return those of `names` in which no request is or will be. Raises: GatewayError."""

    async def stats(self) -> Mapping[str, BackendStats]:
        """Return what each API does, by its name. Raises: GatewayError."""

    async def ensure_running(self) -> None:
        """Replace what died, and finish what `apply` could not. Call it every second or so. Raises: GatewayError."""

    async def stop(self) -> None:
        """End it, requests inside included."""

    async def shutdown(self) -> None:
        """Let go of it: it serves on."""
