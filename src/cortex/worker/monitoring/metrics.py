"""Metrics of a replica: one memory-mapped file per process, merged by series over processes.

A metric file outlives its process. It is a sequence of entries: the length of the key (a word of 8 bytes), the key,
padded to whole words, and the value, a double. The first word is the number of used bytes. A value changes by one plain
store, so it is correct whenever the writer is killed.

A key is a JSON array: kind, name, labels. Histogram buckets are counted individually, not cumulatively, so that the
files of several processes are merged by addition.

Each process of a replica writes `<index>-<pid>` in the replica's metrics folder, its supervisor writes `supervisor`.
Files of processes that ended are compacted into `ended.json`, so that a crash loop does not leave thousands of files.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from cortex.processes.filelock import LockHeldError, hold_lock

#: Pages cost memory only once they are written.
FILE_BYTES = 4 * 1024 * 1024
#: Disk space is reserved in blocks of this size: writing to a page that the file system cannot back kills the process.
RESERVED_BYTES = 64 * 1024
_WORD = 8

#: Upper bounds of the buckets of request durations, in seconds.
DURATION_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
#: Those of the time in user code, of which `/metrics` shows only the ones above. Each is about 12 % more than the one
#: before (the preferred numbers R20), so that two revisions can be compared.
HANDLER = "cortex_request_handler_seconds"
_R20 = (1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8, 3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0)
_STEPS = [float(f"{step}e{power}") for power in range(-4, 2) for step in _R20]
FINE_BOUNDS_S = tuple(sorted({*DURATION_BOUNDS_S, *(step for step in _STEPS if step < DURATION_BOUNDS_S[-1])}))
#: Upper bounds of the buckets of batch sizes.
SIZE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

#: Counter of responses that began and are incomplete.
ABORTED = "cortex_aborted_responses_total"
DEATHS, RELOADS = "cortex_process_deaths_total", "cortex_model_reloads_total"
REQUESTS = "cortex_replica_requests_total"
#: Statuses whose counters exist before their first response: Prometheus' `increase()` does not see a series begin.
INITIAL_STATUSES = (200, 400, 404, 422, 499, 500, 502, 503, 504)

#: File name of the supervisor's own metrics.
SUPERVISOR = "supervisor"
#: Subfolder with the same files about requests that are copies, which count neither as the API's nor for feedback.
COPIES_FOLDER = "copies"
_ENDED, _LOCK = "ended.json", "ended.lock"
_PROCESS_FILE = re.compile(r"\d+-(\d+)")
#: Files of processes that ended are compacted once there are more than this.
_MAX_ENDED_FILES = 4
_ATTEMPTS = 10

_NS = 1e-9
#: Durations whose text is cached.
_MAX_TEXTS = 4096
_BOUNDS_NS = tuple(round(bound * 1e9) for bound in DURATION_BOUNDS_S)
_FINE_BOUNDS_NS = tuple(round(bound * 1e9) for bound in FINE_BOUNDS_S)


class MetricFile:
    """The metrics of one process; `cells[index_of(key)]` is a value. Only one thread at a time may write a cell."""

    def __init__(self, path: Path) -> None:
        """Create or open the file. Raises: OSError if it cannot be created or the disk is full."""
        self._path = path
        self._reserved = 0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, FILE_BYTES)
            self._memory = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        self._reserve(_WORD)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")
        self.cells = self._bytes.cast("d")
        self._lock = threading.Lock()
        self._used = max(self._words[0], _WORD)
        self._reserve(self._used)
        self._indexes = {key: offset // _WORD for key, offset, _ in _entries(bytes(self._bytes[: self._used]))}
        self._of_copies: MetricFile | None = None

    @property
    def of_copies(self) -> MetricFile:
        """Return the file of this process about copies. Raises: OSError if it cannot be created."""
        with self._lock:
            if self._of_copies is None:
                self._of_copies = MetricFile(self._path.parent / COPIES_FOLDER / self._path.name)
            return self._of_copies

    @property
    def left_bytes(self) -> int:
        """Return the free space; an entry takes the bytes of its key and up to three words."""
        return FILE_BYTES - self._used

    def index_of(self, key: str, initial: float = 0.0) -> int | None:
        """Return the index of a series, which is added with `initial` if new; None if the file is full."""
        index = self._indexes.get(key)
        if index is not None:
            return index
        with self._lock:
            return self._indexes.get(key) or self._add(key, initial)

    def _add(self, key: str, initial: float) -> int | None:
        data = key.encode()
        size = -(-len(data) // _WORD) * _WORD
        start = self._used
        end = start + size + 2 * _WORD
        if end > FILE_BYTES:
            return None
        try:
            self._reserve(end)
        except OSError:
            return None
        self._words[start // _WORD] = len(data)
        self._bytes[start + _WORD : start + _WORD + len(data)] = data
        index = (start + _WORD + size) // _WORD
        self.cells[index] = initial
        self._used = (index + 1) * _WORD
        self._words[0] = self._used  # last: readers only see complete entries
        self._indexes[key] = index
        return index

    def _reserve(self, end: int) -> None:
        """Reserve disk space up to `end`. Raises: OSError."""
        if end > self._reserved:
            wanted = min(-(-end // RESERVED_BYTES) * RESERVED_BYTES, FILE_BYTES)
            descriptor = os.open(self._path, os.O_RDWR)
            try:
                os.posix_fallocate(descriptor, 0, wanted)
            finally:
                os.close(descriptor)
            self._reserved = wanted


def read_metrics(path: Path) -> dict[str, float]:
    """Return the values of a file by key; an empty dict if it does not exist or is not a metric file."""
    with contextlib.suppress(OSError, ValueError, struct.error), path.open("rb") as file:
        (used,) = struct.unpack("=Q", file.read(_WORD) or bytes(_WORD))
        file.seek(0)
        data = file.read(min(used, FILE_BYTES))
        return {key: value for key, _, value in _entries(data)}
    return {}


def _entries(data: bytes) -> list[tuple[str, int, float]]:
    """Return (key, offset of the value, value) of each entry. Raises: ValueError if this is not a metric file."""
    found, offset = [], _WORD
    while offset < len(data):
        (length,) = struct.unpack_from("=Q", data, offset)
        at = offset + _WORD + -(-length // _WORD) * _WORD
        if at + _WORD > len(data):
            raise ValueError("not a metric file")
        (value,) = struct.unpack_from("=d", data, at)
        found.append((data[offset + _WORD : offset + _WORD + length].decode(errors="replace"), at, value))
        offset = at + _WORD
    return found


class SeriesKind(StrEnum):
    """The kind of a series, which determines how the values of several processes are merged."""

    COUNTER = "counter"  #: summed
    GAUGE = "gauge"  #: the value set last, by the SET_AT of the same name and labels
    SET_AT = "set_at"  #: when the gauge was set, UNIX seconds; the latest
    BUCKET = "bucket"  #: summed; the label `le` is the upper bound of the bucket
    SUM = "sum"  #: summed; the sum of all values in the buckets of the same name
    MIN = "min"
    MAX = "max"


class Series(NamedTuple):
    """A parsed key."""

    kind: SeriesKind
    name: str
    labels: tuple[tuple[str, str], ...] = ()  #: sorted


def series_key(kind: SeriesKind, name: str, labels: Mapping[str, str] | None = None) -> str:
    """Return the key of a series; `parse_key` is its inverse."""
    return json.dumps([kind.value, name, sorted((labels or {}).items())], separators=(",", ":"))


def parse_key(key: str) -> Series | None:
    """Parse a key; None if it is not a valid one."""
    try:
        kind, name, labels = json.loads(key)
        return Series(SeriesKind(kind), str(name), tuple((str(label), str(value)) for label, value in labels))
    except (ValueError, TypeError, RecursionError):
        return None


def escape_surrogates(text: str) -> str:
    r"""Return text that can be encoded as UTF-8: lone surrogates become escapes such as `\ud800`.

    Methods of `str` subclasses are not called.
    """
    return str.encode(text, errors="backslashreplace").decode()


def merge_series(files: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge the series of several processes."""
    merged: dict[str, float] = {}
    for numbers in files:
        for key, value in numbers.items():
            series = parse_key(key)
            if series is not None:
                merged[key] = value if key not in merged else _merged(series, key, merged, numbers)
    return merged


def _merged(series: Series, key: str, merged: dict[str, float], numbers: Mapping[str, float]) -> float:
    ours, theirs = merged[key], numbers[key]
    match series.kind:
        case SeriesKind.MIN:
            return min(ours, theirs)
        case SeriesKind.MAX | SeriesKind.SET_AT:
            return max(ours, theirs)
        case SeriesKind.GAUGE:
            set_at = series_key(SeriesKind.SET_AT, series.name, dict(series.labels))
            # A SET_AT follows its gauge in each file, so `merged` still has the one that belongs to `ours`.
            return theirs if numbers.get(set_at, 0.0) >= merged.get(set_at, 0.0) else ours
        case _:
            return ours + theirs


class Histogram:
    """A histogram in a metric file. Only one thread at a time may observe; if the file is full, nothing is counted."""

    def __init__(
        self,
        file: MetricFile,
        name: str,
        bounds: Sequence[float] = DURATION_BOUNDS_S,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        limits = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        keys = [series_key(SeriesKind.BUCKET, name, {**(labels or {}), "le": limit}) for limit in limits]
        indexes = [file.index_of(key) for key in [*keys, series_key(SeriesKind.SUM, name, labels)]]
        self._cells = file.cells
        self._bounds = tuple(bounds)
        self.indexes = tuple(index for index in indexes if index is not None)  #: cells of the buckets, then of the sum
        self.is_complete = len(self.indexes) == len(indexes)  #: every cell fit into the file

    def observe(self, value: float) -> None:
        """Count a value; upper bounds are inclusive."""
        if self.is_complete:
            self._cells[self.indexes[bisect_left(self._bounds, value)]] += 1
            self._cells[self.indexes[-1]] += value


def process_file(folder: str, index: int, pid: int) -> Path:
    """Return the path of a process's metric file; `index` is the index of its slot."""
    return Path(folder) / f"{index}-{pid}"


def read_folder(folder: Path) -> dict[str, float]:
    """Return the merged metrics of all processes of a replica, past ones included; empty if the folder is gone."""
    series: dict[str, float] = {}
    for _ in range(_ATTEMPTS):
        before = _read(folder)
        ended, moved = _parse(before)
        files = [path for path in _files(folder) if path.name not in moved]
        series = merge_series([ended, *map(read_metrics, files)])
        if _read(folder) == before:  # otherwise a file was compacted meanwhile
            break
    return series


def compact_ended(folder: Path, max_files: int = _MAX_ENDED_FILES) -> None:
    """Merge the files of processes that ended into one, if there are more than `max_files`.

    If several processes call this at once, one of them compacts. Raises: OSError.
    """
    if len(_ended(folder)) <= max_files:
        return
    with contextlib.suppress(LockHeldError), hold_lock(folder / _LOCK):
        paths = _ended(folder)
        ended, moved = _parse(_read(folder))
        fresh = [path for path in paths if path.name not in moved]
        series = merge_series([ended, *map(read_metrics, fresh)])
        _write(folder, series, [path.name for path in paths])  # from here on readers skip those files
        for path in paths:
            path.unlink(missing_ok=True)
        _write(folder, series, [])  # a later process may reuse a name


def _files(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):  # noqa: PTH208 - names only
            if name == SUPERVISOR or _PROCESS_FILE.fullmatch(name):
                yield folder / name


def _ended(folder: Path) -> list[Path]:
    return [path for path in _files(folder) if not _is_alive(path)]


def _is_alive(path: Path) -> bool:
    match = _PROCESS_FILE.fullmatch(path.name)
    if match is None:
        return True
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # another user's process has this pid now, so the file stays for the moment
    return True


def _read(folder: Path) -> bytes:
    try:
        return (folder / _ENDED).read_bytes()
    except OSError:
        return b""


def _write(folder: Path, series: dict[str, float], moved: list[str]) -> None:
    part = folder / f"{_ENDED}.part"
    part.write_text(json.dumps({"moved": moved, "series": series}))
    part.replace(folder / _ENDED)


def _parse(data: bytes) -> tuple[dict[str, float], frozenset[str]]:
    """Return the series, and the names of the files they were merged from."""
    if not data:
        return {}, frozenset()
    parsed = json.loads(data)
    return parsed["series"], frozenset(parsed["moved"])


class RequestRecorder:
    """Request counters and histograms of one process; without a metric file it only formats `Server-Timing`.

    Event-loop thread only, so that no cell has two writers.
    """

    def __init__(self, file: MetricFile | None) -> None:
        self._file = file
        self._codes: dict[int, int | None] = {}
        self._texts = _DurationTexts()
        self._of_copies: RequestRecorder | None = None
        histograms = []
        if file is not None:
            bounds = {"queue": DURATION_BOUNDS_S, "handler": FINE_BOUNDS_S, "duration": DURATION_BOUNDS_S}
            histograms = [Histogram(file, f"cortex_request_{name}_seconds", each) for name, each in bounds.items()]
            self._aborted = file.index_of(series_key(SeriesKind.COUNTER, ABORTED))
        self._is_counting = bool(histograms) and all(histogram.is_complete for histogram in histograms)
        if file is not None and self._is_counting:
            self._cells = file.cells
            # Inlined in `finish`: three calls of `observe` per request take twice as long.
            (self._queue, self._queue_sum), (self._handler, self._handler_sum), (self._duration, self._duration_sum) = (
                (histogram.indexes[:-1], histogram.indexes[-1]) for histogram in histograms
            )

    @property
    def of_copies(self) -> RequestRecorder:
        """Return the recorder of copies; without a file if it cannot be created."""
        if self._of_copies is None:
            file = None
            with contextlib.suppress(OSError):
                file = self._file and self._file.of_copies
            self._of_copies = RequestRecorder(file)
        return self._of_copies

    def finish(self, status: int, arrived_ns: int, batched_ns: int, started_ns: int, returned_ns: int) -> bytes:
        """Count a response that is about to be written, and return its `Server-Timing` header line.

        Times are monotonic ns, 0 for a step that the request did not reach: arrived at the gateway, began to wait for
        its batch, call started, user code returned. The parts, truncated to microseconds, add up to the total.
        """
        now_ns = time.monotonic_ns()
        arrived_ns = arrived_ns or now_ns
        total_ns = now_ns - arrived_ns
        if self._file is not None:
            self._count(status)
        if not started_ns:
            if self._is_counting:
                self._cells[self._duration[bisect_left(_BOUNDS_NS, total_ns)]] += 1
                self._cells[self._duration_sum] += total_ns * _NS
            text = self._texts[total_ns // 1000]
            return b"server-timing: queue;dur=%b, total;dur=%b\r\n" % (text, text)
        returned_ns = returned_ns or now_ns
        queue_ns, handler_ns = (batched_ns or started_ns) - arrived_ns, returned_ns - started_ns
        if self._is_counting:
            cells = self._cells
            cells[self._queue[bisect_left(_BOUNDS_NS, queue_ns)]] += 1
            cells[self._queue_sum] += queue_ns * _NS
            cells[self._handler[bisect_left(_FINE_BOUNDS_NS, handler_ns)]] += 1
            cells[self._handler_sum] += handler_ns * _NS
            cells[self._duration[bisect_left(_BOUNDS_NS, total_ns)]] += 1
            cells[self._duration_sum] += total_ns * _NS
        texts = self._texts
        queue, handler, encode = queue_ns // 1000, handler_ns // 1000, (now_ns - returned_ns) // 1000
        if not batched_ns:
            return b"server-timing: queue;dur=%b, handler;dur=%b, encode;dur=%b, total;dur=%b\r\n" % (
                texts[queue],
                texts[handler],
                texts[encode],
                texts[queue + handler + encode],
            )
        batch = (started_ns - batched_ns) // 1000
        return b"server-timing: queue;dur=%b, batch;dur=%b, handler;dur=%b, encode;dur=%b, total;dur=%b\r\n" % (
            texts[queue],
            texts[batch],
            texts[handler],
            texts[encode],
            texts[queue + batch + handler + encode],
        )

    def abort(self) -> None:
        """Count a response, counted by its status before, that will never be complete."""
        if self._file is not None and self._aborted is not None:
            self._file.cells[self._aborted] += 1

    def _count(self, status: int) -> None:
        assert self._file is not None
        try:
            index = self._codes[status]
        except KeyError:
            key = series_key(SeriesKind.COUNTER, REQUESTS, {"code": str(status)})
            index = self._codes[status] = self._file.index_of(key)
        if index is not None:
            self._file.cells[index] += 1


class _DurationTexts(dict[int, bytes]):
    """Durations in microseconds as text in milliseconds; cached, because formatting takes longer than a lookup."""

    def __missing__(self, microseconds: int) -> bytes:
        text = b"%d.%03d" % divmod(microseconds, 1000)
        if len(self) < _MAX_TEXTS:
            self[microseconds] = text
        return text


class BatchRecorder:
    """Batch histograms of one process."""

    def __init__(self, file: MetricFile | None) -> None:
        self._wait = Histogram(file, "cortex_batch_wait_seconds") if file is not None else None
        self._size = Histogram(file, "cortex_batch_size", SIZE_BOUNDS) if file is not None else None

    def record(self, size: int, waits_ns: list[int]) -> None:
        """Count a batch of `size` requests, and how long each of them waited for it."""
        if self._wait is not None and self._size is not None:
            self._size.observe(size)
            for wait_ns in waits_ns:
                self._wait.observe(wait_ns * _NS)
