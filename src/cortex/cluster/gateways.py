"""All gateways of a cluster behind one interface: one on each selected node, and perhaps the operator's own.

The agents of the nodes host the gateways, so that another operator feeds the same ones. The operator hosts one itself
where no agent does: its machine is not among the selected nodes, or it has to listen on loopback.

Implements `gateway.base.Gateway`. All gateways get the same routing table, and each reaches replicas on its own
machine by their unix sockets. A gateway that does not answer serves its last table; nothing waits for it, and it gets
the newest table when it is back.

The database has the nodes with a gateway, so that the next operator feeds them at once, even while Ray is away. Only
the setting `--gateways` and `stop` end a gateway, never that a node is missing from a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cortex.cluster.credentials import TlsIdentity
from cortex.cluster.gateway_client import PATIENCE_S, GatewayClient, Stats
from cortex.cluster.node.gateway import NodeGatewaySettings
from cortex.cluster.node_client import NodeClient
from cortex.cluster.placement import AGENT_PREFIX, ClusterResources, NodeAddress, Placer, Resources
from cortex.cluster.transport import PeerError
from cortex.errors import CortexError
from cortex.gateway.addresses import numeric
from cortex.gateway.base import Gateway
from cortex.gateway.routes import RoutingTable
from cortex.gateway.statistics import BackendStats, sum_stats
from cortex.home import write_private
from cortex.processes.codec import decode
from cortex.state.queries.key_values import KeyValueStore
from cortex.telemetry import Logger

#: A gateway that does not answer, on a node that left the cluster, counts no longer after this time.
_GONE_S = 60.0
_FACT = "gateways"
_CHECK_S = 1.0
_POLL_S = 0.05
#: Limit on how long `cortex down` waits for nodes that don't answer.
_STOP_TIMEOUT_S = 10.0
_ANY_HOST = frozenset({"0.0.0.0", "::", "*"})
#: How long the start waits for a gateway that the agent of the operator's machine starts; the agent starts meanwhile.
_FIRST_START_S = 15.0

#: Responses of each API by status class (2 for 2xx).
Counts = dict[str, dict[int, int]]


@dataclass(frozen=True)
class GatewayFleetSettings:
    """Selection of the nodes that have a gateway, and how these gateways listen."""

    where: str  #: "operator": no node; "all"; "group:NAME": the nodes of a node group
    own_host: str  #: listen address of the gateway on the operator's machine
    port: int
    certificate: str = field(default="", repr=False)  #: PEM, with chain and key; "": plain HTTP
    operator_host: str = ""  #: address of the operator's machine in the cluster


@dataclass
class _Member:
    """The gateway of one node."""

    client: GatewayClient
    node_id: str  #: "" while the node is not part of the cluster
    seen_at: float  #: when the node was last part of the cluster, or the gateway last answered


class GatewayFleet:
    """All gateways of a cluster as one gateway.

    `nodes` is the live mapping of followed nodes; `facts` stores which have a gateway. `on_change` is called when the
    number of gateways changes.
    """

    def __init__(
        self,
        own: Gateway,
        nodes: Mapping[str, NodeClient],
        placer: Placer,
        settings: GatewayFleetSettings,
        identity: TlsIdentity,
        epoch: int,
        folder: Path,
        facts: KeyValueStore,
        logger: Logger,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_change = on_change
        self._own = own
        self._nodes = nodes
        self._placer = placer
        self._settings = settings
        self._identity = identity
        self._epoch = epoch
        self._logger = logger
        self._facts = facts
        self._saved = facts.get(_FACT) or "{}"
        #: Nodes with a gateway, and the address on which it listens.
        self._known = _read_listeners(self._saved) if settings.where != "operator" else {}
        self._totals = GatewayTotals(folder / "gateway-totals.json")
        self._members: dict[str, _Member] = {}
        self._ended: set[str] = set()  #: nodes without a gateway that were ordered to end any, since they came up
        self._has_own = True
        self._is_started = False
        self._version = 0
        self._table = RoutingTable()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """HAProxy's master process of the operator's own gateway; None if it has none."""
        return self._own.pid if self._has_own else None

    @property
    def refused_connections(self) -> int:
        """Refused connections of the operator's own gateway; the others log theirs on their nodes."""
        return self._own.refused_connections

    def size(self) -> int:
        """Return the number of gateways, the operator's own included."""
        # Before startup it is that of the last operator, so that HAProxy does not reload with other limits twice.
        has_own, nodes = (self._has_own, self._members) if self._is_started else (self._is_own_needed(), self._known)
        return max(has_own + len(nodes), 1)

    @property
    def table(self) -> RoutingTable:
        """The newest table."""
        return self._table

    def describe(self) -> list[dict[str, Any]]:
        """Return each gateway of a node as JSON; `reason` is empty while it serves the newest routes."""
        scheme = "https" if self._settings.certificate else "http"
        return [
            {"node": host, "url": f"{scheme}://{_in_url(host)}:{self._settings.port}", "reason": member.client.reason}
            for host, member in sorted(self._members.items())
        ]

    # The interface `gateway.base.Gateway`.

    async def startup(self, table: RoutingTable) -> None:
        """Start the operator's own gateway if needed, and update those of the nodes. Raises: GatewayError."""
        self._totals.load()
        self._table, self._version = table, 1
        self._has_own = self._is_own_needed()
        own_host = self._settings.operator_host
        patience_s = PATIENCE_S if own_host in self._known else _FIRST_START_S
        for host in [*self._known]:
            self._add(host, "")
        self._is_started = True
        if self._has_own:
            if own_host not in self._members and own_host in self._nodes and self._nodes[own_host].is_up:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_TIMEOUT_S):
                        await self._end(own_host)  # an earlier operator wanted it; it may have our port
            await self._own.startup(self._with_local_sockets(table))
            self._spawn(self._check(), "check gateways")
            return
        await self._own.stop()  # of an operator that did not know yet that this machine is a node
        if own_host not in self._members:
            self._add(own_host, "")
        client = self._members[own_host].client
        self._spawn(self._check(), "check gateways")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while client.reason:
                    await asyncio.sleep(_POLL_S)

    async def apply(self, table: RoutingTable) -> None:
        """Apply a table to all gateways that answer. Raises: GatewayError of the operator's own gateway."""
        self._table = table
        self._version += 1
        self._offer()
        self._totals.forget({backend.api for backend in table.backends})
        answering = [member.client for member in self._members.values() if member.client.answers]
        work: list[Coroutine[Any, Any, None]] = [client.serves(self._version) for client in answering]
        if self._has_own:
            work.append(self._own.apply(self._with_local_sockets(table)))
        for result in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def use_certificate(self, pem: str) -> None:
        """Replace the certificate; `pem` has its chain and key. The gateways apply it soon."""
        self._own.use_certificate(pem)
        self._settings = replace(self._settings, certificate=pem)
        self._version += 1
        self._offer()

    async def drained(self, names: Collection[str]) -> set[str]:
        """Return those servers in `names` that have no requests and get none at all gateways that answer."""
        asked: list[Coroutine[Any, Any, set[str] | None]] = [
            member.client.drained(names) for member in self._members.values()
        ]
        if self._has_own:
            asked.append(self._own.drained(names))
        return set(names).intersection(*(found for found in await asyncio.gather(*asked) if found is not None))

    async def stats(self) -> Mapping[str, BackendStats]:
        """Return the statistics of each API, summed over all gateways. Raises: GatewayError."""
        own = await self._own.stats() if self._has_own else {}
        of_nodes = [member.client.stats for member in self._members.values()]
        found = {}
        for api in {*own, *self._totals.apis(), *(name for stats in of_nodes for name in stats)}:
            nothing = BackendStats(0, 0)
            ours = own.get(api, nothing)
            counted = replace(nothing, responses=self._totals.of(api))
            together = sum_stats([ours, counted])
            each = [ours, *(stats[api] for stats in of_nodes if api in stats)]
            found[api] = replace(sum_stats(each), responses=together.responses)
        self._totals.save()  # counters that were shown must not go back
        return found

    async def ensure_running(self) -> None:
        """Restart the operator's own gateway if it died; agents do so on nodes. Raises: GatewayError."""
        if self._has_own:
            await self._own.ensure_running()

    async def drain(self, timeout_s: float) -> None:
        """Drain the operator's own gateway. Those of nodes accept connections until `stop`."""
        await self._cancel_tasks()
        if self._has_own:
            await self._own.drain(timeout_s)

    async def stop(self) -> None:
        """End all gateways, with the requests inside them. A later operator ends those that don't answer now."""
        await self._cancel_tasks()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await asyncio.gather(*(self._end(host) for host in list(self._members)))
        self._known.clear()
        await self._save()
        await self._own.stop()

    async def shutdown(self) -> None:
        """Stop updating the gateways; they continue to serve."""
        await self._cancel_tasks()
        await asyncio.gather(*(member.client.shutdown() for member in self._members.values()))
        await self._save()
        await self._own.shutdown()

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Membership.

    async def _check(self) -> None:
        while True:
            try:
                await self._check_once()
            except Exception as error:  # one failed check must not end the loop
                self._logger.error("checking gateways failed", exc_info=error)
            await asyncio.sleep(_CHECK_S)

    async def _check_once(self) -> None:
        self._has_own = self._has_own and self._is_own_needed()
        if not self._has_own and self._own.pid is not None:
            self._logger.info("the agent of this machine hosts the gateway from now on")
            await self._own.stop()
        self._update_members(self._placer.resources())
        placements = self._placer.placements()
        for host, member in list(self._members.items()):
            placement = placements.get(_agent_name(host))
            if member.node_id and (placement is None or placement.state == "lost"):
                await self._placer.place(_agent_name(host), Resources(), member.node_id)
        for name in placements:
            if name.startswith(AGENT_PREFIX) and name not in map(_agent_name, self._known):
                await self._placer.remove(name)
        await self._save()

    def _update_members(self, cluster: ClusterResources | None) -> None:
        """Add the gateways of nodes that are there, end unwanted ones, and count those no longer that are away."""
        now = asyncio.get_running_loop().time()
        found = {node.host: (node_id, node.node_groups) for node_id, node in cluster.nodes.items()} if cluster else {}
        up = {host for host, node in self._nodes.items() if node.is_up}
        before = set(self._members)
        self._ended &= up
        for host in found.keys() | up | before:
            node_id, groups = found.get(host, ("", None))
            member = self._members.get(host)
            wanted = self._is_wanted(host, groups)
            if wanted is False:
                if member is not None or host in up - self._ended:
                    self._spawn(self._end(host), f"end gateway {host}")
            elif member is not None:
                member.node_id = node_id if cluster else member.node_id
                if host in found or member.client.answers:
                    member.seen_at = now
                elif now - member.seen_at > _GONE_S:
                    self._spawn(self._members.pop(host).client.shutdown(), f"leave gateway {host}")
            elif wanted:
                self._add(host, node_id)
        for host in self._known.keys() - self._members.keys() - self._nodes.keys() - found.keys() if cluster else ():
            del self._known[host]
        if before != set(self._members):
            self._on_change()

    def _is_wanted(self, host: str, groups: Collection[str] | None) -> bool | None:
        """Return whether a node is to have a gateway; None if that depends on its groups, and they are unknown."""
        where = self._settings.where
        if where in {"all", "operator"}:
            return where == "all"
        if groups is None:
            return host in self._known or None
        return where in {f"group:{group}" for group in groups}

    def _is_own_needed(self) -> bool:
        """Return whether no agent hosts a gateway where that of the operator's machine has to listen."""
        host, cluster = self._settings.operator_host, self._placer.resources()
        if self._settings.own_host not in {*_ANY_HOST, host}:
            return True
        nodes = cluster.nodes.values() if cluster else ()
        groups = next((node.node_groups for node in nodes if node.host == host), None)
        is_node = groups is not None or host in self._known or host in self._nodes
        return not (is_node and self._is_wanted(host, groups))

    def _client(self, host: str) -> GatewayClient:
        return GatewayClient(
            host, lambda: self._address(host), self._identity, self._epoch, self._add_counts, self._logger
        )

    def _add(self, host: str, node_id: str) -> None:
        client = self._client(host)
        self._members[host] = _Member(client, node_id, asyncio.get_running_loop().time())
        is_own = host == self._settings.operator_host and self._settings.own_host in _ANY_HOST
        self._known.setdefault(host, self._settings.own_host if is_own else host)
        self._ended.discard(host)
        client.offer(self._version, self._node_settings(host), self._table)
        client.startup()

    def _end(self, host: str) -> Coroutine[None, None, None]:
        """Forget the gateway of a node now; return what ends it, if an earlier operator wanted one there, too."""
        self._ended.add(host)
        self._known.pop(host, None)
        member = self._members.pop(host, None)
        return self._end_one(host, member.client if member is not None else self._client(host))

    async def _end_one(self, host: str, client: GatewayClient) -> None:
        try:
            await client.end()
        except PeerError as error:
            self._ended.discard(host)  # tried again while the node is up
            self._logger.warning("gateway of a node can't be ended now", node=host, reason=error)
        await self._placer.remove(_agent_name(host))

    # Tables, addresses and counters.

    def _with_local_sockets(self, table: RoutingTable) -> RoutingTable:
        found = ((numeric(host) or host, node.local_sockets_dir) for host, node in self._nodes.items())
        return table.with_local_sockets({host: folder for host, folder in found if folder is not None})

    def _offer(self) -> None:
        for host, member in self._members.items():
            member.client.offer(self._version, self._node_settings(host), self._table)

    def _node_settings(self, host: str) -> NodeGatewaySettings:
        return NodeGatewaySettings(self._known[host], self._settings.port, self._settings.certificate)

    def _add_counts(self, client: GatewayClient, counts: str, stats: Stats) -> None:
        known = {backend.api for backend in self._table.backends}
        self._totals.add(client.host, counts, {api: each for api, each in stats.items() if api in known})

    def _address(self, host: str) -> NodeAddress | None:
        node = self._nodes.get(host)
        return node.address if node is not None else None

    async def _save(self) -> None:
        """Store what the next operator must know. The next call tries again if the database or the disk is away."""
        self._totals.save()
        text = json.dumps(self._known, sort_keys=True)
        if text != self._saved:
            with contextlib.suppress(OSError, CortexError):
                await asyncio.to_thread(self._facts.put, _FACT, text)
                self._saved = text

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass
class _GatewayCounts:
    """Counters of one node's gateway."""

    counts: str = ""  #: id of the counters; a new home of the node starts others at 0
    newest: Counts = field(default_factory=dict)
    before: Counts = field(default_factory=dict)  #: sums of counters with earlier ids


class GatewayTotals:
    """Response counters of all gateways on nodes, present and past. Totals never decrease. Owns a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._gateways: dict[str, _GatewayCounts] = {}
        self._written = ""

    def load(self) -> None:
        """Load the totals of the last operator; start empty if the file is not readable."""
        try:
            self._gateways = decode(dict[str, _GatewayCounts], json.loads(self._file.read_text()))
        except (OSError, ValueError):
            self._gateways = {}

    def save(self) -> None:
        """Write the totals if they changed. The next call tries again if the disk is full."""
        text = json.dumps({host: vars(gateway) for host, gateway in self._gateways.items()})
        if text != self._written:
            with contextlib.suppress(OSError):
                write_private(self._file, text)
                self._written = text

    def add(self, host: str, counts: str, stats: Mapping[str, BackendStats]) -> None:
        """Take the counters of a gateway. Values for the same `counts` never decrease."""
        gateway = self._gateways.setdefault(host, _GatewayCounts(counts))
        if gateway.counts != counts:
            for api, responses in gateway.newest.items():
                before = gateway.before.setdefault(api, {})
                for kind, count in responses.items():
                    before[kind] = before.get(kind, 0) + count
            gateway.counts, gateway.newest = counts, {}
        for api, each in stats.items():
            known = gateway.newest.setdefault(api, {})
            for kind, count in each.responses.items():
                known[kind] = max(count, known.get(kind, 0))

    def forget(self, apis: Collection[str]) -> None:
        """Drop the totals of APIs that are not in `apis`."""
        for host, gateway in list(self._gateways.items()):
            for counts in (gateway.newest, gateway.before):
                for name in counts.keys() - set(apis):
                    del counts[name]
            if not gateway.newest and not gateway.before:
                del self._gateways[host]

    def apis(self) -> set[str]:
        """Return the APIs that have responses."""
        return {api for gateway in self._gateways.values() for api in (*gateway.newest, *gateway.before)}

    def of(self, api: str) -> dict[int, int]:
        """Return the responses of one API by status class."""
        total: dict[int, int] = {}
        for gateway in self._gateways.values():
            for counts in (gateway.before, gateway.newest):
                for kind, count in counts.get(api, {}).items():
                    total[kind] = total.get(kind, 0) + count
        return total


def _agent_name(host: str) -> str:
    return AGENT_PREFIX + host.replace(".", "-").replace(":", "-")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _read_listeners(text: str) -> dict[str, str]:
    try:
        return decode(dict[str, str], json.loads(text))
    except ValueError:
        return {}
