"""One source of one API: from listings to the catalogues that its watchers are told.

Settles listings, has the content downloaded that a catalogue needs, and only then announces it. What that is, is
decided by `settling` and `announcing`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from cortex.errors import CortexError, StorageError
from cortex.models.announcements import announced, digests_to_keep, find_content, needed
from cortex.models.content_store import Contents, Fill, Order
from cortex.models.debounce import Settling, quick_interval_s, settle
from cortex.models.last_catalogue import Remembered
from cortex.models.listing import Listing, Prefix, prefixes
from cortex.models.poller import Lister
from cortex.models.protocol import CatalogueUpdate
from cortex.models.spec import Catalogue, ModelProblem, ModelSource, Version
from cortex.telemetry import Logger

Tell = Callable[[CatalogueUpdate], None]
#: Downloads the version at a URL with a digest to a new folder.
Download = Callable[[str, str, Path], Awaitable[None]]

#: A catalogue file stays for so long after the next was announced.
FILE_GRACE_S = 60.0
_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


@dataclass
class _Failure:
    """A download that did not succeed."""

    problem: ModelProblem
    times: int
    retry_at: float  #: monotonic


@dataclass
class _Progress:
    """What is being, and what could not be, downloaded; by digest."""

    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    failures: dict[str, _Failure] = field(default_factory=dict)
    since: float | None = None  #: when downloads that keep an announcement waiting began; monotonic


class Feed:
    """Watches its prefixes from `open` to `close`; on one event loop."""

    def __init__(
        self,
        api: str,
        source: ModelSource,
        contents: Contents,
        remembered: Remembered,
        download: Download,
        write_file: Callable[[bytes], Path],
        logger: Logger,
    ) -> None:
        self.watchers: dict[object, Tell] = {}
        self.source = source
        self.api = api
        self._contents = contents
        self._download = download
        self._write_file = write_file
        self._logger = logger
        self._listers: dict[Prefix, Lister] = {}
        self._state = Settling()
        self._errors: dict[Prefix, str] = {}
        self._progress = _Progress()
        self._remembered = remembered
        self._recalled = remembered.recall(api, source)  #: what an earlier agent told
        self._confirmed: Catalogue | None = None
        self._candidate: Catalogue | None = None
        self._files: dict[str, tuple[Catalogue, Path]] = {}
        self._news: CatalogueUpdate | None = None
        self._settled = asyncio.Event()
        self._update_at: asyncio.TimerHandle | None = None

    @property
    def interval_s(self) -> float:
        """Say how often listings are wanted."""
        return self.source.poll_interval_s if self.source.is_live else math.inf

    def open(self, lister_of: Callable[[Prefix], Lister]) -> None:
        """Begin."""
        self._listers = {prefix: lister_of(prefix) for prefix in prefixes(self.source)}
        for lister in self._listers.values():
            lister.add(self)

    def close(self) -> None:
        """End: nothing is told or downloaded for this feed any more."""
        for lister in self._listers.values():
            lister.watchers.discard(self)
        for task in self._progress.running.values():
            task.cancel()
        if self._update_at is not None:
            self._update_at.cancel()
        self._contents.want((self.api, self), None)
        for _, path in self._files.values():
            _unlink_later(path)

    def watch(self, client: object, tell: Tell) -> None:
        """Tell a client what is known, and each change from now on."""
        self.watchers[client] = tell
        if self._news is not None:
            tell(self._news)

    def update_soon(self, delay_s: float = 0.0) -> None:
        """Look at what is settled and on disk once more; however many want it, once, at the earliest time named."""
        loop = asyncio.get_running_loop()
        when = loop.time() + delay_s
        if self._update_at is not None and not self._update_at.cancelled():
            if self._update_at.when() <= when:
                return
            self._update_at.cancel()
        self._update_at = loop.call_at(when, self._update)

    async def obtain(self, model: str, number: str, digest: str) -> Path:
        """Return the folder with a version's content. Raises: StorageError."""
        size_bytes, fill = 0, cast(Fill, self._no_fill)
        if self._contents.find(digest) is None:
            version = await self._locate(model, number, digest)
            size_bytes, fill = version.size_bytes, self._fill(version)
        limit = self.source.disk_cache_size if self.source.is_cached else None
        return await self._contents.obtain(Order(digest, self.api, size_bytes, fill, limit))

    # Listings.

    def on_listing(self, listing: Listing) -> None:
        """Take a listing in."""
        before, self._state = self._state, settle(self._state, self.source, {listing.prefix: listing})
        quick_s = quick_interval_s(self._state, self.source)
        if quick_s is not None:
            self._listers[listing.prefix].list_soon(quick_s)
        was_error = self._errors.pop(listing.prefix, None) is not None
        if was_error or (before.confirmed, before.candidate) != (self._state.confirmed, self._state.candidate):
            self._settled.set()
            self.update_soon()

    def on_error(self, prefix: Prefix, message: str) -> None:
        """Note that a prefix can't be listed."""
        self._errors[prefix] = message
        self._settled.set()
        self.update_soon()

    # From what is settled to what is told.

    def _update(self) -> None:
        self._update_at = None
        state = self._state
        wanted = needed(self.source, state.confirmed, state.candidate)
        kept = digests_to_keep(self.source, state.confirmed, state.candidate, self._confirmed, self._candidate)
        self._contents.want((self.api, self), kept)
        progress = self._progress
        progress.failures = {digest: failure for digest, failure in progress.failures.items() if digest in wanted}
        paths = {digest: str(path) for digest in wanted if (path := self._contents.find(digest)) is not None}
        for digest, (_, version) in wanted.items():
            if digest not in paths:
                self._start(version)
        self._decide(paths)
        try:
            self._announce()
        except StorageError as error:
            self._logger.error("models can't be announced", api=self.api, reason=error)
            self.update_soon(_FIRST_RETRY_S)

    def _start(self, version: Version) -> None:
        digest = version.digest
        failure = self._progress.failures.get(digest)
        if digest in self._progress.running:
            return
        if failure is not None and failure.retry_at > time.monotonic():
            self.update_soon(failure.retry_at - time.monotonic())
            return
        task = asyncio.create_task(self._try(version), name=f"get {digest}")
        self._progress.running[digest] = task

    async def _try(self, version: Version) -> None:
        progress, digest = self._progress, version.digest
        try:
            await self._contents.obtain(Order(digest, self.api, version.size_bytes, self._fill(version)))
            progress.failures.pop(digest, None)
        except Exception as error:
            message = str(error) if isinstance(error, CortexError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, CortexError):
                self._logger.error("download failed", error, api=self.api, url=version.url)
            times = progress.failures[digest].times + 1 if digest in progress.failures else 1
            since = progress.failures[digest].problem.since if times > 1 else time.time()
            retry_at = time.monotonic() + min(_FIRST_RETRY_S * 2 ** min(times - 1, 10), _MAX_RETRY_S)
            problem = ModelProblem("", version.number, f"can't be downloaded: {message}", since)
            progress.failures[digest] = _Failure(problem, times, retry_at)
            self._logger.warning("model can't be downloaded", api=self.api, url=version.url, reason=message)
            if not self.source.is_live and self._confirmed is None:  # it may have changed: nobody else looks again
                for lister in self._listers.values():
                    lister.list_soon(_FIRST_RETRY_S)
        finally:
            progress.running.pop(digest, None)
        self.update_soon()

    def _decide(self, paths: Mapping[str, str]) -> None:
        """Take over what is settled, as far as it is on disk."""
        state, source, progress = self._state, self.source, self._progress
        if state.confirmed is None:
            self._fall_back()
            return
        if self._must_wait(state.confirmed):
            return
        failures = {digest: failure.problem for digest, failure in progress.failures.items()}
        self._confirmed = announced(source, state.confirmed, self._confirmed or self._recalled, paths, failures)
        self._recalled = None
        self._candidate = None
        if state.candidate is not None and not self._downloading(state.candidate):
            candidate = announced(source, state.candidate, self._confirmed, paths, failures)
            self._candidate = candidate if candidate.models != self._confirmed.models else None
        kept = digests_to_keep(source, state.confirmed, state.candidate, self._confirmed, self._candidate)
        self._contents.want((self.api, self), kept)

    def _fall_back(self) -> None:
        """While the source can't be listed, tell what was told before this agent's start, as far as it is on disk."""
        if self._recalled is None or self._confirmed is not None or not self._errors:
            return
        found = {version.digest: self._contents.find(version.digest) for _, version in self._recalled.versions()}
        paths = {digest: str(path) for digest, path in found.items() if path is not None}
        self._confirmed, self._recalled = announced(self.source, self._recalled, None, paths, {}), None
        self._contents.want((self.api, self), digests_to_keep(self.source, self._confirmed))

    def _must_wait(self, confirmed: Catalogue) -> bool:
        """Tell whether downloads should end before more is announced: at first all; later for an interval at most."""
        progress = self._progress
        if not self._downloading(confirmed):
            progress.since = None
            return False
        if self._confirmed is None:
            return True
        now = time.monotonic()
        progress.since = progress.since or now
        left_s = progress.since + self.source.poll_interval_s - now
        if left_s > 0:
            self.update_soon(left_s)
        return left_s > 0

    def _downloading(self, catalogue: Catalogue) -> bool:
        """Tell whether something that it needs is being downloaded for the first time; a retry may take for ever."""
        running = self._progress.running.keys() - self._progress.failures.keys()
        return not running.isdisjoint(needed(self.source, catalogue))

    def _announce(self) -> None:
        error = next(iter(self._errors.values()), None)
        confirmed, candidate = self._file("confirmed", self._confirmed), self._file("candidate", self._candidate)
        news = CatalogueUpdate(confirmed, candidate, error)
        if news == self._news or news == CatalogueUpdate(None, None, None):
            return
        if confirmed is not None and (self._news is None or confirmed != self._news.confirmed) and self._confirmed:
            count = sum(len(model.versions) for model in self._confirmed.models)
            self._logger.info("models confirmed", api=self.api, versions=count, problems=len(self._confirmed.problems))
            self._remembered.keep(self.api, self.source, self._confirmed)
        self._news = news
        for tell in list(self.watchers.values()):
            tell(news)

    def _file(self, kind: str, catalogue: Catalogue | None) -> str | None:
        """Return a file with this catalogue; the same one as long as it is the same."""
        old = self._files.get(kind)
        if catalogue is None:
            if old is not None:
                _unlink_later(self._files.pop(kind)[1])
            return None
        if old is None or old[0] != catalogue:
            self._files[kind] = (catalogue, self._write_file(catalogue.to_json()))
            if old is not None:
                _unlink_later(old[1])
        return str(self._files[kind][1])

    # Contents.

    async def _locate(self, model: str, number: str, digest: str) -> Version:
        while True:
            state = self._state
            known = (state.confirmed, state.candidate, self._confirmed, self._candidate)
            version = find_content(model, number, digest, *known)
            if version is not None:
                return version
            if state.confirmed is not None:
                raise StorageError("its files have been changed or removed meanwhile; what is there now is served soon")
            if self._errors:
                raise StorageError(next(iter(self._errors.values())))
            self._settled.clear()
            await self._settled.wait()

    def _fill(self, version: Version) -> Fill:
        return lambda folder: self._download(version.url, version.digest, folder)

    async def _no_fill(self, folder: Path) -> None:
        raise StorageError(f"{folder.name} was removed from the disk just now; try again")


def _unlink_later(path: Path) -> None:
    asyncio.get_running_loop().call_later(FILE_GRACE_S, path.unlink, True)
