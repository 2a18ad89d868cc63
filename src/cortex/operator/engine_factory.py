"""Chooses where replicas run, by what the installation is made of."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cortex import __version__
from cortex.cluster.engine import Access, ClusterEngine
from cortex.cluster.gateways import Fleet, FleetSettings
from cortex.cluster.known_nodes import NodesFile, SharedNodes
from cortex.cluster.node.start import NodeStart
from cortex.cluster.placement import Placer
from cortex.cluster.ray_placer import RayPlacer
from cortex.cluster.transport import derived
from cortex.engine.base import Engine
from cortex.engine.local import LocalEngine
from cortex.engine.preparing import Prepared, prepare_revision
from cortex.errors import InputError
from cortex.gateway.base import AnyGateway
from cortex.gateway.config import GatewaySettings
from cortex.home import Home
from cortex.installation import Installation
from cortex.state.apis import Target
from cortex.state.key_values import FactStore
from cortex.telemetry import Logger


@dataclass(frozen=True)
class Place:
    """Where replicas run, and how what they are started from is prepared."""

    engine: Engine
    prepare: Callable[[Target], Awaitable[Prepared]]
    gateway_secret: str = ""  #: what replicas are shown that are reached over TCP
    cluster: ClusterEngine | None = None
    placer: Placer | None = None  #: who finds room on the cluster
    #: Makes one of the operator's own gateway and those on nodes; None where there are no nodes.
    fleet: Callable[[AnyGateway, GatewaySettings], Fleet] | None = None


def create_place(home: Home, installation: Installation, facts: FactStore, epoch: int, logger: Logger) -> Place:
    """Return it. Raises: InputError if the address of this machine can't be found."""
    if installation.engine == "local":
        return Place(LocalEngine(home, os.environ, logger), functools.partial(prepare_revision, home, os.environ))
    secret = facts.put_if_absent("cluster_secret", secrets.token_hex(32))
    cluster_id = facts.put_if_absent("cluster_id", secrets.token_hex(4))
    address = installation.ray_address or ""
    access = Access(secret, own_address(installation), installation.node_port, epoch)
    start = NodeStart(cluster_id, secret, __version__)
    placer = RayPlacer(address, start, os.environ, home.logs_dir / "ray.log", logger)
    nodes = SharedNodes(facts) if installation.database else NodesFile(home.run_dir / "nodes.json")
    engine = ClusterEngine(home, placer, access, nodes, logger)

    def fleet(own: AnyGateway, listening: GatewaySettings) -> Fleet:
        settings = FleetSettings(
            installation.gateways, listening.host, listening.port, listening.certificate, access.host
        )
        return Fleet(own, engine, placer, settings, derived(secret, "node"), epoch, home.run_dir, logger)

    return Place(engine, _on_nodes, access.gateway_secret, engine, placer, fleet)


async def _on_nodes(target: Target) -> Prepared:
    """Prepare nothing here: each node does it for itself."""
    return Prepared("", {})


def own_address(installation: Installation) -> str:
    """Return the address at which the cluster's nodes reach this machine: the one that leads to Ray's head.

    Nothing is sent. Raises: InputError if it can't be found.
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
            f"Ray's head at {ray_address} can't be found: {error.strerror or error}; check --ray-address, "
            "and say with --advertise at which address nodes reach this machine"
        ) from None
