"""Limit of the bytes that callers of an API's endpoint have stored, as workloads or jobs, for each API.

A measurement reads the size of each row, so it is rare, and callers never wait for one: what arrives is added to the
last one. Once little room is left, what has ended makes room in the background, the oldest first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cortex.errors import BusyError, TooLargeError, format_size
from cortex.telemetry import Logger

#: Minimum time between two measurements of an API.
_MEASURE_EVERY_S = 1.0
#: Part of the limit above which room is made, and part of this to which it is made, so that not each arrival needs it.
_FULL, _FREED = 0.9, 0.9
_FIX = "raise networking.max_stored_size of the API"

_logger = Logger("cortex.jobs")


@dataclass
class _StoredSize:
    bytes: int = 0
    is_measured: bool = False
    tried_at: float = -math.inf
    measuring: asyncio.Task[None] | None = None
    arrived: int = 0  #: since the measurement began
    measurements: int = 0  #: that have begun


class StorageLimit:
    """`make_room(api, max_bytes, kept_bytes)` returns what is stored, in bytes.

    If it is more than `max_bytes`, it first removes what has ended until `kept_bytes` remain.
    """

    def __init__(self, make_room: Callable[[str, int, int], Awaitable[int]], clock: Callable[[], float]) -> None:
        self._make_room = make_room
        self._clock = clock
        self._stored: dict[str, _StoredSize] = {}

    def admit(self, api: str, size_bytes: int, max_bytes: int) -> None:
        """Add bytes that a caller wants to store. Raises: BusyError if there is no room now, TooLargeError if never."""
        _check_size(api, size_bytes, max_bytes)
        stored = self._stored.setdefault(api, _StoredSize())
        if stored.measuring is None and self._needs_measurement(stored, size_bytes, max_bytes):
            stored.arrived = 0
            stored.measurements += 1
            wanted = min(int(max_bytes * _FULL), max_bytes - size_bytes)
            stored.measuring = asyncio.create_task(self._measure(api, stored, wanted), name=f"make room for {api}")
        if stored.bytes + size_bytes > max_bytes:
            raise BusyError(
                f"{api} has no room for {format_size(size_bytes)} more: its callers may store {format_size(max_bytes)};"
                f" try again later, or {_FIX}"
            )
        stored.bytes += size_bytes
        stored.arrived += size_bytes

    @contextmanager
    def submission(self, api: str, max_bytes: int) -> Iterator[Callable[[int], None]]:
        """Context of a submission, with a function to `admit` its parts. If it fails, they don't count any more.

        One that is cancelled may be stored nevertheless.
        """
        admitted, since_measurement, measurements = 0, 0, 0

        def admit(size_bytes: int) -> None:
            nonlocal admitted, since_measurement, measurements
            _check_size(api, admitted + size_bytes, max_bytes)
            self.admit(api, size_bytes, max_bytes)
            admitted += size_bytes
            if measurements != (begun := self._stored[api].measurements):
                since_measurement, measurements = 0, begun
            since_measurement += size_bytes

        try:
            yield admit
        except Exception:
            # A measurement finds only what is stored.
            if (stored := self._stored.get(api)) and stored.measurements == measurements:
                stored.bytes -= since_measurement
                stored.arrived -= since_measurement
            raise

    def _needs_measurement(self, stored: _StoredSize, size_bytes: int, max_bytes: int) -> bool:
        is_recent = 0 <= self._clock() - stored.tried_at < _MEASURE_EVERY_S
        is_full = stored.bytes + size_bytes > max_bytes * _FULL
        return not is_recent and (is_full or not stored.is_measured)

    async def _measure(self, api: str, stored: _StoredSize, wanted: int) -> None:
        try:
            stored.bytes = await self._make_room(api, wanted, int(wanted * _FREED)) + stored.arrived
            stored.is_measured = True
        except Exception as error:  # raised by a database that is away: a later arrival measures again
            _logger.error("what callers have stored can't be measured", exc_info=error, api=api)
        finally:
            stored.measuring, stored.tried_at = None, self._clock()


def _check_size(api: str, size_bytes: int, max_bytes: int) -> None:
    """Raises: TooLargeError if so much can never be stored."""
    if size_bytes > max_bytes:
        raise TooLargeError(
            f"this has {format_size(size_bytes)}, and callers of {api} may store {format_size(max_bytes)}; {_FIX}"
        )
