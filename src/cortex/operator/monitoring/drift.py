"""Drift detection: compares windows of an API's predictions with a baseline. Pure.

The statistic is the population stability index (PSI), the sum of (p - q) ln(p / q) over bins. Without drift it is
distributed as (1/n + 1/m) times a chi-square variable with (bins - 1) degrees of freedom, for a window of n and a
baseline of m predictions. This gives the threshold that chance exceeds at a given rate. Counts are by category: the
name of a class, or the number of a bucket (`worker/monitoring/tracker.py`) as text.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

from cortex.config.rules.project_rules import MIN_BASELINE
from cortex.errors import InputError
from cortex.worker.monitoring.metrics import escape_surrogates
from cortex.worker.monitoring.tracker import bucket_of

Counts = Mapping[str, int]
#: Counts of one bin: (in the baseline, in the window).
Pair = tuple[int, int]

#: Bins of numbers, with equal shares.
NUMBER_BINS = 10
#: Maximum of classes with a bin of their own.
CLASS_BINS = 30
#: Minimum of the expected count per bin in the smaller sample.
MIN_COUNT = 5
#: Factor on the false alarm rate, because the chi-square approximation is exact for large samples only.
_MARGIN = 0.5
#: Windows kept in the history.
KEPT_WINDOWS = 24


@dataclass(frozen=True)
class Window:
    """Comparison of one window with the baseline."""

    at: float  #: UNIX time at its end
    count: int  #: predictions in it
    psi: float
    threshold: float

    @property
    def is_drift(self) -> bool:
        """Return True if the index exceeds what chance explains."""
        return self.psi > self.threshold


@dataclass(frozen=True)
class DriftSettings:
    """Parameters of the comparison."""

    counts_classes: bool  #: of classes, not numbers
    window: int  #: minimum of predictions per window
    false_alarm_rate: float  #: per window


@dataclass(frozen=True)
class Drift:
    """State of drift detection for one model, stored as JSON.

    empty baseline ──first window──▶ baseline ──each further window──▶ compared (+ drifted)
    """

    model: str  #: identifies the model; another one starts with a new state
    mark: Counts  #: totals at the start of the current window
    baseline: Counts  #: empty until known
    problem: str = ""  #: why the configured baseline is not used
    compared: int = 0  #: number of windows compared
    drifted: int = 0  #: number of windows with drift
    windows: tuple[Window, ...] = ()  #: latest windows, oldest first

    @property
    def last(self) -> Window | None:
        """The latest window."""
        return self.windows[-1] if self.windows else None

    def to_data(self) -> dict[str, Any]:
        """Return JSON data; `from_data` is the inverse."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Drift:
        """Return the state in `data`, as returned by `to_data`."""
        return cls(**{**data, "windows": tuple(Window(**window) for window in data["windows"])})


def begin(model: str, totals: Counts, given: Counts, problem: str = "") -> Drift:
    """Return the initial state at `totals`; with an empty `given` baseline, the first window becomes the baseline."""
    return Drift(model, dict(totals), dict(given), problem)


def observe(drift: Drift, totals: Counts, settings: DriftSettings, now: float) -> Drift:
    """Return the state after the totals of all predictions; the same object if no window is complete.

    A window ends at the first call with enough predictions, so it may have more.
    """
    if any(totals.get(category, 0) < count for category, count in drift.mark.items()):
        return replace(drift, mark=dict(totals))  # counters were reset, as by a reboot
    counts = {name: more for name, count in totals.items() if (more := count - drift.mark.get(name, 0)) > 0}
    size = sum(counts.values())
    if size < settings.window:
        return drift
    if not drift.baseline:
        return replace(drift, mark=dict(totals), baseline=counts)
    psi, threshold = compare(drift.baseline, counts, settings)
    window = Window(now, size, psi, threshold)
    return replace(
        drift,
        mark=dict(totals),
        compared=drift.compared + 1,
        drifted=drift.drifted + window.is_drift,
        windows=(*drift.windows, window)[-KEPT_WINDOWS:],
    )


def compare(baseline: Counts, counts: Counts, settings: DriftSettings) -> tuple[float, float]:
    """Return the PSI of `counts` against `baseline`, and the threshold that chance exceeds at the false alarm rate."""
    m, n = sum(baseline.values()), sum(counts.values())
    both = {name: (baseline.get(name, 0), counts.get(name, 0)) for name in {*baseline, *counts}}
    bins = _bins(both, settings, min(m, n) / (m + n), min(m, n) / (m + n))
    if len(bins) < 2:
        # The smaller sample is negligible beside the larger one, although it may differ completely. Weight both samples
        # equally, and require twice the count, because the smaller sample varies more.
        bins = _bins(both, settings, min(m, n) / m / 4, min(m, n) / n / 4)
    if len(bins) < 2:
        return 0.0, 0.0
    threshold = chi_square_quantile(_MARGIN * settings.false_alarm_rate, len(bins) - 1) * (1 / n + 1 / m)
    return _index(bins, m, n), threshold


def _index(bins: Iterable[Pair], m: int, n: int) -> float:
    # Add half a prediction to each bin of the smaller sample, and the same share to the other: an empty bin has no
    # logarithm, and small bins would exceed the threshold too often.
    bins = list(bins)
    half = 0.5 / min(m, n)
    whole = 1 + half * len(bins)
    total = 0.0
    for before, after in bins:
        p, q = (after / n + half) / whole, (before / m + half) / whole
        total += (p - q) * math.log(p / q)
    return total


# Bins are chosen from both samples together. Chosen from the baseline alone, they would favour classes that it has too
# many of by chance, which the window would then seem to lack.


def _bins(both: Mapping[str, Pair], settings: DriftSettings, before: float, after: float) -> list[Pair]:
    """Return (baseline, window) per bin.

    `before` and `after` are the predictions expected in the smaller sample per prediction of baseline and window.
    """

    def expected(pair: Pair) -> float:
        return pair[0] * before + pair[1] * after

    if settings.counts_classes:
        return _by_class(both, expected)
    return _by_size(both, expected, max(MIN_COUNT, expected(_sum(both.values())) / NUMBER_BINS))


def _by_class(both: Mapping[str, Pair], expected: Callable[[Pair], float]) -> list[Pair]:
    """Return one bin for each of the largest classes, and one for the rest."""
    ranked = sorted(both.items(), key=lambda item: (-expected(item[1]), item[0]))
    own = [pair for _, pair in ranked[:CLASS_BINS] if expected(pair) >= MIN_COUNT]
    rest = _sum(pair for _, pair in ranked[len(own) :])
    if own and expected(rest) < MIN_COUNT:
        rest = _sum((rest, own.pop()))
    return [*own, rest]


def _by_size(both: Mapping[str, Pair], expected: Callable[[Pair], float], enough: float) -> list[Pair]:
    """Return bins in order of the numbers."""
    bins, rest = [], (0, 0)
    for _, pair in sorted(both.items(), key=lambda item: int(item[0])):
        rest = _sum((rest, pair))
        if expected(rest) >= enough:
            bins.append(rest)
            rest = (0, 0)
    if bins and expected(rest) < enough / 2:
        rest = _sum((rest, bins.pop()))
    return [*bins, rest]


def _sum(pairs: Iterable[Pair]) -> Pair:
    before, after = 0, 0
    for pair in pairs:
        before, after = before + pair[0], after + pair[1]
    return before, after


# Baseline files.


def parse_baseline(data: bytes, counts_classes: bool) -> Mapping[str, int]:
    """Return the counts by category in a baseline file.

    `data` is JSON: a list of predictions or, for classes, an object of counts by name. Raises: InputError.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON: {error}") from None
    if isinstance(value, dict) and counts_classes:
        counts = {escape_surrogates(name): _count(name, count) for name, count in value.items()}
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
        raise InputError(f"the count of {json.dumps(name)} must be a non-negative integer (got {_shown(count)})")
    return count


def _class(place: int, item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int):
        raise InputError(f"item {place} must be a class: a string or an integer (got {_shown(item)})")
    return escape_surrogates(str(item))


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


def chi_square_quantile(tail: float, degrees: int) -> float:
    """Return the value that a chi-square variable exceeds with probability `tail` (0 to 1, both excluded).

    The approximation of Wilson and Hilferty (1931). For tails below 1 % and few degrees it is a few percent too high,
    so that false alarms are rarer than requested.
    """
    spread = 2 / (9 * degrees)
    deviations = -NormalDist().inv_cdf(max(tail, sys.float_info.min))
    return degrees * max(0.0, 1 - spread + deviations * math.sqrt(spread)) ** 3
