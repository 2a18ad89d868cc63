"""Interface of the gateway: one HAProxy, or several on the nodes of a cluster that serve the same routing table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from cortex.gateway.routes import RoutingTable
from cortex.gateway.statistics import BackendStats


class Gateway(Protocol):
    """Applies routing tables to HAProxy, which continues to serve while no operator runs."""

    @property
    def pid(self) -> int | None:
        """HAProxy's master process on the operator's machine."""

    @property
    def refused_connections(self) -> int:
        """Connections above the limit of one address at the gateway on the operator's machine."""

    async def startup(self, table: RoutingTable) -> None:
        """Adopt the running HAProxy, or start one. Raises: GatewayError."""

    async def apply(self, table: RoutingTable) -> None:
        """Put a table in force before returning; idempotent. Raises: GatewayError."""

    def use_certificate(self, pem: str) -> None:
        """Serve another certificate soon; `pem` contains the chain and the key."""

    async def drained(self, names: Collection[str]) -> set[str]:
        """Return the servers in `names` that have no request and will get none. Raises: GatewayError."""

    async def stats(self) -> Mapping[str, BackendStats]:
        """Return the statistics of each API by name. Raises: GatewayError."""

    async def ensure_running(self) -> None:
        """Replace a dead HAProxy, and retry a failed `apply`. Call it about every second. Raises: GatewayError."""

    async def drain(self, timeout_s: float) -> None:
        """Accept no new connections, and wait up to `timeout_s` until all open requests have ended; `stop` follows.

        `startup` of a later operator accepts connections again. Raises: GatewayError.
        """

    async def stop(self) -> None:
        """End HAProxy together with its open requests."""

    async def shutdown(self) -> None:
        """Stop watching HAProxy, which continues to serve."""
