"""Decide whether the calls of a process are so short that the gateway may send it requests ahead.

A request that is sent ahead waits for the call that runs when it arrives. The average duration of that call is not the
average of all calls: a long call is met more often, in proportion to its duration d. So it is Σd² / Σd, and

    Σd² / Σd ≤ LIMIT   ⇔   Σd·(d − LIMIT) ≤ 0

which is one sum, the excess. One call of 8 s among 10,000 of 1 ms makes it positive, although their average is 1.8 ms.
The weight d is at least `MIN_WEIGHT_NS`: between calls of microseconds, each pause of a busy machine would be too long.
"""

from __future__ import annotations

from cortex.replica.shared_state import SharedConnectionState

#: Calls are short if the one that a request meets takes at most this long on average.
LIMIT_NS = 5_000_000
MIN_WEIGHT_NS = 1_000_000
#: After as many calls, 1/64 of the excess is forgotten: half of it after 11,000 calls. The first ones do not count,
#: because they may have to load something; nothing is sent ahead to a process before it has run twice as many.
DECAY_CALLS = 256
_DECAY_SHIFT = 6


class CallDurations:
    """Durations of the calls of one process; the result is in the memory shared with the supervisor."""

    def __init__(self, shared_state: SharedConnectionState) -> None:
        self.are_short = False
        self._shared_state = shared_state
        self._excess = 0
        self._calls = 0
        self._is_warm = False

    def record(self, duration_ns: int) -> None:
        """Record a call. Event-loop thread only."""
        weight_ns = duration_ns if duration_ns > MIN_WEIGHT_NS else MIN_WEIGHT_NS
        self._excess += weight_ns * (duration_ns - LIMIT_NS)
        self._calls += 1
        if self._calls >= DECAY_CALLS:
            self._calls = 0
            self._decay()
        if self.are_short and self._excess > 0:
            self._set(False)

    def _decay(self) -> None:
        if not self._is_warm:
            self._is_warm = True
            self._excess = 0
            return
        self._excess -= self._excess >> _DECAY_SHIFT
        if not self.are_short and self._excess <= 0:
            self._set(True)

    def _set(self, are_short: bool) -> None:
        self.are_short = are_short
        self._shared_state.has_short_calls = are_short
