"""`cortex simulate --canary`: estimate the time until a new version is rolled back or promoted at given traffic."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

from cortex.cli.output import Json, Table, format_duration
from cortex.cli.session import Session
from cortex.config.values import fraction, percentage
from cortex.errors import UsageError
from cortex.operator.autoscaling.traffic import Trace
from cortex.operator.canary.simulation import (
    CanaryPlan,
    Regression,
    TrialSummary,
    simulate_canary,
    slow_rates,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that concern canaries."""
    canary = parser.add_argument_group("canaries")
    canary.add_argument(
        "--canary",
        action="store_true",
        help="simulate how soon a new version is rolled back or promoted, instead of autoscaling",
    )
    canary.add_argument(
        "--steps",
        type=_steps,
        default="1%,10%,50%",
        help="shares of requests to the new version, as in update_strategy.canary; default: %(default)s",
    )
    canary.add_argument(
        "--error-rate", type=_share, default="1%", help="share of requests that fail; default: %(default)s"
    )
    canary.add_argument(
        "--errors", type=_share, metavar="PERCENT", help="share of requests to the new version that fail"
    )
    canary.add_argument(
        "--latency", type=_share, metavar="PERCENT", help="increase of the latency with the new version, such as 30%%"
    )
    canary.add_argument(
        "--max-error-increase",
        type=_share,
        default="0.5%",
        help="tolerated increase of --error-rate; default: %(default)s",
    )
    canary.add_argument(
        "--max-latency-increase", type=_share, default="25%", help="tolerated increase of the p99; default: %(default)s"
    )
    canary.add_argument(
        "--confidence",
        type=_confidence,
        default="0.99",
        help="probability that a good version is not rolled back; default: %(default)s",
    )
    canary.add_argument("--trials", type=int, default=100, help="number of simulated trials; default: %(default)s")


def run(arguments: argparse.Namespace, trace: Trace, session: Session) -> int:
    """Simulate and print how the trials ended; deterministic for a seed."""
    if arguments.trials < 1:
        raise UsageError(f"--trials must be at least 1 (got {arguments.trials})")
    # Trials of days have as many windows as those of an hour: a longer window decides later by its length.
    plan = CanaryPlan(arguments.steps, confidence=arguments.confidence, window_s=max(5.0, trace.duration_s / 2000))
    rows = [
        (name, regression, simulate_canary(regression, plan, trace, arguments.trials, arguments.seed))
        for name, regression in _regressions(arguments)
    ]
    if arguments.output == "json":
        session.console.json(
            {"plan": asdict(plan), "outcomes": [_as_json(name, each, found) for name, each, found in rows]}
        )
        return 0
    session.console.table(*outcomes_table(rows))
    shown = f"{trace.requests:,.0f} requests in {format_duration(trace.duration_s)}"
    session.console.line(
        f"\n{shown}; steps: {' → '.join(f'{100 * step:.3g} %' for step in plan.steps)}; {arguments.trials} trials each"
    )
    return 0


def outcomes_table(rows: list[tuple[str, Regression, TrialSummary]]) -> Table:
    """Return a table with a row for each regression."""
    headers = [
        "new version",
        "rolled back",
        "promoted",
        "undecided",
        "time (half)",
        "time (90 %)",
        "its requests (half)",
    ]
    return headers, [
        [
            name,
            _part(found.worse, found),
            _part(found.not_worse, found),
            _part(found.undecided, found),
            "-" if found.p50_s is None else format_duration(found.p50_s),
            "-" if found.p90_s is None else format_duration(found.p90_s),
            "-" if found.p50_requests is None else f"{found.p50_requests:,}",
        ]
        for name, _, found in rows
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


def _as_json(name: str, regression: Regression, found: TrialSummary) -> Json:
    return {"name": name, **asdict(regression), **asdict(found), "undecided": found.undecided}


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
