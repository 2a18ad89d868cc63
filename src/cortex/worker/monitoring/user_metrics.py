"""The `metrics_client` of user code: the user's own metrics, in the metric file of the process.

It is thread-safe. A process that user code forks gets a metric file of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cortex.worker.monitoring.metrics import (
    FILE_BYTES,
    Histogram,
    MetricFile,
    SeriesKind,
    compact_ended,
    escape_surrogates,
    process_file,
    series_key,
)
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.spec import ReplicaSpec

#: Maximum number of combinations of name and tags per process; further ones are dropped.
MAX_SERIES = 1000
#: Part of the metric file that is reserved for cortex's own metrics.
RESERVED_FILE_BYTES = FILE_BYTES // 4
#: Longer names are rejected.
MAX_NAME_CHARACTERS = 200
#: Longer tag values are truncated.
MAX_TAG_CHARACTERS = 1000
#: Upper bounds of histogram buckets: 1, 2.5 and 5 of each power of ten.
BOUNDS = tuple(float(f"{digit}e{power}") for power in range(-4, 6) for digit in (1, 2.5, 5))

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_TAG = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_PREFIXES = ("cortex_", "istio_", "_")
#: Suffixes of the series that a histogram produces.
_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")
#: Maximum length of a value in an error message.
_SHOWN_CHARACTERS = 100
_RESERVED_TAGS = frozenset({"api", "le", "quantile"})

Tags = Mapping[str, object]


class MetricsClient:
    """Gauges, counters and histograms; the operator's `/metrics` shows them aggregated over all processes of the API.

    Without a file, values are discarded; `folder` and `index` determine the file of a forked process. Each call raises
    ValueError for a name, tag or value that Prometheus does not allow, and nothing else.
    """

    def __init__(self, file: MetricFile | None, folder: str = "", index: int = 0) -> None:
        self._file = file
        self._folder = folder
        self._index = index
        self._reset(os.getpid())

    def attach(self, file: MetricFile | None, index: int) -> None:
        """Record in `file` from now on, in a fork that became process `index`; call it before any other method."""
        self._file, self._index = file, index
        self._reset(os.getpid())

    def gauge(self, metric: str, value: float, tags: Tags | None = None) -> None:
        """Set a gauge; the aggregate is the value set last by any process."""
        number = _number(metric, value)
        with self._locked():
            cells = self._find("gauge", metric, tags)
            if isinstance(cells, _Gauge) and self._file is not None:
                self._file.cells[cells.value], self._file.cells[cells.set_at] = number, time.time()

    def increment(self, metric: str, value: float = 1, tags: Tags | None = None) -> None:
        """Increment a counter; the aggregate is the sum over all processes."""
        number = _number(metric, value)
        if number < 0:
            raise ValueError(
                f"{_metric(metric)}: a counter can't go down, so {_shown(value)} can't be added; use gauge()"
            )
        with self._locked():
            index = self._find("counter", metric, tags)
            if isinstance(index, int) and self._file is not None:
                self._file.cells[index] += number

    def histogram(self, metric: str, value: float, tags: Tags | None = None) -> None:
        """Observe a value in a histogram; the aggregate is the sum over all processes."""
        number = _number(metric, value)
        with self._locked():
            histogram = self._find("histogram", metric, tags)
            if isinstance(histogram, Histogram):
                histogram.observe(number)

    def _locked(self) -> contextlib.AbstractContextManager[bool]:
        """Return the lock, a new one after a fork: an inherited lock may be held by a thread that the fork lacks."""
        pid = os.getpid()
        if pid != self._pid:
            self._file = self._open(pid)
            self._reset(pid)
        return self._lock

    def _open(self, pid: int) -> MetricFile | None:
        if not self._folder:
            return None
        with contextlib.suppress(OSError, ValueError):  # there may be thousands of forks, which leave a file each
            compact_ended(Path(self._folder))
        with contextlib.suppress(OSError):
            return MetricFile(process_file(self._folder, self._index, pid))
        return None

    def _reset(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.RLock()  # `__str__` of a tag may record a metric itself
        self._series: dict[tuple[str, str, _TagItems], _Cells] = {}
        self._kinds: dict[str, str] = {}
        self._has_warned = False

    def _find(self, kind: str, metric: str, tags: Tags | None) -> _Cells | None:
        """Return the cells of a series, which is created if new; None if it is dropped. Raises: ValueError."""
        try:
            return self._series[kind, metric, tuple(tags.items()) if tags else ()]
        except Exception:  # a new series, or tag values that are not text, whose methods may raise anything
            metric = _checked_name(metric)
            labels = _labels(metric, tags)
            return self._series.get((kind, metric, tuple(labels.items()))) or self._create(kind, metric, labels)

    def _create(self, kind: str, metric: str, labels: Mapping[str, str]) -> _Cells | None:
        before = self._kinds.get(metric, kind)
        if before != kind:
            raise ValueError(f"metric {metric} is a {before} already; use another name for a {kind}")
        self._check_lines(kind, metric)
        if self._file is None:
            return None
        fits = (
            len(self._series) < MAX_SERIES
            and _size(kind, metric, labels) <= self._file.left_bytes - RESERVED_FILE_BYTES
        )
        made = self._add(self._file, kind, metric, labels) if fits else None
        if made is not None:
            self._kinds[metric] = kind
            self._series[kind, metric, tuple(labels.items())] = made
        elif not self._has_warned:
            self._has_warned = True
            write_log(
                f"metrics_client: {metric} with tags {dict(labels)} is dropped, and so are other new series: this "
                f"process uses too many combinations of names and tags (at most {MAX_SERIES}, fewer if tags are long)\n"
            )
        return made

    def _check_lines(self, kind: str, metric: str) -> None:
        """Reject a name that clashes with a series of a histogram. Raises: ValueError."""
        for suffix in _HISTOGRAM_SUFFIXES:
            base = metric.removesuffix(suffix)
            if base != metric and self._kinds.get(base) == "histogram":
                raise ValueError(f"metric {metric}: the histogram {base} has a line of this name; use another name")
            if kind == "histogram" and (taken := f"{metric}{suffix}") in self._kinds:
                raise ValueError(
                    f"metric {metric}: a histogram has a line {taken}, which is a {self._kinds[taken]} already; use "
                    "another name"
                )

    def _add(self, file: MetricFile, kind: str, metric: str, labels: Mapping[str, str]) -> _Cells | None:
        if kind == "histogram":
            return Histogram(file, metric, BOUNDS, labels)
        if kind == "counter":
            return file.index_of(series_key(SeriesKind.COUNTER, metric, labels))
        value = file.index_of(series_key(SeriesKind.GAUGE, metric, labels))  # SET_AT must follow it, for `merge_series`
        set_at = file.index_of(series_key(SeriesKind.SET_AT, metric, labels))
        return None if value is None or set_at is None else _Gauge(value, set_at)


class _Gauge(NamedTuple):
    value: int
    set_at: int


_Cells = int | _Gauge | Histogram
_TagItems = tuple[tuple[str, object], ...]


def metrics_client(spec: ReplicaSpec, index: int, file: MetricFile | None) -> MetricsClient:
    """Return the metrics client of process `index`."""
    return MetricsClient(file, spec.metrics_dir, index)


def _size(kind: str, metric: str, labels: Mapping[str, str]) -> int:
    """Return the maximum size of a series in the file, in bytes."""
    longest = len(series_key(SeriesKind.COUNTER, metric, {**labels, "le": "0.00025"})) + 3 * 8
    return longest * {"counter": 1, "gauge": 2, "histogram": len(BOUNDS) + 2}[kind]


def _number(metric: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{_metric(metric)}: the number is too large; 1.8e308 is the largest") from None
    except Exception:  # `__float__` of the value may raise anything
        raise ValueError(f"{_metric(metric)}: {_shown(value)} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{_metric(metric)}: {_shown(value)} is not a finite number")
    return number


def _checked_name(metric: object) -> str:
    """Return the name as plain text. Raises: ValueError."""
    if not isinstance(metric, str) or not _NAME.fullmatch(metric):
        raise ValueError(
            f"{_shown(metric)} is not the name of a metric: use letters, digits, `_` and `:`, and no digit at the start"
        )
    name = escape_surrogates(metric)
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"{_shown(name)} is too long for a name: {MAX_NAME_CHARACTERS} characters are the most")
    if name.startswith(_RESERVED_PREFIXES):
        raise ValueError(f"metric {name}: names that begin with cortex_, istio_ or _ are reserved; use another")
    return name


def _labels(metric: str, tags: Tags | None) -> dict[str, str]:
    """Return the tags as text, sorted. Raises: ValueError."""
    if tags is not None and not isinstance(tags, Mapping):
        raise ValueError(f'metric {metric}: tags must be a dictionary such as {{"model": "v2"}}, not {_shown(tags)}')
    labels = {}
    try:
        items: list[tuple[object, object]] = [] if tags is None else [(tag, value) for tag, value in tags.items()]
    except Exception as error:  # the mapping may be a class of the user
        raise ValueError(f"metric {metric}: the tags can't be read: {type(error).__name__}") from None
    for tag, value in items:
        if not isinstance(tag, str) or not _TAG.fullmatch(tag) or (name := escape_surrogates(tag)).startswith("__"):
            raise ValueError(f"metric {metric}: {_shown(tag)} is not the name of a tag: use letters, digits and `_`")
        if name in _RESERVED_TAGS:
            raise ValueError(f"metric {metric}: the tag {name!r} is reserved; use another name")
        try:
            labels[name] = escape_surrogates(str(value))[:MAX_TAG_CHARACTERS]
        except Exception as error:  # `__str__` of the value may raise anything
            kind = type(error).__name__
            raise ValueError(f"metric {metric}: the value of the tag {name!r} has no text: {kind}") from None
    return dict(sorted(labels.items()))


def _metric(metric: object) -> str:
    is_name = isinstance(metric, str) and _NAME.fullmatch(metric) and len(metric) <= MAX_NAME_CHARACTERS
    return f"metric {metric if is_name else _shown(metric)}"


def _shown(value: object) -> str:
    """Return a value for an error message; it may be huge, or its repr may raise."""
    try:
        text = repr(value)
    except Exception:
        return f"a value of the type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
