"""Keeps model contents on this machine's disk: each is put there once, is whole or not there, and leaves when unneeded.

`content/<digest>/` is a content, `content/.part-*` one that comes or goes, `index/<digest>.json` what is known of one.
Knows nothing of sources or sockets; what goes is decided by `retention`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from cortex.errors import StorageError
from cortex.models.eviction import Held, choose_victim, unneeded
from cortex.telemetry import Logger

_PART = ".part-"
#: How long a download waits for the disk limit of its API to allow it; less than a request may take by default, so that
#: it is answered with the reason.
ROOM_TIMEOUT_S = 45.0
#: Left free on the disk for everything else.
_SPARE_BYTES = 16 * 1024 * 1024

#: Makes the folder and puts all files into it.
Fill = Callable[[Path], Awaitable[None]]


@dataclass(frozen=True)
class Order:
    """A content that is wanted on disk."""

    digest: str
    api: str
    size_bytes: int
    fill: Fill
    limit: int | None = None  #: how many contents of the API may be on disk


class Contents:
    """The contents of one home; for one event loop. `client` is whatever tells clients apart."""

    def __init__(self, folder: Path, logger: Logger) -> None:
        self._folder = folder / "content"
        self._index = folder / "index"
        self._logger = logger
        self._held: dict[str, Held] = {}
        self._flights: dict[str, asyncio.Task[None]] = {}
        self._coming: Counter[tuple[str, str]] = Counter()  #: (API, digest) with a place kept for them
        self._leaving: Counter[str] = Counter()  #: by API, still counted
        self._leases: dict[object, dict[str, str]] = {}  #: by client: digest to API
        self._using: dict[object, tuple[str, frozenset[str]]] = {}  #: by client: API, digests
        self._wanted: dict[tuple[str, object], frozenset[str]] = {}
        self._unneeded_since: dict[str, float] = {}
        self._freed = asyncio.Event()
        self._parts = itertools.count(1)
        #: Nothing is removed before: whoever holds contents has not said so yet. Monotonic time, seconds.
        self.settled_at = 0.0

    def startup(self) -> None:
        """Find what is there and clear away what an earlier process left half done."""
        for folder in (self._folder, self._index):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in self._folder.glob(f"{_PART}*"):
            shutil.rmtree(part, ignore_errors=True)
        for path in filter(Path.is_dir, self._folder.iterdir()):
            held = self._read_index(path.name)
            if held is None or _size_bytes(path) < held.size_bytes:
                shutil.rmtree(path, ignore_errors=True)  # the machine went down before all of it was on disk
            else:
                self._held[path.name] = held
        for file in self._index.iterdir():
            if file.stem not in self._held or file.suffix != ".json":
                file.unlink(missing_ok=True)

    async def shutdown(self) -> None:
        """Give up all downloads; what they have so far is removed."""
        for flight in self._flights.values():
            flight.cancel()
        await asyncio.gather(*self._flights.values(), return_exceptions=True)

    def find(self, digest: str) -> Path | None:
        """Return where a content is, if it is all there."""
        if digest in self._held:
            path = self._folder / digest
            if path.is_dir():
                return path
            del self._held[digest]  # somebody cleaned up
        return None

    async def obtain(self, order: Order) -> Path:
        """Return a content's folder once it is there; it is downloaded once, however many ask.

        Hold a lease of it first, or it may leave again. Raises: StorageError.
        """
        place = (order.api, order.digest)
        await self._make_room(order)
        self._coming[place] += 1
        try:
            while (path := self.find(order.digest)) is None:
                flight = self._flights.get(order.digest)
                if flight is None:
                    flight = asyncio.create_task(self._download(order), name=f"download {order.digest}")
                    self._flights[order.digest] = flight
                    flight.add_done_callback(lambda done: self._landed(order.digest, done))
                await asyncio.shield(flight)
            self._touch(order)
            return path
        finally:
            self._coming[place] -= 1
            self._coming += Counter()  # forget what is zero
            self._freed.set()

    def _landed(self, digest: str, flight: asyncio.Task[None]) -> None:
        del self._flights[digest]
        if not flight.cancelled():
            flight.exception()  # those who asked may all have gone

    # Who needs what.

    def lease(self, client: object, api: str, digest: str) -> bool:
        """Keep a content for a client of an API until it is released or the client goes; False: it had that already."""
        leases = self._leases.setdefault(client, {})
        is_new = digest not in leases
        leases[digest] = api
        return is_new

    def release(self, client: object, digest: str) -> None:
        """End a lease; one that was not taken is no harm."""
        self._leases.get(client, {}).pop(digest, None)
        self._freed.set()

    def use(self, client: object, api: str, digests: Collection[str]) -> None:
        """Keep these contents for a client of an API; replaces those of before."""
        self._using[client] = (api, frozenset(digests))
        self._freed.set()

    def forget(self, client: object) -> None:
        """End all that a client leases and uses."""
        self._leases.pop(client, None)
        self._using.pop(client, None)
        self._freed.set()

    def want(self, owner: tuple[str, object], digests: Collection[str] | None) -> None:
        """Say which contents the catalogues of an API, and of what in it, name; None: there are none any more."""
        if digests is None:
            self._wanted.pop(owner, None)
        else:
            self._wanted[owner] = frozenset(digests)

    def forget_lost(self) -> bool:
        """Notice contents that somebody else removed; tell whether there were any."""
        lost = [digest for digest in self._held if not (self._folder / digest).is_dir()]
        for digest in lost:
            del self._held[digest]
        return bool(lost)

    async def collect(self, grace_s: float) -> None:
        """Remove what nobody has needed for `grace_s`."""
        now = time.monotonic()
        gone = unneeded(self._held.values(), self._wanted.values(), self._kept())
        self._unneeded_since = {digest: self._unneeded_since.get(digest, now) for digest in gone}
        if now < self.settled_at:
            return
        for digest, since in sorted(self._unneeded_since.items()):
            # Each removal takes a while, in which this one may have gone already, or be wanted again.
            if now - since >= grace_s and digest in self._held and not self._is_needed(digest):
                await self._remove(digest)

    def _is_needed(self, digest: str) -> bool:
        return digest in self._kept() or any(digest in wanted for wanted in self._wanted.values())

    def _kept(self) -> set[str]:
        return {digest for _, digest in self._keepers()}

    def _keepers(self) -> Iterator[tuple[str, str]]:
        """Yield each API with a content that it can't do without now."""
        yield from self._coming
        for leases in self._leases.values():
            yield from ((api, digest) for digest, api in leases.items())
        for api, digests in self._using.values():
            yield from ((api, digest) for digest in digests)

    # The limit of an API.

    async def _make_room(self, order: Order) -> None:
        """Return once the content has a place among those that its API may have. Raises: StorageError.

        What other APIs keep counts no more for this one, but stays.
        """
        if order.limit is None:
            return
        deadline = time.monotonic() + ROOM_TIMEOUT_S
        while (count := self._count(order)) >= order.limit:
            now = time.monotonic()
            kept = {digest for api, digest in self._keepers() if api == order.api}
            victim = choose_victim(self._held.values(), order.api, kept) if now >= self.settled_at else None
            if victim is not None and count - self._leaving[order.api] >= order.limit:
                await self._evict(victim, order.api)
                continue
            if now >= deadline:
                raise StorageError(
                    f"all {order.limit} versions that disk_cache_size allows on disk are being loaded; set it to the "
                    "number of processes on this machine, or more"
                )
            self._freed.clear()
            until = self.settled_at if now < self.settled_at else deadline
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), max(until - now, 0.01))

    def _count(self, order: Order) -> int:
        """Count the contents of the API on disk, those that come and go included; -1 if this one is among them."""
        present = {digest for digest, item in self._held.items() if order.api in item.apis}
        present |= {digest for api, digest in self._coming if api == order.api}
        return -1 if order.digest in present else len(present) + self._leaving[order.api]

    async def _evict(self, victim: Held, api: str) -> None:
        """Take a content from an API; it stays on disk if others have it."""
        is_kept = len(victim.apis) > 1 or victim.digest in self._kept()
        if is_kept or any(victim.digest in wanted for (name, _), wanted in self._wanted.items() if name != api):
            self._keep(replace(victim, apis=victim.apis - {api}))
        else:
            await self._remove(victim.digest)

    # The disk.

    async def _download(self, order: Order) -> None:
        if not self._has_space(order.size_bytes):
            await self.collect(0)
            if not self._has_space(order.size_bytes):
                raise StorageError(self._full(order.size_bytes))
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have cleaned up
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=self._folder))
        try:
            started_at = time.monotonic()
            await order.fill(part / order.digest)
            size_bytes = await asyncio.to_thread(_size_bytes, part / order.digest)
            held = Held(order.digest, frozenset({order.api}), time.time(), size_bytes)
            self._write_index(held)
            (part / order.digest).rename(self._folder / order.digest)
            part.rmdir()
            self._held[order.digest] = held
        except BaseException as error:
            if _is_full(error):
                raise StorageError(self._full(order.size_bytes)) from error
            if isinstance(error, OSError):
                raise StorageError(f"{part} can't be written: {error}") from error
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        seconds = round(time.monotonic() - started_at, 3)
        self._logger.info(
            "model downloaded", api=order.api, digest=order.digest, size_bytes=order.size_bytes, seconds=seconds
        )

    def _has_space(self, size_bytes: int) -> bool:
        try:
            return shutil.disk_usage(self._folder).free >= size_bytes + _SPARE_BYTES
        except OSError:
            return True  # what is wrong will show

    def _full(self, size_bytes: int) -> str:
        try:
            free = f"{shutil.disk_usage(self._folder).free} bytes are free"
        except OSError as error:
            free = str(error)
        return f"the disk is full: {size_bytes} bytes are needed in {self._folder}, {free}; make room there"

    async def _remove(self, digest: str) -> None:
        held = self._held.pop(digest)
        self._unneeded_since.pop(digest, None)
        part = self._folder / f"{_PART}gone-{next(self._parts)}"
        for api in held.apis:
            self._leaving[api] += 1
        try:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / digest).rename(part)
            (self._index / f"{digest}.json").unlink(missing_ok=True)
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        finally:
            self._leaving -= Counter(held.apis)
            self._freed.set()
        self._logger.info("model removed from disk", digest=digest)

    # What is known of a content.

    def _touch(self, order: Order) -> None:
        held = self._held[order.digest]
        if order.api not in held.apis:
            held = replace(held, apis=held.apis | {order.api})
            self._keep(held)
        now = time.time_ns()
        self._held[order.digest] = replace(held, used_at=now / 1e9)
        with contextlib.suppress(OSError):
            os.utime(self._index / f"{order.digest}.json", ns=(now, now))

    def _keep(self, held: Held) -> None:
        self._held[held.digest] = held
        with contextlib.suppress(OSError):
            self._write_index(held)
        self._freed.set()

    def _read_index(self, digest: str) -> Held | None:
        file = self._index / f"{digest}.json"
        try:
            data = orjson.loads(file.read_bytes())
            return Held(digest, frozenset(map(str, data["apis"])), file.stat().st_mtime, int(data["size_bytes"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_index(self, held: Held) -> None:
        self._index.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._index / f"{held.digest}.part"
        part.write_bytes(orjson.dumps({"apis": sorted(held.apis), "size_bytes": held.size_bytes}))
        part.rename(self._index / f"{held.digest}.json")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _is_full(error: BaseException | None) -> bool:
    """Tell whether something failed because no more can be written."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False
