"""Engine that runs replicas on the nodes of a cluster. Implements `engine.base.Engine`.

To start a replica, the placer reserves its resources on a node, and the agent of that node prepares and hosts it.
Only the silence of a node decides that its replicas are lost, whatever Ray reports about the node, and when.
`remote_replica.py` has the states of a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from cortex.cluster.archives import ProjectArchives
from cortex.cluster.credentials import ClusterCredentials
from cortex.cluster.known_nodes import KnownNodes
from cortex.cluster.metrics_mirror import REFRESH_S, MetricsMirror
from cortex.cluster.node.relay import OperatorPort
from cortex.cluster.node_client import LeaderAddress, NodeClient
from cortex.cluster.placement import AGENT_PREFIX, NodeAddress, Placement, Placer, choose_node
from cortex.cluster.remote_replica import (
    UNREACHABLE_S,
    RemoteReplica,
    home_folders,
    map_paths,
    newest_addresses,
    reserve_again,
    unlimited_inventory,
    unreachable_reason,
    waiting_reason,
)
from cortex.cluster.transport import PeerError
from cortex.engine.devices import Inventory
from cortex.engine.local import first_status
from cortex.engine.usage import ResourceUsage
from cortex.errors import EngineError
from cortex.home import Home
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaSpec, ReplicaStatus, RequestLimits

#: At startup, known nodes have this long to connect before new replicas are placed.
ADOPT_TIMEOUT_S = 4.0
_CHECK_S = 1.0
#: A node that left the cluster is forgotten after this much silence.
GONE_AFTER_S = 600.0


class ClusterEngine:
    """Replicas on the nodes of a cluster; `engine/base.py` documents what each method promises."""

    def __init__(
        self,
        home: Home,
        placer: Placer,
        credentials: ClusterCredentials,
        known_nodes: KnownNodes,
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_change: Callable[[], None] = lambda: None
        self._on_end: Callable[[Path], None] = lambda folder: None
        self._home = home
        self._placer = placer
        self._credentials = credentials
        self._port = OperatorPort(home.jobs_socket, credentials.identity)
        self._leader = LeaderAddress(credentials.host, credentials.port, credentials.epoch)
        self._known_nodes = known_nodes
        self._logger = logger
        self._clock = clock
        self._archives = ProjectArchives(home)
        self._mirror = MetricsMirror(home.metrics_dir)
        self._nodes: dict[str, NodeClient] = {}
        self._replicas: dict[str, RemoteReplica] = {}
        #: By id, the node of each replica lost with its node. Its metrics are aggregated once its end is known.
        self._lost_with_node: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_started = False

    async def startup(self, on_change: Callable[[], None], on_end: Callable[[Path], None]) -> None:
        """Adopt the running replicas of all nodes that answer. Raises: EngineError if the port is taken."""
        self._on_change, self._on_end = on_change, on_end
        await self._listen()
        self._mirror.startup(self._home.run_dir / "led", self._credentials.epoch)
        await self._adopt()
        self._is_started = True
        self._on_placements()
        self._spawn(self._check(), "check replicas of the cluster")
        self._spawn(self._refresh_metrics(), "copy metrics of the cluster")

    async def _adopt(self) -> None:
        """Wait until all nodes report their replicas, for a limited time. Known nodes do while Ray lists others.

        Ray may be away: if a node answers, its replicas don't wait longer for Ray than for nodes.
        """
        deadline = self._clock() + ADOPT_TIMEOUT_S
        placing = self._spawn(self._placer.startup(self._on_placements), "find reservations")
        for address in self._known_nodes.all():
            self._follow(address)
        known = set(self._nodes)
        await asyncio.wait([placing], timeout=ADOPT_TIMEOUT_S)
        if not any(node.is_up for node in self._nodes.values()):
            await placing
        self._on_placements()
        if known != set(self._nodes):
            deadline = self._clock() + ADOPT_TIMEOUT_S
        while self._clock() < deadline and not all(node.is_up for node in self._nodes.values()):
            await asyncio.sleep(0.05)

    async def shutdown(self) -> None:
        """Stop following all replicas without stopping one."""
        await asyncio.to_thread(self._known_nodes.save)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(node.shutdown() for node in self._nodes.values()))
        await self._placer.shutdown()
        await self._port.shutdown()

    async def _listen(self) -> None:
        credentials = self._credentials
        try:
            port = await self._port.startup(credentials.host, credentials.port)
        except OSError as error:
            raise EngineError(
                f"the operator can't listen for nodes on {credentials.host}:{credentials.port}: "
                f"{error.strerror or error}; choose another port with `cortex up --node-port`, or another address "
                "with `--advertise`"
            ) from error
        self._leader = replace(self._leader, port=port)

    async def end_nodes(self) -> None:
        """End the agents of all nodes that answer. No replica may run."""
        await asyncio.gather(*(node.end() for node in self._nodes.values()))

    @property
    def nodes(self) -> Mapping[str, NodeClient]:
        """All followed nodes by host; the mapping is live."""
        return self._nodes

    # The interface `engine.base.Engine`.

    async def find_devices(self) -> Inventory:
        """Return the same as `devices`."""
        return self.devices()

    def devices(self) -> Inventory:
        """Return an unlimited inventory: the placer, not the operator, decides whether a replica fits."""
        return unlimited_inventory()

    async def start(self, spec: ReplicaSpec) -> None:
        """Request a place for a replica; its status reports the progress."""
        self._replicas[spec.id] = RemoteReplica(spec, first_status(spec, 0))
        await self._place(self._replicas[spec.id])
        self._on_placements()

    async def stop(self, replica_id: str, drain_s: float) -> None:
        """Drain and stop a replica."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        replica.stop_drain_s = drain_s
        if replica.node is None or not replica.node.is_up:  # nothing was started
            await self._forget(replica_id)
        else:
            replica.node.stop(replica_id, drain_s)

    async def configure(self, replica_id: str, limits: RequestLimits) -> None:
        """Change the limits of a running replica, from its next request on."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        replica.spec = replica.spec.with_limits(limits)
        if replica.node is not None:
            replica.node.configure(replica_id, limits)

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return every replica that is requested or runs, by id, with its newest status."""
        return {name: (replica.spec, replica.status) for name, replica in self._replicas.items()}

    def unsettled(self) -> set[str]:
        """Return the replicas whose metrics may still change: all that run, or may run on a node that is away."""
        is_all = all(node.is_up for node in self._nodes.values())
        return set(self._replicas) if is_all else self._mirror.names() | set(self._replicas)

    async def cores(self, replicas: Iterable[ReplicaStatus]) -> Mapping[str, float]:
        """Return the recent CPU usage, in cores, of the ready replicas of each API on all nodes that answer."""
        apis = {status.api for status in replicas if status.is_ready}
        reports = [node.cores for node in self._nodes.values() if node.is_up]
        return {
            api: sum(cores.get(api, 0.0) for cores in reports) for api in apis if any(api in cores for cores in reports)
        }

    async def usage(self) -> Mapping[str, ResourceUsage]:
        """Return what the nodes that answer last reported of their replicas, by id."""
        reports = [node.usage for node in self._nodes.values() if node.is_up]
        return {replica: usage for report in reports for replica, usage in report.items()}

    # Called by `NodeClient`.

    def node_is_up(self, node: NodeClient) -> None:
        """Adopt the replicas of a node, and repeat the commands that it may have missed."""
        self._logger.info("node is up", node=node.address.host, replicas=len(node.replicas))
        for name in node.replicas:
            self.replica_changed(node, name)
        for replica in list(self._replicas.values()):
            if replica.node is node:
                self._repeat_commands(node, replica)
        for name in node.ended:
            self._spawn(self._collect_ended(node, name), f"collect metrics of {name}")
        self._on_change()

    def node_is_lost(self, node: NodeClient, reason: str) -> None:
        """Drop the replicas of a node; the reconciler places others."""
        lost = [name for name, replica in self._replicas.items() if replica.node is node]
        self._logger.error("node is lost", node=node.address.host, reason=reason, replicas=len(lost))
        for name in lost:
            del self._replicas[name]
            self._lost_with_node[name] = node.address.host
            self._spawn(self._placer.remove(name), f"remove {name}")
        self._on_change()

    def replica_changed(self, node: NodeClient, replica_id: str) -> None:
        """Take the new status of a replica, or its end."""
        found = node.replicas.get(replica_id)
        replica = self._replicas.get(replica_id)
        if found is None:
            if replica_id in node.ended:
                self._spawn(self._collect_ended(node, replica_id), f"collect metrics of {replica_id}")
            if replica is not None and replica.node is node:
                self._remove_ended(replica_id)
            return
        self._lost_with_node.pop(replica_id, None)
        if replica is None:
            # An earlier operator started it, or its node was lost and came back. The reconciler retires it if it is
            # one too many.
            replica = RemoteReplica(self._spec_here(node, found.spec), found.status, node)
            self._replicas[replica_id] = replica
            self._logger.info("replica adopted", replica=replica_id, node=node.address.host)
        replica.node = node
        if found.is_reserved:
            replica.unreserved_since, replica.is_leaving = None, False
        elif replica.unreserved_since is None:
            replica.unreserved_since = self._clock()
        replica.update(found.status)
        self._on_change()

    async def project_archive(self, project_hash: str) -> tuple[Path, str]:
        """Return a file with the archive of a project, and the archive's digest."""
        return await self._archives.get(project_hash)

    def _repeat_commands(self, node: NodeClient, replica: RemoteReplica) -> None:
        if replica.spec.id not in node.replicas:
            if replica.stop_drain_s is None and replica.spec.id not in node.ended:
                self._start_on(node, replica)
            else:
                self._remove_ended(replica.spec.id)
        elif replica.stop_drain_s is not None:
            node.stop(replica.spec.id, replica.stop_drain_s)
        else:
            node.configure(replica.spec.id, replica.spec.limits)

    def was_lost_with_node(self, replica_id: str) -> bool:
        """Return whether a replica is gone because its node was lost."""
        return replica_id in self._lost_with_node

    # Placements.

    async def _place(self, replica: RemoteReplica) -> None:
        cluster, node_id = self._placer.resources(), ""
        if cluster is not None:
            occupants = [each.as_occupant(replica) for each in self._replicas.values() if each is not replica]
            away = [host for host, node in self._nodes.items() if not node.is_up]
            node_id = choose_node(replica.wanted, cluster, occupants, away)
        replica.preferred_host = cluster.nodes[node_id].host if cluster is not None and node_id else ""
        await self._placer.place(replica.spec.id, replica.wanted, preferred=node_id)

    def _on_placements(self) -> None:
        placements = self._placer.placements()
        for address in newest_addresses(placements.values()):
            self._follow(address)
        if not self._is_started:
            return
        for name, placement in placements.items():
            replica = self._replicas.get(name)
            if name.startswith(AGENT_PREFIX):
                continue  # it only keeps an agent running
            if replica is None:
                self._spawn(self._placer.remove(name), f"remove {name}")  # of an earlier operator; nothing of it runs
            elif replica.node is None:
                self._on_placement(replica, placement)

    def _on_placement(self, replica: RemoteReplica, placement: Placement) -> None:
        if placement.state == "lost":
            if replica.retry_at is None:
                self._logger.warning("reservation lost", replica=replica.spec.id, reason=placement.reason)
                replica.lost(placement.reason, self._clock())
                self._on_change()
        elif placement.state == "placed" and placement.node is not None:
            replica.node = self._nodes[placement.node.host]
            replica.placed()
            if replica.node.is_up:
                self._start_on(replica.node, replica)

    def _start_on(self, node: NodeClient, replica: RemoteReplica) -> None:
        assert node.home is not None
        spec = map_paths(replica.spec, home_folders(self._home, Home(node.home)))
        secret = self._credentials.gateway_secret
        node.start(replace(spec, listen_host=node.address.host, gateway_secret=secret))

    def _follow(self, address: NodeAddress) -> None:
        node = self._nodes.get(address.host)
        if node is None:
            node = NodeClient(address, self._credentials.identity, self._leader, self, self._logger)
            self._nodes[address.host] = node
            self._known_nodes.add(address)
            node.startup()
        elif node.address.port != address.port:
            node.move(address)
            self._known_nodes.add(address)

    # Periodic checks.

    async def _check(self) -> None:
        while True:
            try:
                await self._check_once()
            except Exception as error:  # one failed check must not end the loop
                self._logger.error("checking replicas failed", exc_info=error)
            await asyncio.sleep(_CHECK_S)

    async def _check_once(self) -> None:
        await asyncio.to_thread(self._known_nodes.save)
        cluster, placements = self._placer.resources(), self._placer.placements()
        for name, replica in list(self._replicas.items()):
            placement = placements.get(name)
            if replica.node is None and replica.is_due(self._clock()):
                await self._place(replica)
            elif replica.node is None and placement is not None and placement.state == "pending":
                reason = replica.problem or waiting_reason(replica, placement, self._placer)
                if reason != replica.status.lack:
                    replica.status = replace(replica.status, lack=reason)
                    self._on_change()
            elif replica.node is None and placement is None and replica.retry_at is None:
                if self._placer.is_available:
                    await self._place(replica)
            elif replica.node is not None and not replica.node.is_up:
                await self._place_elsewhere(replica, placement)
            elif replica.unreserved_since is not None and replica.stop_drain_s is None:
                await self._check_reservation(replica)
        if cluster is not None:
            await self._forget_nodes({node.host for node in cluster.nodes.values()})
            self._archives.keep_only({Path(replica.spec.project_dir).name for replica in self._replicas.values()})

    async def _forget_nodes(self, hosts: set[str]) -> None:
        """Stop following nodes that left the cluster and have been silent for `GONE_AFTER_S`."""
        for host, node in list(self._nodes.items()):
            if host not in hosts and node.silent_s > GONE_AFTER_S:
                self._logger.info("node is forgotten", node=host)
                del self._nodes[host]
                self._known_nodes.remove(host)
                await node.shutdown()
                for name in [name for name, where in self._lost_with_node.items() if where == host]:
                    del self._lost_with_node[name]
                    await asyncio.to_thread(self._on_end, self._home.metrics_dir / name)

    async def _place_elsewhere(self, replica: RemoteReplica, placement: Placement | None) -> None:
        """Handle a replica that was placed on a node that has not answered since; nothing of it was started."""
        reason, since_s = unreachable_reason(replica, placement)
        if since_s > UNREACHABLE_S:
            self._logger.warning("replica is placed again", replica=replica.spec.id, reason=reason)
            await self._placer.remove(replica.spec.id)
            replica.node = None
            replica.lost(reason, self._clock())
        else:
            replica.status = replace(replica.status, lack=reason)
        self._on_change()

    async def _check_reservation(self, replica: RemoteReplica) -> None:
        if await reserve_again(replica, self._placer, self._clock) or replica.is_leaving:
            return
        self._logger.warning("replica is replaced: its resources can't be reserved", replica=replica.spec.id)
        if replica.spec.is_job_worker:
            await self.stop(replica.spec.id, replica.spec.timeout_s)  # another worker runs the batches that it leased
        replica.is_leaving = True
        replica.update(replica.status)
        self._on_change()

    async def _refresh_metrics(self) -> None:
        while True:
            running = {name: each.node for name, each in self._replicas.items() if each.node and each.node.is_up}
            with contextlib.suppress(Exception):  # the next round fetches what this one could not
                await self._mirror.refresh(running)
            await asyncio.sleep(REFRESH_S)

    # The end of a replica.

    def _remove_ended(self, name: str) -> None:
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        self._on_change()  # first, because the gateway still routes to it
        self._spawn(self._placer.remove(name), f"remove {name}")
        if replica.stop_drain_s is None:
            self._logger.warning("replica vanished", api=replica.spec.api, replica=name)
        else:
            self._logger.info("replica stopped", api=replica.spec.api, replica=name)

    async def _forget(self, name: str) -> None:
        self._replicas.pop(name, None)
        await self._placer.remove(name)
        self._on_change()

    async def _collect_ended(self, node: NodeClient, name: str) -> None:
        """Aggregate the metrics of an ended replica, then delete them on the node."""
        async with self._mirror.lock(name):
            if name not in node.ended:
                return
            try:
                await self._mirror.fetch(name, node)
            except (PeerError, OSError) as error:
                self._logger.warning("metrics of a replica can't be fetched yet", replica=name, error=error)
                return
            await asyncio.to_thread(self._on_end, self._home.metrics_dir / name)
            self._lost_with_node.pop(name, None)
            node.forget(name)

    def _spec_here(self, node: NodeClient, spec: ReplicaSpec) -> ReplicaSpec:
        assert node.home is not None
        return map_paths(spec, home_folders(Home(node.home), self._home))

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
