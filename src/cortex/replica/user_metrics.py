"""The `metrics_client` of user code: numbers under names of the user's own, in the process's file of metrics.

Any thread may call it, and so may a process that the user's code forks, which gets a file of its own. It must not know
what becomes of the numbers.
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

from cortex.replica.errors import write_log
from cortex.replica.metric_file import FILE_BYTES, MetricFile
from cortex.replica.metric_folder import gather_ended, process_file
from cortex.replica.series import Histogram, SeriesKind, encodable, series_key
from cortex.replica.spec import ReplicaSpec

#: Combinations of name and tags that one process may use; others are dropped.
MAX_SERIES = 1000
#: So much of the file is not for them: what cortex itself counts must find room, however long tags are.
KEPT_BYTES = FILE_BYTES // 4
#: A longer name is refused.
MAX_NAME_CHARACTERS = 200
#: A longer value of a tag is cut off.
MAX_TAG_CHARACTERS = 1000
#: Upper bounds of the buckets of histograms, whatever they measure: 1, 2.5 and 5 of each power of ten.
BOUNDS = tuple(float(f"{digit}e{power}") for power in range(-4, 6) for digit in (1, 2.5, 5))

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_TAG = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_PREFIXES = ("cortex_", "istio_", "_")
#: What a histogram adds to its name, a line each.
_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")
#: Of a value in a message.
_SHOWN_CHARACTERS = 100
_RESERVED_TAGS = frozenset({"api", "le", "quantile"})

Tags = Mapping[str, object]


class MetricsClient:
    """Sets, counts and observes numbers; `/metrics` of the operator shows their sum over all processes of the API.

    Without a file it takes everything and keeps nothing; `folder` and `index` say where a fork has its file. Each call
    raises ValueError for a name, tag or value that Prometheus would not take. Nothing else ever fails.
    """

    def __init__(self, file: MetricFile | None, folder: str = "", index: int = 0) -> None:
        self._file = file
        self._folder = folder
        self._index = index
        self._forget(os.getpid())

    def gauge(self, metric: str, value: float, tags: Tags | None = None) -> None:
        """Set a number; of several processes, the one that set it last counts."""
        number = _number(metric, value)
        with self._locked():
            cells = self._find("gauge", metric, tags)
            if isinstance(cells, _Gauge) and self._file is not None:
                self._file.cells[cells.value], self._file.cells[cells.set_at] = number, time.time()

    def increment(self, metric: str, value: float = 1, tags: Tags | None = None) -> None:
        """Add to a number that only grows; all processes add up."""
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
        """Count a value by its size; all processes add up."""
        number = _number(metric, value)
        with self._locked():
            histogram = self._find("histogram", metric, tags)
            if isinstance(histogram, Histogram):
                histogram.observe(number)

    def _locked(self) -> contextlib.AbstractContextManager[bool]:
        """Return the lock of this process: one that a fork inherits may be held by a thread that it does not have."""
        pid = os.getpid()
        if pid != self._pid:
            self._file = self._open(pid)
            self._forget(pid)
        return self._lock

    def _open(self, pid: int) -> MetricFile | None:
        if not self._folder:
            return None
        with contextlib.suppress(OSError, ValueError):  # forks may come by the thousand, and leave a file each
            gather_ended(Path(self._folder))
        with contextlib.suppress(OSError):
            return MetricFile(process_file(self._folder, self._index, pid))
        return None

    def _forget(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.RLock()  # a tag's `__str__` may count something too
        self._series: dict[tuple[str, str, _TagItems], _Cells] = {}
        self._kinds: dict[str, str] = {}
        self._told = False

    def _find(self, kind: str, metric: str, tags: Tags | None) -> _Cells | None:
        """Return where a series is, made if it is new; None if it is not kept. Raises: ValueError."""
        try:
            return self._series[kind, metric, tuple(tags.items()) if tags else ()]
        except Exception:  # new, or with values that are no text yet, whose own methods may raise anything
            metric = _checked_name(metric)
            labels = _labels(metric, tags)
            return self._series.get((kind, metric, tuple(labels.items()))) or self._make(kind, metric, labels)

    def _make(self, kind: str, metric: str, labels: Mapping[str, str]) -> _Cells | None:
        before = self._kinds.get(metric, kind)
        if before != kind:
            raise ValueError(f"metric {metric} is a {before} already; use another name for a {kind}")
        self._check_lines(kind, metric)
        if self._file is None:
            return None
        fits = len(self._series) < MAX_SERIES and _size(kind, metric, labels) <= self._file.left_bytes - KEPT_BYTES
        made = self._add(self._file, kind, metric, labels) if fits else None
        if made is not None:
            self._kinds[metric] = kind
            self._series[kind, metric, tuple(labels.items())] = made
        elif not self._told:
            self._told = True
            write_log(
                f"metrics_client: {metric} with tags {dict(labels)} is not kept, nor are others that are new: this "
                f"process uses too many combinations of names and tags (at most {MAX_SERIES}, fewer of long tags)\n"
            )
        return made

    def _check_lines(self, kind: str, metric: str) -> None:
        """Refuse a name that would be shown twice, as a number and as a line of a histogram. Raises: ValueError."""
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
        value = file.index_of(series_key(SeriesKind.GAUGE, metric, labels))  # its moment comes after it, for `merge`
        set_at = file.index_of(series_key(SeriesKind.SET_AT, metric, labels))
        return None if value is None or set_at is None else _Gauge(value, set_at)


class _Gauge:
    __slots__ = ("set_at", "value")

    def __init__(self, value: int, set_at: int) -> None:
        self.value = value
        self.set_at = set_at


_Cells = int | _Gauge | Histogram
_TagItems = tuple[tuple[str, object], ...]


def metrics_client(spec: ReplicaSpec, index: int, file: MetricFile | None) -> MetricsClient:
    """Return the client of process `index`, which writes to the process's file."""
    return MetricsClient(file, spec.metrics_dir, index)


def _size(kind: str, metric: str, labels: Mapping[str, str]) -> int:
    """Return what a series takes of the file in bytes, at most."""
    longest = len(series_key(SeriesKind.COUNTER, metric, {**labels, "le": "0.00025"})) + 3 * 8
    return longest * {"counter": 1, "gauge": 2, "histogram": len(BOUNDS) + 2}[kind]


def _number(metric: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{_metric(metric)}: the number is too large; 1.8e308 is the largest") from None
    except Exception:  # the value's own `__float__` may raise anything
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
    name = encodable(metric)
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"{_shown(name)} is too long for a name: {MAX_NAME_CHARACTERS} characters are the most")
    if name.startswith(_RESERVED_PREFIXES):
        raise ValueError(f"metric {name}: names that begin with cortex_, istio_ or _ are not the user's; use another")
    return name


def _labels(metric: str, tags: Tags | None) -> dict[str, str]:
    """Return the tags as text, sorted. Raises: ValueError."""
    if tags is not None and not isinstance(tags, Mapping):
        raise ValueError(f'metric {metric}: tags must be a dictionary such as {{"model": "v2"}}, not {_shown(tags)}')
    labels = {}
    for tag, value in _items(metric, tags):
        if not isinstance(tag, str) or not _TAG.fullmatch(tag) or (name := encodable(tag)).startswith("__"):
            raise ValueError(f"metric {metric}: {_shown(tag)} is not the name of a tag: use letters, digits and `_`")
        if name in _RESERVED_TAGS:
            raise ValueError(f"metric {metric}: the tag {name!r} is not the user's; use another name")
        labels[name] = _text(metric, name, value)
    return dict(sorted(labels.items()))


def _items(metric: str, tags: Tags | None) -> list[tuple[object, object]]:
    try:
        return [] if tags is None else [(tag, value) for tag, value in tags.items()]
    except Exception as error:  # of a mapping of the user's own
        raise ValueError(f"metric {metric}: the tags can't be read: {type(error).__name__}") from None


def _text(metric: str, tag: str, value: object) -> str:
    try:
        return encodable(str(value))[:MAX_TAG_CHARACTERS]
    except Exception as error:  # of the value's own `__str__`
        raise ValueError(f"metric {metric}: the value of the tag {tag!r} has no text: {type(error).__name__}") from None


def _metric(metric: object) -> str:
    is_name = isinstance(metric, str) and _NAME.fullmatch(metric) and len(metric) <= MAX_NAME_CHARACTERS
    return f"metric {metric if is_name else _shown(metric)}"


def _shown(value: object) -> str:
    """Return what a message says of a value, which may be huge, or raise when it is shown."""
    try:
        text = repr(value)
    except Exception:
        return f"a value of the type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
