"""Simulate the trials of a canary: the time until a new version is rolled back or promoted at given traffic.

Run it with `python -m benchmarks.canary_trials`. Requests arrive as in a trace. Each one goes to the new version with
the probability of the present step, and has the observed property, such as an error or a latency above the threshold,
with the rate of its version. `evidence` judges the counts, as strictly as a `Judge` without predictions.
"""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from cortex.cli.commands.projects.simulate import add_traffic, read_traffic
from cortex.cli.output import Console, format_duration
from cortex.config.values import fraction, percentage
from cortex.errors import CortexError
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

_HEADERS = ["new version", "rolled back", "promoted", "undecided", "time (half)", "time (90 %)", "its requests (half)"]
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


# The command.


def main(words: Sequence[str] | None = None) -> None:
    """Simulate, and print how the trials ended; deterministic for a seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.canary_trials", description=__doc__)
    add_traffic(parser)
    parser.add_argument(
        "--steps",
        type=_steps,
        default="1%,10%,50%",
        help="shares of requests to the new version, as in update_strategy.canary; default: %(default)s",
    )
    parser.add_argument(
        "--error-rate", type=_share, default="1%", help="share of requests that fail; default: %(default)s"
    )
    parser.add_argument(
        "--errors", type=_share, metavar="PERCENT", help="share of requests to the new version that fail"
    )
    parser.add_argument(
        "--latency", type=_share, metavar="PERCENT", help="increase of the latency with the new version, such as 30%%"
    )
    parser.add_argument(
        "--max-error-increase",
        type=_share,
        default="0.5%",
        help="tolerated increase of --error-rate; default: %(default)s",
    )
    parser.add_argument(
        "--max-latency-increase", type=_share, default="25%", help="tolerated increase of the p99; default: %(default)s"
    )
    parser.add_argument(
        "--confidence",
        type=_confidence,
        default="0.99",
        help="probability that a good version is not rolled back; default: %(default)s",
    )
    parser.add_argument("--trials", type=int, default=100, help="number of simulated trials; default: %(default)s")
    parser.add_argument("--service-cv", type=float, default=0.5, help="coefficient of variation of the latency")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random numbers; default: %(default)s")
    arguments = parser.parse_args(words)
    if arguments.trials < 1:
        parser.error(f"--trials must be at least 1 (got {arguments.trials})")
    try:
        trace = read_traffic(arguments)
    except CortexError as error:
        parser.error(str(error))
    # Trials of days have as many windows as those of an hour: a longer window decides later by its length.
    plan = CanaryPlan(arguments.steps, confidence=arguments.confidence, window_s=max(5.0, trace.duration_s / 2000))
    rows = [
        (name, simulate_canary(regression, plan, trace, arguments.trials, arguments.seed))
        for name, regression in _regressions(arguments)
    ]
    console = Console.of(os.environ)
    console.table(_HEADERS, _cells(rows))
    shown = f"{trace.requests:,.0f} requests in {format_duration(trace.duration_s)}"
    steps = " → ".join(f"{100 * step:.3g} %" for step in plan.steps)
    console.line(f"\n{shown}; steps: {steps}; {arguments.trials} trials each")
    console.flush()


def _cells(rows: list[tuple[str, TrialSummary]]) -> list[list[str]]:
    return [
        [
            name,
            _part(found.worse, found),
            _part(found.not_worse, found),
            _part(found.undecided, found),
            "-" if found.p50_s is None else format_duration(found.p50_s),
            "-" if found.p90_s is None else format_duration(found.p90_s),
            "-" if found.p50_requests is None else f"{found.p50_requests:,}",
        ]
        for name, found in rows
    ]


def _regressions(arguments: argparse.Namespace) -> list[tuple[str, Regression]]:
    rate, margin = arguments.error_rate, arguments.max_error_increase
    tolerated, cv = arguments.max_latency_increase, max(arguments.service_cv, 0.05)
    found = [("errors as before", Regression(rate, rate, margin))]
    if arguments.errors is not None:
        found.append((f"errors {rate:.3%} → {arguments.errors:.3%}", Regression(rate, arguments.errors, margin)))
    found.append(("latency as before", slow_rates(0.0, tolerated, cv)))
    if arguments.latency is not None:
        found.append((f"latency +{arguments.latency:.0%}", slow_rates(arguments.latency, tolerated, cv)))
    return found


def _part(count: int, of: TrialSummary) -> str:
    return f"{100 * count / of.trials:.0f} %"


def _share(text: str) -> float:
    try:
        share = fraction(percentage(at_most=1000)(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (such as 10%)") from None
    return share


def _steps(text: str) -> tuple[float, ...]:
    steps = tuple(map(_share, text.split(",")))
    if not all(0 < step < 1 for step in steps):
        raise argparse.ArgumentTypeError(f"must be above 0 and below 100% (got {text})")
    return steps


def _confidence(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0.5 <= value < 1):
        raise argparse.ArgumentTypeError(f"must be at least 0.5 and below 1 (got {text})")
    return value


if __name__ == "__main__":
    main()
