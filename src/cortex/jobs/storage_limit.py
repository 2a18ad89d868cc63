"""Limit of the bytes that callers of an API's endpoint have stored, as workloads or jobs, for each API.

A measurement reads the size of each row, so it is rare: what arrives is added to the last one. What has ended makes
room for it, the oldest first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cortex.errors import BusyError, TooLargeError, format_size

#: Minimum time between two measurements of an API.
_MEASURE_EVERY_S = 1.0


@dataclass
class _StoredSize:
    bytes: int
    measured_at: float


class StorageLimit:
    """`make_room(api, max_bytes)` removes what has ended if more is stored, and returns the bytes that remain."""

    def __init__(self, make_room: Callable[[str, int], Awaitable[int]], clock: Callable[[], float]) -> None:
        self._make_room = make_room
        self._clock = clock
        self._stored: dict[str, _StoredSize] = {}
        self._measuring = asyncio.Lock()

    async def admit(self, api: str, size_bytes: int, max_bytes: int) -> None:
        """Add bytes that a caller wants to store. Raises: BusyError if there is no room, TooLargeError if never."""
        fix = "raise networking.max_stored_size of the API"
        if size_bytes > max_bytes:
            raise TooLargeError(
                f"this has {format_size(size_bytes)}, and callers of {api} may store {format_size(max_bytes)}; {fix}"
            )
        if self._needs_measurement(api, size_bytes, max_bytes):
            async with self._measuring:
                if self._needs_measurement(api, size_bytes, max_bytes):
                    remaining = await self._make_room(api, max(0, max_bytes - size_bytes))
                    self._stored[api] = _StoredSize(remaining, self._clock())
        stored = self._stored[api]
        if stored.bytes + size_bytes > max_bytes:
            raise BusyError(
                f"{api} has no room for {format_size(size_bytes)} more: its callers may store {format_size(max_bytes)}"
                f" that has not ended; try again later, or {fix}"
            )
        stored.bytes += size_bytes

    def _needs_measurement(self, api: str, size_bytes: int, max_bytes: int) -> bool:
        known = self._stored.get(api)
        if known is None:
            return True
        is_recent = 0 <= self._clock() - known.measured_at < _MEASURE_EVERY_S
        return known.bytes + size_bytes > max_bytes and not is_recent
