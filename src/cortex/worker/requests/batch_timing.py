"""Start time and size of batches. Pure.

A batch begins at once, unless other requests are expected: clients that just received a response tend to send another
request, so as many are expected as were in the process when the last calls ended. The wait is short compared to a call,
which the first request would otherwise make the others wait for.

If all clients are in one batch, the process has nothing to compute while their responses and next requests travel.
Where that costs more than it saves, the clients are divided: one half arrives while the batch of the other half runs.
`_Division` compares the throughput of both ways.

A call with several requests can take longer than as many calls with one: BLAS takes several times as long for a matrix
of two rows as for two vectors. So the duration of each batch size is measured, and such sizes are called one by one.
Both the shortest and the average times have to say so. The shortest follow a change at once, but other programs on the
processor interrupt most long calls and few short ones; the average has all interruptions.
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
#: Weight of the newest call in the average duration: 1/8.
_AVERAGE_SHIFT = 3
#: Single calls are preferred if they take less than this share of the time per request in a batch.
_CLEARLY_LESS = 0.8
#: Requests over which the average time of a request is taken.
_AVERAGED = 512
#: Growth of a measured minimum per call, so that it follows changes of the model and the load.
_DECAY = 1.02
#: Intervals, in batches, at which the other way of calling is measured again. Single calls are cheap to try.
_TRY_ONE, _TRY_ALL = 64, 256
#: Recovery of the patience after each call.
_RECOVERY = 1 / 32
#: Batches of all expected requests in one measurement of the throughput; twice as many of the halves.
_WINDOW = 8
#: Measurements of an experiment, and from the beginning of one to the next.
_EXPERIMENT, _REPEAT = 10, 160
#: Share of idle time below which there is nothing to gain by halves.
_IDLE = 0.1
#: Halves are better if a request takes less than this share of the time: they need more CPU.
_BETTER = 0.95


class BatchTiming:
    """Measurements and decisions of one process. All times are monotonic ns."""

    def __init__(self, max_size: int, interval_s: float) -> None:
        self._max_size = max_size
        self._interval_ns = int(interval_s * 1e9)
        self._expected = 1
        self.target = 1  #: requests that are worth waiting for: those that are expected, or half of them
        self._division = _Division()
        self._ended_ns = 0
        self._last_ns = 0
        self._average_ns = 0
        self._patience = 1.0
        self._is_waiting = False
        #: The shortest and the average time per request, by the bit length of the batch size.
        self._row_ns: dict[int, float] = {}
        self._average_row_ns: dict[int, float] = {}
        self._batches = 0

    def is_full(self, waiting: int) -> bool:
        """Return whether a batch of the waiting requests would not grow while another one runs."""
        return waiting >= (self._max_size if self._division.parts == 1 else self.target)

    def is_alone(self, came_ns: int) -> bool:
        """Return whether a single request may be called without checking for others."""
        return self._expected == 1 and self._last_ns < _LONG_NS and came_ns - self._ended_ns > _AT_ONCE_NS

    def wait_ns(self, waiting: int, first_ns: int, now_ns: int) -> int:
        """Return how much longer to wait, 0 to begin the batch; the first of `waiting` requests came at `first_ns`."""
        if waiting < self.target and self._prefers_one(self.target):
            return 0
        if waiting >= self.target:
            if self._is_waiting:
                self._is_waiting = False
                self._patience = min(1.0, self._patience * 2)
            return 0
        duration_ns = self.target * self._row_ns.get(self.target.bit_length(), 0)  # 0 if it was not measured
        share_ns = int(max(self._average_ns, duration_ns) * _SHARE * self._patience)
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
        size = min(waiting, self._max_size if self._division.parts == 1 else self.target)  # halves of the same size
        if size == 1:
            return 1
        self._batches += 1
        if self._prefers_one(size):
            return size if self._batches % _TRY_ALL == 0 else 1
        return 1 if self._batches % _TRY_ONE == 0 else size

    def _prefers_one(self, size: int) -> bool:
        kind = size.bit_length()
        return all(
            1 in times and kind in times and times[1] < times[kind] * _CLEARLY_LESS
            for times in (self._row_ns, self._average_row_ns)
        )

    def record(self, size: int, still_waiting: int, duration_ns: int, now_ns: int) -> None:
        """Record a call with `size` requests that ended at `now_ns` while `still_waiting` others waited."""
        row_ns, kind = duration_ns / size, size.bit_length()
        # The minimum excludes whatever else the machine did during a call.
        self._row_ns[kind] = min(row_ns, self._row_ns.get(kind, row_ns) * _DECAY)
        average_ns = self._average_row_ns.get(kind, row_ns)
        self._average_row_ns[kind] = average_ns + (row_ns - average_ns) * min(size / _AVERAGED, 1)
        self._expected = max(size + still_waiting, self._expected * 7 // 8)
        self._division.record(size, self._expected, duration_ns, max(now_ns - duration_ns - self._ended_ns, 0), now_ns)
        self.target = min(-(-self._expected // self._division.parts), self._max_size)
        self._ended_ns = now_ns
        self._last_ns = duration_ns
        self._average_ns += (duration_ns - self._average_ns) >> _AVERAGE_SHIFT
        self._patience = min(1.0, self._patience + _RECOVERY)


class _Division:
    """Decision whether the requests of one process form one batch or two halves, by an experiment.

    Both ways alternate in short windows, so that whatever else the machine does slows both of them.
    """

    def __init__(self) -> None:
        self.parts = 1
        self._load = 0  #: of the last experiment
        self._row_ns: dict[int, list[float]] = {1: [], 2: []}  #: elapsed time per request, by parts
        self._windows = _EXPERIMENT  #: since the beginning of the last experiment
        self._restart(0)

    def _restart(self, now_ns: int) -> None:
        self._began_ns = now_ns
        self._batches = self._requests = self._idle_ns = self._expected = 0

    def record(self, size: int, expected: int, duration_ns: int, idle_ns: int, now_ns: int) -> None:
        """Record a call of `size` requests that ended now, after the process was idle for some time."""
        if idle_ns > max(duration_ns, _LONG_NS):  # no client had anything to ask
            self._restart(now_ns)
            return
        self._batches += 1
        self._requests += size
        self._idle_ns += idle_ns
        self._expected = max(self._expected, expected)
        if self._batches == _WINDOW * self.parts:
            self._on_window(now_ns - self._began_ns)
            self._restart(now_ns)

    def _on_window(self, elapsed_ns: int) -> None:
        self._windows += 1
        if self._windows <= _EXPERIMENT:
            self._row_ns[self.parts].append(elapsed_ns / self._requests)
            self.parts = 3 - self.parts
            if self._windows == _EXPERIMENT:
                whole_ns, halves_ns = (sorted(times)[len(times) // 2] for times in self._row_ns.values())
                self.parts = 2 if halves_ns < whole_ns * _BETTER else 1
            return
        load = (self._expected * 4 // 3).bit_length()  # so that a request more or less than 2ⁿ is the same load
        is_due = load != self._load or self._windows >= _REPEAT
        if is_due and (self.parts == 2 or self._idle_ns > elapsed_ns * _IDLE):
            self._load, self._windows, self._row_ns = load, 0, {1: [], 2: []}
