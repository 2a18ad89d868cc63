"""The difference between the clocks of a worker and of a gateway on another machine."""

from __future__ import annotations

#: Clocks drift or are adjusted: minima older than two windows are discarded.
_CLOCK_WINDOW_NS = 30_000_000_000
_INFINITE_NS = 1 << 64


class GatewayClock:
    """Estimate of the clock offset of a gateway on another machine.

    Of the requests of the last 30 to 60 seconds, the one with the smallest apparent wait is assumed not to have waited,
    so its apparent wait is the clock offset. If every request waited, waits are underestimated: callers get more time
    than their timeout, never less.
    """

    def __init__(self) -> None:
        self._minimum_ns = _INFINITE_NS
        self._previous_minimum_ns = _INFINITE_NS
        self._offset_ns = 0  #: the smaller of both
        self._window_ends_ns = 0

    def waited_ns(self, apparent_ns: int, now_ns: int) -> int:
        """Return the actual wait of a request that arrived `apparent_ns` ago by both clocks; `now_ns` is monotonic."""
        if now_ns >= self._window_ends_ns:
            self._previous_minimum_ns, self._minimum_ns = self._minimum_ns, apparent_ns
            self._window_ends_ns = now_ns + _CLOCK_WINDOW_NS
            self._offset_ns = min(self._minimum_ns, self._previous_minimum_ns)
        elif apparent_ns < self._minimum_ns:
            self._minimum_ns = apparent_ns
            self._offset_ns = min(self._minimum_ns, self._previous_minimum_ns)
        return apparent_ns - self._offset_ns
