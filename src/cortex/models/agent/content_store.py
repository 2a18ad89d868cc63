"""Content-addressed store of model files on this machine's disk: each content is downloaded once, whole or not at all.

`content/<digest>/` is a content, `content/.part-*` one that is being written or removed, `index/<digest>.json` its
metadata. A content leaves the disk when no client uses it and no catalogue retains it (`collect_garbage`), or, least
recently used first, to keep an API within `disk_cache_size`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from cortex.errors import StorageError, format_size, is_disk_full
from cortex.telemetry import Logger

_PART = ".part-"
#: How long a download waits for room within `disk_cache_size`: less than the default timeout of a request, so that the
#: caller receives the reason.
ROOM_TIMEOUT_S = 45.0
#: Free disk space that downloads leave to everything else.
_SPARE_BYTES = 16 * 1024 * 1024

#: Creates a folder with all files of a content.
FillFolder = Callable[[Path], Awaitable[None]]


@dataclass(frozen=True)
class ContentRequest:
    """A request for a content to be on disk."""

    digest: str
    api: str
    size_bytes: int
    fill: FillFolder
    limit: int | None = None  #: maximum number of contents of the API on disk


@dataclass(frozen=True)
class StoredContent:
    """One content on disk."""

    digest: str
    apis: frozenset[str]  #: the APIs that fetched it; it counts against the limit of each
    used_at: float  #: when it was last fetched; UNIX time, seconds
    size_bytes: int = 0  #: of its files when they were downloaded


def choose_victim(stored: Iterable[StoredContent], api: str, in_use: Collection[str]) -> StoredContent | None:
    """Return the least recently used content of an API that is not in use, None if there is none."""
    candidates = [item for item in stored if api in item.apis and item.digest not in in_use]
    return min(candidates, key=lambda item: (item.used_at, item.digest), default=None)


def unneeded(stored: Iterable[StoredContent], retained: Iterable[Collection[str]], in_use: Collection[str]) -> set[str]:
    """Return the contents that are neither retained by a catalogue nor in use."""
    needed = set(in_use).union(*retained)
    return {item.digest for item in stored if item.digest not in needed}


class ContentStore:
    """The contents of one home; for one event loop. A `client` is any hashable object that identifies a client."""

    def __init__(self, folder: Path, logger: Logger) -> None:
        self._folder = folder / "content"
        self._index = folder / "index"
        self._logger = logger
        self._stored: dict[str, StoredContent] = {}
        self._downloads: dict[str, asyncio.Task[None]] = {}
        self._incoming: Counter[tuple[str, str]] = Counter()  #: (API, digest) of fetches in progress, which have room
        self._outgoing: Counter[str] = Counter()  #: by API: contents being removed, which still count
        self._leases: dict[object, dict[str, str]] = {}  #: by client: digest to API
        self._using: dict[object, tuple[str, frozenset[str]]] = {}  #: by client: API, digests
        self._retained: dict[tuple[str, object], frozenset[str]] = {}
        self._unneeded_since: dict[str, float] = {}
        self._freed = asyncio.Event()
        self._parts = itertools.count(1)
        #: Monotonic time before which nothing is removed: clients have yet to reconnect and report what they use.
        self.no_removal_before = 0.0

    def startup(self) -> None:
        """Read the index and delete what an earlier process left incomplete."""
        for folder in (self._folder, self._index):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in self._folder.glob(f"{_PART}*"):
            shutil.rmtree(part, ignore_errors=True)
        for path in filter(Path.is_dir, self._folder.iterdir()):
            stored = self._read_index(path.name)
            if stored is None or _size_bytes(path) < stored.size_bytes:
                shutil.rmtree(path, ignore_errors=True)  # the machine crashed before all of it was on disk
            else:
                self._stored[path.name] = stored
        for file in self._index.iterdir():
            if file.stem not in self._stored or file.suffix != ".json":
                file.unlink(missing_ok=True)

    async def shutdown(self) -> None:
        """Cancel all downloads and delete their files."""
        for download in self._downloads.values():
            download.cancel()
        await asyncio.gather(*self._downloads.values(), return_exceptions=True)

    def find(self, digest: str) -> Path | None:
        """Return the folder of a complete content."""
        if digest in self._stored:
            path = self._folder / digest
            if path.is_dir():
                return path
            del self._stored[digest]  # deleted by someone else
        return None

    async def fetch(self, request: ContentRequest) -> Path:
        """Return a content's folder; download it if necessary, once for all concurrent requests.

        Only a lease, acquired before, keeps it on disk afterwards. Raises: StorageError.
        """
        key = (request.api, request.digest)
        await self._make_room(request)
        self._incoming[key] += 1
        try:
            while (path := self.find(request.digest)) is None:
                download = self._downloads.get(request.digest)
                if download is None:
                    download = asyncio.create_task(self._download(request), name=f"download {request.digest}")
                    self._downloads[request.digest] = download
                    download.add_done_callback(lambda done: self._download_done(request.digest, done))
                await asyncio.shield(download)
            self._touch(request)
            return path
        finally:
            self._incoming[key] -= 1
            self._incoming += Counter()  # drops zero counts
            self._freed.set()

    def _download_done(self, digest: str, download: asyncio.Task[None]) -> None:
        del self._downloads[digest]
        if not download.cancelled():
            download.exception()  # marks it as retrieved: all requests may have been cancelled

    # Use and retention.

    def lease(self, client: object, api: str, digest: str) -> bool:
        """Keep a content for a client until it is released; return False if the client already has a lease."""
        leases = self._leases.setdefault(client, {})
        is_new = digest not in leases
        leases[digest] = api
        return is_new

    def release(self, client: object, digest: str) -> None:
        """End a lease, if there is one."""
        self._leases.get(client, {}).pop(digest, None)
        self._freed.set()

    def set_used(self, client: object, api: str, digests: Collection[str]) -> None:
        """Keep these contents for a client of an API; replaces the client's previous set."""
        self._using[client] = (api, frozenset(digests))
        self._freed.set()

    def remove_client(self, client: object) -> None:
        """End all leases and uses of a client."""
        self._leases.pop(client, None)
        self._using.pop(client, None)
        self._freed.set()

    def retain(self, owner: tuple[str, object], digests: Collection[str] | None) -> None:
        """Keep the contents of an API's catalogues; replaces the owner's previous set. None removes the owner."""
        if digests is None:
            self._retained.pop(owner, None)
        else:
            self._retained[owner] = frozenset(digests)

    def drop_missing(self) -> bool:
        """Drop contents that someone else deleted; return True if there were any."""
        missing = [digest for digest in self._stored if not (self._folder / digest).is_dir()]
        for digest in missing:
            del self._stored[digest]
        return bool(missing)

    async def collect_garbage(self, grace_s: float) -> None:
        """Remove contents that have been unneeded for `grace_s`."""
        now = time.monotonic()
        garbage = unneeded(self._stored.values(), self._retained.values(), self._in_use())
        self._unneeded_since = {digest: self._unneeded_since.get(digest, now) for digest in garbage}
        if now < self.no_removal_before:
            return
        for digest, since in sorted(self._unneeded_since.items()):
            # During the removals before, this one may have been removed, or become needed again.
            if now - since >= grace_s and digest in self._stored and not self._is_needed(digest):
                await self._remove(digest)

    def _is_needed(self, digest: str) -> bool:
        return digest in self._in_use() or any(digest in retained for retained in self._retained.values())

    def _in_use(self) -> set[str]:
        return {digest for _, digest in self._uses()}

    def _uses(self) -> Iterator[tuple[str, str]]:
        """Yield each API with a content that it uses now."""
        yield from self._incoming
        for leases in self._leases.values():
            yield from ((api, digest) for digest, api in leases.items())
        for api, digests in self._using.values():
            yield from ((api, digest) for digest in digests)

    # The limit of an API.

    async def _make_room(self, request: ContentRequest) -> None:
        """Wait until the API's limit allows the content; evict others. Raises: StorageError.

        A content that other APIs need stays on disk, but no longer counts for this API.
        """
        if request.limit is None:
            return
        deadline = time.monotonic() + ROOM_TIMEOUT_S
        while (count := self._count(request)) >= request.limit:
            now = time.monotonic()
            in_use = {digest for api, digest in self._uses() if api == request.api}
            may_remove = now >= self.no_removal_before
            victim = choose_victim(self._stored.values(), request.api, in_use) if may_remove else None
            if victim is not None and count - self._outgoing[request.api] >= request.limit:
                await self._evict(victim, request.api)
                continue
            if now >= deadline:
                raise StorageError(
                    f"all {request.limit} versions that disk_cache_size allows on disk are being loaded; set it to the "
                    "number of processes on this machine, or more"
                )
            self._freed.clear()
            until = deadline if may_remove else self.no_removal_before
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), max(until - now, 0.01))

    def _count(self, request: ContentRequest) -> int:
        """Return the number of the API's contents, with incoming and outgoing ones; -1 if this one is among them."""
        present = {digest for digest, item in self._stored.items() if request.api in item.apis}
        present |= {digest for api, digest in self._incoming if api == request.api}
        return -1 if request.digest in present else len(present) + self._outgoing[request.api]

    async def _evict(self, victim: StoredContent, api: str) -> None:
        """Remove a content from an API; it stays on disk if other APIs need it."""
        is_shared = len(victim.apis) > 1 or victim.digest in self._in_use()
        if is_shared or any(victim.digest in digests for (name, _), digests in self._retained.items() if name != api):
            self._replace(replace(victim, apis=victim.apis - {api}))
        else:
            await self._remove(victim.digest)

    # The disk.

    async def _download(self, request: ContentRequest) -> None:
        if not self._has_space(request.size_bytes):
            await self.collect_garbage(0)
            if not self._has_space(request.size_bytes):
                raise StorageError(self._disk_full(request.size_bytes))
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # someone may have deleted it
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=self._folder))
        try:
            started_at = time.monotonic()
            await request.fill(part / request.digest)
            size_bytes = await asyncio.to_thread(_size_bytes, part / request.digest)
            stored = StoredContent(request.digest, frozenset({request.api}), time.time(), size_bytes)
            self._write_index(stored)
            (part / request.digest).rename(self._folder / request.digest)
            part.rmdir()
            self._stored[request.digest] = stored
        except BaseException as error:
            if is_disk_full(error):
                raise StorageError(self._disk_full(request.size_bytes)) from error
            if isinstance(error, OSError):
                raise StorageError(f"{part} can't be written: {error}") from error
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        seconds = round(time.monotonic() - started_at, 3)
        self._logger.info(
            "model downloaded", api=request.api, digest=request.digest, size_bytes=request.size_bytes, seconds=seconds
        )

    def _has_space(self, size_bytes: int) -> bool:
        try:
            return shutil.disk_usage(self._folder).free >= size_bytes + _SPARE_BYTES
        except OSError:
            return True  # the download will report the error

    def _disk_full(self, size_bytes: int) -> str:
        try:
            free = f"{format_size(shutil.disk_usage(self._folder).free)} are free"
        except OSError as error:
            free = str(error)
        needed = format_size(size_bytes)
        return f"the disk is full: {needed} are needed in {self._folder}, {free}; free some space there"

    async def _remove(self, digest: str) -> None:
        stored = self._stored.pop(digest)
        self._unneeded_since.pop(digest, None)
        part = self._folder / f"{_PART}gone-{next(self._parts)}"
        for api in stored.apis:
            self._outgoing[api] += 1
        try:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / digest).rename(part)
            (self._index / f"{digest}.json").unlink(missing_ok=True)
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        finally:
            self._outgoing -= Counter(stored.apis)
            self._freed.set()
        self._logger.info("model removed from disk", digest=digest)

    # The index.

    def _touch(self, request: ContentRequest) -> None:
        stored = self._stored[request.digest]
        if request.api not in stored.apis:
            stored = replace(stored, apis=stored.apis | {request.api})
            self._replace(stored)
        now = time.time_ns()
        self._stored[request.digest] = replace(stored, used_at=now / 1e9)
        with contextlib.suppress(OSError):
            os.utime(self._index / f"{request.digest}.json", ns=(now, now))

    def _replace(self, stored: StoredContent) -> None:
        self._stored[stored.digest] = stored
        with contextlib.suppress(OSError):
            self._write_index(stored)
        self._freed.set()

    def _read_index(self, digest: str) -> StoredContent | None:
        file = self._index / f"{digest}.json"
        try:
            data = orjson.loads(file.read_bytes())
            apis = frozenset(map(str, data["apis"]))
            return StoredContent(digest, apis, file.stat().st_mtime, int(data["size_bytes"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_index(self, stored: StoredContent) -> None:
        self._index.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._index / f"{stored.digest}.part"
        part.write_bytes(orjson.dumps({"apis": sorted(stored.apis), "size_bytes": stored.size_bytes}))
        part.rename(self._index / f"{stored.digest}.json")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
