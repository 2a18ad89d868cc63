"""Counts the answers of one process and tells how long the parts of each took. It knows nothing of sockets.

All of it runs on the event loop's thread, so no cell has two writers.
"""

from __future__ import annotations

from bisect import bisect_left
from time import monotonic_ns
from typing import Protocol

from cortex.replica.metric_file import MetricFile
from cortex.replica.series import SECONDS, SIZES, Histogram, SeriesKind, series_key

_NS = 1e-9
#: Durations whose texts one process remembers.
_MAX_TEXTS = 4096
_BOUNDS_NS = tuple(round(bound * 1e9) for bound in SECONDS)


class Timed(Protocol):
    """When a request reached each part of its way, in monotonic ns; 0 where it has not been."""

    arrived_ns: int  #: at the gateway
    batched_ns: int  #: where calls are batched: it began to wait for its batch
    started_ns: int  #: its call began
    returned_ns: int  #: the user's code was done with it


class Recorder:
    """Writes to the process's file of metrics; without one, it still times."""

    def __init__(self, file: MetricFile | None) -> None:
        self._file = file
        self._codes: dict[int, int | None] = {}
        self._texts = _Texts()
        names = ("queue", "handler", "duration")
        made = [Histogram(file, f"cortex_request_{name}_seconds") for name in names] if file is not None else []
        self._is_counting = bool(made) and all(histogram.is_whole for histogram in made)
        if file is not None and self._is_counting:
            self._cells = file.cells
            # Taken apart, as three calls of `observe` for each request would take twice as long.
            (self._queue, self._queue_sum), (self._handler, self._handler_sum), (self._duration, self._duration_sum) = (
                (histogram.indexes[:-1], histogram.indexes[-1]) for histogram in made
            )

    def finish(self, request: Timed, status: int) -> bytes:
        """Count an answer that is about to be written; returns its header `Server-Timing`.

        For a stream that is its first byte. The parts, cut to microseconds, sum up to the total.
        """
        now = monotonic_ns()
        arrived = request.arrived_ns or now
        started = request.started_ns
        total_ns = now - arrived
        if self._file is not None:
            self._count(status)
        if not started:
            if self._is_counting:
                self._cells[self._duration[bisect_left(_BOUNDS_NS, total_ns)]] += 1
                self._cells[self._duration_sum] += total_ns * _NS
            text = self._texts[total_ns // 1000]
            return b"server-timing: queue;dur=%b, total;dur=%b\r\n" % (text, text)
        batched = request.batched_ns
        returned = request.returned_ns or now
        queue_ns, handler_ns = (batched or started) - arrived, returned - started
        if self._is_counting:
            cells = self._cells
            cells[self._queue[bisect_left(_BOUNDS_NS, queue_ns)]] += 1
            cells[self._queue_sum] += queue_ns * _NS
            cells[self._handler[bisect_left(_BOUNDS_NS, handler_ns)]] += 1
            cells[self._handler_sum] += handler_ns * _NS
            cells[self._duration[bisect_left(_BOUNDS_NS, total_ns)]] += 1
            cells[self._duration_sum] += total_ns * _NS
        texts = self._texts
        queue, handler, encode = queue_ns // 1000, handler_ns // 1000, (now - returned) // 1000
        if not batched:
            return b"server-timing: queue;dur=%b, handler;dur=%b, encode;dur=%b, total;dur=%b\r\n" % (
                texts[queue],
                texts[handler],
                texts[encode],
                texts[queue + handler + encode],
            )
        batch = (started - batched) // 1000
        return b"server-timing: queue;dur=%b, batch;dur=%b, handler;dur=%b, encode;dur=%b, total;dur=%b\r\n" % (
            texts[queue],
            texts[batch],
            texts[handler],
            texts[encode],
            texts[queue + batch + handler + encode],
        )

    def _count(self, status: int) -> None:
        assert self._file is not None
        try:
            index = self._codes[status]
        except KeyError:
            key = series_key(SeriesKind.COUNTER, "cortex_replica_requests_total", {"code": str(status)})
            index = self._codes[status] = self._file.index_of(key)
        if index is not None:
            self._file.cells[index] += 1


class _Texts(dict[int, bytes]):
    """Durations in milliseconds by microseconds; the common ones are remembered, as formatting takes longer."""

    def __missing__(self, microseconds: int) -> bytes:
        text = b"%d.%03d" % divmod(microseconds, 1000)
        if len(self) < _MAX_TEXTS:
            self[microseconds] = text
        return text


class BatchRecorder:
    """Counts the calls that got several requests at once."""

    def __init__(self, file: MetricFile | None) -> None:
        self._wait = Histogram(file, "cortex_batch_wait_seconds") if file is not None else None
        self._size = Histogram(file, "cortex_batch_size", SIZES) if file is not None else None

    def began(self, size: int, waited_ns: list[int]) -> None:
        """Count a call with `size` requests, and how long each had waited for it."""
        if self._wait is not None and self._size is not None:
            self._size.observe(size)
            for wait_ns in waited_ns:
                self._wait.observe(wait_ns * _NS)
