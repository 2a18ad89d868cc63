"""Start time and size of batches. Pure.

A batch begins at once, unless other requests are expected: clients that just received a response tend to send another
request, so as many are expected as were in the process when the last call ended. The wait is short compared to a call,
which the first request would otherwise make the others wait for.

A call with several requests can take longer than as many calls with one: BLAS takes several times as long for a matrix
of two rows as for two vectors. So the duration of each batch size is measured, and such sizes are called one by one.
"""

from __future__ import annotations

#: Maximum wait, as a share of the duration of a call.
_SHARE = 0.5
#: Shorter waits are pointless: event loops wait for whole milliseconds.
_SHORTEST_NS = 1_000_000
#: Compared with calls of this duration, checking for other requests costs nothing.
_LONG_NS = 1_000_000
#: A request that is read this soon after a call arrived during it, so others may be in their sockets too.
_AT_ONCE_NS = 15_000
#: Weight of the newest call in the average: 1/8.
_AVERAGE_SHIFT = 3
#: Single calls are preferred if they take less than this share of the time per request in a batch.
_CLEARLY_LESS = 0.8
#: Growth of a measured minimum per call, so that it follows changes of the model and the load.
_DECAY = 1.02
#: Intervals, in batches, at which the other way of calling is measured again. Single calls are cheap to try.
_TRY_ONE, _TRY_ALL = 64, 256
#: Recovery of the patience after each call.
_RECOVERY = 1 / 32


class BatchTiming:
    """Measurements and decisions of one process. All times are monotonic ns."""

    def __init__(self, max_size: int, interval_s: float) -> None:
        self._max_size = max_size
        self._interval_ns = int(interval_s * 1e9)
        self._expected = 1
        self._ended_ns = 0
        self._last_ns = 0
        self._average_ns = 0
        self._patience = 1.0
        self._is_waiting = False
        self._row_ns: dict[int, float] = {}  #: the shortest time per request, by the bit length of the batch size
        self._batches = 0

    @property
    def expected(self) -> int:
        """Return how many requests are worth waiting for."""
        return self._expected

    def is_alone(self, came_ns: int) -> bool:
        """Return whether a single request may be called without checking for others."""
        return self._expected == 1 and self._last_ns < _LONG_NS and came_ns - self._ended_ns > _AT_ONCE_NS

    def wait_ns(self, waiting: int, first_ns: int, now_ns: int) -> int:
        """Return how much longer to wait, 0 to begin the batch; the first of `waiting` requests came at `first_ns`."""
        if waiting < self._expected and self._prefers_one(self._expected):
            return 0
        if waiting >= self._expected:
            if self._is_waiting:
                self._is_waiting = False
                self._patience = min(1.0, self._patience * 2)
            return 0
        share_ns = int(self._average_ns * _SHARE * self._patience)
        # The deadline is the same for the whole batch: later requests do not postpone it. It counts from the end of the
        # last call, otherwise clients in two groups would never merge: one arrives while the call of the other runs.
        left_ns = min(max(first_ns, self._ended_ns) + self._interval_ns, self._ended_ns + share_ns) - now_ns
        if left_ns > 0 and (self._is_waiting or left_ns >= _SHORTEST_NS):
            self._is_waiting = True
            return left_ns
        if self._is_waiting:
            self._is_waiting = False
            self._patience /= 2
        return 0

    def size(self, waiting: int) -> int:
        """Return the size of the next call."""
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

    def record(self, size: int, still_waiting: int, duration_ns: int, now_ns: int) -> None:
        """Record a call with `size` requests that ended at `now_ns` while `still_waiting` others waited."""
        row_ns, kind = duration_ns / size, size.bit_length()
        # The minimum excludes whatever else the machine did during a call.
        self._row_ns[kind] = min(row_ns, self._row_ns.get(kind, row_ns) * _DECAY)
        self._expected = min(size + still_waiting, self._max_size)
        self._ended_ns = now_ns
        self._last_ns = duration_ns
        self._average_ns += (duration_ns - self._average_ns) >> _AVERAGE_SHIFT
        self._patience = min(1.0, self._patience + _RECOVERY)
