"""When a batch is closed, and with how many: at once, unless others are known to be on their way. Pure.

Clients that were answered a moment ago are likely to ask again: as many are expected as were inside when the last call
ended. The wait for them is short against a call, which the first would otherwise keep the others waiting for.

A call of a few can take longer than as many calls of one: a product with a matrix of two rows takes BLAS several times
as long as two products with a vector. So it is learned what each size takes, and those are called one by one.
"""

from __future__ import annotations

#: The wait is at most this part of what a call takes.
_SHARE = 0.5
#: Event loops wait for whole milliseconds.
_SHORTEST_NS = 1_000_000
#: Next to a call that takes this long, a look for others costs nothing.
_LONG_NS = 1_000_000
#: A request that comes so soon after a call has come while it ran: others may lie in their sockets beside it.
_AT_ONCE_NS = 15_000
#: Weight of the newest call in the average: 1/8.
_AVERAGE_SHIFT = 3
#: Calls of one are preferred where they take less than this part of a batch's time, for each request.
_CLEARLY_LESS = 0.8
#: What was once the shortest time is forgotten by so much with each call: models change, and so does the load.
_FORGOTTEN = 1.02
#: Every so many batches are called the other way, to learn what that takes now. Small ones cost little to try.
_TRY_ONE, _TRY_ALL = 64, 256
#: How fast the willingness to wait comes back, after each call.
_RECOVERY = 1 / 32


class BatchTiming:
    """Learns from the calls of one process. All times are monotonic ns."""

    def __init__(self, max_size: int, interval_s: float) -> None:
        self._max_size = max_size
        self._interval_ns = int(interval_s * 1e9)
        self._expected = 1
        self._ended_ns = 0
        self._last_ns = 0
        self._average_ns = 0
        self._patience = 1.0
        self._is_waiting = False
        self._row_ns: dict[int, float] = {}  #: the shortest time for each request, by the bits of a call's size
        self._batches = 0

    @property
    def expected(self) -> int:
        """How many requests are worth waiting for."""
        return self._expected

    def is_alone(self, came_ns: int) -> bool:
        """Tell whether the only request that waits may be called without a look for others."""
        return self._expected == 1 and self._last_ns < _LONG_NS and came_ns - self._ended_ns > _AT_ONCE_NS

    def wait_ns(self, waiting: int, first_ns: int, now_ns: int) -> int:
        """Return how much longer the batch stays open, 0 to close it; the first of `waiting` came at `first_ns`."""
        if waiting < self._expected and self._prefers_one(self._expected):
            return 0
        if waiting >= self._expected:
            if self._is_waiting:
                self._is_waiting = False
                self._patience = min(1.0, self._patience * 2)
            return 0
        share_ns = int(self._average_ns * _SHARE * self._patience)
        # One moment for the whole batch: whoever joins does not put it off. Before the last call ended, the first was
        # not kept waiting for others. Else callers in two groups would stay so: one comes while the other runs.
        left_ns = min(max(first_ns, self._ended_ns) + self._interval_ns, self._ended_ns + share_ns) - now_ns
        if left_ns > 0 and (self._is_waiting or left_ns >= _SHORTEST_NS):
            self._is_waiting = True
            return left_ns
        if self._is_waiting:
            self._is_waiting = False
            self._patience /= 2
        return 0

    def size(self, waiting: int) -> int:
        """Return with how many of those that wait the next call is made."""
        size = min(waiting, self._max_size)
        if size == 1:
            return 1
        self._batches += 1
        if self._prefers_one(size):
            return size if self._batches % _TRY_ALL == 0 else 1
        return 1 if self._batches % _TRY_ONE == 0 else size

    def _prefers_one(self, size: int) -> bool:
        alone_ns, together_ns = self._row_ns.get(1), self._row_ns.get(size.bit_length())
        return alone_ns is not None and together_ns is not None and alone_ns < together_ns * _CLEARLY_LESS

    def called(self, size: int, still_waiting: int, duration_ns: int, now_ns: int) -> None:
        """Learn that a call with `size` requests ended at `now_ns`, while others were waiting already."""
        row_ns, kind = duration_ns / size, size.bit_length()
        # The shortest: what else the machine did meanwhile is not the call's.
        self._row_ns[kind] = min(row_ns, self._row_ns.get(kind, row_ns) * _FORGOTTEN)
        self._expected = min(size + still_waiting, self._max_size)
        self._ended_ns = now_ns
        self._last_ns = duration_ns
        self._average_ns += (duration_ns - self._average_ns) >> _AVERAGE_SHIFT
        self._patience = min(1.0, self._patience + _RECOVERY)
