"""Poll one prefix for all its watchers: one listing per interval, however many watchers.

The poller decides when to list: at the shortest interval of its watchers, less often if the store is slow, and with
exponential backoff while it can't be listed. Intervals vary a little, so that the nodes of a cluster, which list the
same stores, spread their requests over time.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from cortex.errors import StorageError
from cortex.models.agent.listing import Listing, Prefix
from cortex.processes.backoff import Backoff
from cortex.telemetry import Logger

ListPrefix = Callable[[Prefix], Awaitable[Listing]]

#: A listing that takes longer is slow: polling may then keep the store busy for a tenth of the time only.
SLOW_LISTING_S = 1.0
_SLOW_SHARE = 0.1
#: A listing that takes longer, and twice as long as the one before, is reported while it continues. Its requests fail
#: later (`storage.locations`), because some stores are slow.
SILENCE_S = 10.0
#: Maximum delay before a failed listing is retried.
MAX_RETRY_S = 10.0
_BACKOFF = Backoff(1.0, MAX_RETRY_S, jitter=0.1)
#: Each interval is shortened by a random share of at most this size.
_JITTER = 0.1


class ListingWatcher(Protocol):
    """A receiver of listings."""

    @property
    def interval_s(self) -> float:
        """Return the polling interval; infinite for listings only after `Poller.list_soon`."""
        ...

    def on_listing(self, listing: Listing) -> None:
        """Handle a complete listing, newer than the one before."""
        ...

    def on_error(self, prefix: Prefix, message: str) -> None:
        """Handle a failed listing; the error lasts until the next listing."""
        ...


class Poller:
    """Polls one prefix from the first `add` to `stop`, which the owner calls after the last watcher was removed."""

    def __init__(
        self,
        prefix: Prefix,
        list_prefix: ListPrefix,
        concurrency: asyncio.Semaphore,
        logger: Logger,
    ) -> None:
        self.watchers: set[ListingWatcher] = set()
        self._prefix = prefix
        self._list_prefix = list_prefix
        self._concurrency = concurrency
        self._logger = logger
        self._recent: list[Listing] = []  #: the last two, which confirm each other
        self._error: str | None = None
        self._silence_s = SILENCE_S
        self._earliest_at = 0.0  #: no listing begins before; monotonic
        self._begun_at = 0.0
        self._interval_share = 1.0  #: drawn for each listing
        self._soon_at = math.inf
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, watcher: ListingWatcher) -> None:
        """Add a watcher; it receives the recent listings at once."""
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
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._wait_until_due()
            self._begun_at = time.monotonic()
            self._interval_share = random.uniform(1 - _JITTER, 1)
            self._soon_at = math.inf
            error, store_s = await self._list_once()
            if error is not None:
                # However long the failure took: a store that is back should be noticed soon.
                failures += 1
                pause_s = _BACKOFF.delay_s(failures)
                self._soon_at = 0.0
            else:
                pause_s = store_s / _SLOW_SHARE - store_s if store_s > SLOW_LISTING_S else 0.0
                failures = 0
            self._earliest_at = time.monotonic() + pause_s

    async def _wait_until_due(self) -> None:
        while True:
            due_at = max(self._earliest_at, min(self._begun_at + self._interval_s(), self._soon_at))
            delay_s = due_at - time.monotonic()
            if delay_s <= 0:
                return
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), None if math.isinf(delay_s) else delay_s)
            except TimeoutError:
                return

    def _interval_s(self) -> float:
        return min((watcher.interval_s for watcher in self.watchers), default=math.inf) * self._interval_share

    async def _list_once(self) -> tuple[str | None, float]:
        """Notify the watchers; return the error, if any, and the seconds for which the store was busy."""
        store_s = 0.0
        try:
            async with self._concurrency:
                begun_at = time.monotonic()
                silence = asyncio.get_running_loop().call_later(self._silence_s, self._report_silence)
                try:
                    listing = await self._list_prefix(self._prefix)
                finally:
                    silence.cancel()
                store_s = time.monotonic() - begun_at
                self._silence_s = max(SILENCE_S, 2 * store_s)
        except StorageError as error:
            return self._fail(str(error)), store_s
        except Exception as error:  # stores hold arbitrary keys: none of them may end the polling of other prefixes
            self._logger.error("listing failed", error, url=self._prefix.url)
            return self._fail(f"{self._prefix.url} can't be listed: {type(error).__name__}: {error}"), store_s
        if self._error is not None:
            self._logger.info("models can be listed again", url=self._prefix.url)
            self._error = None
            store_s = 0.0  # however long it was silent: what is new should be noticed soon
        self._recent = [*self._recent[-1:], listing]
        for watcher in list(self.watchers):
            watcher.on_listing(listing)
        return None, store_s

    def _report_silence(self) -> None:
        if self._error is None:
            self._fail(
                f"{self._prefix.url} has not been listed within {self._silence_s:.0f} s: its store does not answer, "
                "or is slow; the listing continues"
            )

    def _fail(self, message: str) -> str:
        if message != self._error:
            self._logger.warning("models can't be listed", url=self._prefix.url, reason=message)
        self._error = message
        for watcher in list(self.watchers):
            watcher.on_error(self._prefix, message)
        return message
