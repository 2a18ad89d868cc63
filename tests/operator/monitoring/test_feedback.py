"""Strict parsing of feedback and baselines; scores of predictions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortex.errors import InputError
from cortex.operator.monitoring.drift import parse_baseline
from cortex.operator.monitoring.feedback import as_text, parse_feedback, score
from cortex.state.queries.predictions import MAX_ERROR, GroundTruth
from cortex.worker.monitoring.tracker import bucket_of, class_hash

HOUR = 487_000
ID = f"{HOUR * 3_600_000 + 5}-7-1"


@pytest.mark.parametrize(
    "body",
    [
        b'{"request_id": "a", "truth": 7}',
        b'[{"request_id": "a", "truth": "7"}]',
        b'{"request_id": "a", "truth": "x"}\n\n{"request_id": "a", "truth": "7", "more": 1}\n',
    ],
    ids=["object", "list", "lines"],
)
def test_accepts_an_object_a_list_or_lines(body: bytes) -> None:
    assert parse_feedback(body, counts_classes=True) == {"a": "7"}


def test_escapes_text_that_utf_8_can_not_encode() -> None:
    body = rb'{"request_id": "\ud800", "truth": "\udfff"}'
    baseline = rb'{"\ud800": 500}'

    assert parse_feedback(body, counts_classes=True) == {r"\ud800": r"\udfff"}
    assert parse_baseline(baseline, counts_classes=True) == {r"\ud800": 500}


@pytest.mark.parametrize(
    ("body", "counts_classes", "message"),
    [
        (b"", True, "the body is empty"),
        (b"[]", True, "the body is empty"),
        (b'{"request_id": "a", "truth": 1}\n{', True, "line 2: it is not JSON"),
        (b'{"request_id": "a", "truth": 1}\n3', True, "line 2: it must be an object with the keys"),
        (b'[{"request_id": 3, "truth": 1}]', True, "item 0: it must be an object with the keys"),
        (b'{"request_id": "a"}', True, "body: it must be an object with the keys"),
        (b'{"request_id": "a", "truth": true}', True, "the truth must be a class"),
        (b'{"request_id": "a", "truth": 0.5}', True, "the truth must be a class"),
        (b'{"request_id": "a", "truth": "0.5"}', False, "the truth must be a number"),
        (b'{"request_id": "a", "truth": NaN}', False, "the truth must be a number"),
        (b'{"request_id": "a", "truth": 1' + b"0" * 400 + b"}", False, "the truth must be a number"),
        (b"[" * 100_000, False, "line 1: it is not JSON"),
    ],
    ids=range(12),
)
def test_rejects_invalid_feedback(body: bytes, counts_classes: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_feedback(body, counts_classes)


def test_scores_classes_as_right_or_wrong() -> None:
    predictions = {ID: as_text(class_hash("cat")), "x": as_text(class_hash("dog"))}

    scored = score({ID: "cat", "x": "cat", "unknown": "cat"}, predictions, now=lambda: (HOUR + 3) * 3600.0)

    assert scored == [GroundTruth(ID, HOUR, predictions[ID], 0.0), GroundTruth("x", HOUR + 3, predictions["x"], 1.0)]


def test_scores_numbers_by_their_error() -> None:
    assert score({ID: 2.5}, {ID: as_text(2.0)}, now=lambda: 0.0) == [GroundTruth(ID, HOUR, "2.0", -0.5)]
    assert score({ID: -1.7e308}, {ID: as_text(1.7e308)}, now=lambda: 0.0)[0].error == MAX_ERROR


@pytest.mark.parametrize(
    ("value", "counts_classes", "counts"),
    [
        ({"cat": 60, "dog": 50, "none": 0}, True, {"cat": 60, "dog": 50}),
        (["cat", 7, "7"] * 40, True, {"cat": 40, "7": 80}),
        ([1.5, -2, 0] * 40, False, {str(bucket_of(1.5)): 40, str(bucket_of(-2)): 40, "0": 40}),
    ],
    ids=["counts", "classes", "numbers"],
)
def test_accepts_counts_or_predictions_as_a_baseline(value: Any, counts_classes: bool, counts: dict[str, int]) -> None:
    assert parse_baseline(json.dumps(value).encode(), counts_classes) == counts


@pytest.mark.parametrize(
    ("value", "counts_classes", "message"),
    [
        ({"cat": 99}, True, "it has 99 predictions; at least 100 are needed"),
        ({"cat": 0.5}, True, 'the count of "cat" must be a non-negative integer \\(got 0.5\\)'),
        ({"cat": -1}, True, 'the count of "cat" must be'),
        ({"1": 500}, False, "it must be a list of predictions$"),
        ("cat", True, "it must be a list of predictions, or an object of counts by class"),
        ([1, 2.5], True, "item 1 must be a class: a string or an integer \\(got 2.5\\)"),
        ([1, "2"], False, "item 1 must be a number"),
        ([1, float("inf")], False, "item 1 must be a finite number"),
        ([10**400], False, "item 0 must be a finite number"),
        ([True], False, "item 0 must be a number"),
    ],
    ids=range(10),
)
def test_rejects_an_invalid_baseline(value: Any, counts_classes: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_baseline(json.dumps(value).encode(), counts_classes)


def test_rejects_a_baseline_that_is_no_json() -> None:
    with pytest.raises(InputError, match="it is not JSON"):
        parse_baseline(b"\xff\xfe", counts_classes=True)
