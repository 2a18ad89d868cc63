from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from cortex.errors import StorageError
from cortex.models.agent.listing import Listing, Prefix
from cortex.models.agent.poller import Poller
from cortex.telemetry import Logger

PREFIX = Prefix("s3://b/m")


@dataclass(eq=False)
class Listener:
    interval_s: float
    listings: list[Listing] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def on_listing(self, listing: Listing) -> None:
        self.listings.append(listing)

    def on_error(self, prefix: Prefix, message: str) -> None:
        self.errors.append(message)


@dataclass
class Store:
    """A fake store that answers at once, or with an error."""

    listed_at: list[float] = field(default_factory=list)
    error: Exception | None = None
    takes_s: float = 0.0

    async def list(self, prefix: Prefix) -> Listing:
        self.listed_at.append(time.monotonic())
        await asyncio.sleep(self.takes_s)
        if self.error:
            raise self.error
        return Listing(prefix, time.time(), {}, 0)


@contextlib.asynccontextmanager
async def polling() -> AsyncIterator[tuple[Poller, Store]]:
    store = Store()
    poller = Poller(PREFIX, store.list, asyncio.Semaphore(4), Logger("test"))
    try:
        async with asyncio.timeout(30):
            yield poller, store
    finally:
        poller.stop()


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


async def test_all_watchers_share_the_listings_at_the_shortest_interval() -> None:
    async with polling() as (poller, store):
        slow, quick = Listener(60), Listener(0.1)
        poller.add(slow)
        await until(lambda: slow.listings)
        poller.add(quick)
        assert quick.listings == slow.listings
        await until(lambda: len(quick.listings) == 4)
        assert quick.listings == slow.listings
        gaps = [later - earlier for earlier, later in zip(store.listed_at[1:], store.listed_at[2:], strict=False)]
        assert min(gaps) > 0.085


async def test_intervals_vary_so_that_machines_list_a_store_at_different_times() -> None:
    async with polling() as (poller, store):
        poller.add(Listener(0.2))
        while True:  # a timer is never early: without variation, no gap is shorter
            await until(lambda count=len(store.listed_at): len(store.listed_at) > count)  # type: ignore[misc]
            if any(0.18 <= b - a < 0.199 for a, b in itertools.pairwise(store.listed_at)):
                break


async def test_list_soon_does_not_wait_for_the_interval() -> None:
    async with polling() as (poller, store):
        once = Listener(math.inf)
        poller.add(once)
        await until(lambda: once.listings)
        poller.list_soon(0.05)
        await until(lambda: len(once.listings) == 2)


@pytest.mark.heavy
async def test_a_store_that_is_down_is_polled_with_backoff_and_then_normally() -> None:
    async with polling() as (poller, store):
        store.error = StorageError("S3 can't be reached")
        listener = Listener(0.05)
        poller.add(listener)
        await until(lambda: len(listener.errors) == 3)
        # A second, then two, but for a tenth that is random. A busy machine only makes each longer.
        assert store.listed_at[1] - store.listed_at[0] > 0.89
        assert store.listed_at[2] - store.listed_at[1] > 1.79
        late = Listener(60)
        poller.add(late)
        assert late.errors == ["S3 can't be reached"]
        store.error = None
        await until(lambda: len(listener.listings) >= 3)


async def test_an_unexpected_exception_is_a_listing_error_and_polling_continues() -> None:
    async with polling() as (poller, store):
        store.error = RuntimeError("what is this")
        listener = Listener(0.05)
        poller.add(listener)
        await until(lambda: listener.errors)
        assert listener.errors == ["s3://b/m can't be listed: RuntimeError: what is this"]
        store.error = None
        await until(lambda: listener.listings)


async def test_a_slow_store_is_listed_for_a_tenth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    async with polling() as (poller, store):
        monkeypatch.setattr("cortex.models.agent.poller.SLOW_LISTING_S", 0.1)
        store.takes_s = 0.15
        listener = Listener(0.05)
        poller.add(listener)
        await until(lambda: listener.listings)
        store.takes_s = 0.0
        await until(lambda: len(listener.listings) == 2)
        assert store.listed_at[1] - store.listed_at[0] > 1.4


async def test_a_store_that_does_not_answer_is_reported_while_the_listing_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cortex.models.agent.poller.SILENCE_S", 0.05)
    async with polling() as (poller, store):
        store.takes_s = 0.5
        listener = Listener(0.01)
        poller.add(listener)
        await until(lambda: listener.errors)
        assert listener.errors[0].startswith("s3://b/m has not been listed within 0 s: its store does not answer")
        await until(lambda: listener.listings)
