"""Limit of the bytes that callers of an API's endpoint have stored, as workloads or jobs, for each API.

A measurement reads the size of each row, so it is rare, and callers never wait for one: what arrives is added to the
last one. Once little room is left, what has ended makes room in the background, the oldest first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cortex.errors import BusyError, TooLargeError, format_size
from cortex.telemetry import Logger

#: Minimum time between two measurements of an API.
_MEASURE_EVERY_S = 1.0
#: Part of the limit above which room is made.
_FULL = 0.9

_logger = Logger("cortex.jobs")


@dataclass
class _StoredSize:
    bytes: int = 0
    measured_at: float | None = None
    measuring: asyncio.Task[None] | None = None
    arrived: int = 0  #: since the measurement began


class StorageLimit:
    """`make_room(api, max_bytes)` removes what has ended if more is stored, and returns the bytes that remain."""

    def __init__(self, make_room: Callable[[str, int], Awaitable[int]], clock: Callable[[], float]) -> None:
        self._make_room = make_room
        self._clock = clock
        self._stored: dict[str, _StoredSize] = {}

    def admit(self, api: str, size_bytes: int, max_bytes: int) -> None:
        """Add bytes that a caller wants to store. Raises: BusyError if there is no room now, TooLargeError if never."""
        self.check_size(api, size_bytes, max_bytes)
        stored = self._stored.setdefault(api, _StoredSize())
        if stored.measuring is None and self._needs_measurement(stored, size_bytes, max_bytes):
            stored.arrived = 0
            wanted = min(int(max_bytes * _FULL), max_bytes - size_bytes)
            stored.measuring = asyncio.create_task(self._measure(api, stored, wanted), name=f"make room for {api}")
        if stored.bytes + size_bytes > max_bytes:
            raise BusyError(
                f"{api} has no room for {format_size(size_bytes)} more: its callers may store {format_size(max_bytes)};"
                f" try again later, or {_FIX}"
            )
        stored.bytes += size_bytes
        stored.arrived += size_bytes

    def check_size(self, api: str, size_bytes: int, max_bytes: int) -> None:
        """Raises: TooLargeError if so much can never be stored."""
        if size_bytes > max_bytes:
            raise TooLargeError(
                f"this has {format_size(size_bytes)}, and callers of {api} may store {format_size(max_bytes)}; {_FIX}"
            )

    def give_back(self, api: str, size_bytes: int) -> None:
        """Subtract bytes that were admitted and then not stored."""
        if stored := self._stored.get(api):
            stored.bytes -= size_bytes
            stored.arrived -= size_bytes

    def _needs_measurement(self, stored: _StoredSize, size_bytes: int, max_bytes: int) -> bool:
        if stored.measured_at is None:
            return True
        is_recent = 0 <= self._clock() - stored.measured_at < _MEASURE_EVERY_S
        return stored.bytes + size_bytes > max_bytes * _FULL and not is_recent

    async def _measure(self, api: str, stored: _StoredSize, wanted: int) -> None:
        try:
            stored.bytes = await self._make_room(api, wanted) + stored.arrived
            stored.measured_at = self._clock()
        except Exception as error:  # raised by a database that is away: the next arrival measures again
            _logger.error("what callers have stored can't be measured", exc_info=error, api=api)
        finally:
            stored.measuring = None


_FIX = "raise networking.max_stored_size of the API"
