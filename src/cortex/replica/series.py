"""Names of the series in files of metrics, and histograms made of them. What is merged how is told by the kind.

A key is a JSON array: kind, name, labels. Buckets of a histogram are counted one by one, not cumulated, so files of
several processes are merged by adding.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from cortex.replica.metric_file import MetricFile

#: Upper bounds in seconds, of times that requests take.
SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
#: Upper bounds of the number of requests in one call.
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class SeriesKind(StrEnum):
    """How the values that several processes have of one series become one."""

    COUNTER = "counter"  #: added
    GAUGE = "gauge"  #: the one that was set last, by the SET_AT of the same name and labels
    SET_AT = "set_at"  #: when the gauge was set, UNIX seconds
    BUCKET = "bucket"  #: added; the label `le` is the bucket's upper bound
    SUM = "sum"  #: added; of all values in the buckets of the same name
    MIN = "min"
    MAX = "max"


class Series(NamedTuple):
    """A key, taken apart."""

    kind: SeriesKind
    name: str
    labels: tuple[tuple[str, str], ...] = ()  #: sorted


def series_key(kind: SeriesKind, name: str, labels: Mapping[str, str] | None = None) -> str:
    """Return the key of a series; `parse_key` is its inverse."""
    return json.dumps([kind.value, name, sorted((labels or {}).items())], separators=(",", ":"))


def parse_key(key: str) -> Series | None:
    """Take a key apart; None if it is none of ours."""
    try:
        kind, name, labels = json.loads(key)
        return Series(SeriesKind(kind), str(name), tuple((str(label), str(value)) for label, value in labels))
    except (ValueError, TypeError, RecursionError):
        return None


def encodable(text: str) -> str:
    r"""Return the text as one that UTF-8 can say: halves of surrogate pairs become `\ud800` and the like.

    Of a subclass only the characters count: none of its methods is called.
    """
    return str.encode(text, errors="backslashreplace").decode()


def merge(files: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Make one set of numbers of those of several processes."""
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
            moment = series_key(SeriesKind.SET_AT, series.name, dict(series.labels))
            # A moment comes after its gauge in each file, so `merged` still has the one of `ours`.
            return theirs if numbers.get(moment, 0.0) >= merged.get(moment, 0.0) else ours
        case _:
            return ours + theirs


class Histogram:
    """Counts values by bucket. One thread at a time may observe; where the file is full, nothing is counted."""

    def __init__(
        self, file: MetricFile, name: str, bounds: Sequence[float] = SECONDS, labels: Mapping[str, str] | None = None
    ) -> None:
        limits = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        keys = [series_key(SeriesKind.BUCKET, name, {**(labels or {}), "le": limit}) for limit in limits]
        indexes = [file.index_of(key) for key in [*keys, series_key(SeriesKind.SUM, name, labels)]]
        self._cells = file.cells
        self._bounds = tuple(bounds)
        self.indexes = tuple(index for index in indexes if index is not None)  #: cells of the buckets, and of the sum
        self.is_whole = len(self.indexes) == len(indexes)  #: the file had room

    def observe(self, value: float) -> None:
        """Count a value; one that is a bucket's bound belongs to that bucket."""
        if self.is_whole:
            self._cells[self.indexes[bisect_left(self._bounds, value)]] += 1
            self._cells[self.indexes[-1]] += value
