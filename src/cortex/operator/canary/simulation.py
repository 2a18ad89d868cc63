"""Simulate how soon a regression of a new version is noticed in the steps of a trial, or a good one promoted. Pure.

Requests arrive as in a trace. Each one goes to the new version with the probability of the present step, and has the
observed property, such as an error or a latency above the threshold, with the rate of its version. `evidence` judges
the counts, as strictly as a `Judge` without predictions.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from cortex.operator.autoscaling.traffic import Trace
from cortex.operator.canary.evidence import CountWindow
from cortex.operator.canary.judge import (
    BLOCK_S,
    PROPERTIES,
    SEGMENT_S,
    SLOW_TOGETHER,
    Comparison,
    evidence_per_block,
    needed_evidence,
    segment_weight,
)

#: Quantile of the old version's latency above which requests count as slow.
SLOW_QUANTILE = 0.99
#: Means below this are drawn exactly.
_EXACT_MEAN = 30.0


@dataclass(frozen=True)
class Regression:
    """Rates of one property in both versions, and the tolerated difference."""

    old_rate: float
    new_rate: float
    margin: float
    cluster: float = 1.0  #: requests that have the property together

    @property
    def is_worse(self) -> bool:
        """Return whether the new version exceeds the margin."""
        return self.new_rate - self.old_rate > self.margin


@dataclass(frozen=True)
class CanaryPlan:
    """Settings of a simulated trial."""

    steps: tuple[float, ...]  #: shares of the requests that it gets, above 0 and below 1
    min_requests: int = 100  #: that it answers in each step
    confidence: float = 0.99
    window_s: float = 10.0


@dataclass(frozen=True)
class SimulatedVerdict:
    """End of one simulated trial."""

    worse: bool  #: it was found worse; else not worse in any step
    time_s: float
    requests: int  #: to the new version


@dataclass(frozen=True)
class TrialSummary:
    """Summary of many simulated trials. Quantiles are over the trials with this verdict, None if there is none."""

    trials: int
    worse: int
    not_worse: int
    p50_s: float | None  #: time to the verdict that is right
    p90_s: float | None
    p50_requests: int | None

    @property
    def undecided(self) -> int:
        """Number of trials without a verdict at the end of the trace."""
        return self.trials - self.worse - self.not_worse


def slow_rates(increase: float, margin: float, cv: float) -> Regression:
    """Return the regression of a latency that grows by the factor 1 + `increase`, where 1 + `margin` is tolerated.

    Latencies have a log-normal distribution with the coefficient of variation `cv`. A request of the old version is
    slow if it exceeds the old version's p99, one of the new version if it exceeds 1 + `margin` times as much.
    """
    normal = NormalDist()
    deviation = math.sqrt(math.log(1 + cv * cv))
    limit = normal.inv_cdf(SLOW_QUANTILE) + math.log((1 + margin) / (1 + increase)) / deviation
    return Regression(1 - SLOW_QUANTILE, 1 - normal.cdf(limit), 0.0, SLOW_TOGETHER)


def simulate_canary(regression: Regression, plan: CanaryPlan, trace: Trace, trials: int, seed: int) -> TrialSummary:
    """Run trials on the same trace, each with other random numbers. Deterministic for a seed."""
    generator = random.Random(seed)
    verdicts = [_trial(regression, plan, trace, generator) for _ in range(trials)]
    found = [verdict for verdict in verdicts if verdict is not None]
    right = sorted(verdict.time_s for verdict in found if verdict.worse == regression.is_worse)
    requests = sorted(verdict.requests for verdict in found if verdict.worse == regression.is_worse)
    worse = sum(verdict.worse for verdict in found)
    return TrialSummary(
        trials=trials,
        worse=worse,
        not_worse=len(found) - worse,
        p50_s=_quantile(right, 0.5),
        p90_s=_quantile(right, 0.9),
        p50_requests=requests[len(requests) // 2] if requests else None,
    )


def _trial(regression: Regression, plan: CanaryPlan, trace: Trace, generator: random.Random) -> SimulatedVerdict | None:
    worse, not_worse = needed_evidence(PROPERTIES, plan.confidence)
    compared = Comparison.at(regression.margin, regression.cluster, regression.old_rate, evidence_per_block(worse))
    time_s, requests, block_began_s = 0.0, 0, 0.0
    step, step_requests, segments, segment_began_s = 0, 0, 0, 0.0
    while time_s < trace.duration_s:
        if time_s - block_began_s >= BLOCK_S:
            block_began_s = time_s
            if time_s - segment_began_s >= SEGMENT_S:
                segments, segment_began_s = segments + 1, time_s
                compared.begin_segment(segment_weight(segments), is_step=False)
            compared.begin_block()
        share = plan.steps[step]
        end_s = min(time_s + plan.window_s, trace.duration_s)
        arrivals = trace.mean_rate(time_s, end_s) * (end_s - time_s)
        na, nb = _poisson(generator, arrivals * (1 - share)), _poisson(generator, arrivals * share)
        window = CountWindow(
            na, _binomial(generator, na, regression.old_rate), nb, _binomial(generator, nb, regression.new_rate)
        )
        compared.observe(window)
        time_s, requests, step_requests = end_s, requests + nb, step_requests + nb
        if compared.within.log >= worse:
            return SimulatedVerdict(True, time_s, requests)
        if compared.beyond.log >= not_worse and step_requests >= plan.min_requests:
            step, step_requests = step + 1, 0
            if step == len(plan.steps):
                return SimulatedVerdict(False, time_s, requests)
            segments, segment_began_s, block_began_s = segments + 1, time_s, time_s
            compared.begin_segment(segment_weight(segments), is_step=True)
    return None


def _quantile(values: list[float], at: float) -> float | None:
    return values[min(len(values) - 1, int(at * len(values)))] if values else None


def _poisson(generator: random.Random, mean: float) -> int:
    if mean > _EXACT_MEAN:
        return max(0, round(generator.gauss(mean, math.sqrt(mean))))
    count, product, limit = 0, generator.random(), math.exp(-mean)
    while product > limit:
        count += 1
        product *= generator.random()
    return count


def _binomial(generator: random.Random, of: int, rate: float) -> int:
    if rate > 0.5:
        return of - _binomial(generator, of, 1 - rate)
    if of * rate > _EXACT_MEAN:
        return min(of, max(0, round(generator.gauss(of * rate, math.sqrt(of * rate * (1 - rate))))))
    if rate <= 0:
        return 0
    # The distances between successes have a geometric distribution.
    count, position, scale = 0, 0, math.log1p(-rate)
    while True:
        position += 1 + int(math.log(1 - generator.random()) / scale)
        if position > of:
            return count
        count += 1
