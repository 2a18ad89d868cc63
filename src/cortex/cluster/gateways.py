"""The gateways of a cluster as one: that beside the operator, and one on each node that is to have one.

Implements `gateway.base.AnyGateway`. All get the same table, and each reaches what is on its own machine by its path.
Who does not answer is waited for by nobody, serves on with what it had, and gets the newest as soon as it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cortex.cluster.gateway_client import GatewayLink, Stats
from cortex.cluster.gateway_totals import GatewayTotals
from cortex.cluster.node.gateway import NodeGatewaySettings
from cortex.cluster.node_client import NodeLink
from cortex.cluster.placement import AGENT_PREFIX, ClusterResources, NodeAddress, Placement, Resources
from cortex.cluster.transport import WireError
from cortex.gateway.addresses import numeric
from cortex.gateway.base import AnyGateway
from cortex.gateway.routes import RoutingTable
from cortex.gateway.stats import BackendStats, summed
from cortex.home import write_private
from cortex.telemetry import Logger

#: A node that the cluster knows no more, and whose gateway is silent, is given up after so long.
_GONE_S = 60.0
_TEND_S = 1.0
#: What `cortex down` waits for nodes that don't answer.
_STOP_TIMEOUT_S = 10.0
_EVERYWHERE = frozenset({"0.0.0.0", "::", "*"})


class Nodes(Protocol):
    """What is asked of the engine of the cluster."""

    @property
    def links(self) -> Mapping[str, NodeLink]:
        """The nodes with an agent, by their addresses."""


class Reserving(Protocol):
    """What is asked of the placer."""

    async def place(self, name: str, resources: Resources, node_id: str = "") -> None:
        """Have an agent run on a node."""

    async def remove(self, name: str) -> None:
        """Need it no more."""

    def placements(self) -> dict[str, Placement]:
        """Return what is placed."""

    def resources(self) -> ClusterResources | None:
        """Return what the cluster has; None while it does not answer."""


@dataclass(frozen=True)
class FleetSettings:
    """Which nodes have a gateway, and how those listen."""

    where: str  #: "operator": none; "all"; "group:NAME": those of a node group
    own_host: str  #: on which the operator's own gateway listens
    port: int
    certificate: str = field(default="", repr=False)  #: PEM, with chain and key; "": plain HTTP
    operator_host: str = ""  #: address of the operator's machine among the nodes


@dataclass
class _Member:
    """The gateway of one node."""

    link: GatewayLink
    node_id: str  #: "" while the cluster does not answer
    seen_at: float  #: when the cluster knew the node last, or the gateway answered


class Fleet:
    """One gateway for whoever feeds it. `on_change` is called when another number of gateways serves."""

    def __init__(
        self,
        own: AnyGateway,
        nodes: Nodes,
        placer: Reserving,
        settings: FleetSettings,
        key: str,
        epoch: int,
        folder: Path,
        logger: Logger,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._own = own
        self._nodes = nodes
        self._placer = placer
        self._settings = settings
        self._key = key
        self._epoch = epoch
        self._logger = logger
        self._file = folder / "gateways.json"
        self._totals = GatewayTotals(folder / "gateway-totals.json")
        self._members: dict[str, _Member] = {}
        self._ended: set[str] = set()  #: nodes that were told to have no gateway, since they are up
        self._is_started = False
        self._number = 0
        self._table = RoutingTable()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """HAProxy's master process beside the operator."""
        return self._own.pid

    def size(self) -> int:
        """Return how many gateways there are or should be, the operator's own included."""
        # Before it starts it is as it was: another number would have HAProxy load other limits, and then these again.
        return 1 + len(self._members if self._is_started else self._known())

    @property
    def table(self) -> RoutingTable:
        """The newest table."""
        return self._table

    def describe(self) -> list[dict[str, Any]]:
        """Return each gateway of a node as JSON; `reason` says why it has not the newest routes."""
        scheme = "https" if self._settings.certificate else "http"
        return [
            {"node": host, "url": f"{scheme}://{_in_url(host)}:{self._settings.port}", "reason": member.link.reason}
            for host, member in sorted(self._members.items())
        ]

    # AnyGateway.

    async def startup(self, table: RoutingTable) -> None:
        """Start the operator's own, and feed those that the last operator knew. Raises: GatewayError."""
        self._totals.load()
        self._table, self._number = table, 1
        for host in self._known():
            self._add(host, "")
        self._is_started = True
        await self._own.startup(self._seen_from_here(table))
        self._begin(self._tend(), "tend gateways")

    async def apply(self, table: RoutingTable) -> None:
        """Put a table in force at the operator's own gateway and all that answer. Raises: GatewayError of its own."""
        self._table = table
        self._number += 1
        self._offer()
        self._totals.forget({backend.api for backend in table.backends})
        answering = [member.link for member in self._members.values() if member.link.answers]
        own, *_ = await asyncio.gather(
            self._own.apply(self._seen_from_here(table)),
            *(link.serves(self._number) for link in answering),
            return_exceptions=True,
        )
        if isinstance(own, BaseException):
            raise own

    def use_certificate(self, pem: str) -> None:
        """Serve another certificate, with chain and key, soon."""
        self._own.use_certificate(pem)
        self._settings = replace(self._settings, certificate=pem)
        self._number += 1
        self._offer()

    async def drained(self, names: Collection[str]) -> set[str]:
        """Return those of `names` in which no request is or will be, as far as gateways answer."""
        links = [member.link for member in self._members.values()]
        own, *others = await asyncio.gather(self._own.drained(names), *(link.drained(names) for link in links))
        return set(own or ()).intersection(*(found for found in others if found is not None))

    async def stats(self) -> Mapping[str, BackendStats]:
        """Return what each API does, by its name, over all gateways. Raises: GatewayError."""
        own = await self._own.stats()
        told = [member.link.stats for member in self._members.values()]
        found = {}
        for api in {*own, *(name for stats in told for name in stats)}:
            nothing = BackendStats(0, 0)
            ours = own.get(api, nothing)
            counted = replace(nothing, responses=self._totals.of(api))
            together = summed([ours, counted])
            each = [ours, *(stats[api] for stats in told if api in stats)]
            found[api] = replace(summed(each), responses=together.responses)
        self._totals.save()  # what was shown is not to be forgotten
        return found

    async def ensure_running(self) -> None:
        """Keep the operator's own; those of nodes are kept by their agents. Raises: GatewayError."""
        await self._own.ensure_running()

    async def stop(self) -> None:
        """End all of them, requests inside included; of nodes that don't answer, later operators must."""
        await self._let_go()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await asyncio.gather(*(self._leave(host) for host in list(self._members)))
        self._totals.save()
        await self._own.stop()

    async def shutdown(self) -> None:
        """Let go of all: they serve on."""
        await self._let_go()
        await asyncio.gather(*(member.link.shutdown() for member in self._members.values()))
        self._totals.save()
        await self._own.shutdown()

    async def _let_go(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Which nodes have one.

    async def _tend(self) -> None:
        while True:
            try:
                await self._tend_once()
            except Exception as error:  # one bad look must not end all
                self._logger.error("tending gateways failed", exc_info=error)
            await asyncio.sleep(_TEND_S)

    async def _tend_once(self) -> None:
        there = self._placer.resources()
        if there is not None:
            self._look(there)
        placements = self._placer.placements()
        for host, member in list(self._members.items()):
            placement = placements.get(_agent_name(host))
            if member.node_id and (placement is None or placement.state == "lost"):
                await self._placer.place(_agent_name(host), Resources(), member.node_id)
        for name in placements:
            if name.startswith(AGENT_PREFIX) and name not in map(_agent_name, self._members):
                await self._placer.remove(name)
        self._end_unwanted()
        self._totals.save()

    def _look(self, there: ClusterResources) -> None:
        """Add what is new, and leave out what is gone for good."""
        now = asyncio.get_running_loop().time()
        nodes = {node.host: (node_id, node.node_groups) for node_id, node in there.nodes.items()}
        before = set(self._members)
        for host, (node_id, groups) in nodes.items():
            if not self._is_wanted(host, groups):
                self._drop(host)
            elif host in self._members:
                self._members[host].node_id, self._members[host].seen_at = node_id, now
            else:
                self._add(host, node_id)
        for host, member in list(self._members.items()):
            if host not in nodes:
                member.node_id = ""
                if member.link.answers:
                    member.seen_at = now
                elif now - member.seen_at > _GONE_S:
                    self._drop(host)
        if before != set(self._members):
            self._remember()
            self.on_change()

    def _is_wanted(self, host: str, groups: Collection[str]) -> bool:
        settings = self._settings
        if host == settings.operator_host and settings.own_host in {*_EVERYWHERE, host}:
            return False  # the operator's own is there
        return settings.where == "all" or settings.where in {f"group:{group}" for group in groups}

    def _add(self, host: str, node_id: str) -> None:
        link = GatewayLink(host, lambda: self._address(host), self._key, self._epoch, self._note, self._logger)
        self._members[host] = _Member(link, node_id, asyncio.get_running_loop().time())
        self._ended.discard(host)
        link.offer(self._number, self._for(host), self._table)
        link.startup()

    def _drop(self, host: str) -> None:
        if host in self._members:
            self._begin(self._leave(host), f"end gateway {host}")

    async def _leave(self, host: str) -> None:
        member = self._members.pop(host)
        self._remember()
        self._ended.add(host)
        self.on_change()
        try:
            await member.link.end()
        except WireError as error:
            self._ended.discard(host)  # it is told once it is back
            self._logger.warning("gateway of a node can't be ended now", node=host, reason=error)
        await self._placer.remove(_agent_name(host))

    def _end_unwanted(self) -> None:
        """Have gateways end that an operator before us wanted; a node that is away is told once it is back."""
        up = {host for host, link in self._nodes.links.items() if link.is_up}
        self._ended &= up
        for host in up - self._ended - self._members.keys():
            self._ended.add(host)
            self._begin(self._end_one(host), f"end gateway {host}")

    async def _end_one(self, host: str) -> None:
        link = GatewayLink(host, lambda: self._address(host), self._key, self._epoch, self._note, self._logger)
        try:
            await link.end()
        except WireError:
            self._ended.discard(host)

    # Feeding.

    def _seen_from_here(self, table: RoutingTable) -> RoutingTable:
        found = ((numeric(host) or host, link.sockets_here) for host, link in self._nodes.links.items())
        return table.seen_from({host: folder for host, folder in found if folder is not None})

    def _offer(self) -> None:
        for host, member in self._members.items():
            member.link.offer(self._number, self._for(host), self._table)

    def _for(self, host: str) -> NodeGatewaySettings:
        return NodeGatewaySettings(host, self._settings.port, self._settings.certificate)

    def _note(self, link: GatewayLink, counts: str, stats: Stats) -> None:
        known = {backend.api for backend in self._table.backends}
        self._totals.note(link.host, counts, {api: each for api, each in stats.items() if api in known})

    def _address(self, host: str) -> NodeAddress | None:
        link = self._nodes.links.get(host)
        return link.address if link is not None else None

    def _known(self) -> list[str]:
        return _hosts(self._file) if self._settings.where != "operator" else []

    def _remember(self) -> None:
        with contextlib.suppress(OSError):  # the cluster will tell again
            write_private(self._file, json.dumps(sorted(self._members)))

    def _begin(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _agent_name(host: str) -> str:
    return AGENT_PREFIX + host.replace(".", "-").replace(":", "-")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _hosts(file: Path) -> list[str]:
    try:
        return [str(host) for host in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError):
        return []
