"""The model agent: one process per machine and home that lists sources, downloads contents and serves clients.

`python -m cortex.models.agent HOME [--node]`. It outlives the operator; ends on SIGTERM, or once nobody has been
connected for a while. Credentials are those of the environment it was started with. On a node of a cluster, `--node`,
it has the operator's agent list what is in stores, as long as that answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cortex.errors import CortexError, StorageError
from cortex.home import Home
from cortex.models.clients import Client
from cortex.models.content_store import Contents
from cortex.models.fetch_listing import download_version, list_models
from cortex.models.last_catalogue import Remembered
from cortex.models.listing import Listing, Prefix
from cortex.models.listing_client import Asker
from cortex.models.listing_server import SharedListings
from cortex.models.poller import Lister
from cortex.models.protocol import Fetch, Fetched, FetchFailed, Release, Request, Using, Watch
from cortex.models.source_monitor import FILE_GRACE_S, Feed
from cortex.models.spec import ModelSource
from cortex.processes.priority import enter_background, leave_background
from cortex.storage.client import is_remote
from cortex.telemetry import Logger, configure

#: The exit code where another agent runs for this home.
ALREADY_RUNS = 3


@dataclass(frozen=True)
class Limits:
    """How the agent spends time and disk."""

    idle_s: float = 60.0  #: without a client for so long, it ends
    linger_s: float = 30.0  #: a source is still listed so long after its last watcher has gone
    content_grace_s: float = 60.0  #: unneeded content stays so long
    first_grace_s: float = 600.0  #: nothing is taken for unneeded within so long after the start
    reconnect_s: float = 3.0  #: within so long after the start, those who hold contents have said so
    housekeeping_s: float = 5.0
    listings: int = 16  #: at once
    downloads: int = 4  #: at once
    silence_s: float = 10.0  #: the operator's agent that says nothing for so long is away


_LOCK_TIMEOUT_S = 2.0
_EXIT_TIMEOUT_S = 0.8
_BACKLOG = 1024
_DESCRIPTORS = 65_536
#: A worker's threads ask for no more than this at the same time; who does is not read from for a while.
_FETCHES_AT_ONCE = 1000
#: So long it stays in the foreground after a fetch: the next often follows.
_FOREGROUND_S = 1.0


@dataclass
class _Session:
    """What one client has asked for."""

    feeds: set[Feed] = field(default_factory=set)
    watched: Feed | None = None
    using: frozenset[str] = frozenset()
    fetches: set[asyncio.Task[None]] = field(default_factory=set)


class Agent:
    """Everything that one agent does; `run` until told to stop."""

    def __init__(
        self, home: Home, environ: Mapping[str, str], limits: Limits, logger: Logger, is_node: bool = False
    ) -> None:
        self._home = home
        self._environ = dict(environ)
        self._limits = limits
        self._logger = logger
        self._files = home.run_dir / "models"
        self._file_numbers = itertools.count(1)
        self._contents = Contents(home.models_dir, logger)
        self._waiting = 0  # fetches that calls wait for
        self._is_in_foreground = False
        self._remembered = Remembered(home.models_dir / "known")
        self._sessions: dict[Client, _Session] = {}
        self._feeds: dict[tuple[str, ModelSource], Feed] = {}
        self._listers: dict[Prefix, Lister] = {}
        self._listing_turns = asyncio.Semaphore(limits.listings)
        self._download_turns = asyncio.Semaphore(limits.downloads)
        # On a node, what comes to this socket is taken to the operator's agent: it is that one's there.
        self._asker = Asker(home.listings_socket, limits.silence_s, logger) if is_node else None
        self._shared = None if is_node else SharedListings(self._list, self._listing_turns, logger)
        self._had_feeds = False
        self._stop = asyncio.Event()
        self._idle_since = time.monotonic()

    async def run(self) -> None:
        """Serve until SIGTERM, or until nobody needs it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        started_at = time.monotonic()
        enter_background()
        await asyncio.to_thread(self._contents.startup)
        self._contents.settled_at = started_at + self._limits.reconnect_s
        self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        loop.call_later(FILE_GRACE_S, self._clear_files, set(self._files.iterdir()))
        listener = _listen(self._home.model_agent_socket)
        server = await loop.create_unix_server(self._connect, sock=listener)
        if self._shared is not None:
            await self._shared.startup(_listen(self._home.listings_socket))
        self._logger.info("model agent started", pid=os.getpid())
        housekeeping = asyncio.create_task(self._keep_house(started_at), name="housekeeping")
        await self._stop.wait()
        _exit_in_time()
        server.close()
        housekeeping.cancel()
        for client in list(self._sessions):
            client.close()
        for feed in self._feeds.values():
            feed.close()
        for lister in self._listers.values():
            lister.stop()
        if self._asker is not None:
            self._asker.close()
        if self._shared is not None:
            self._shared.shutdown()
            self._home.listings_socket.unlink(missing_ok=True)
        await self._contents.shutdown()
        self._home.model_agent_socket.unlink(missing_ok=True)
        self._logger.info("model agent stopped", pid=os.getpid())

    # Clients.

    def _connect(self) -> Client:
        return Client(self._joined, self._asked, self._left, self._logger)

    def _joined(self, client: Client) -> None:
        self._sessions[client] = _Session()

    def _left(self, client: Client) -> None:
        session = self._sessions.pop(client, None)
        if session is None:
            return
        for fetch in session.fetches:
            fetch.cancel()
        self._contents.forget(client)
        for feed in session.feeds:
            del feed.watchers[client]
            self._close_later(feed)
        if not self._sessions:
            self._idle_since = time.monotonic()

    def _asked(self, client: Client, request: Request) -> None:
        """Do what a client says. Raises: ValueError if it may not."""
        session = self._sessions[client]
        match request:
            case Watch(api, source):
                if session.watched is not None:
                    raise ValueError("a connection watches once")
                session.watched = self._feed(api, source)
                session.feeds.add(session.watched)
                session.watched.watch(client, client.tell)
                self._use(client, session)
            case Using(digests):
                session.using = digests
                self._use(client, session)
            case Fetch():
                task = asyncio.create_task(self._fetch(client, session, request), name=f"fetch {request.digest}")
                session.fetches.add(task)
                task.add_done_callback(lambda done: self._fetched(client, session, done))
                if len(session.fetches) == _FETCHES_AT_ONCE:
                    client.hold(True)
            case Release(digest):
                self._contents.release(client, digest)

    def _use(self, client: Client, session: _Session) -> None:
        """Keep what a replica uses. One that caches models names all there are; its workers lease what they load."""
        if session.watched is not None and not session.watched.source.is_cached:
            self._contents.use(client, session.watched.api, session.using)

    def _fetched(self, client: Client, session: _Session, done: asyncio.Task[None]) -> None:
        session.fetches.discard(done)
        if len(session.fetches) == _FETCHES_AT_ONCE - 1:
            client.hold(False)

    async def _fetch(self, client: Client, session: _Session, request: Fetch) -> None:
        feed = self._feed(request.api, request.source)
        if feed not in session.feeds:
            session.feeds.add(feed)
            feed.watch(client, lambda news: None)
        is_new = self._contents.lease(client, request.api, request.digest)
        try:
            with self._in_foreground():
                path = await feed.obtain(request.model, request.version, request.digest)
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
        """Take part like any process while a call waits for what it fetches, and a moment longer."""
        self._waiting += 1
        if not self._is_in_foreground:
            self._is_in_foreground = True
            leave_background()
            asyncio.get_running_loop().call_later(_FOREGROUND_S, self._rest)
        try:
            yield
        finally:
            self._waiting -= 1

    def _rest(self) -> None:
        if self._waiting:
            asyncio.get_running_loop().call_later(_FOREGROUND_S, self._rest)
        else:
            self._is_in_foreground = False
            enter_background()

    # Sources.

    def _feed(self, api: str, source: ModelSource) -> Feed:
        key = (api, source)
        feed = self._feeds.get(key)
        if feed is None:
            self._had_feeds = True
            feed = Feed(api, source, self._contents, self._remembered, self._download, self._write_file, self._logger)
            self._feeds[key] = feed
            feed.open(self._lister)
        return feed

    def _lister(self, prefix: Prefix) -> Lister:
        lister = self._listers.get(prefix)
        if lister is None:
            ask = self._asker.ask if self._asker is not None and is_remote(prefix.url) else None
            lister = Lister(prefix, self._list, self._listing_turns, self._logger, ask)
            self._listers[prefix] = lister
        return lister

    def _close_later(self, feed: Feed) -> None:
        asyncio.get_running_loop().call_later(self._limits.linger_s, self._close_unwatched, feed)

    def _close_unwatched(self, feed: Feed) -> None:
        if feed.watchers:
            return
        for key in [key for key, each in self._feeds.items() if each is feed]:
            del self._feeds[key]
            feed.close()
        for prefix in [prefix for prefix, lister in self._listers.items() if not lister.watchers]:
            self._listers.pop(prefix).stop()

    async def _list(self, prefix: Prefix) -> Listing:
        return await list_models(prefix, self._environ)

    async def _download(self, url: str, digest: str, folder: Path) -> None:
        async with self._download_turns:
            await download_version(url, digest, folder, self._environ)

    # Files.

    def _write_file(self, data: bytes) -> Path:
        """Write a catalogue. Raises: StorageError."""
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
    def _clear_files(old: set[Path]) -> None:
        for path in old:
            with contextlib.suppress(OSError):
                path.unlink()

    async def _keep_house(self, started_at: float) -> None:
        while not self._stop.is_set():
            await asyncio.sleep(self._limits.housekeeping_s)
            try:
                await self._tidy(started_at)
            except OSError as error:
                self._logger.error("housekeeping failed", error)

    async def _tidy(self, started_at: float) -> None:
        limits, now = self._limits, time.monotonic()
        if not self._home.model_agent_socket.exists():
            self._logger.error("model agent ends: its socket was removed", socket=self._home.model_agent_socket)
            self._stop.set()
            return
        if self._shared is not None:
            self._shared.forget_unneeded()
        if self._contents.forget_lost():
            for feed in self._feeds.values():
                feed.update_soon()
        is_idle = not self._sessions and now - self._idle_since >= limits.idle_s
        # One that never had a source can't tell what is needed: replicas may still wait for their environment.
        is_over = is_idle and self._had_feeds and not self._feeds
        if is_over or (self._had_feeds and now - started_at >= limits.first_grace_s):
            await self._contents.collect(0 if is_over else limits.content_grace_s)
        if is_over:
            self._remembered.forget_all()
        if is_idle and not self._sessions:
            self._logger.info("model agent ends: nobody needs it")
            self._stop.set()


def main() -> None:
    """Run the agent of the home that the first argument names."""
    home, is_node = Home(Path(sys.argv[1])), sys.argv[2:] == ["--node"]
    home.create()
    configure(home.logs_dir / "models.log")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with only_one(home):
        asyncio.run(_run(home, is_node))


async def _run(home: Home, is_node: bool) -> None:
    logger = Logger("cortex.models")
    await Agent(home, os.environ, Limits(), logger, is_node).run()


@contextlib.contextmanager
def only_one(home: Home) -> Iterator[None]:
    """Hold the home's lock; the kernel frees it when we end. One that is just ending gets a moment."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with (home.run_dir / "models.lock").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    print(f"error: a model agent already runs for {home.path}", file=sys.stderr, flush=True)
                    sys.exit(ALREADY_RUNS)
                time.sleep(0.05)
        yield


def _listen(path: Path) -> socket.socket:
    """Take the socket's place at once, whatever an earlier agent left there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    listener.bind(str(part))
    part.chmod(0o600)
    listener.listen(_BACKLOG)
    part.rename(path)
    return listener


def _exit_in_time() -> None:
    """End even if a thread is busy with the disk; what is half done is cleared by the next agent."""
    timer = threading.Timer(_EXIT_TIMEOUT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
