"""Limit of the bytes that callers have stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cortex.errors import BusyError, TooLargeError
from cortex.jobs.storage_limit import StorageLimit

MAX = 1000


def limit_of(remaining: list[int], now: Callable[[], float] = lambda: 0.0) -> tuple[StorageLimit, list[int]]:
    """Return a limit whose measurements return `remaining`, and the list of what they had to make room for."""
    measured: list[int] = []

    async def make_room(_: str, max_bytes: int) -> int:
        measured.append(max_bytes)
        return remaining.pop(0)

    return StorageLimit(make_room, now), measured


async def test_what_arrives_is_added_to_the_first_measurement() -> None:
    limit, measured = limit_of([100])
    for _ in range(3):
        await limit.admit("a", 300, MAX)
    with pytest.raises(
        BusyError, match="a has no room for 1 bytes more: its callers may store 1000 bytes that has not ended"
    ):
        await limit.admit("a", 1, MAX)
    assert measured == [700]


async def test_it_is_measured_again_once_there_is_no_room_and_a_second_is_over() -> None:
    now = [0.0]
    limit, measured = limit_of([900, 950, 200], lambda: now[0])
    with pytest.raises(BusyError):
        await limit.admit("a", 101, MAX)
    now[0] = 0.9
    with pytest.raises(BusyError):
        await limit.admit("a", 101, MAX)
    now[0] = 1.0
    with pytest.raises(BusyError):
        await limit.admit("a", 101, MAX)
    now[0] = -50.0  # the clock was set back
    await limit.admit("a", 101, MAX)
    assert measured == [899] * 3


async def test_what_is_larger_than_the_limit_never_has_room() -> None:
    limit, measured = limit_of([])
    with pytest.raises(TooLargeError, match="callers of a may store 1000 bytes; raise networking.max_stored_size"):
        await limit.admit("a", MAX + 1, MAX)
    assert measured == []
