"""Factory of engine and gateway, for one machine or a Ray cluster."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
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
from cortex.installation import Installation
from cortex.operator.context import OperatorContext
from cortex.operator.revisions.preparations import Preparations
from cortex.state.revision import Revision

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
    preparations: Preparations  #: of environments and models
    gateway_secret: str = ""  #: authenticates the gateway to replicas that it reaches over TCP
    gateway_count: Callable[[], int] = lambda: 1  #: number of gateways that serve the routes
    #: Whether a replica ended with its node, which its revision is not blamed for.
    was_lost_with_node: Callable[[str], bool] = lambda replica_id: False
    cluster: Cluster | None = None


def create_infrastructure(context: OperatorContext, certificate: str) -> Infrastructure:
    """Return engine and gateway of an installation; `certificate` is a PEM file, "" without TLS.

    Raises: InputError if `own_address` does.
    """
    home, installation, facts, logger = context.home, context.installation, context.facts, context.logger
    listening = GatewaySettings(context.settings.host, context.settings.gateway_port, certificate=certificate)
    gateway = HaproxyGateway(home, listening)
    wake = context.wakes.both
    if installation.engine == "local":
        engine = LocalEngine(home, os.environ, logger, python=sys.executable)
        prepare = partial(prepare_revision, home, os.environ)
        return Infrastructure(engine, gateway, Preparations(prepare, wake, time.time, logger))
    # Lazy imports: operators of one machine start sooner, with less memory.
    from cortex.cluster.credentials import ClusterCredentials  # noqa: PLC0415
    from cortex.cluster.engine import ClusterEngine  # noqa: PLC0415
    from cortex.cluster.gateways import GatewayFleet, GatewayFleetSettings  # noqa: PLC0415
    from cortex.cluster.known_nodes import KnownNodes  # noqa: PLC0415
    from cortex.cluster.node.start import NodeStart  # noqa: PLC0415
    from cortex.cluster.ray_placer import RayPlacer  # noqa: PLC0415

    secret = facts.put_if_absent("cluster_secret", secrets.token_hex(32))
    cluster_id = facts.put_if_absent("cluster_id", secrets.token_hex(4))
    address = installation.ray_address or ""
    credentials = ClusterCredentials(secret, own_address(installation), installation.node_port, context.epoch or 1)
    start = NodeStart(cluster_id, credentials.for_nodes, __version__)
    placer = RayPlacer(address, start, os.environ, home.logs_dir / "ray.log", logger)
    nodes = KnownNodes(facts, home.run_dir / "nodes.json")
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
        context.epoch or 1,
        home.run_dir,
        facts,
        logger,
        wake,
    )
    cluster = Cluster(cluster_engine, placer, fleet)
    preparations = Preparations(_prepare_nothing, wake, time.time, logger)
    secret, was_lost = credentials.gateway_secret, cluster_engine.was_lost_with_node
    return Infrastructure(cluster_engine, fleet, preparations, secret, fleet.size, was_lost, cluster)


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
