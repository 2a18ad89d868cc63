"""The model agent: one process per machine and home that lists model sources, downloads contents and serves clients.

`python -m cortex.models.agent.agent HOME`. It outlives the operator, and ends on SIGTERM or after a while without
clients. It uses the credentials of its environment.

    supervisor ──Watch, Using──▶ ClientConnection ─▶ SourceMonitor (one per API and source) ─▶ Poller (one per prefix)
    worker ───Fetch, Release───▶        │                      └──▶ ContentStore (one per home)
                                        └─────────────────────────────▲
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import orjson

from cortex.errors import CortexError, StorageError
from cortex.home import Home
from cortex.models.agent.content_store import ContentStore
from cortex.models.agent.listing import Listing, Prefix, download_version, list_models
from cortex.models.agent.poller import Poller
from cortex.models.agent.source_monitor import FILE_GRACE_S, LastCatalogues, SourceMonitor
from cortex.models.protocol import (
    MAX_LINE_BYTES,
    Answer,
    CatalogueUpdate,
    Fetch,
    Fetched,
    FetchFailed,
    Release,
    Request,
    Using,
    Watch,
    read_request,
    write,
)
from cortex.models.spec import ModelSource
from cortex.processes.filelock import LockHeldError, hold_lock
from cortex.processes.priority import enter_background, leave_background
from cortex.processes.sockets import replace_listener
from cortex.telemetry import Logger, configure

#: The exit code if another agent runs for this home.
ALREADY_RUNS = 3


@dataclass(frozen=True)
class AgentLimits:
    """Timeouts and concurrency limits of the agent."""

    idle_s: float = 60.0  #: it ends after this time without clients
    linger_s: float = 30.0  #: a source is listed this long after its last watcher left
    content_grace_s: float = 60.0  #: unneeded content stays on disk this long
    first_grace_s: float = 600.0  #: no content is removed as unneeded this long after the start
    reconnect_s: float = 3.0  #: clients reconnect and report the contents they use within this time after the start
    housekeeping_s: float = 5.0
    listings: int = 16  #: concurrent
    downloads: int = 4  #: concurrent


_LOCK_TIMEOUT_S = 2.0
_EXIT_TIMEOUT_S = 0.8
_DESCRIPTORS = 65_536
#: Concurrent fetches of one client, more than the threads of a worker; reading pauses at this number.
_MAX_FETCHES = 1000
#: After a fetch the agent stays in the foreground this long: often another one follows.
_FOREGROUND_S = 1.0


class ModelAgentServer:
    """The agent of one home; `run` serves until the end."""

    def __init__(self, home: Home, environ: Mapping[str, str], limits: AgentLimits, logger: Logger) -> None:
        self._home = home
        self._environ = dict(environ)
        self._limits = limits
        self._logger = logger
        self._files = home.run_dir / "models"
        self._file_numbers = itertools.count(1)
        self._contents = ContentStore(home.models_dir, logger)
        self._foreground_users = 0  # fetches in progress, which calls wait for
        self._is_in_foreground = False
        self._last_catalogues = LastCatalogues(home.models_dir / "known")
        self._clients: set[ClientConnection] = set()
        self._monitors: dict[tuple[str, ModelSource], SourceMonitor] = {}
        self._pollers: dict[Prefix, Poller] = {}
        self._concurrent_listings = asyncio.Semaphore(limits.listings)
        self._concurrent_downloads = asyncio.Semaphore(limits.downloads)
        self._had_monitors = False
        self._idle_apis: set[str] = set()  #: those whose contents are kept although nobody watches their sources
        self._stop = asyncio.Event()
        self._idle_since = time.monotonic()

    async def run(self) -> None:
        """Serve until SIGTERM, or until the agent has been idle for a while."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        started_at = time.monotonic()
        enter_background()
        await asyncio.to_thread(self._contents.startup)
        self._contents.no_removal_before = started_at + self._limits.reconnect_s
        self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        loop.call_later(FILE_GRACE_S, self._delete_files, set(self._files.iterdir()))
        listener = replace_listener(self._home.model_agent_socket)
        server = await loop.create_unix_server(lambda: ClientConnection(self, self._logger), sock=listener)
        self._logger.info("model agent started", pid=os.getpid())
        housekeeping = asyncio.create_task(self._run_housekeeping(started_at), name="housekeeping")
        await self._stop.wait()
        # Exit even if a thread is busy with the disk; the next agent deletes what is incomplete.
        timer = threading.Timer(_EXIT_TIMEOUT_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        server.close()
        housekeeping.cancel()
        for client in list(self._clients):
            client.close()
        for monitor in self._monitors.values():
            monitor.stop()
        for poller in self._pollers.values():
            poller.stop()
        await self._contents.shutdown()
        self._home.model_agent_socket.unlink(missing_ok=True)
        self._logger.info("model agent stopped", pid=os.getpid())

    # Clients.

    def add_client(self, client: ClientConnection) -> None:
        """Register a client that connected."""
        self._clients.add(client)

    def remove_client(self, client: ClientConnection) -> None:
        """Release everything of a client that disconnected."""
        if client not in self._clients:
            return
        self._clients.discard(client)
        for fetch in client.fetches:
            fetch.cancel()
        self._contents.remove_client(client)
        for monitor in client.monitors:
            del monitor.watchers[client]
            asyncio.get_running_loop().call_later(self._limits.linger_s, self._stop_unwatched, monitor)
        if not self._clients:
            self._idle_since = time.monotonic()

    def handle(self, client: ClientConnection, request: Request) -> None:
        """Handle a client's request. Raises: ValueError if it is not permitted."""
        match request:
            case Watch(api, source):
                if client.watched is not None:
                    raise ValueError("only one watch per connection is permitted")
                client.watched = self._monitor(api, source)
                client.monitors.add(client.watched)
                client.watched.add_watcher(client, client.send_update)
                self._set_used(client)
            case Using(digests):
                client.using = digests
                self._set_used(client)
            case Fetch():
                task = asyncio.create_task(self._fetch(client, request), name=f"fetch {request.digest}")
                client.add_fetch(task)
            case Release(digest):
                self._contents.release(client, digest)

    def _set_used(self, client: ClientConnection) -> None:
        """Keep the contents that a replica uses. With caching, its workers lease the ones that they load instead."""
        if client.watched is not None and not client.watched.source.is_cached:
            self._contents.set_used(client, client.watched.api, client.using)

    async def _fetch(self, client: ClientConnection, request: Fetch) -> None:
        monitor = self._monitor(request.api, request.source)
        if monitor not in client.monitors:
            client.monitors.add(monitor)
            monitor.add_watcher(client, lambda update: None)
        is_new = self._contents.lease(client, request.api, request.digest)
        try:
            with self._in_foreground():
                path = await monitor.fetch(request.model, request.version, request.digest)
            client.send(Fetched(request.id, str(path)))
            return
        except CortexError as error:
            message = str(error)
            self._logger.warning("model can't be fetched", api=request.api, digest=request.digest, reason=message)
        except Exception as error:  # the client must get an answer
            message = f"{type(error).__name__}: {error}"
            self._logger.error("fetch failed", error, api=request.api, digest=request.digest)
        if is_new:
            self._contents.release(client, request.digest)
        client.send(FetchFailed(request.id, message))

    @contextlib.contextmanager
    def _in_foreground(self) -> Iterator[None]:
        """Run at normal priority while calls wait for fetches, and a moment longer."""
        self._foreground_users += 1
        if not self._is_in_foreground:
            self._is_in_foreground = True
            leave_background()
            asyncio.get_running_loop().call_later(_FOREGROUND_S, self._return_to_background)
        try:
            yield
        finally:
            self._foreground_users -= 1

    def _return_to_background(self) -> None:
        if self._foreground_users:
            asyncio.get_running_loop().call_later(_FOREGROUND_S, self._return_to_background)
        else:
            self._is_in_foreground = False
            enter_background()

    # Sources.

    def _monitor(self, api: str, source: ModelSource) -> SourceMonitor:
        monitor = self._monitors.get((api, source))
        if monitor is None:
            self._had_monitors = True
            monitor = SourceMonitor(
                api, source, self._contents, self._last_catalogues, self._download, self._write_file, self._logger
            )
            self._monitors[api, source] = monitor
            monitor.start(self._poller)
        return monitor

    def _poller(self, prefix: Prefix) -> Poller:
        poller = self._pollers.get(prefix)
        if poller is None:
            poller = Poller(prefix, self._list, self._concurrent_listings, self._logger)
            self._pollers[prefix] = poller
        return poller

    def _stop_unwatched(self, monitor: SourceMonitor) -> None:
        if monitor.watchers:
            return
        for key in [key for key, each in self._monitors.items() if each is monitor]:
            del self._monitors[key]
            monitor.stop()
        for prefix in [prefix for prefix, poller in self._pollers.items() if not poller.watchers]:
            self._pollers.pop(prefix).stop()

    async def _list(self, prefix: Prefix) -> Listing:
        return await list_models(prefix, self._environ)

    async def _download(self, url: str, digest: str, listed: str | None, folder: Path) -> None:
        async with self._concurrent_downloads:
            await download_version(url, digest, folder, self._environ, listed)

    # Files.

    def _write_file(self, data: bytes) -> Path:
        """Write a catalogue to a new file. Raises: StorageError."""
        path = self._files / f"{os.getpid()}-{next(self._file_numbers)}.json"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(data)
            part.rename(path)
        except OSError as error:
            raise StorageError(f"{path} can't be written: {error}") from error
        return path

    @staticmethod
    def _delete_files(paths: set[Path]) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()

    async def _run_housekeeping(self, started_at: float) -> None:
        while not self._stop.is_set():
            await asyncio.sleep(self._limits.housekeeping_s)
            try:
                await self._clean_up(started_at)
            except OSError as error:
                self._logger.error("housekeeping failed", error)

    async def _clean_up(self, started_at: float) -> None:
        limits, now = self._limits, time.monotonic()
        if not self._home.model_agent_socket.exists():
            self._logger.error("model agent ends: its socket was removed", socket=self._home.model_agent_socket)
            self._stop.set()
            return
        if self._contents.drop_missing():
            for monitor in self._monitors.values():
                monitor.publish_soon()
        is_idle = not self._clients and now - self._idle_since >= limits.idle_s
        # An agent that never had a source can't know what is needed: replicas may still wait for their environment.
        is_over = is_idle and self._had_monitors and not self._monitors
        if is_over or (self._had_monitors and now - started_at >= limits.first_grace_s):
            # Keep what deployed APIs without replicas have served, such as those that are scaled to zero.
            contents = self._last_catalogues.keep_only(self._monitors, _deployed_apis(self._home))
            for api in self._idle_apis | contents.keys():
                self._contents.retain((api, self._last_catalogues), contents.get(api))
            self._idle_apis = {*contents}
            await self._contents.collect_garbage(0 if is_over else limits.content_grace_s)
        if is_idle and not self._clients:
            self._logger.info("model agent ends: it has no clients")
            self._stop.set()


def _deployed_apis(home: Home) -> list[str]:
    """Return the names of the APIs with models, which the operator writes; none on a node of a cluster."""
    try:
        return list(orjson.loads(home.apis_with_models_file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return []


class ClientConnection(asyncio.Protocol):
    """The connection of one client.

    While the client does not read, its requests are not read, and of catalogue updates only the newest is kept.
    """

    def __init__(self, agent: ModelAgentServer, logger: Logger) -> None:
        self.monitors: set[SourceMonitor] = set()
        self.watched: SourceMonitor | None = None
        self.using: frozenset[str] = frozenset()
        self.fetches: set[asyncio.Task[None]] = set()
        self._agent = agent
        self._logger = logger
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._is_full = False  #: the client does not read
        self._update: CatalogueUpdate | None = None  #: to send once the client reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the agent."""
        self._transport = cast(asyncio.Transport, transport)
        self._agent.add_client(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister from the agent."""
        self._transport = None
        self._agent.remove_client(self)

    def data_received(self, data: bytes) -> None:
        """Handle complete lines; an invalid request closes the connection."""
        self._unread += data
        if b"\n" in data:
            *lines, rest = self._unread.split(b"\n")
            self._unread = rest
            for line in lines:
                if self._transport is None or self._transport.is_closing():
                    return
                self._handle(bytes(line))
        if len(self._unread) > MAX_LINE_BYTES:
            self._refuse(f"a line of more than {MAX_LINE_BYTES} bytes")

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read: this bounds the answers that have to be kept."""
        self._is_full = True
        self._pause_or_resume()

    def resume_writing(self) -> None:
        """Resume reading and send the newest update."""
        self._is_full = False
        self._pause_or_resume()
        if self._update is not None:
            self.send_update(self._update)

    def add_fetch(self, task: asyncio.Task[None]) -> None:
        """Count a fetch in progress; reading pauses while there are too many."""
        self.fetches.add(task)
        task.add_done_callback(self._remove_fetch)
        self._pause_or_resume()

    def send_update(self, update: CatalogueUpdate) -> None:
        """Send a catalogue update, or keep the newest one while the client does not read."""
        self._update = update if self._is_full else None
        if not self._is_full:
            self.send(update)

    def send(self, answer: Answer) -> None:
        """Send an answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(write(answer))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _remove_fetch(self, task: asyncio.Task[None]) -> None:
        self.fetches.discard(task)
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_full or len(self.fetches) >= _MAX_FETCHES:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _handle(self, line: bytes) -> None:
        try:
            self._agent.handle(self, read_request(line))
        except ValueError as error:
            self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        self._logger.warning("model agent closed a client's connection", reason=reason[:500])
        self.close()


def main() -> None:
    """Run the agent of the home in the first argument."""
    home = Home(Path(sys.argv[1]))  # the other arguments state the version; node agents of earlier ones add `--node`
    home.create()
    configure(home.logs_dir / "models.log")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with only_one(home):
        asyncio.run(_run(home))


async def _run(home: Home) -> None:
    await ModelAgentServer(home, os.environ, AgentLimits(), Logger("cortex.models")).run()


@contextlib.contextmanager
def only_one(home: Home) -> Iterator[None]:
    """Hold the home's lock, which the kernel releases at the end of the process; wait for an agent that is ending."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(home.run_dir / "models.lock", _LOCK_TIMEOUT_S))
        except LockHeldError:
            print(f"error: a model agent already runs for {home.path}", file=sys.stderr, flush=True)
            sys.exit(ALREADY_RUNS)
        yield


if __name__ == "__main__":
    main()
