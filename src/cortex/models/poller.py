"""Lists one prefix again and again for all who watch it: one pass each time, however many they are.

Owns when that happens; what a listing means is for those who are told. Where another lists for several machines, it is
asked first.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from cortex.errors import StorageError
from cortex.models.listing import Listing, Prefix
from cortex.telemetry import Logger

List = Callable[[Prefix], Awaitable[Listing]]


@dataclass(frozen=True)
class Asked:
    """A listing that another has made."""

    listing: Listing
    begun_at: float  #: about when; monotonic, of this machine, never too early
    state: str  #: the same if the models are; a word of the one who was asked


class Ask(Protocol):
    """Has another list."""

    async def __call__(
        self, prefix: Prefix, max_age_s: float, newer_than_s: float, before: Asked | None
    ) -> Asked | None:
        """Return a listing that began less than `newer_than_s` ago; a new one if none is younger than `max_age_s`.

        None: nobody answers. `before` is what was returned last. Raises: StorageError if it can't be listed.
        """
        ...


#: A listing that takes longer is slow: it must not be more than a tenth of what the store does for us.
SLOW_LISTING_S = 1.0
_SLOW_SHARE = 0.1
#: While a store can't be listed, it is asked less and less often, down to this.
MAX_RETRY_S = 10.0
_FIRST_RETRY_S = 1.0
#: What is listed once only has to be as new as this, where another lists it.
_FRESH_S = 1.0


class Watcher(Protocol):
    """Somebody who wants listings."""

    @property
    def interval_s(self) -> float:
        """Say how often; infinite: not any more, or only when asked for by `Lister.list_soon`."""
        ...

    def on_listing(self, listing: Listing) -> None:
        """Take a complete listing, newer than the one before."""
        ...

    def on_error(self, prefix: Prefix, message: str) -> None:
        """Learn that the prefix can't be listed just now; the next listing ends that."""
        ...


class Lister:
    """One prefix. Begins with its first watcher; `stop` when the last has gone."""

    def __init__(
        self, prefix: Prefix, list_prefix: List, turns: asyncio.Semaphore, logger: Logger, ask: Ask | None = None
    ) -> None:
        self.watchers: set[Watcher] = set()
        self._prefix = prefix
        self._list = list_prefix
        self._turns = turns
        self._logger = logger
        self._ask = ask
        self._asked: Asked | None = None
        self._newest_at = -math.inf  #: when the newest listing was begun; monotonic
        self._recent: list[Listing] = []
        self._error: str | None = None
        self._due_at = 0.0  #: not before, whoever asks; monotonic
        self._begun_at = 0.0
        self._soon_at = math.inf
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, watcher: Watcher) -> None:
        """Tell one more; it gets at once what was seen lately."""
        self.watchers.add(watcher)
        for listing in self._recent:
            watcher.on_listing(listing)
        if self._error is not None:
            watcher.on_error(self._prefix, self._error)
        if self._task is None:
            self._soon_at = 0.0
            self._task = asyncio.create_task(self._run(), name=f"list {self._prefix.url}")
        self._wake.set()

    def list_soon(self, delay_s: float) -> None:
        """List after `delay_s` at the latest, unless the store is slow or can't be listed."""
        self._soon_at = min(self._soon_at, time.monotonic() + delay_s)
        self._wake.set()

    def stop(self) -> None:
        """List no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._until_due()
            self._begun_at = time.monotonic()
            self._soon_at = math.inf
            error, store_s = await self._list_once()
            if error is not None:
                # However long it took to fail: a store that comes back is to be noticed soon.
                pause_s = min(_FIRST_RETRY_S * 2**failures, MAX_RETRY_S) * random.uniform(0.9, 1.1)
                failures = min(failures + 1, 10)
                self._soon_at = 0.0
            else:
                pause_s = store_s / _SLOW_SHARE - store_s if store_s > SLOW_LISTING_S else 0.0
                failures = 0
            self._due_at = time.monotonic() + pause_s

    async def _until_due(self) -> None:
        while True:
            due_at = max(self._due_at, min(self._begun_at + self._interval_s(), self._soon_at))
            delay_s = due_at - time.monotonic()
            if delay_s <= 0:
                return
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), None if math.isinf(delay_s) else delay_s)
            except TimeoutError:
                return

    def _interval_s(self) -> float:
        return min((watcher.interval_s for watcher in self.watchers), default=math.inf)

    async def _list_once(self) -> tuple[str | None, float]:
        """Return why it failed, if it did, and for how many seconds the store was busy with us."""
        store_s = 0.0
        try:
            listing = await self._listing_of_another()
            if listing is None:
                async with self._turns:
                    self._newest_at = time.monotonic()
                    listing = await self._list(self._prefix)
                    store_s = time.monotonic() - self._newest_at
        except StorageError as error:
            return self._fail(str(error)), store_s
        except Exception as error:  # a listing has everything that can be in a store: no key may end the others'
            self._logger.error("listing failed", error, url=self._prefix.url)
            return self._fail(f"{self._prefix.url} can't be listed: {type(error).__name__}: {error}"), store_s
        if self._error is not None:
            self._logger.info("models can be listed again", url=self._prefix.url)
            self._error = None
        self._recent = [*self._recent[-1:], listing]
        for watcher in list(self.watchers):
            watcher.on_listing(listing)
        return None, store_s

    async def _listing_of_another(self) -> Listing | None:
        if self._ask is None:
            return None
        interval_s = self._interval_s()
        max_age_s = _FRESH_S if math.isinf(interval_s) else interval_s
        asked = await self._ask(self._prefix, max_age_s, time.monotonic() - self._newest_at, self._asked)
        if asked is None:
            self._asked = None
            return None
        self._asked = asked
        # The next one is due when the interval of this one is over, so that all who ask do so at about the same time.
        self._begun_at = self._newest_at = asked.begun_at
        return asked.listing

    def _fail(self, message: str) -> str:
        if message != self._error:
            self._logger.warning("models can't be listed", url=self._prefix.url, reason=message)
        self._error = message
        for watcher in list(self.watchers):
            watcher.on_error(self._prefix, message)
        return message
