"""Limit of the bytes that callers have stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cortex.errors import BusyError, TooLargeError
from cortex.jobs.storage_limit import StorageLimit

MAX = 1000


class Stored:
    """Rows of an API that can be measured, and removed as far as they have ended."""

    def __init__(self, remaining: list[int]) -> None:
        self.remaining = remaining
        self.measured: list[int] = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def make_room(self, _: str, max_bytes: int, kept_bytes: int) -> int:
        assert kept_bytes == int(max_bytes * 0.9)
        self.measured.append(max_bytes)
        await self.may_end.wait()
        return self.remaining.pop(0)


def limit_of(remaining: list[int], now: Callable[[], float] = lambda: 0.0) -> tuple[StorageLimit, Stored]:
    stored = Stored(remaining)
    return StorageLimit(stored.make_room, now), stored


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_arrives_is_added_to_the_first_measurement() -> None:
    limit, stored = limit_of([100])
    for _ in range(3):
        limit.admit("a", 300, MAX)
        await settle()
    with pytest.raises(BusyError, match="a has no room for 1 bytes more: its callers may store 1000 bytes; try again"):
        limit.admit("a", 1, MAX)
    assert stored.measured == [700]


async def test_room_is_made_in_the_background_before_there_is_none() -> None:
    now = [0.0]
    limit, stored = limit_of([850, 500, 700], lambda: now[0])
    limit.admit("a", 40, MAX)  # measured meanwhile
    await settle()
    now[0] = 1.0
    stored.may_end.clear()
    limit.admit("a", 60, MAX)
    with pytest.raises(BusyError):
        limit.admit("a", 51, MAX)
    stored.may_end.set()
    await settle()
    limit.admit("a", 440, MAX)  # 500 and the 60 that arrived while room was made
    with pytest.raises(BusyError):
        limit.admit("a", 1, MAX)
    now[0] = -50.0  # the clock was set back
    with pytest.raises(BusyError):
        limit.admit("a", 1, MAX)
    await settle()
    limit.admit("a", 300, MAX)
    assert stored.measured == [900, 900, 900]


async def test_a_failed_submission_gives_back_only_what_is_counted() -> None:
    now = [0.0]
    limit, _ = limit_of([0, 350], lambda: now[0])
    with pytest.raises(ValueError, match="it fails"), limit.submission("a", MAX) as admit:
        admit(600)
        await settle()  # the first measurement found nothing
        now[0] = 1.0
        limit.admit("a", 350, MAX)  # stored when the second one finds it, of these rows only
        await settle()
        raise ValueError("it fails")
    with pytest.raises(BusyError):
        limit.admit("a", 301, MAX)  # 350 were found, and 350 arrived meanwhile
    limit.admit("a", 300, MAX)


async def test_what_is_larger_than_the_limit_never_has_room() -> None:
    limit, stored = limit_of([])
    with pytest.raises(TooLargeError, match="callers of a may store 1000 bytes; raise networking.max_stored_size"):
        limit.admit("a", MAX + 1, MAX)
    assert stored.measured == []


async def test_what_was_admitted_and_not_stored_leaves_its_room() -> None:
    limit, _ = limit_of([0])
    with pytest.raises(ZeroDivisionError), limit.submission("a", MAX) as admit:
        admit(600)
        with pytest.raises(TooLargeError):
            admit(600)
        admit(400)
        raise ZeroDivisionError
    await settle()
    limit.admit("a", MAX, MAX)


async def test_a_measurement_that_fails_is_made_again_a_second_later() -> None:
    now = [0.0]
    limit, stored = limit_of([], lambda: now[0])
    for _ in range(3):
        limit.admit("a", 1, MAX)
        await settle()  # there is nothing to pop
    assert len(stored.measured) == 1
    stored.remaining, now[0] = [MAX], 1.0
    limit.admit("a", 1, MAX)
    await settle()
    with pytest.raises(BusyError):
        limit.admit("a", 1, MAX)
