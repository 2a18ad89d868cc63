"""Anytime-valid evidence about the difference of two rates, such as the error rates of two revisions. Pure.

The traffic of both revisions is compared window by window. In a window, `na` requests of the old revision have a
property `a` times (an error, for example) with an unknown rate θa, and `nb` requests of the new one `b` times, with a
rate θb. A claim is a half-plane of these rates: "θb - θa is at most the margin", or "at least the margin". The rates
may change from window to window, so bursts and the time of day cancel out, as long as the claim holds in each window.

Evidence against a claim is a product of likelihood ratios, one factor for each window:

    P(counts | alternative) / P(counts | projection)

The alternative is a pair of rates that violates the claim, chosen before the window's outcomes are known. The
projection is the pair within the claim that is closest to it, in the sense of na KL(θa) + nb KL(θb). Because the claim
is convex, each factor has an expectation of at most 1 for all rates within the claim [1]. So by Ville's inequality,
the probability that the product *ever* reaches 1/α is at most α if the claim is true. Anyone may look at any time, and
stop when the evidence is enough. A mixture over several alternatives keeps this property, and needs no assumption
about the size of a difference.

Requests of a window are assumed to be independent, given their rates. Where outcomes come in clusters of up to φ equal
ones, as if a crash fails all requests in a process, factors to the power of 1/φ keep the property (Jensen's
inequality).

A count may have a fraction: a request that has the property with a known probability counts as that probability.
The logarithm of a factor is linear in the counts, so this is its mean over the draws, and the property above is kept
(Jensen's inequality again).

Outcomes also come in bursts: one process pauses, or its connection to a database hangs for a while. So evidence is
collected in blocks of time, and the logarithm grows by at most `cap` in each one. A burst alone then decides nothing,
however many requests it hits, and the property above is kept: the smaller of a supermartingale and a constant is one.

A revision may be good for hours, and worse from then on: under more load, or because it leaks memory. The product would
first have to make up for all that it lost until then. So evidence is also collected from later points in time on, each
with a weight: a weighted sum of such products keeps the property above if the weights add up to 1.

[1] R. Turner, A. Ly, P. Grünwald: Generic E-variables for exact sequential k-sample tests that allow for optional
stopping. Journal of Statistical Planning and Inference 230, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

#: Differences beyond the margin that the alternatives have, as rates.
EFFECTS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512)
#: Rates of alternatives stay away from 0 and 1 by this much, because a single count would rule such a rate out.
_MIN_RATE = 1e-6
#: Weight of the newest window in the estimate of the old revision's rate, at least.
_NEWEST = 0.02
#: Precision of projected rates, relative to their distance from 0 and 1, and steps that suffice in any case.
_PRECISION, _MAX_STEPS = 1e-9, 60


class CountWindow(NamedTuple):
    """Counts of one window: `a` of `na` requests of the old revision, and `b` of `nb` of the new one."""

    na: int
    a: float
    nb: int
    b: float


class Claim(IntEnum):
    """Claim about the difference of the rates, new minus old."""

    AT_MOST = 1  #: the margin or less
    AT_LEAST = -1  #: the margin or more


@dataclass
class Evidence:
    """Evidence against one claim, over all windows observed so far."""

    claim: Claim
    margin: float  #: -1 to 1
    cluster: float = 1.0  #: φ: largest number of requests that fail together
    rate: float = 0.01  #: expected rate of the old revision; the first guess comes from its past
    known: float = 1.0  #: requests behind `rate`
    logs: list[float] = field(default_factory=lambda: [0.0] * len(EFFECTS))  #: one for each alternative
    cap: float | None = None  #: growth of `logs` in one block, at most; None: any
    base: list[float] = field(default_factory=lambda: [0.0] * len(EFFECTS))  #: `logs` when the block began

    @property
    def log(self) -> float:
        """Logarithm of the evidence; the claim is refuted at confidence 1 - α if it is at least ln(1/α)."""
        return log_mean([self._capped(index) for index in range(len(self.logs))])

    def blocks_until(self, needed: float) -> int:
        """Return the number of blocks, with the present one, that the evidence needs at least to reach `needed`."""
        if self.cap is None or self.log >= needed:
            return 0
        return math.ceil((needed - log_mean(self.base)) / self.cap - 1e-6)

    def begin_block(self) -> None:
        """Begin the next block of time."""
        self.base = [self._capped(index) for index in range(len(self.logs))]
        self.logs = list(self.base)

    def restart(self) -> None:
        """Drop the evidence, but not what is known of the rate."""
        self.logs = [0.0] * len(EFFECTS)
        self.base = list(self.logs)

    def collect_anew(self, weight: float) -> None:
        """Begin a block from which on evidence is also collected anew; the evidence from the start has the weight 1."""
        self.begin_block()
        self.base = [log_sum([each, math.log(weight)]) for each in self.base]
        self.logs = list(self.base)

    def observe(self, window: CountWindow) -> None:
        """Add one window. A window in which a revision has no request adds nothing to the evidence."""
        if window.na and window.nb:
            for index, effect in enumerate(EFFECTS):
                alternative = self._alternative(effect)
                if alternative is not None:
                    self.logs[index] += (
                        _log_ratio(window, alternative, self._project(window, alternative)) / self.cluster
                    )
        self._learn(window)

    def growth(self, window: CountWindow) -> float:
        """Return by how much the logarithm grows per request of the new revision if traffic goes on as in `window`.

        0 if the rates do not violate the claim.
        """
        if not (window.na and window.nb):
            return 0.0
        rates = (window.a / window.na, window.b / window.nb)
        if (rates[1] - rates[0] - self.margin) * self.claim.value <= 0:
            return 0.0
        closest = self._project(window, rates)
        information = window.na * _divergence(rates[0], closest[0]) + window.nb * _divergence(rates[1], closest[1])
        return information / window.nb / self.cluster

    def _capped(self, index: int) -> float:
        return self.logs[index] if self.cap is None else min(self.logs[index], self.base[index] + self.cap)

    def _alternative(self, effect: float) -> tuple[float, float] | None:
        old = min(max(self.rate, _MIN_RATE), 1 - _MIN_RATE)
        new = old + self.margin + effect * self.claim.value
        if _MIN_RATE <= new <= 1 - _MIN_RATE:
            return old, new
        # The most that the rate can differ is a useful alternative too: a new revision without any error, for example.
        limit = _MIN_RATE if new < _MIN_RATE else 1 - _MIN_RATE
        return (old, limit) if (limit - old - self.margin) * self.claim.value > 0 else None

    def _project(self, window: CountWindow, rates: tuple[float, float]) -> tuple[float, float]:
        """Return the rates on the boundary of the claim, new - old = margin, that are closest to `rates`."""
        old, new = rates
        low, high = max(0.0, -self.margin), min(1.0, 1.0 - self.margin)
        if self.margin == 0:
            both = (window.na * old + window.nb * new) / (window.na + window.nb)
            return both, both

        tiny = (high - low) * 1e-12
        low, high = low + tiny, high - tiny
        rate = min(max((window.na * old + window.nb * (new - self.margin)) / (window.na + window.nb), low), high)
        # Newton's method for the root of the slope, which is monotonic; a step out of the bracket halves it instead.
        for _ in range(_MAX_STEPS):
            other = rate + self.margin
            slope = window.na * (rate - old) / (rate * (1 - rate)) + window.nb * (other - new) / (other * (1 - other))
            low, high = (low, rate) if slope > 0 else (rate, high)
            steepness = window.na * _curvature(old, rate) + window.nb * _curvature(new, other)
            before, rate = rate, rate - slope / steepness
            if not low < rate < high:
                rate = (low + high) / 2
            if abs(rate - before) <= _PRECISION * min(before, 1 - before, other, 1 - other):
                break
        return rate, rate + self.margin

    def _learn(self, window: CountWindow) -> None:
        self.known += window.na
        if window.na:
            self.rate += max(window.na / self.known, _NEWEST) * (window.a / window.na - self.rate)


def _log_ratio(window: CountWindow, alternative: tuple[float, float], within: tuple[float, float]) -> float:
    return _log_part(window.a, window.na, alternative[0], within[0]) + _log_part(
        window.b, window.nb, alternative[1], within[1]
    )


def _log_part(count: float, of: int, rate: float, other: float) -> float:
    """Return ln(P(count | rate) / P(count | other)) of a binomial count."""
    yes = count * math.log(rate / other) if count else 0.0
    no = (of - count) * math.log((1 - rate) / (1 - other)) if of > count else 0.0
    return yes + no


def _divergence(rate: float, other: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli variables."""
    yes = rate * math.log(rate / other) if rate else 0.0
    no = (1 - rate) * math.log((1 - rate) / (1 - other)) if rate < 1 else 0.0
    return yes + no


def _curvature(rate: float, other: float) -> float:
    """Return the second derivative of `_divergence` by `other`."""
    return rate / other**2 + (1 - rate) / (1 - other) ** 2


def log_mean(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of evidence given as logarithms, which is evidence against a common claim."""
    return log_sum(logs) - math.log(len(logs))


def log_sum(logs: Sequence[float]) -> float:
    """Return the logarithm of the sum of numbers given as logarithms."""
    top = max(logs)
    return top + math.log(sum(math.exp(each - top) for each in logs))
