"""Size of the next lease: about a quarter of a second of work. Pure."""

from __future__ import annotations

MAX_BATCHES = 512
_LEASE_WORK_S = 0.25
#: Maximum growth from one lease to the next, because the first batches may not be representative.
_GROWTH = 16
_WEIGHT = 0.5


class LeaseSizer:
    """Measures the speed of a job on this worker."""

    def __init__(self) -> None:
        self._batch_s: float | None = None
        self._last = 1

    def record(self, batches: int, seconds: float) -> None:
        """Record how long a number of batches took."""
        if batches:
            newest = seconds / batches
            self._batch_s = newest if self._batch_s is None else self._batch_s + _WEIGHT * (newest - self._batch_s)
            self._last = batches

    @property
    def batches(self) -> int:
        """Return the size of the next lease."""
        if self._batch_s is None:
            return 1
        wanted = _LEASE_WORK_S / max(self._batch_s, 1e-9)
        return int(max(1, min(wanted, MAX_BATCHES, self._last * _GROWTH)))

    def is_quick(self, batches: int) -> bool:
        """Return whether this many batches end soon, so that the next lease is fetched meanwhile.

        An early lease of slow batches would withhold them from idle workers.
        """
        return self._batch_s is not None and self._batch_s * batches <= 2 * _LEASE_WORK_S
