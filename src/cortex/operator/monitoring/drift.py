"""Whether an API predicts otherwise than it did: windows of its predictions are compared with a baseline. All is pure.

The figure is the population stability index, the sum of (p - q) ln(p / q) over bins. Where nothing has changed, it is
(1/n + 1/m) times a chi-square number with one degree of freedom less than there are bins, n and m being the sizes of
window and baseline; this gives the threshold that is exceeded by chance at a stated rate. Counts come by category: the
name of a class, or the number of a bucket (`replica/prediction_series.py`) as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cortex.operator.monitoring.chi_square import chi_square_quantile

Counts = Mapping[str, int]
#: Of one bin: in the baseline, in the window.
Pair = tuple[int, int]

#: Numbers are sorted into so many bins of equal shares.
NUMBER_BINS = 10
#: As many classes have a bin of their own at most.
CLASS_BINS = 30
#: Of each bin, the smaller of the two samples is to be expected to have as many.
MIN_COUNT = 5
#: The law holds for large samples only: thresholds are those of a rate so much smaller than the stated one.
_MARGIN = 0.5
#: Windows that are remembered.
KEPT_WINDOWS = 24


@dataclass(frozen=True)
class Window:
    """One comparison."""

    at: float  #: when it was complete, UNIX seconds
    count: int  #: predictions in it
    psi: float
    threshold: float

    @property
    def is_drift(self) -> bool:
        """Tell whether chance does not explain the figure."""
        return self.psi > self.threshold


@dataclass(frozen=True)
class Settings:
    """What windows are compared with what."""

    counts_classes: bool
    window: int  #: predictions
    false_alarm_rate: float  #: per window


@dataclass(frozen=True)
class Drift:
    """What is known of one model's predictions so far; it crosses restarts as JSON."""

    model: str  #: of what, so that another model begins anew
    mark: Counts  #: the totals when the present window began
    baseline: Counts  #: empty until it is known
    problem: str = ""  #: why the baseline is not the one that was asked for
    compared: int = 0  #: windows
    drifted: int = 0  #: windows that were drift
    windows: tuple[Window, ...] = ()  #: the last ones, oldest first

    @property
    def last(self) -> Window | None:
        """The newest comparison."""
        return self.windows[-1] if self.windows else None

    def to_data(self) -> dict[str, Any]:
        """Return what becomes JSON; `from_data` is its inverse."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Drift:
        """Read what `to_data` returned."""
        return cls(**{**data, "windows": tuple(Window(**window) for window in data["windows"])})


def begin(model: str, totals: Counts, given: Counts, problem: str = "") -> Drift:
    """Begin with the next prediction; `given` is the baseline, or empty where the first window becomes it."""
    return Drift(model, dict(totals), dict(given), problem)


def observe(drift: Drift, totals: Counts, settings: Settings, now: float) -> Drift:
    """Look at the totals of all predictions; the same object where no window has become complete.

    A window ends at the first look that finds enough predictions, so it may have more.
    """
    if any(totals.get(category, 0) < count for category, count in drift.mark.items()):
        return replace(drift, mark=dict(totals))  # counts were lost, with the memory of the machine
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


def compare(baseline: Counts, counts: Counts, settings: Settings) -> tuple[float, float]:
    """Return the index of `counts` against `baseline`, and the threshold that chance exceeds at the stated rate."""
    m, n = sum(baseline.values()), sum(counts.values())
    both = {name: (baseline.get(name, 0), counts.get(name, 0)) for name in {*baseline, *counts}}
    bins = _bins(both, settings, min(m, n) / (m + n), min(m, n) / (m + n))
    if len(bins) < 2:
        # All of the smaller sample is too little beside the larger one, though it may be all that is different. Each
        # sample then counts for a half; twice as much is asked for, as chance has more to say in the smaller one.
        bins = _bins(both, settings, min(m, n) / m / 4, min(m, n) / n / 4)
    if len(bins) < 2:
        return 0.0, 0.0
    threshold = chi_square_quantile(_MARGIN * settings.false_alarm_rate, len(bins) - 1) * (1 / n + 1 / m)
    return _index(bins, m, n), threshold


def _index(bins: Iterable[Pair], m: int, n: int) -> float:
    # Half a prediction more in each bin of the smaller sample, and as large a share of the other: an empty bin has no
    # logarithm, and small ones would exceed the threshold too often.
    bins = list(bins)
    half = 0.5 / min(m, n)
    whole = 1 + half * len(bins)
    total = 0.0
    for before, after in bins:
        p, q = (after / n + half) / whole, (before / m + half) / whole
        total += (p - q) * math.log(p / q)
    return total


# Bins are chosen by both samples together: by the baseline alone, classes that it has too many of by chance would be
# chosen more often, and the window would seem to lack them.


def _bins(both: Mapping[str, Pair], settings: Settings, before: float, after: float) -> list[Pair]:
    """Return (baseline, window) per bin.

    Per prediction of the baseline in a bin, `before` are expected in the smaller sample; per one of the window `after`.
    """

    def expected(pair: Pair) -> float:
        return pair[0] * before + pair[1] * after

    if settings.counts_classes:
        return _by_class(both, expected)
    return _by_size(both, expected, max(MIN_COUNT, expected(_sum(both.values())) / NUMBER_BINS))


def _by_class(both: Mapping[str, Pair], expected: Callable[[Pair], float]) -> list[Pair]:
    """Return a bin for each of the largest classes, and one for the rest."""
    ranked = sorted(both.items(), key=lambda item: (-expected(item[1]), item[0]))
    own = [pair for _, pair in ranked[:CLASS_BINS] if expected(pair) >= MIN_COUNT]
    rest = _sum(pair for _, pair in ranked[len(own) :])
    if own and expected(rest) < MIN_COUNT:
        rest = _sum((rest, own.pop()))
    return [*own, rest]


def _by_size(both: Mapping[str, Pair], expected: Callable[[Pair], float], enough: float) -> list[Pair]:
    """Return bins from the smallest numbers to the largest."""
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
