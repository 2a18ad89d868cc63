"""Disagreement of two revisions about the same requests: their predictions, joined by request id.

While a canary gets copies of all requests, the trackers of both revisions store their predictions, each process in a
ring file. Without a tracker, replicas store digests of their answers. Whatever one side lost is never counted: a
request that failed there, or a copy that was not made.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cortex.config.schema import TrackerConfig
from cortex.worker.monitoring.answers import answers_agree
from cortex.worker.monitoring.tracker import CLASSIFICATION, PredictionKind, read_predictions

#: Predictions of each revision that wait for the other one; the oldest are dropped.
MAX_WAITING = 100_000
#: Numbers disagree if they differ by more than this part of the larger one.
NUMBER_TOLERANCE = 0.01

_Predictions = dict[bytes, float | int]


class PairedPredictions:
    """Predictions of two revisions that have not been paired yet. Not thread-safe."""

    def __init__(self, kind: PredictionKind) -> None:
        self.kind = kind
        self._read: dict[Path, int] = {}  #: predictions of each file that were read or existed before
        self._old: _Predictions = {}
        self._new: _Predictions = {}

    def read(self, old: Iterable[Path], new: Iterable[Path]) -> tuple[int, int]:
        """Return the pairs since the last call, and how many of them disagree. Files that appear later count whole."""
        begins = not self._read
        self._add(self._old, old, begins)
        self._add(self._new, new, begins)
        return self._join()

    def _add(self, waiting: _Predictions, paths: Iterable[Path], begins: bool) -> None:
        for path in paths:
            count, predictions = read_predictions(path, self.kind, self._read.get(path, 0))
            self._read[path] = count
            if not begins:
                waiting |= predictions
        for request in list(waiting)[: max(0, len(waiting) - MAX_WAITING)]:
            del waiting[request]

    def _join(self) -> tuple[int, int]:
        both = self._old.keys() & self._new.keys()
        different = sum(disagree(self._old.pop(request), self._new.pop(request), self.kind) for request in both)
        return len(both), different


def disagree(old: float, new: float, kind: PredictionKind) -> bool:
    """Return whether two predictions differ: classes and answers at all, numbers by more than `NUMBER_TOLERANCE`."""
    if kind is PredictionKind.CLASS:
        return old != new
    if kind is PredictionKind.ANSWER:
        return not answers_agree(int(old), int(new))
    return abs(old - new) > NUMBER_TOLERANCE * max(abs(old), abs(new))


def kind_of(tracker: TrackerConfig | None) -> PredictionKind:
    """Return what replicas with this tracker store."""
    if tracker is None:
        return PredictionKind.ANSWER
    return PredictionKind.CLASS if tracker.model_type == CLASSIFICATION else PredictionKind.NUMBER
