"""Owns the running gateway: one HAProxy that follows the routing table; knows nothing of replicas but their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import psutil

from cortex.errors import GatewayError
from cortex.gateway.answer_totals import Tally
from cortex.gateway.backends import Sockets, capacity, server_options
from cortex.gateway.config import CONFIG_FILE, GatewaySettings, Rendered, render
from cortex.gateway.counters import average_ms
from cortex.gateway.maps import BACKEND_PREFIX, api_of, backend_name
from cortex.gateway.process import HaproxyProcess, connection_limit, why_not_listening
from cortex.gateway.routes import RoutingTable
from cortex.gateway.runtime_api import (
    BackendState,
    Runtime,
    Unresponsive,
    WantedServer,
    Workers,
    cut_off_commands,
    has_others,
    lacks_servers,
    may_use,
    server_commands,
)
from cortex.gateway.runtime_maps import LiveMaps
from cortex.gateway.stats import BackendStats
from cortex.home import Home, write_private
from cortex.telemetry import Logger

START_TIMEOUT_S = 10.0
#: Probes in a row without an answer after which HAProxy counts as hung and is replaced.
HUNG_AFTER_PROBES = 2
#: Rounds of commands in which a worker must come to have every server it should.
_SYNC_ROUNDS = 3
_POLL_S = 0.01

__all__ = ["BackendStats", "Gateway", "GatewaySettings"]


class Gateway:
    """HAProxy, kept equal to the newest routing table.

    A reload leaves old workers behind for as long as their clients have requests or idle connections open. HAProxy
    takes no orders for their servers, so what new requests they get they pass on to the current worker (see `config`),
    and only their counts matter here.
    """

    def __init__(self, home: Home, settings: GatewaySettings) -> None:
        self._home = home
        self._folder = home.run_dir / "gateway"
        self._settings = replace(settings, max_connections=connection_limit(settings.max_connections))
        self._sockets = Sockets(
            stats=str(home.sockets_dir / "gateway.sock"),
            successor=str(home.sockets_dir / "gateway-successor.sock"),
            inside=str(home.sockets_dir / "gateway-inside.sock"),
        )
        master_socket = home.sockets_dir / "gateway-master.sock"
        self._process = HaproxyProcess(self._folder, CONFIG_FILE, master_socket, home.logs_dir)
        self._runtime = Runtime(master_socket)
        self._maps = LiveMaps(self._runtime)
        self._logger = Logger(__name__)
        self._lock = asyncio.Lock()
        self._table = RoutingTable()
        self._synced: tuple[RoutingTable, int | None] | None = None
        self._unwritten: OSError | None = None  # why the newest files are not on disk
        self._leaving = False  # some worker still has a server that the table has not
        self._failed_probes = 0
        self._tally = Tally(self._runtime, self._sockets.stats, self._folder / "counters.json", self._logger)
        self._watch: int | None = None
        self._recovery: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """HAProxy's master process."""
        return self._process.pid

    async def startup(self, table: RoutingTable) -> None:
        """Adopt the HAProxy that runs for this home, or start one. Raises: GatewayError, also for a taken port."""
        async with self._lock:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._table = table
            rendered = self._write(table)
            if self._process.adopt():
                try:
                    await self._follow(rendered)
                except Unresponsive:
                    await self._restart()
                else:
                    self._watch_process()
                    self._logger.info("gateway adopted", pid=self._process.pid)
            else:
                await self._restart()

    async def apply(self, table: RoutingTable) -> None:
        """Make HAProxy serve `table`. Repeating it changes nothing. Raises: GatewayError; the table is kept and tried
        again by `ensure_running`.
        """
        async with self._lock:
            self._table = table
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
        """Serve another certificate, with chain and key: the next `apply` or `ensure_running` reloads."""
        self._settings = replace(self._settings, certificate=pem)
        self._synced = None

    async def drained(self, names: Collection[str]) -> set[str]:
        """Return those of `names` in which no request is or will be, in any worker.

        Only servers that the applied table has no more ever become drained. A body that comes in slowly through an old
        worker may keep its servers from it for long: set a limit to the wait.
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
        """Return the number of requests inside each server, by its name, over all workers."""
        seen = await self._runtime.all_backends(await self._runtime.workers())
        return _in_flight(state for backends in seen.values() for state in backends.values())

    async def stats(self) -> dict[str, BackendStats]:
        """Return what every API of any worker does, by its name."""
        seen, totals = await self._tally.count(self._apis())
        by_api: dict[str, list[BackendState]] = {}
        for backends in seen.values():
            for name, state in backends.items():
                api = api_of(name)
                if api is not None:
                    by_api.setdefault(api, []).append(state)
        return {api: _stats(states, totals.get(api, {})) for api, states in by_api.items()}

    async def ensure_running(self) -> None:
        """Replace an HAProxy that died or hangs, and finish what `apply` could not. Call it every second or so."""
        async with self._lock:
            await asyncio.to_thread(self._process.trim_logs)  # it may copy many megabytes
            if not self._process.is_alive():
                self._logger.warning("gateway died, starting it again", pid=self._process.pid)
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
                await self._tally.keep(workers.current)
                seen, _ = await self._tally.count(self._apis())
                for pid, backends in seen.items():
                    if commands := cut_off_commands(backends):
                        await self._runtime.run(pid, commands)
                self._process.trim_memory(workers.current, asyncio.get_running_loop().time())
                self._failed_probes = 0
            except Unresponsive as error:
                await self._count_failure(error)

    async def stop(self) -> None:
        """End HAProxy and all its workers, requests inside included."""
        await self.shutdown()
        async with self._lock:
            if self._process.pid is None:
                self._process.adopt()
            await self._process.stop()

    async def shutdown(self) -> None:
        """Leave HAProxy running and stop watching it."""
        self._unwatch()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
            self._recovery = None
        if self._process.is_alive():
            with contextlib.suppress(GatewayError):
                await self._tally.count(self._apis())
        self._tally.close()

    def _apis(self) -> set[str]:
        return {backend.api for backend in self._table.backends}

    def _write(self, table: RoutingTable) -> Rendered:
        rendered = render(table, self._settings, self._sockets)
        self._unwritten = None
        try:
            for name, text in rendered.files.items():
                path = self._folder / name
                if not path.exists() or path.read_text() != text:
                    write_private(path, text)
        except OSError as error:  # a full disk; what needs no file goes on
            self._unwritten = error
        return rendered

    def _require_files(self) -> None:
        """Make sure that HAProxy reads what was rendered. Raises: GatewayError."""
        if self._unwritten is not None:
            raise GatewayError(f"the gateway's files can't be written: {self._unwritten}") from self._unwritten

    async def _follow(self, rendered: Rendered) -> None:
        """Bring the running HAProxy to the table: through its socket if that is enough, else by a reload."""
        workers = await self._runtime.workers()
        if workers.current is None or await self._runtime.structure(workers.current) != rendered.structure:
            self._require_files()
            log_start = self._process.log_size()
            if workers.current is not None:
                await self._tally.keep(workers.current)
            try:
                await self._runtime.reload()
            except Unresponsive:
                raise
            except GatewayError as error:
                raise self._explained(str(error), log_start) from error
            workers = await self._runtime.workers()
            self._logger.info("gateway reloaded", pid=self._process.pid, worker=workers.current)
        await self._sync(workers)

    async def _sync(self, workers: Workers) -> None:
        """Give the current worker the table's servers and reasons; servers still busy stay and are seen to later."""
        pid = workers.current
        if pid is None:
            raise Unresponsive("HAProxy has no worker")
        await self._maps.sync_keys(workers, self._table)
        wanted = {
            backend_name(backend): {
                server.name: WantedServer(server_options(server), capacity(server)) for server in backend.servers
            }
            for backend in self._table.backends
        }
        said: list[str] = []
        observed = await self._runtime.backends(pid)
        for _ in range(_SYNC_ROUNDS):
            commands = server_commands(observed, wanted, BACKEND_PREFIX)
            if not commands:
                break
            said = await self._runtime.run(pid, commands)
            observed = await self._runtime.backends(pid)
        if lacks_servers(observed, wanted):
            raise GatewayError(f"HAProxy did not take its servers: {' '.join(said)[-1000:]}")
        self._leaving = has_others(observed, wanted, BACKEND_PREFIX)
        await self._maps.sync(pid, self._table)
        self._synced = (self._table, pid)

    async def _restart(self) -> None:
        """End whatever is left of the last HAProxy and start one that serves the table."""
        self._unwatch()
        self._tally.close()
        await self._process.stop()
        with contextlib.suppress(OSError):  # then the files can't be written either, which is told
            self._home.create()
            self._folder.mkdir(mode=0o700, exist_ok=True)
        rendered = self._write(self._table)
        self._require_files()
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
        self._leaving = False
        self._synced = (self._table, (await self._runtime.workers()).current)
        self._watch_process()
        self._logger.info("gateway started", pid=self._process.pid, port=self._settings.port)

    async def _wait_until_serving(self, rendered: Rendered, log_start: int) -> None:
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
        """Name the cause: the taken port, or else HAProxy's own words."""
        words = self._process.log_tail(log_start)
        if "cannot bind" in words or "cannot bind" in what:
            taken = why_not_listening(self._settings.host, self._settings.port)
            if taken:
                return GatewayError(taken)
        return GatewayError(f"{what}\n{words}".strip())

    async def _is_dying(self) -> bool:
        """Say whether the master ends within a moment; its sockets are gone before it is."""
        for _ in range(50):
            if not self._process.is_alive():
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _count_failure(self, error: Unresponsive) -> None:
        self._failed_probes += 1
        if self._failed_probes >= HUNG_AFTER_PROBES:
            self._logger.warning("gateway hangs, replacing it", pid=self._process.pid, reason=str(error))
            await self._restart()

    def _watch_process(self) -> None:
        """Recover at once when the master dies, rather than at the next tick."""
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
        except GatewayError as error:  # `ensure_running` is called again
            self._logger.error("gateway can't be started again", reason=str(error))


def _stats(states: Sequence[BackendState], responses: Mapping[int, int]) -> BackendStats:
    servers = _in_flight(states)
    return BackendStats(
        in_flight=sum(servers.values()),
        queued=sum(state.queued + sum(server.queued for server in state.servers.values()) for state in states),
        requests=max(0, sum(state.requests for state in states)),
        servers=servers,
        responses=responses,
        average_ms=average_ms(states),
    )


def _in_flight(states: Iterable[BackendState]) -> dict[str, int]:
    total: dict[str, int] = {}
    for state in states:
        for name, server in state.servers.items():
            total[name] = total.get(name, 0) + server.in_flight
    return total
