"""Factory of engine and gateway, for one machine or a Ray cluster."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cortex import __version__
from cortex.engine.base import Engine
from cortex.engine.environment import Prepared, prepare_revision
from cortex.engine.local import LocalEngine
from cortex.errors import InputError
from cortex.gateway.base import Gateway
from cortex.gateway.config import GatewaySettings
from cortex.gateway.haproxy import HaproxyGateway
from cortex.home import Home
from cortex.installation import Installation
from cortex.state.queries.key_values import KeyValueStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger

if TYPE_CHECKING:
    from cortex.cluster.engine import ClusterEngine
    from cortex.cluster.gateways import GatewayFleet
    from cortex.cluster.placement import Placer


@dataclass(frozen=True)
class Cluster:
    """Parts that exist only on a cluster."""

    engine: ClusterEngine
    placer: Placer
    fleet: GatewayFleet


@dataclass(frozen=True)
class Infrastructure:
    """Engine and gateway, on one machine or on a cluster."""

    engine: Engine
    gateway: Gateway
    prepare: Callable[[Revision], Awaitable[Prepared]]  #: prepares environment and models of a revision
    gateway_secret: str = ""  #: authenticates the gateway to replicas that it reaches over TCP
    cluster: Cluster | None = None


def create_infrastructure(
    home: Home,
    installation: Installation,
    listening: GatewaySettings,
    facts: KeyValueStore,
    epoch: int,
    on_fleet_change: Callable[[], None],
    logger: Logger,
) -> Infrastructure:
    """Return engine and gateway of an installation; `on_fleet_change` is as in `GatewayFleet`.

    Raises: InputError if `own_address` does.
    """
    gateway = HaproxyGateway(home, listening)
    if installation.engine == "local":
        engine = LocalEngine(home, os.environ, logger, python=sys.executable)
        return Infrastructure(engine, gateway, partial(prepare_revision, home, os.environ))
    # Lazy imports: operators of one machine start sooner, with less memory.
    from cortex.cluster.credentials import ClusterCredentials  # noqa: PLC0415
    from cortex.cluster.engine import ClusterEngine  # noqa: PLC0415
    from cortex.cluster.gateways import GatewayFleet, GatewayFleetSettings  # noqa: PLC0415
    from cortex.cluster.known_nodes import nodes_in_database, nodes_in_file  # noqa: PLC0415
    from cortex.cluster.node.start import NodeStart  # noqa: PLC0415
    from cortex.cluster.ray_placer import RayPlacer  # noqa: PLC0415

    secret = facts.put_if_absent("cluster_secret", secrets.token_hex(32))
    cluster_id = facts.put_if_absent("cluster_id", secrets.token_hex(4))
    address = installation.ray_address or ""
    credentials = ClusterCredentials(secret, own_address(installation), installation.node_port, epoch)
    start = NodeStart(cluster_id, credentials.for_nodes, __version__)
    placer = RayPlacer(address, start, os.environ, home.logs_dir / "ray.log", logger)
    nodes = nodes_in_database(facts) if installation.database else nodes_in_file(home.run_dir / "nodes.json")
    cluster_engine = ClusterEngine(home, placer, credentials, nodes, logger)
    settings = GatewayFleetSettings(
        installation.gateways, listening.host, listening.port, listening.certificate, credentials.host
    )
    fleet = GatewayFleet(
        gateway,
        cluster_engine.nodes,
        placer,
        settings,
        credentials.identity,
        epoch,
        home.run_dir,
        logger,
        on_fleet_change,
    )
    cluster = Cluster(cluster_engine, placer, fleet)
    return Infrastructure(cluster_engine, fleet, _prepare_nothing, credentials.gateway_secret, cluster)


async def _prepare_nothing(revision: Revision) -> Prepared:
    """Return an empty preparation: each node prepares revisions itself."""
    return Prepared("", {})


def own_address(installation: Installation) -> str:
    """Return this machine's address on the route to Ray's head node, by which cluster nodes reach it.

    Sends no packet. Raises: InputError if Ray's head can't be resolved.
    """
    if installation.advertise:
        return installation.advertise
    ray_address = installation.ray_address or ""
    host, _, port = ray_address.removeprefix("ray://").rpartition(":")
    try:
        [(family, *_, address)] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[:1]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise InputError(
            f"Ray's head node at {ray_address} can't be found: {error.strerror or error}; check --ray-address, "
            "and set the address at which nodes reach this machine with --advertise"
        ) from None
