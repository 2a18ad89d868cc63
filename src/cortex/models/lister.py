"""Lists one prefix again and again for all who watch it: one pass each time, however many they are.

Owns when that happens; what a listing means is for those who are told.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from cortex.errors import StorageError
from cortex.models.listed import Listing, Prefix
from cortex.telemetry import Logger

List = Callable[[Prefix], Awaitable[Listing]]

#: A listing that takes longer is slow: it must not be more than a tenth of what the store does for us.
SLOW_LISTING_S = 1.0
_SLOW_SHARE = 0.1
#: While a store can't be listed, it is asked less and less often, down to this.
MAX_RETRY_S = 10.0
_FIRST_RETRY_S = 1.0


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

    def __init__(self, prefix: Prefix, list_prefix: List, turns: asyncio.Semaphore, logger: Logger) -> None:
        self.watchers: set[Watcher] = set()
        self._prefix = prefix
        self._list = list_prefix
        self._turns = turns
        self._logger = logger
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
            async with self._turns:
                started_at = time.monotonic()
                error = await self._list_once()
                took_s = time.monotonic() - started_at
            if error is not None:
                # However long it took to fail: a store that comes back is to be noticed soon.
                pause_s = took_s + min(_FIRST_RETRY_S * 2**failures, MAX_RETRY_S) * random.uniform(0.9, 1.1)
                failures = min(failures + 1, 10)
                self._soon_at = 0.0
            else:
                pause_s = took_s / _SLOW_SHARE if took_s > SLOW_LISTING_S else 0.0
                failures = 0
            self._due_at = started_at + pause_s

    async def _until_due(self) -> None:
        while True:
            interval_s = min((watcher.interval_s for watcher in self.watchers), default=math.inf)
            due_at = max(self._due_at, min(self._begun_at + interval_s, self._soon_at))
            delay_s = due_at - time.monotonic()
            if delay_s <= 0:
                return
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), None if math.isinf(delay_s) else delay_s)
            except TimeoutError:
                return

    async def _list_once(self) -> str | None:
        """Return why it failed, if it did."""
        try:
            listing = await self._list(self._prefix)
        except StorageError as error:
            return self._fail(str(error))
        except Exception as error:  # a listing has everything that can be in a store: no key may end the others'
            self._logger.error("listing failed", error, url=self._prefix.url)
            return self._fail(f"{self._prefix.url} can't be listed: {type(error).__name__}: {error}")
        if self._error is not None:
            self._logger.info("models can be listed again", url=self._prefix.url)
            self._error = None
        self._recent = [*self._recent[-1:], listing]
        for watcher in list(self.watchers):
            watcher.on_listing(listing)
        return None

    def _fail(self, message: str) -> str:
        if message != self._error:
            self._logger.warning("models can't be listed", url=self._prefix.url, reason=message)
        self._error = message
        for watcher in list(self.watchers):
            watcher.on_error(self._prefix, message)
        return message
