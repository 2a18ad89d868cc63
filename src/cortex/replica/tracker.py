"""Counts what an API predicts: classes, or numbers by their size, from the results of the user's method.

What it counts goes to the process's file of metrics; the last predictions, by request id, to a ring beside it. It never
fails a request: what can't be tracked is a line in the log. How the counts are read is `prediction_series.py`.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cortex.replica.errors import write_log
from cortex.replica.metric_file import MetricFile
from cortex.replica.prediction_series import (
    COUNT_KEY,
    MAX_KEY,
    MIN_KEY,
    OTHER,
    SUM_KEY,
    UNTRACKED_KEY,
    bucket_key,
    bucket_of,
    class_key,
)
from cortex.replica.predictions import FOLDER, PredictionKind, PredictionRing, class_hash
from cortex.replica.series import encodable
from cortex.replica.spec import ReplicaSpec

#: Classes that one process counts by name; further ones are counted together.
MAX_CLASSES = 1000
#: A longer name is no class, but a text that was generated.
MAX_CLASS_CHARACTERS = 128
#: What can't be tracked is logged this often at most.
_WARN_EVERY_S = 60.0

_NEW = -1
CLASSIFICATION = "classification"


class Untrackable(Exception):
    """A result has no value to track; the message says why."""


class Tracker:
    """Tracks the predictions of one process. Threads may share it."""

    def __init__(self, spec: ReplicaSpec, file: MetricFile, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._key = spec.tracker_key
        self._counts_classes = spec.tracker_type == CLASSIFICATION
        self._file = file
        self._cells = file.cells
        self._lock = threading.Lock()
        self._classes: dict[str | int, tuple[int | None, int]] = {}
        self._buckets: dict[int, int | None] = {}
        self._totals: tuple[int, int, int, int] | None = None
        self._quiet_until = -math.inf
        self._unlogged = 0
        self._has_told_of_others = False
        self._ring = _open_ring(spec)

    def track(self, result: Any, request_id: bytes) -> None:
        """Count the prediction in a successful result. Never raises."""
        try:
            value = result if self._key is None else self._value_in(result)
            if self._counts_classes:
                self._count_class(_as_class(value), request_id)
            else:
                self._count_number(_as_number(value), request_id)
        except BaseException as error:  # the user's result may run the user's code, which may say sys.exit()
            with contextlib.suppress(BaseException):
                self._warn(_reason(error), request_id)

    def _value_in(self, result: Any) -> Any:
        if not isinstance(result, dict):
            raise Untrackable(f"the result is {_a(result)}, which has no key `{self._key}`: return a dict")
        value = result.get(self._key)
        if value is None:
            reason = "is null in the result" if self._key in result else "is not in the result"
            raise Untrackable(f"the key `{self._key}` {reason}")
        return value

    def _count_class(self, name: str | int, request_id: bytes) -> None:
        with self._lock:
            index, known_hash = self._classes.get(name) or self._add_class(name)
            if index is not None:
                self._cells[index] += 1
            if self._ring is not None:
                self._ring.append(request_id, known_hash)

    def _add_class(self, name: str | int) -> tuple[int | None, int]:
        shown = encodable(str(name))
        if len(self._classes) >= MAX_CLASSES or len(shown) > MAX_CLASS_CHARACTERS:
            if not self._has_told_of_others:
                self._has_told_of_others = True
                write_log(
                    f"tracker: classes beyond the first {MAX_CLASSES}, and names of more than {MAX_CLASS_CHARACTERS} "
                    f"characters, are counted together as {OTHER}\n"
                )
            return self._file.index_of(class_key(OTHER)), class_hash(shown)
        known = self._file.index_of(class_key(shown)), class_hash(shown)
        self._classes[name] = known
        return known

    def _count_number(self, value: float, request_id: bytes) -> None:
        bucket = bucket_of(value)
        with self._lock:
            cells = self._cells
            count, total, lowest, highest = self._totals or self._add_totals(value)
            index = self._buckets.get(bucket, _NEW)
            if index == _NEW:
                index = self._buckets[bucket] = self._file.index_of(bucket_key(bucket))
            if index is not None:
                cells[index] += 1
            cells[count] += 1
            cells[total] += value
            if value < cells[lowest]:
                cells[lowest] = value
            if value > cells[highest]:
                cells[highest] = value
            if self._ring is not None:
                self._ring.append(request_id, value)

    def _add_totals(self, value: float) -> tuple[int, int, int, int]:
        # Zeros would be taken for predictions that were seen.
        found = [self._file.index_of(key, value) for key in (MIN_KEY, MAX_KEY)]
        found = [*(self._file.index_of(key) for key in (COUNT_KEY, SUM_KEY)), *found]
        count, total, lowest, highest = found
        if count is None or total is None or lowest is None or highest is None:
            raise Untrackable("the file of metrics is full")
        self._totals = count, total, lowest, highest
        return self._totals

    def _warn(self, why: str, request_id: bytes) -> None:
        with self._lock:
            if (index := self._file.index_of(UNTRACKED_KEY)) is not None:
                self._cells[index] += 1
            now = self._now()
            if now < self._quiet_until:
                self._unlogged += 1
                return
            more, self._unlogged, self._quiet_until = self._unlogged, 0, now + _WARN_EVERY_S
        since = f"; so are {more} since the last such line" if more else ""
        write_log(f"tracker: the prediction of request {request_id.decode('latin-1')} is not tracked: {why}{since}\n")


def _open_ring(spec: ReplicaSpec) -> PredictionRing | None:
    kind = PredictionKind.CLASS if spec.tracker_type == CLASSIFICATION else PredictionKind.NUMBER
    try:
        return PredictionRing(Path(spec.metrics_dir) / FOLDER, kind)
    except OSError as error:
        write_log(f"tracker: predictions can't be kept for truth that comes later: {error.strerror or error}\n")
        return None


def _reason(error: BaseException) -> str:
    try:
        return str(error) if isinstance(error, Untrackable) else f"{type(error).__name__}: {error}"
    except BaseException:  # the user's exception, with a text of the user's making
        return type(error).__name__


def _as_class(value: Any) -> str | int:
    kind = type(value)
    if kind is str or kind is int:
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, str | numbers.Integral):  # numpy's integers are Integral
        raise Untrackable(f"the value is {_a(value)}: a class is a string or an integer")
    return encodable(str(value))  # plain text, whose hash is nobody's code


def _as_number(value: Any) -> float:
    if type(value) is float:
        return _finite(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Untrackable(f"the value is {_a(value)}: a regression predicts a float or an integer")
    try:
        number = float(value)
    except OverflowError:
        raise Untrackable("the value is too large a number") from None
    return _finite(number)


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise Untrackable(f"the value is {number}: it must be finite")
    return number


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"
