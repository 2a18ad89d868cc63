"""Prediction tracking: counts of classes or a histogram of numbers, and the last predictions by request id.

Counts are series of the process's metric file. The histogram's buckets grow by a constant factor on both sides of zero,
so that the counts of several processes are merged by addition and quantiles have a relative error of at most
`RELATIVE_ERROR`. A ring file beside it holds the last predictions by request id, for feedback that arrives later.

Tracking never fails a request: a result that cannot be tracked is logged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import math
import mmap
import numbers
import os
import struct
import threading
import time
from collections.abc import Callable, Collection
from enum import IntEnum
from pathlib import Path
from typing import Any

from cortex.errors import with_article
from cortex.worker.monitoring.metrics import COPIES_FOLDER, MetricFile, SeriesKind, escape_surrogates, series_key
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.spec import ReplicaSpec

#: Classes that one process counts by name; further ones are counted as `OTHER`.
MAX_CLASSES = 1000
#: Longer names are counted as `OTHER`: they are generated text rather than classes.
MAX_CLASS_CHARACTERS = 128
#: Minimum interval between log lines about results that cannot be tracked.
_WARN_EVERY_S = 60.0

_NEW = -1
CLASSIFICATION = "classification"

#: Relative error of a quantile computed from the buckets.
RELATIVE_ERROR = 0.01
#: Smaller magnitudes are counted as 0, larger ones in the outermost bucket.
SMALLEST, LARGEST = 1e-12, 1e15

PREDICTIONS = "cortex_predictions_total"
UNTRACKED = "cortex_untracked_predictions_total"
VALUE = "cortex_prediction_value"
#: One series per bucket; the underscore keeps them out of `/metrics`, which they would flood.
BUCKETS = "_prediction_bucket"

#: Label of all classes that are not counted by name.
OTHER = "(other)"

COUNT_KEY = series_key(SeriesKind.COUNTER, PREDICTIONS)
UNTRACKED_KEY = series_key(SeriesKind.COUNTER, UNTRACKED)
SUM_KEY = series_key(SeriesKind.COUNTER, f"{VALUE}_sum")
MIN_KEY = series_key(SeriesKind.MIN, VALUE)
MAX_KEY = series_key(SeriesKind.MAX, VALUE)

_LOG_GROWTH = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_log = math.log  # a global is faster than an attribute, and every prediction takes a logarithm
_PER_LOG = 1 / _LOG_GROWTH
#: Shifts bucket numbers so that positive values have positive ones, negative values negative ones, and zero has 0.
_OFFSET = 1 - math.floor(math.log(SMALLEST) * _PER_LOG)
_OUTERMOST = math.floor(math.log(LARGEST) * _PER_LOG) + _OFFSET

#: Predictions that the ring of a process holds.
RING_SIZE = 65_536
#: Subfolder of a replica's metrics folder.
PREDICTIONS_FOLDER = "predictions"
#: The gateway's ids have 32 characters at most.
ID_BYTES = 40

_MAGIC = 0x78657472_6F633031
_HEADER = struct.Struct("=QQQ")  # magic, kind, number of records ever written
_HEADER_BYTES = 64
_COUNT_WORD = 2
_HASH = struct.Struct(f"={ID_BYTES}sQ")
_NUMBER = struct.Struct(f"={ID_BYTES}sd")
_RECORD_BYTES = _NUMBER.size
_FILE_BYTES = _HEADER_BYTES + RING_SIZE * _RECORD_BYTES
#: Up to this many ids, `bytes.find` per id is faster than one pass over all records.
_MAX_SEARCHES = 16


class Untrackable(Exception):
    """A result without a value to track; the message gives the reason."""


class PredictionTracker:
    """Counts the predictions of one process. Thread-safe."""

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
        self._has_logged_other = False
        self._ring = _open_ring(spec)
        self._spec = spec
        self._of_copies: PredictionTracker | None = None

    def track(self, result: Any, request_id: bytes, is_copy: bool = False) -> None:
        """Count the prediction in a successful result, apart from the others if its request is a copy. Never raises."""
        try:
            if is_copy:
                self._tracker_of_copies().track(result, request_id)
                return
            value = result if self._key is None else self._value_in(result)
            if self._counts_classes:
                self._count_class(_as_class(value), request_id)
            else:
                self._count_number(_as_number(value), request_id)
        except BaseException as error:  # methods of the result are user code, which may call sys.exit()
            with contextlib.suppress(BaseException):
                self._warn(_reason(error), request_id)

    def _tracker_of_copies(self) -> PredictionTracker:
        with self._lock:
            if self._of_copies is None:
                folder = str(Path(self._spec.metrics_dir) / COPIES_FOLDER)
                spec = dataclasses.replace(self._spec, metrics_dir=folder)
                self._of_copies = PredictionTracker(spec, self._file.of_copies, self._now)
            return self._of_copies

    def _value_in(self, result: Any) -> Any:
        if dataclasses.is_dataclass(result) or hasattr(type(result), "__pydantic_serializer__"):
            result = {self._key: getattr(result, self._key or "", None)}
        if not isinstance(result, dict):
            raise Untrackable(
                f"the result is {with_article(type(result).__name__)}, which has no key `{self._key}`: return a dict"
            )
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
        shown = escape_surrogates(str(name))
        if len(self._classes) >= MAX_CLASSES or len(shown) > MAX_CLASS_CHARACTERS:
            if not self._has_logged_other:
                self._has_logged_other = True
                write_log(
                    f"tracker: classes beyond the first {MAX_CLASSES}, and names of more than {MAX_CLASS_CHARACTERS} "
                    f"characters, are counted as {OTHER}\n"
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
        # Initial zeros would look like predictions.
        found = [self._file.index_of(key, value) for key in (MIN_KEY, MAX_KEY)]
        found = [*(self._file.index_of(key) for key in (COUNT_KEY, SUM_KEY)), *found]
        count, total, lowest, highest = found
        if count is None or total is None or lowest is None or highest is None:
            raise Untrackable("the metric file is full")
        self._totals = count, total, lowest, highest
        return self._totals

    def _warn(self, reason: str, request_id: bytes) -> None:
        with self._lock:
            if (index := self._file.index_of(UNTRACKED_KEY)) is not None:
                self._cells[index] += 1
            now = self._now()
            if now < self._quiet_until:
                self._unlogged += 1
                return
            more, self._unlogged, self._quiet_until = self._unlogged, 0, now + _WARN_EVERY_S
        since = f" ({more} more since the last warning)" if more else ""
        write_log(
            f"tracker: the prediction of request {request_id.decode('latin-1')} is not tracked: {reason}{since}\n"
        )


def _open_ring(spec: ReplicaSpec) -> PredictionRing | None:
    kind = PredictionKind.CLASS if spec.tracker_type == CLASSIFICATION else PredictionKind.NUMBER
    try:
        return PredictionRing(Path(spec.metrics_dir) / PREDICTIONS_FOLDER, kind)
    except OSError as error:
        write_log(f"tracker: cannot store predictions for later feedback: {error.strerror or error}\n")
        return None


def _reason(error: BaseException) -> str:
    try:
        return str(error) if isinstance(error, Untrackable) else f"{type(error).__name__}: {error}"
    except BaseException:  # `__str__` of the user's exception
        return type(error).__name__


def _as_class(value: Any) -> str | int:
    kind = type(value)
    if kind is str or kind is int:
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, str | numbers.Integral):  # numpy integers are Integral
        raise Untrackable(f"the value is {with_article(type(value).__name__)}: a class is a string or an integer")
    return escape_surrogates(str(value))  # a plain str, whose hash runs no user code


def _as_number(value: Any) -> float:
    if type(value) is float:
        return _finite(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Untrackable(
            f"the value is {with_article(type(value).__name__)}: a regression predicts a float or an integer"
        )
    try:
        number = float(value)
    except OverflowError:
        raise Untrackable("the value is too large a number") from None
    return _finite(number)


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise Untrackable(f"the value is {number}: it must be finite")
    return number


def class_key(name: str) -> str:
    """Return the series key of the count of a class."""
    return series_key(SeriesKind.COUNTER, PREDICTIONS, {"class": name})


def bucket_key(bucket: int) -> str:
    """Return the series key of the count of a bucket."""
    return series_key(SeriesKind.COUNTER, BUCKETS, {"bucket": str(bucket)})


def bucket_of(value: float) -> int:
    """Return the bucket of a finite number; buckets have the order of their numbers."""
    if SMALLEST <= value < LARGEST:
        return int(_log(value) * _PER_LOG + _OFFSET)
    if -LARGEST < value <= -SMALLEST:
        return -int(_log(-value) * _PER_LOG + _OFFSET)
    if -SMALLEST < value < SMALLEST:
        return 0
    return _OUTERMOST if value > 0 else -_OUTERMOST


def bucket_value(bucket: int) -> float:
    """Return the number that differs from every number of a bucket by at most `RELATIVE_ERROR`."""
    if bucket == 0:
        return 0.0
    size = 2 * math.exp((abs(bucket) - _OFFSET + 1) * _LOG_GROWTH) / (math.exp(_LOG_GROWTH) + 1)
    return math.copysign(size, bucket)


class PredictionKind(IntEnum):
    """Kind of the values in a ring."""

    CLASS = 1  #: `class_hash` of a class's name
    NUMBER = 2
    ANSWER = 3  #: `answers.answer_digest` of an answer


class PredictionRing:
    """The last predictions of a process by request id, in a memory-mapped file; one thread at a time may append.

    The file is a header and a ring of records of one size: the request id, padded with zeros, and a value (a double, or
    a hash). It outlives its process, and the next process continues it.
    """

    def __init__(self, folder: Path, kind: PredictionKind) -> None:
        """Open the first file that no running process has locked. Raises: OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Stays open to hold the lock, which the kernel releases when the process ends. Forks do not inherit it.
        self._descriptor = _lock_one(folder)
        # Without reserved space, a store on a full disk kills the process.
        os.posix_fallocate(self._descriptor, 0, _FILE_BYTES)
        self._memory = mmap.mmap(self._descriptor, _FILE_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._pack = _record(kind).pack_into
        magic, known_kind, count = _HEADER.unpack_from(self._memory)
        self._count = count if (magic, known_kind) == (_MAGIC, kind) else 0
        _HEADER.pack_into(self._memory, 0, _MAGIC, kind, self._count)

    def append(self, request_id: bytes, value: float) -> None:
        """Append a prediction; it replaces the oldest one if the ring is full."""
        self._pack(self._memory, _HEADER_BYTES + self._count % RING_SIZE * _RECORD_BYTES, request_id, value)
        self._count += 1
        self._words[_COUNT_WORD] = self._count


def _record(kind: PredictionKind) -> struct.Struct:
    return _NUMBER if kind is PredictionKind.NUMBER else _HASH


def class_hash(name: str) -> int:
    """Return the hash that stands for a class in a ring."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def find_predictions(path: Path, kind: PredictionKind, ids: Collection[str]) -> dict[str, float | int]:
    """Return the predictions of the given requests in one file; empty if it is of another kind or does not exist."""
    with contextlib.suppress(OSError, struct.error):
        data = path.read_bytes()
        magic, known_kind, count = _HEADER.unpack_from(data)
        if (magic, known_kind) == (_MAGIC, kind):
            record = _record(kind)
            wanted = {padded: request_id for request_id in ids if (padded := _padded(request_id))}
            used = data[_HEADER_BYTES : _HEADER_BYTES + min(count, RING_SIZE) * _RECORD_BYTES]
            return _search(used, record, wanted) if len(wanted) <= _MAX_SEARCHES else _scan(used, record, wanted)
    return {}


def read_predictions(path: Path, kind: PredictionKind, after: int) -> tuple[int, dict[bytes, float | int]]:
    """Return the number of predictions ever written to a file, and those after the first `after`, by padded id.

    Predictions that may be overwritten at this moment are left out. 0 and nothing if the file is of another kind.
    """
    with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
        magic, known_kind, count = _HEADER.unpack(file.read(_HEADER.size))
        if (magic, known_kind) == (_MAGIC, kind):
            record = _record(kind)
            found: dict[bytes, float | int] = {}
            at = max(after if after <= count else 0, count - RING_SIZE // 2)
            while at < count:
                slot = at % RING_SIZE
                wanted = min(count - at, RING_SIZE - slot)
                file.seek(_HEADER_BYTES + slot * _RECORD_BYTES)
                data = file.read(wanted * _RECORD_BYTES)
                found.update(record.iter_unpack(data[: len(data) // _RECORD_BYTES * _RECORD_BYTES]))
                at += wanted
            return count, found
    return 0, {}


def copy_predictions(source: Path, target: Path) -> None:
    """Copy a ring atomically, unless it is empty. Raises: OSError."""
    data = source.read_bytes()
    if len(data) < _HEADER_BYTES:
        return
    magic, _, count = _HEADER.unpack_from(data)
    if magic == _MAGIC and count:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        part.write_bytes(data[: _HEADER_BYTES + min(count, RING_SIZE) * _RECORD_BYTES])
        part.replace(target)


def _padded(request_id: str) -> bytes | None:
    """Return the id as it is stored; None if it cannot be stored."""
    with contextlib.suppress(UnicodeEncodeError):
        data = request_id.encode("latin-1")
        return data.ljust(ID_BYTES, b"\0") if 0 < len(data) <= ID_BYTES else None
    return None


def _search(data: bytes, record: struct.Struct, wanted: dict[bytes, str]) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for padded, request_id in wanted.items():
        at = data.find(padded)
        while at >= 0 and at % _RECORD_BYTES:  # a match that spans two records
            at = data.find(padded, at + 1)
        if at >= 0 and at + _RECORD_BYTES <= len(data):
            found[request_id] = record.unpack_from(data, at)[1]
    return found


def _scan(data: bytes, record: struct.Struct, wanted: dict[bytes, str]) -> dict[str, float | int]:
    whole = data[: len(data) // _RECORD_BYTES * _RECORD_BYTES]
    return {wanted[padded]: value for padded, value in record.iter_unpack(whole) if padded in wanted}


def _lock_one(folder: Path) -> int:
    for number in itertools.count():
        descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    raise AssertionError("unreachable: numbers are infinite")
