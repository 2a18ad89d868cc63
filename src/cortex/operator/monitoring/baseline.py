"""Reads what an API's predictions are compared with from a file of its project. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from cortex.config.project_rules import MIN_BASELINE
from cortex.errors import InputError
from cortex.replica.prediction_series import bucket_of
from cortex.replica.series import encodable


def parse_baseline(data: bytes, counts_classes: bool) -> Mapping[str, int]:
    """Return the counts by category, as `drift` takes them.

    `data` is JSON: a list of predictions, or, of classes, an object of counts by name. Raises: InputError.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON: {error}") from None
    if isinstance(value, dict) and counts_classes:
        counts = {encodable(name): _count(name, count) for name, count in value.items()}
    elif isinstance(value, list):
        category = _class if counts_classes else _bucket
        counts = dict(Counter(category(place, item) for place, item in enumerate(value)))
    else:
        also = ", or an object of counts by class" if counts_classes else ""
        raise InputError(f"it must be a list of predictions{also}")
    counts = {name: count for name, count in counts.items() if count}
    if (known := sum(counts.values())) < MIN_BASELINE:
        raise InputError(f"it has {known} predictions; at least {MIN_BASELINE} are needed")
    return counts


def _count(name: str, count: Any) -> int:
    if type(count) is not int or count < 0:
        raise InputError(f"the count of {json.dumps(name)} must be an integer, and not negative (got {_shown(count)})")
    return count


def _class(place: int, item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int):
        raise InputError(f"item {place} must be a class: a string or an integer (got {_shown(item)})")
    return encodable(str(item))


def _bucket(place: int, item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise InputError(f"item {place} must be a number (got {_shown(item)})")
    try:
        number = float(item)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"item {place} must be a finite number (got {_shown(item)})")
    return str(bucket_of(number))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"
