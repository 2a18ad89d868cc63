"""`cortex simulate`: simulate the autoscaling of an API under recorded or synthetic traffic."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cortex.cli.arguments import add_config, add_output
from cortex.cli.output import Console, format_duration, located
from cortex.cli.session import Session
from cortex.client.packaging import find_config
from cortex.config.schema import Api
from cortex.config.values import duration_s
from cortex.errors import ConfigError, InputError, UsageError
from cortex.operator.autoscaling.queueing_theory import ServiceTime
from cortex.operator.autoscaling.simulation import Assumptions, Outcome, simulate, slots
from cortex.operator.autoscaling.traffic import SHAPES, Trace, read_trace, shaped
from cortex.operator.deploy.diagnose import diagnose

_MS_PER_S = 1000.0
_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: Width of the labels of the vertical axis.
_AXIS = 9


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config(parser)
    parser.add_argument("--api", metavar="NAME", help="API to simulate; required if the file has several")
    add_traffic(parser)
    parser.add_argument("--canary", action=_MovedSimulation, nargs=0, help=argparse.SUPPRESS)
    assumed = parser.add_argument_group("assumptions")
    assumed.add_argument(
        "--service-time", type=_seconds, default="100ms", help="average duration of a call; default: %(default)s"
    )
    assumed.add_argument(
        "--service-cv",
        type=_amount,
        default="0.5",
        help="coefficient of variation of the duration: standard deviation / average; default: %(default)s",
    )
    assumed.add_argument(
        "--startup-time",
        type=_seconds,
        default="10s",
        help="time until a new replica receives requests; default: %(default)s",
    )
    assumed.add_argument(
        "--replicas", type=int, metavar="N", help="initial replicas; default: as many as the initial rate requires"
    )
    assumed.add_argument("--room", type=int, metavar="N", help="maximum replicas that the machine has capacity for")
    assumed.add_argument("--seed", type=int, default=1, help="seed of the random numbers; default: %(default)s")
    add_output(parser)


def add_traffic(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe traffic; see `read_traffic`."""
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--trace",
        metavar="FILE",
        help="recorded traffic: CSV with the columns time_s,requests_per_s, or NDJSON with these keys",
    )
    traffic.add_argument("--rate", type=_amount, help="constant traffic: requests per second")
    traffic.add_argument("--shape", choices=tuple(SHAPES), help=f"synthetic traffic: {', '.join(SHAPES)}")
    traffic.add_argument(
        "--base", type=_amount, default="1", help="minimum requests per second of a shape; default: %(default)s"
    )
    traffic.add_argument(
        "--peak", type=_amount, default="50", help="maximum requests per second of a shape; default: %(default)s"
    )
    traffic.add_argument(
        "--duration",
        type=_seconds,
        default="1h",
        help="duration of a shape or of a constant rate, such as 24h; default: %(default)s",
    )


class _MovedSimulation(argparse.Action):
    """The option that simulated canaries."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error("--canary is now a command of cortex's repository: python -m benchmarks.canary_trials --help")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Simulate and print the outcome, which is deterministic."""
    trace, api = read_traffic(arguments), _api(arguments)
    assumptions = Assumptions(
        ServiceTime(arguments.service_time, arguments.service_cv),
        arguments.startup_time,
        arguments.replicas,
        arguments.room,
        arguments.seed,
    )
    outcome = simulate(api, trace, assumptions)
    if arguments.output == "json":
        session.console.json(as_json(api, assumptions, outcome))
    else:
        _show(api, assumptions, outcome, session.console)
    return 0


def read_traffic(arguments: argparse.Namespace) -> Trace:
    """Return the traffic that the arguments describe. Raises: UsageError, InputError."""
    if sum(given is not None for given in (arguments.trace, arguments.shape, arguments.rate)) != 1:
        raise UsageError(f"give one of --trace FILE, --rate NUMBER and --shape {'|'.join(SHAPES)}")
    if arguments.rate is not None:
        if not (arguments.rate > 0 and arguments.duration > 0):
            raise UsageError("--rate and --duration must be above 0")
        return Trace((0.0,), (arguments.rate,), arguments.duration)
    if arguments.shape is not None:
        return shaped(arguments.shape, arguments.base, arguments.peak, arguments.duration)
    try:
        return read_trace(Path(arguments.trace).read_text(), arguments.trace)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"{arguments.trace}: can't be read: {reason}") from None


def as_json(api: Api, assumptions: Assumptions, outcome: Outcome) -> dict[str, Any]:
    """Return the whole outcome; times are in seconds."""
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
        raise InputError(f"--api is required: {file} has {', '.join(scaled) or 'none with replicas'}")
    return scaled[arguments.api or next(iter(scaled))]


def _show(api: Api, assumptions: Assumptions, outcome: Outcome, console: Console) -> None:
    points, service = outcome.points, assumptions.service
    for title, values, shown in (
        ("requests per second", [point.rate for point in points], _count),
        ("replicas requested", [float(point.requested) for point in points], _count),
        ("replicas ready", [float(point.ready) for point in points], _count),
        ("requests waiting", [point.waiting for point in points], _count),
        ("p50 latency", [point.p50_s for point in points], _time),
        ("p95 latency", [point.p95_s for point in points], _time),
    ):
        for line in panel(title, values, shown):
            console.line(line)
    console.line(time_axis(format_duration(outcome.duration_s), len(points)))
    console.line()
    console.line(f"assumed: calls take {_time(service.mean_s)} on average (cv {service.cv:g}), {slots(api)} at a time")
    console.line(f"assumed: a replica takes {_time(assumptions.startup_s)} to start")
    console.line(f"replicas: {outcome.average_replicas:.3g} on average, {outcome.most_replicas} at most")
    console.line(f"requests: {outcome.requests:,.0f}, {_lost(outcome)}")
    quantiles = (("p50", outcome.p50_s), ("p95", outcome.p95_s), ("p99", outcome.p99_s))
    console.line("latency: " + ", ".join(f"{name} {'-' if at is None else _time(at)}" for name, at in quantiles))
    console.line(f"changes of the number of replicas: {len(outcome.decisions)}; -o json prints them with their reasons")


def panel(
    title: str, values: Sequence[float | None], shown: Callable[[float], str], width: int = 72, height: int = 4
) -> list[str]:
    """Return the lines of a chart from 0 to the maximum. Each column shows the maximum of its values.

    None: no value.
    """
    columns = [_maximum(values, column, min(width, len(values))) for column in range(min(width, len(values)))]
    top = max((value for value in columns if value is not None), default=0.0)
    lines = [title]
    for row in reversed(range(height)):
        label = shown(top) if row == height - 1 else shown(0.0) if row == 0 else ""
        cells = "".join(_cell(value, top, row, height) for value in columns)
        lines.append(f"{label:>{_AXIS}} │{cells}".rstrip())
    return lines


def time_axis(duration: str, columns: int, width: int = 72) -> str:
    """Return the time axis below the charts, from 0 to the end."""
    return f"{'':{_AXIS}} └0{duration:>{max(min(width, columns) - 1, 1)}}"


def _maximum(values: Sequence[float | None], column: int, columns: int) -> float | None:
    part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
    return max((value for value in part if value is not None), default=None)


def _cell(value: float | None, top: float, row: int, height: int) -> str:
    if not value:
        return "_" if value == 0 and row == 0 else " "
    filled = value / top * height - row
    least = 1 if row == 0 else 0  # values above 0 remain visible
    return _EIGHTHS[min(8, max(least, round(filled * 8)))]


def _lost(outcome: Outcome) -> str:
    if not outcome.refused and not outcome.timed_out:
        return "none rejected or timed out"
    return f"{outcome.refused:,.0f} rejected (503), {outcome.timed_out:,.0f} timed out while waiting (504)"


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
