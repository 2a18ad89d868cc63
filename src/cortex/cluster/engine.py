"""Runs replicas on the nodes of a cluster: a placer reserves what each wants, and the agent of its node hosts it.

Implements `engine.base.Engine`. What a replica is started from is prepared on its node. Which replicas are gone is
decided here, by the silence of their node; what a placer learns of it later changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from cortex.cluster.archives import Archives
from cortex.cluster.credentials import Access as Access
from cortex.cluster.known_nodes import KnownNodes
from cortex.cluster.metrics_mirror import REFRESH_S, Mirror
from cortex.cluster.node.relay import JOBS, LISTINGS, OperatorPort
from cortex.cluster.node_client import Leader, NodeLink
from cortex.cluster.path_mapping import homes, rebase
from cortex.cluster.placement import AGENT_PREFIX, NodeAddress, Placement, Placer
from cortex.cluster.remote import Remote, any_devices, spec_of_folder
from cortex.cluster.reserving import UNREACHABLE_S, lack_of, newest_addresses, reserve_again, unreached
from cortex.cluster.transport import WireError, derived
from cortex.engine.devices import Inventory
from cortex.engine.local import first_status
from cortex.errors import EngineError
from cortex.home import Home
from cortex.replica.spec import Limits, ReplicaSpec, ReplicaStatus
from cortex.telemetry import Logger

#: Nodes that are known get so long to answer before anything new is placed.
ADOPT_TIMEOUT_S = 4.0
_TEND_S = 1.0
#: A node that is not of the cluster any more may come back so long after it was heard last.
GONE_AFTER_S = 600.0


class ClusterEngine:
    """Replicas on the nodes of a cluster; see `engine/base.py` for what each method promises."""

    def __init__(
        self,
        home: Home,
        placer: Placer,
        access: Access,
        known_nodes: KnownNodes,
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_end: Callable[[ReplicaSpec], None] = lambda spec: None
        self._home = home
        self._placer = placer
        self._access = access
        targets = {JOBS: home.jobs_socket, LISTINGS: home.listings_socket}
        self._port = OperatorPort(targets, derived(access.secret, "operator"))
        self._leader = Leader(access.host, access.port, access.epoch)
        self._known_nodes = known_nodes
        self._logger = logger
        self._clock = clock
        self._archives = Archives(home)
        self._mirror = Mirror(home.metrics_dir)
        self._links: dict[str, NodeLink] = {}
        self._remotes: dict[str, Remote] = {}
        #: By id, the node of each replica that was lost with its node: what it counted is taken in once that is known.
        self._given_up: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_started = False

    # Life.

    async def startup(self) -> None:
        """Adopt every replica that already runs, on all nodes that answer. Raises: EngineError if the port is taken."""
        await self._listen()
        self._mirror.startup(self._home.run_dir / "led", self._access.epoch)
        self._placer.on_change = self._on_placements
        await self._placer.startup()
        for address in self._known_nodes.all():
            self._link_to(address)
        self._on_placements()
        deadline = self._clock() + ADOPT_TIMEOUT_S
        while self._clock() < deadline and not all(link.is_up for link in self._links.values()):
            await asyncio.sleep(0.05)
        self._is_started = True
        self._on_placements()
        self._begin(self._tend(), "tend replicas of the cluster")
        self._begin(self._refresh(), "copy numbers of the cluster")

    async def shutdown(self) -> None:
        """Let go of all replicas without stopping one."""
        await asyncio.to_thread(self._known_nodes.save)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.shutdown() for link in self._links.values()))
        await self._placer.shutdown()
        await self._port.shutdown()

    async def _listen(self) -> None:
        access = self._access
        try:
            port = await self._port.startup(access.host, access.port)
        except OSError as error:
            raise EngineError(
                f"the operator can't listen for nodes on {access.host}:{access.port}: {error.strerror or error}; "
                "choose another port with `cortex up --node-port`, or another address with `--advertise`"
            ) from error
        self._leader = replace(self._leader, port=port)

    async def end_nodes(self) -> None:
        """End the agents of all nodes that answer; their replicas must be gone."""
        await asyncio.gather(*(link.end() for link in self._links.values()))

    @property
    def links(self) -> Mapping[str, NodeLink]:
        """The nodes, by their addresses."""
        return self._links

    # Engine.

    async def find_devices(self) -> Inventory:
        """Return as many of everything as anybody could want."""
        return self.devices()

    def devices(self) -> Inventory:
        """Return as many of everything as anybody could want: who waits for room is told by the cluster."""
        return any_devices()

    async def start(self, spec: ReplicaSpec) -> None:
        """Ask for a place for a replica; what follows is told by its status."""
        self._remotes[spec.id] = Remote(spec, first_status(spec, 0))
        await self._placer.place(spec.id, self._remotes[spec.id].wanted)
        self._on_placements()

    async def stop(self, replica_id: str, drain_s: float) -> None:
        """Ask a replica to finish the requests inside it and end."""
        remote = self._remotes.get(replica_id)
        if remote is None:
            return
        remote.stop_drain_s = drain_s
        if remote.link is None or not remote.link.is_up:  # nothing was started
            await self._forget(replica_id)
        else:
            remote.link.stop(replica_id, drain_s)

    async def configure(self, replica_id: str, limits: Limits) -> None:
        """Change the limits of a running replica, from its next request on."""
        remote = self._remotes.get(replica_id)
        if remote is None:
            return
        remote.spec = remote.spec.with_limits(limits)
        if remote.link is not None:
            remote.link.configure(replica_id, limits)

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return every replica that is wanted or runs, by id, with its newest status."""
        return {name: (remote.spec, remote.status) for name, remote in self._remotes.items()}

    def unsettled(self) -> set[str]:
        """Return the replicas that run, and those that may, on nodes that do not answer: they count still."""
        is_all = all(link.is_up for link in self._links.values())
        return set(self._remotes) if is_all else self._mirror.names() | set(self._remotes)

    async def cores(self, replicas: Iterable[ReplicaStatus]) -> Mapping[str, float]:
        """Return the cores that the ready replicas of each API used lately, on all nodes that answer."""
        apis = {status.api for status in replicas if status.is_ready}
        told = [link.cores for link in self._links.values() if link.is_up]
        return {api: sum(cores.get(api, 0.0) for cores in told) for api in apis if any(api in cores for cores in told)}

    # What nodes tell (`link.LinkOwner`).

    def node_is_up(self, link: NodeLink) -> None:
        """Take up all that a node has, and tell it what it is to start or stop."""
        self._logger.info("node is up", node=link.address.host, replicas=len(link.replicas))
        for name in link.replicas:
            self.replica_changed(link, name)
        for remote in list(self._remotes.values()):
            if remote.link is link:
                self._order_again(link, remote)
        for name in link.ended:
            self._begin(self._fold(link, name), f"fold {name}")
        self.on_change()

    def node_is_lost(self, link: NodeLink, reason: str) -> None:
        """Give up all that was on a node: it is placed anew elsewhere."""
        lost = [name for name, remote in self._remotes.items() if remote.link is link]
        self._logger.error("node is lost", node=link.address.host, reason=reason, replicas=len(lost))
        for name in lost:
            del self._remotes[name]
            self._given_up[name] = link.address.host
            self._begin(self._placer.remove(name), f"remove {name}")
        self.on_change()

    def replica_changed(self, link: NodeLink, replica_id: str) -> None:
        """Learn how a replica is now, or that it is over."""
        found = link.replicas.get(replica_id)
        remote = self._remotes.get(replica_id)
        if found is None:
            if replica_id in link.ended:
                self._begin(self._fold(link, replica_id), f"fold {replica_id}")
            if remote is not None and remote.link is link:
                self._over(replica_id)
            return
        self._given_up.pop(replica_id, None)
        if remote is None:
            # The operator before started it, or it was given up while its node was away: it counts again. Whether it is
            # one too many is decided where that is always decided.
            remote = Remote(self._ours(link, found.spec), found.status, link)
            self._remotes[replica_id] = remote
            self._logger.info("replica adopted", replica=replica_id, node=link.address.host)
        remote.link = link
        if found.is_reserved:
            remote.unreserved_since, remote.is_leaving = None, False
        elif remote.unreserved_since is None:
            remote.unreserved_since = self._clock()
        remote.learn(found.status)
        self.on_change()

    def _order_again(self, link: NodeLink, remote: Remote) -> None:
        """Say what may have been lost with the connection."""
        if remote.spec.id not in link.replicas:
            if remote.stop_drain_s is None and remote.spec.id not in link.ended:
                self._start_on(link, remote)
            else:
                self._over(remote.spec.id)
        elif remote.stop_drain_s is not None:
            link.stop(remote.spec.id, remote.stop_drain_s)
        else:
            link.configure(remote.spec.id, remote.spec.limits)

    def was_lost_with_node(self, replica_id: str) -> bool:
        """Tell whether a replica is gone for no fault of its own."""
        return replica_id in self._given_up

    async def project_archive(self, project_hash: str) -> tuple[Path, str]:
        """Return a file with the archive of a project, and the archive's digest."""
        return await self._archives.get(project_hash)

    # What the placer tells.

    def _on_placements(self) -> None:
        placements = self._placer.placements()
        for address in newest_addresses(placements.values()):
            self._link_to(address)
        if not self._is_started:
            return
        for name, placement in placements.items():
            remote = self._remotes.get(name)
            if name.startswith(AGENT_PREFIX):
                continue  # all there is to it is the node
            if remote is None:
                self._begin(self._placer.remove(name), f"remove {name}")  # of an operator before; nothing of it runs
            elif remote.link is None:
                self._on_placement(remote, placement)

    def _on_placement(self, remote: Remote, placement: Placement) -> None:
        if placement.state == "lost":
            if remote.retry_at is None:
                self._logger.warning("reservation lost", replica=remote.spec.id, reason=placement.reason)
                remote.lost(placement.reason, self._clock())
                self.on_change()
        elif placement.state == "placed" and placement.node is not None:
            remote.link = self._links[placement.node.host]
            remote.placed()
            if remote.link.is_up:
                self._start_on(remote.link, remote)

    def _start_on(self, link: NodeLink, remote: Remote) -> None:
        assert link.home is not None
        spec = rebase(remote.spec, homes(self._home, Home(link.home)))
        link.start(replace(spec, listen_host=link.address.host, gateway_secret=self._access.gateway_secret))

    def _link_to(self, address: NodeAddress) -> None:
        link = self._links.get(address.host)
        if link is None:
            link = NodeLink(address, derived(self._access.secret, "node"), self._leader, self, self._logger)
            self._links[address.host] = link
            self._known_nodes.add(address)
            link.startup()
        elif link.address.port != address.port:
            link.move(address)
            self._known_nodes.add(address)

    # Time.

    async def _tend(self) -> None:
        while True:
            try:
                await self._tend_once()
            except Exception as error:  # one bad look must not end all
                self._logger.error("tending replicas failed", exc_info=error)
            await asyncio.sleep(_TEND_S)

    async def _tend_once(self) -> None:
        await asyncio.to_thread(self._known_nodes.save)
        there, placements = self._placer.resources(), self._placer.placements()
        for name, remote in list(self._remotes.items()):
            placement = placements.get(name)
            if remote.link is None and remote.is_due(self._clock()):
                await self._placer.place(name, remote.wanted)
            elif remote.link is None and placement is not None and placement.state == "pending":
                words = remote.problem or lack_of(remote, placement, self._placer)
                if words != remote.status.lack:
                    remote.status = replace(remote.status, lack=words)
                    self.on_change()
            elif remote.link is None and placement is None and remote.retry_at is None:
                if self._placer.is_available:
                    await self._placer.place(name, remote.wanted)
            elif remote.link is not None and not remote.link.is_up:
                await self._place_elsewhere(remote, placement)
            elif remote.unreserved_since is not None and remote.stop_drain_s is None:
                await self._keep_place(remote)
        if there is not None:
            await self._forget_nodes({node.host for node in there.nodes.values()})
            self._archives.keep_only({Path(remote.spec.project_dir).name for remote in self._remotes.values()})

    async def _forget_nodes(self, hosts: set[str]) -> None:
        """Stop looking for nodes that are not of the cluster any more and have been silent for long."""
        for host, link in list(self._links.items()):
            if host not in hosts and link.silent_s > GONE_AFTER_S:
                self._logger.info("node is forgotten", node=host)
                del self._links[host]
                self._known_nodes.remove(host)
                await link.shutdown()
                for name in [name for name, where in self._given_up.items() if where == host]:
                    del self._given_up[name]
                    await asyncio.to_thread(self.on_end, spec_of_folder(self._home.metrics_dir / name))

    async def _place_elsewhere(self, remote: Remote, placement: Placement | None) -> None:
        """See to a replica that nothing was started of, because its node has not answered since it was placed there."""
        words, since_s = unreached(remote, placement)
        if since_s > UNREACHABLE_S:
            self._logger.warning("replica is placed anew", replica=remote.spec.id, reason=words)
            await self._placer.remove(remote.spec.id)
            remote.link = None
            remote.lost(words, self._clock())
        else:
            remote.status = replace(remote.status, lack=words)
        self.on_change()

    async def _keep_place(self, remote: Remote) -> None:
        if await reserve_again(remote, self._placer, self._clock) or remote.is_leaving:
            return
        self._logger.warning("replica is to be replaced: its place can't be reserved", replica=remote.spec.id)
        if remote.spec.is_job_worker:
            await self.stop(remote.spec.id, remote.spec.timeout_s)  # what it has leased is run by another
        remote.is_leaving = True
        remote.learn(remote.status)
        self.on_change()

    async def _refresh(self) -> None:
        while True:
            running = {name: remote.link for name, remote in self._remotes.items() if remote.link and remote.link.is_up}
            with contextlib.suppress(Exception):  # numbers of a node that is away come later
                await self._mirror.refresh(running)
            await asyncio.sleep(REFRESH_S)

    # The end of a replica.

    def _over(self, name: str) -> None:
        remote = self._remotes.pop(name, None)
        if remote is None:
            return
        self.on_change()  # first: the gateway still sends requests there
        self._begin(self._placer.remove(name), f"remove {name}")
        if remote.stop_drain_s is None:
            self._logger.warning("replica vanished", api=remote.spec.api, replica=name)
        else:
            self._logger.info("replica stopped", api=remote.spec.api, replica=name)

    async def _forget(self, name: str) -> None:
        self._remotes.pop(name, None)
        await self._placer.remove(name)
        self.on_change()

    async def _fold(self, link: NodeLink, name: str) -> None:
        """Take over what an ended replica counted, then have it removed there."""
        async with self._mirror.held(name):
            if name not in link.ended:
                return
            try:
                await self._mirror.fetch(name, link)
            except (WireError, OSError) as error:
                self._logger.warning("numbers of a replica can't be fetched yet", replica=name, error=error)
                return
            await asyncio.to_thread(self.on_end, spec_of_folder(self._home.metrics_dir / name))
            self._given_up.pop(name, None)
            link.forget(name)

    def _ours(self, link: NodeLink, spec: ReplicaSpec) -> ReplicaSpec:
        assert link.home is not None
        return rebase(spec, homes(Home(link.home), self._home))

    def _begin(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
