"""Disagreement: predictions of two revisions about the same requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.operator.canary.disagreement import MAX_WAITING, PairedPredictions, disagree
from cortex.worker.monitoring.tracker import RING_SIZE, PredictionKind, PredictionRing, class_hash

CLASS, NUMBER = PredictionKind.CLASS, PredictionKind.NUMBER


@pytest.mark.parametrize(
    ("kind", "old", "new", "expected"),
    [
        (CLASS, class_hash("cat"), class_hash("cat"), False),
        (CLASS, class_hash("cat"), class_hash("dog"), True),
        (NUMBER, 1.0, 1.0099, False),
        (NUMBER, 1.0, 1.02, True),
        (NUMBER, -1.0, 1.0, True),
        (NUMBER, 0.0, 0.0, False),
    ],
)
def test_classes_differ_at_all_and_numbers_by_more_than_the_tolerance(
    kind: PredictionKind, old: float, new: float, expected: bool
) -> None:
    assert disagree(old, new, kind) is expected


def test_predictions_are_paired_by_request_in_any_order(tmp_path: Path) -> None:
    old, new = PredictionRing(tmp_path / "old", CLASS), PredictionRing(tmp_path / "new", CLASS)
    files = [tmp_path / "old" / "0"], [tmp_path / "new" / "0"]
    for ring in (old, new):
        ring.append(b"before", 1)
    subject = PairedPredictions(CLASS)
    assert subject.read(*files) == (0, 0)  # from before the comparison
    for request in (b"a", b"b", b"lost"):
        old.append(request, 1)
    new.append(b"b", 2)
    assert subject.read(*files) == (1, 1)
    new.append(b"a", 1)
    new.append(b"failed", 1)
    assert subject.read(*files) == (1, 0)
    late = PredictionRing(tmp_path / "late", CLASS)
    late.append(b"lost", 2)
    assert subject.read(files[0], [*files[1], tmp_path / "late" / "0"]) == (1, 1)
    assert subject.read(*files) == (0, 0)


def test_predictions_that_wait_are_bounded(tmp_path: Path) -> None:
    old, new = PredictionRing(tmp_path / "old", CLASS), PredictionRing(tmp_path / "new", CLASS)
    files = [tmp_path / "old" / "0"], [tmp_path / "new" / "0"]
    subject = PairedPredictions(CLASS)
    subject.read(*files)
    number = 0
    while number <= MAX_WAITING:
        for _ in range(RING_SIZE // 4):
            old.append(b"%d" % number, 1)
            number += 1
        assert subject.read(*files) == (0, 0)
    for request in (b"0", b"%d" % (number - 1)):
        new.append(request, 1)
    assert subject.read(*files) == (1, 0)
