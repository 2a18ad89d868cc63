"""Feedback: true values of earlier predictions, parsed and compared with the predictions. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cortex.errors import InputError
from cortex.state.queries.predictions import MAX_ERROR, GroundTruth
from cortex.worker.monitoring.metrics import escape_surrogates
from cortex.worker.monitoring.tracker import class_hash

#: Maximum size of one body.
MAX_FEEDBACK_BYTES = 32 * 1024 * 1024
_MS_PER_HOUR = 3_600_000
#: Request ids start with the time of arrival, in milliseconds of UNIX time.
_TIME_DIGITS = 13

#: True values by request id: names of classes, or numbers.
Truths = Mapping[str, str | float]


def parse_feedback(body: bytes, counts_classes: bool) -> Truths:
    """Return the true values by request id; the last one of each request counts.

    `body` is an object `{"request_id", "truth"}`, a list of such, or one such object per line.
    Raises: InputError with the line or item.
    """
    truths: dict[str, str | float] = {}
    for place, item in _items(body):
        if not isinstance(item, dict) or not isinstance(item.get("request_id"), str) or "truth" not in item:
            raise InputError(f'{place}: it must be an object with the keys "request_id" (a string) and "truth"')
        truths[escape_surrogates(item["request_id"])] = _truth(place, item["truth"], counts_classes)
    if not truths:
        raise InputError('the body is empty; post {"request_id": …, "truth": …}, one such object per line')
    return truths


def _items(body: bytes) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(body)
    except (ValueError, RecursionError):
        yield from _lines(body)
        return
    yield from (((f"item {n}", item) for n, item in enumerate(whole)) if isinstance(whole, list) else [("body", whole)])


def _lines(body: bytes) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(body.splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"line {number}: it is not JSON: {error}") from None


def _truth(place: str, value: Any, counts_classes: bool) -> str | float:
    if counts_classes:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise InputError(f"{place}: the truth must be a class: a string or an integer")
        return escape_surrogates(str(value))  # like the tracker's names of classes
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise InputError(f"{place}: the truth must be a number")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def as_text(prediction: float) -> str:
    """Return the stored form of a prediction: the hash of a class (an int), or a number."""
    return f"{prediction:016x}" if isinstance(prediction, int) else repr(prediction)


def score(truths: Truths, predictions: Mapping[str, str], now: Callable[[], float]) -> list[GroundTruth]:
    """Compare the truths with `predictions` (by request id, in the form of `as_text`); skip those without one."""
    return [
        GroundTruth(request_id, _hour(request_id, now), predictions[request_id], _error(predictions[request_id], truth))
        for request_id, truth in truths.items()
        if request_id in predictions
    ]


def _error(prediction: str, truth: str | float) -> float:
    if isinstance(truth, str):
        return 0.0 if as_text(class_hash(truth)) == prediction else 1.0
    return min(max(float(prediction) - truth, -MAX_ERROR), MAX_ERROR)


def _hour(request_id: str, now: Callable[[], float]) -> int:
    digits = request_id[:_TIME_DIGITS]
    ms = int(digits) if len(digits) == _TIME_DIGITS and digits.isascii() and digits.isdigit() else int(now() * 1000)
    return ms // _MS_PER_HOUR
