"""`cortex simulate`: what the autoscaler would do with an API under some traffic, without running any of it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cortex.cli.age import duration
from cortex.cli.arguments import UsageError, add_output
from cortex.cli.context import Context
from cortex.cli.output import Console
from cortex.cli.plot import panel, time_axis
from cortex.cli.report import located
from cortex.client.packaging import DEFAULT_CONFIG, find_config
from cortex.config.schema import Api
from cortex.config.values import duration_s
from cortex.errors import ConfigError, InputError
from cortex.operator.autoscaling.queueing_theory import ServiceTime
from cortex.operator.autoscaling.simulation import Assumptions, Outcome, simulate, slots
from cortex.operator.autoscaling.traffic import SHAPES, Trace, read_trace, shaped
from cortex.operator.deploy.diagnose import diagnose

_MS_PER_S = 1000.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=DEFAULT_CONFIG, help="configuration file, or the folder it is in"
    )
    parser.add_argument("--api", metavar="NAME", help="which of its APIs, if there are several")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--trace", metavar="FILE", help="CSV with the columns time_s,requests_per_s, or NDJSON with these keys"
    )
    traffic.add_argument("--shape", choices=tuple(SHAPES), help=f"a named course: {', '.join(SHAPES)}")
    traffic.add_argument("--base", type=_amount, default=1.0, help="lowest requests per second of a shape")
    traffic.add_argument("--peak", type=_amount, default=50.0, help="highest requests per second of a shape")
    traffic.add_argument("--duration", type=_seconds, default=3600.0, help="how long a shape lasts, such as 24h")
    assumed = parser.add_argument_group("assumptions")
    assumed.add_argument("--service-time", type=_seconds, default=0.1, help="how long a call takes on average")
    assumed.add_argument("--service-cv", type=_amount, default=0.5, help="its standard deviation / its average")
    assumed.add_argument("--startup-time", type=_seconds, default=10.0, help="until a new replica gets requests")
    assumed.add_argument(
        "--replicas", type=int, metavar="N", help="replicas in the beginning; else as many as the first rate takes"
    )
    assumed.add_argument("--room", type=int, metavar="N", help="replicas that the machine has room for")
    assumed.add_argument("--seed", type=int, default=1, help="of what is left to chance")
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Simulate and show. The same arguments show the same."""
    if (arguments.trace is None) == (arguments.shape is None):
        raise UsageError(f"give either --trace FILE or --shape {'|'.join(SHAPES)}")
    api, trace = _api(arguments), _trace(arguments)
    assumptions = Assumptions(
        ServiceTime(arguments.service_time, arguments.service_cv),
        arguments.startup_time,
        arguments.replicas,
        arguments.room,
        arguments.seed,
    )
    outcome = simulate(api, trace, assumptions)
    if arguments.output == "json":
        context.console.json(as_json(api, assumptions, outcome))
    else:
        _show(api, assumptions, outcome, context.console)
    return 0


def as_json(api: Api, assumptions: Assumptions, outcome: Outcome) -> dict[str, Any]:
    """Return all of it, times in seconds."""
    return {
        "api": api.name,
        "assumptions": asdict(assumptions),
        **asdict(outcome),
        "average_replicas": outcome.average_replicas,
    }


def _api(arguments: argparse.Namespace) -> Api:
    file = find_config(Path(arguments.config))
    try:
        apis = diagnose(file, file.name).apis
    except ConfigError as error:
        raise located(error, file.parent) from None
    scaled = {api.name: api for api in apis if api.kind.has_replicas}
    if arguments.api is not None and arguments.api not in scaled:
        raise InputError(f"{file} has no API {arguments.api} with replicas; it has {', '.join(scaled) or 'none'}")
    if arguments.api is None and len(scaled) != 1:
        raise InputError(f"say which API with --api: {file} has {', '.join(scaled) or 'none with replicas'}")
    return scaled[arguments.api or next(iter(scaled))]


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.shape is not None:
        return shaped(arguments.shape, arguments.base, arguments.peak, arguments.duration)
    try:
        return read_trace(Path(arguments.trace).read_text(), arguments.trace)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"{arguments.trace}: can't be read: {reason}") from None


def _show(api: Api, assumptions: Assumptions, outcome: Outcome, console: Console) -> None:
    points, service = outcome.points, assumptions.service
    for title, values, shown in (
        ("requests per second", [point.rate for point in points], _count),
        ("replicas requested", [float(point.requested) for point in points], _count),
        ("replicas ready", [float(point.ready) for point in points], _count),
        ("requests that wait", [point.waiting for point in points], _count),
        ("p50 latency", [point.p50_s for point in points], _time),
        ("p95 latency", [point.p95_s for point in points], _time),
    ):
        for line in panel(title, values, shown):
            console.line(line)
    console.line(time_axis(duration(outcome.duration_s), len(points)))
    console.line()
    console.line(f"assumed: calls take {_time(service.mean_s)} on average (cv {service.cv:g}), {slots(api)} at a time")
    console.line(f"assumed: a replica takes {_time(assumptions.startup_s)} to start")
    console.line(f"replicas: {outcome.average_replicas:.3g} on average, {outcome.most_replicas} at most")
    console.line(f"requests: {outcome.requests:,.0f}, {_lost(outcome)}")
    quantiles = (("p50", outcome.p50_s), ("p95", outcome.p95_s), ("p99", outcome.p99_s))
    console.line("latency: " + ", ".join(f"{name} {'-' if at is None else _time(at)}" for name, at in quantiles))
    console.line(f"changes of the number: {len(outcome.decisions)}; -o json has them with their reasons")


def _lost(outcome: Outcome) -> str:
    if not outcome.refused and not outcome.timed_out:
        return "none refused or timed out"
    return f"{outcome.refused:,.0f} refused (503), {outcome.timed_out:,.0f} timed out while they waited (504)"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * _MS_PER_S:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def _amount(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be 0 or more (got {text})")
    return value


_read_duration: Callable[[object], float] = duration_s(above=0)


def _seconds(text: str) -> float:
    try:
        return _read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (such as 500ms, 30s or 24h)") from None
