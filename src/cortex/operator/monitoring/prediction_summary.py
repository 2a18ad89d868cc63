"""JSON summary of an API's predictions, drift and accuracy, as `cortex get` shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite, sqrt

from cortex.config.schema import TrackerConfig
from cortex.operator.monitoring.drift import Drift, Window
from cortex.payloads.json_object import Json
from cortex.state.queries.predictions import ErrorSums
from cortex.worker.monitoring.metrics import escape_surrogates, parse_key
from cortex.worker.monitoring.tracker import (
    BUCKETS,
    CLASSIFICATION,
    COUNT_KEY,
    MAX_KEY,
    MIN_KEY,
    PREDICTIONS,
    RELATIVE_ERROR,
    SUM_KEY,
    UNTRACKED_KEY,
    bucket_value,
)

#: Maximum of classes shown, the most frequent first.
SHOWN_CLASSES = 20
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_HOUR_S = 3600

Numbers = Mapping[str, float]


def categories(numbers: Numbers, counts_classes: bool) -> dict[str, int]:
    """Return the number of predictions by class or by bucket."""
    name, label = (PREDICTIONS, "class") if counts_classes else (BUCKETS, "bucket")
    found: dict[str, int] = {}
    for key, value in numbers.items():
        series = parse_key(key) if name in key else None
        if series is not None and series.name == name and value > 0:
            for text in (escape_surrogates(text) for of, text in series.labels if of == label):
                found[text] = found.get(text, 0) + int(value)
    return found


def summarize(numbers: Numbers, tracker: TrackerConfig) -> Json:
    """Summarize the predictions since the API was deployed."""
    counts_classes = tracker.model_type == CLASSIFICATION
    counts = categories(numbers, counts_classes)
    summary: Json = {
        "key": tracker.key,
        "model_type": tracker.model_type,
        "predictions": sum(counts.values()),
        "untracked": int(numbers.get(UNTRACKED_KEY, 0)),
    }
    if not counts_classes:
        return summary | {"regression": _regression(numbers, counts)}
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return summary | {"classes": dict(ranked[:SHOWN_CLASSES]), "class_count": len(ranked)}


def _regression(numbers: Numbers, counts: Mapping[str, int]) -> Json | None:
    count = int(numbers.get(COUNT_KEY, 0))
    if not count or not counts:
        return None
    low, high = numbers[MIN_KEY], numbers[MAX_KEY]
    return {
        "count": count,
        "min": low,
        "max": high,
        "avg": _finite(numbers.get(SUM_KEY, 0.0) / count),
        "quantiles": {str(q): min(max(quantile(counts, q), low), high) for q in QUANTILES},
        "relative_error": RELATIVE_ERROR,
    }


def quantile(counts: Mapping[str, int], q: float) -> float:
    """Return the `q` quantile, with a relative error of up to `RELATIVE_ERROR`, from counts per bucket."""
    ranked = sorted((int(bucket), count) for bucket, count in counts.items())
    left = q * sum(count for _, count in ranked)
    for bucket, count in ranked:
        left -= count
        if left <= 0:
            return bucket_value(bucket)
    return bucket_value(ranked[-1][0])


def describe_drift(drift: Drift, pending: int, tracker: TrackerConfig) -> Json:
    """Describe the drift state; `pending` predictions belong to the current, incomplete window."""
    last = drift.last
    return {
        "baseline": tracker.baseline or "the first predictions",
        "problem": drift.problem,
        "baseline_count": sum(drift.baseline.values()),
        "window": tracker.window,
        "pending": pending,
        "false_alarm_rate": tracker.false_alarm_rate,
        "is_drift": last.is_drift if last else None,
        "psi": last.psi if last else None,
        "threshold": last.threshold if last else None,
        "windows": drift.compared,
        "windows_with_drift": drift.drifted,
        "last_windows": [_window(window) for window in drift.windows],
    }


def _window(window: Window) -> Json:
    return {
        "at": datetime.fromtimestamp(window.at, UTC).isoformat(),
        "count": window.count,
        "psi": window.psi,
        "threshold": window.threshold,
        "is_drift": window.is_drift,
    }


def describe_truth(hours: Mapping[int, ErrorSums], tracker: TrackerConfig) -> Json | None:
    """Return accuracy or errors of the predictions with feedback; None without feedback."""
    if not hours:
        return None
    figures = _accuracy if tracker.model_type == CLASSIFICATION else _errors
    by_hour = [
        {"hour": datetime.fromtimestamp(hour * _HOUR_S, UTC).isoformat(), **figures(sums)}
        for hour, sums in hours.items()
    ]
    return {**figures(sum(hours.values(), ErrorSums())), "hours": by_hour}


def _accuracy(sums: ErrorSums) -> Json:
    return {"count": sums.told, "accuracy": 1 - sums.absolute / sums.told}


def _errors(sums: ErrorSums) -> Json:
    return {
        "count": sums.told,
        "mean_error": _finite(sums.error / sums.told),
        "mean_absolute_error": _finite(sums.absolute / sums.told),
        "root_mean_squared_error": _finite(sqrt(max(0.0, sums.squared / sums.told))),
    }


def _finite(value: float) -> float | None:
    """Return the value, or None for an overflow: JSON has no infinity."""
    return value if isfinite(value) else None
