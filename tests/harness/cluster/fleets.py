"""Gateways for tests: HAProxy beside an operator, and one on each real node agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from cortex.cluster.credentials import ClusterCredentials
from cortex.cluster.engine import ClusterEngine
from cortex.cluster.gateways import GatewayFleet, GatewayFleetSettings
from cortex.cluster.known_nodes import KnownNodes
from cortex.gateway.config import GatewaySettings
from cortex.gateway.haproxy import HaproxyGateway
from cortex.gateway.routes import Server
from cortex.home import Home
from cortex.state.database import open_state
from cortex.state.queries.key_values import KeyValueStore
from cortex.telemetry import Logger
from harness.cluster.local_nodes import SECRET, LocalNode, StaticPlacer
from harness.ports import free_port
from harness.servers.upstream import Answer, Client, Upstream


@dataclass
class Operator:
    """One operator's gateways. They continue to serve when it ends."""

    fleet: GatewayFleet
    own: HaproxyGateway
    placer: StaticPlacer
    engine: ClusterEngine

    def reasons(self) -> dict[str, str]:
        return {each["node"]: each["reason"] for each in self.fleet.describe()}

    async def all_serve(self) -> None:
        """Wait until every node has a gateway with the newest table."""
        await until(lambda: len(self.reasons()) == len(self.placer.nodes) and not any(self.reasons().values()))


@dataclass
class Site:
    """A home, a database, nodes, servers, and one port for the gateways of all of them."""

    home: Home
    facts: KeyValueStore
    nodes: list[LocalNode]
    port: int = field(default_factory=free_port)
    upstreams: dict[str, Upstream] = field(default_factory=dict)

    async def server(self, name: str) -> Server:
        """Start and return a server on TCP."""
        if name not in self.upstreams:
            self.upstreams[name] = await Upstream(self.home.sockets_dir / name, "127.0.0.1").start()
        return Server(name, self.upstreams[name].address, 10)

    @contextlib.asynccontextmanager
    async def operator(
        self,
        where: str = "all",
        epoch: int = 1,
        home: Home | None = None,
        is_available: bool = True,
        at: LocalNode | None = None,
    ) -> AsyncIterator[Operator]:
        """Run an operator without a table; its gateways continue to serve afterwards.

        `home` is another one's than the site's; `is_available`: Ray answers; `at`: its machine, else it is not a node.
        """
        home, host = home or self.home, at.host if at else "127.0.0.1"
        placer = StaticPlacer([node.address for node in self.nodes], is_available=is_available)
        access = ClusterCredentials(SECRET, host, 0, epoch)
        engine = ClusterEngine(home, placer, access, KnownNodes(self.facts), Logger("test"))
        own = HaproxyGateway(home, GatewaySettings(host, self.port))
        settings = GatewayFleetSettings(where, host, self.port, operator_host=host)
        fleet = GatewayFleet(
            own, engine.nodes, placer, settings, access.identity, epoch, home.run_dir, self.facts, Logger("test")
        )
        await engine.startup(lambda: None, lambda spec: None)
        try:
            yield Operator(fleet, own, placer, engine)
        finally:
            await fleet.shutdown()
            await engine.shutdown()

    async def client(self, node: LocalNode | None) -> Client:
        """Return a client of the gateway of a node, or of the operator's."""
        client = Client(self.port)
        client.reader, client.writer = await asyncio.open_connection(node.host if node else "127.0.0.1", self.port)
        return client

    async def ask(self, node: LocalNode | None, target: str, method: str = "GET", body: bytes = b"") -> Answer:
        """Send a request to the gateway of a node, or to the operator's."""
        client = await self.client(node)
        try:
            return await client.request(method, target, body, {})
        finally:
            client.close()


@contextlib.asynccontextmanager
async def site(home: Home, nodes: list[LocalNode]) -> AsyncIterator[Site]:
    """Yield a site; its gateways end afterwards, the nodes stay."""
    database = open_state(home.database_file)
    made = Site(home, KeyValueStore(database), nodes)
    try:
        yield made
    finally:
        try:
            async with made.operator(epoch=99) as last:
                await last.fleet.startup(last.fleet.table)
                await last.fleet.stop()
        finally:
            for upstream in made.upstreams.values():
                await upstream.stop()
            database.dispose()


async def until(condition: Callable[[], Any], timeout_s: float = 40) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):
            await asyncio.sleep(0.02)
    return found


async def eventually(condition: Callable[[], Awaitable[Any]], timeout_s: float = 40) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (found := await condition()):
            await asyncio.sleep(0.02)
    return found
