"""Names of the series of tracked predictions, and the buckets that sort numbers by size with a bounded error.

Buckets grow by a constant factor on both sides of zero, so that counts of several processes are merged by adding and a
quantile is known within `RELATIVE_ERROR`, whatever the numbers are.
"""

from __future__ import annotations

import math

from cortex.replica.series import SeriesKind, series_key

#: Of a quantile that is read from the buckets.
RELATIVE_ERROR = 0.01
#: Numbers smaller than this are counted as 0, larger ones than the other in the outermost bucket.
SMALLEST, LARGEST = 1e-12, 1e15

PREDICTIONS = "cortex_predictions_total"
UNTRACKED = "cortex_untracked_predictions_total"
VALUE = "cortex_prediction_value"
#: One series per bucket: too many to be shown, which is what the underscore says.
BUCKETS = "_prediction_bucket"

#: The class of all those that are not counted by name.
OTHER = "(other)"

COUNT_KEY = series_key(SeriesKind.COUNTER, PREDICTIONS)
UNTRACKED_KEY = series_key(SeriesKind.COUNTER, UNTRACKED)
SUM_KEY = series_key(SeriesKind.COUNTER, f"{VALUE}_sum")
MIN_KEY = series_key(SeriesKind.MIN, VALUE)
MAX_KEY = series_key(SeriesKind.MAX, VALUE)

_LOG_GROWTH = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_log = math.log  # found sooner: this is on the way of each prediction
_PER_LOG = 1 / _LOG_GROWTH
#: Makes numbers of positive values' buckets positive, those of negative values' negative, and leaves 0 to zero.
_OFFSET = 1 - math.floor(math.log(SMALLEST) * _PER_LOG)
_OUTERMOST = math.floor(math.log(LARGEST) * _PER_LOG) + _OFFSET


def class_key(name: str) -> str:
    """Return the key of a class's count."""
    return series_key(SeriesKind.COUNTER, PREDICTIONS, {"class": name})


def bucket_key(bucket: int) -> str:
    """Return the key of a bucket's count."""
    return series_key(SeriesKind.COUNTER, BUCKETS, {"bucket": str(bucket)})


def bucket_of(value: float) -> int:
    """Return the bucket of a finite number; buckets are ordered as their numbers are."""
    if SMALLEST <= value < LARGEST:
        return int(_log(value) * _PER_LOG + _OFFSET)
    if -LARGEST < value <= -SMALLEST:
        return -int(_log(-value) * _PER_LOG + _OFFSET)
    if -SMALLEST < value < SMALLEST:
        return 0
    return _OUTERMOST if value > 0 else -_OUTERMOST


def value_of(bucket: int) -> float:
    """Return the number that is at most `RELATIVE_ERROR` away from all numbers of a bucket."""
    if bucket == 0:
        return 0.0
    size = 2 * math.exp((abs(bucket) - _OFFSET + 1) * _LOG_GROWTH) / (math.exp(_LOG_GROWTH) + 1)
    return math.copysign(size, bucket)
