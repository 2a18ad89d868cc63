"""For how long a request was in a gateway on another machine, whose clock is not ours. Pure."""

from __future__ import annotations

#: Clocks drift apart, or are set; what was seen longer ago than twice this does not count.
_WINDOW_NS = 30_000_000_000
#: Longer than any difference of clocks.
_NEVER = 1 << 64


class GatewayClock:
    """One gateway's clock.

    Of the requests of the last half minute or so, the one that seems to have waited least is taken for one that did not
    wait: the rest of what lies between its two times is the difference of the clocks. Where each of them waited, that
    is overlooked, and callers are given more time than they asked for, never less.
    """

    def __init__(self) -> None:
        self._least = _NEVER
        self._least_before = _NEVER
        self._difference = 0  #: the lesser of both
        self._window_ends_ns = 0

    def waited_ns(self, apparent_ns: int, now_ns: int) -> int:
        """Return how long a request waited that came `apparent_ns` ago by both clocks; `now_ns` is monotonic."""
        if now_ns >= self._window_ends_ns:
            self._least_before, self._least = self._least, apparent_ns
            self._window_ends_ns = now_ns + _WINDOW_NS
            self._difference = min(self._least, self._least_before)
        elif apparent_ns < self._least:
            self._least = apparent_ns
            self._difference = min(self._least, self._least_before)
        return apparent_ns - self._difference
