"""The tracked predictions of one API as `cortex get` shows them: what was predicted, drift, and how right it was."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from cortex.cli.age import age, stamp
from cortex.cli.output import Console

#: Of the hours in which there was truth, the last ones.
_SHOWN_HOURS = 12

Tracked = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


def show_tracker(tracked: Tracked, api: str, console: Console, now: datetime) -> None:
    """Write all that is known."""
    console.line()
    if _has_predictions(tracked):
        console.table(*predictions_table(tracked))
    for line in notes(tracked, api, now):
        console.line(line)
    if truth := tracked["truth"]:
        console.line()
        console.table(*truth_table(truth))


def _has_predictions(tracked: Tracked) -> bool:
    """Tell whether there is something to show: of the very first number, the bucket is counted before the rest."""
    return bool(tracked["predictions"]) and ("classes" in tracked or tracked["regression"] is not None)


def predictions_table(tracked: Tracked) -> Table:
    """Return headers and rows: one per class, or one of numbers."""
    if (numbers := tracked.get("regression")) is not None:
        quantiles = numbers["quantiles"]
        headers = ["predictions", "min", *(f"{100 * float(q):g}%" for q in quantiles), "max", "avg"]
        shown = [numbers["min"], *quantiles.values(), numbers["max"], numbers["avg"]]
        return headers, [[str(numbers["count"]), *map(_number, shown)]]
    total = tracked["predictions"]
    rows = [[name or '""', str(count), f"{count / total:.1%}"] for name, count in tracked["classes"].items()]
    return ["class", "count", "share"], rows


def notes(tracked: Tracked, api: str, now: datetime) -> Iterator[str]:
    """Say what the table does not: what is left out, what could not be tracked, and drift."""
    if not _has_predictions(tracked):
        yield "no predictions yet"
    hidden = tracked.get("class_count", 0) - len(tracked.get("classes", ()))
    if hidden > 0:
        yield f"and {hidden:,} more classes"
    if untracked := tracked["untracked"]:
        yield f"{untracked:,} could not be tracked; `cortex logs {api}` says why"
    drift = tracked["drift"]
    if drift["problem"]:
        yield drift["problem"]
    yield f"drift: {_drift(drift, now)}"


def _drift(drift: dict[str, Any], now: datetime) -> str:
    if not drift["baseline_count"]:
        return f"not known yet, {_awaited(drift, 'predictions so far', 'become the baseline')}"
    if drift["psi"] is None:
        baseline = f"the baseline has {drift['baseline_count']:,} predictions"
        return f"not known yet, {baseline}, and {_awaited(drift, 'have come since', 'are compared with it')}"
    last = drift["last_windows"][-1]
    word, sign = ("yes", ">") if drift["is_drift"] else ("no", "<=")
    ago = age(datetime.fromisoformat(last["at"]), now)
    return (
        f"{word}, {ago} ago: PSI {drift['psi']:.4f} {sign} {drift['threshold']:.4f} over {last['count']:,} "
        f"predictions; {drift['windows_with_drift']:,} of {drift['windows']:,} windows drifted, "
        f"where chance makes {drift['false_alarm_rate']:.2%} at most"
    )


def _awaited(drift: dict[str, Any], came: str, become: str) -> str:
    """Say how many predictions there are, and what is made of them; the operator looks every few seconds."""
    pending, window = drift["pending"], drift["window"]
    if pending < window:
        return f"{pending:,} {came}; {window:,} or more {become}"
    return f"{pending:,} {came}; they {become} within seconds"


def truth_table(truth: dict[str, Any]) -> Table:
    """Return headers and rows: all hours together, then the last ones."""
    named = (
        ("accuracy", "accuracy", "{:.2%}"),
        ("mean_error", "mean error", "{:.5g}"),
        ("mean_absolute_error", "mean absolute error", "{:.5g}"),
        ("root_mean_squared_error", "root mean squared error", "{:.5g}"),
    )
    shown = [(key, header, form) for key, header, form in named if key in truth]
    rows = [("all", truth)]
    rows += [(stamp(datetime.fromisoformat(hour["hour"])), hour) for hour in truth["hours"][-_SHOWN_HOURS:]]
    headers = ["hour", "known truth", *(header for _, header, _ in shown)]
    return headers, [[name, str(of["count"]), *(_figure(of[key], form) for key, _, form in shown)] for name, of in rows]


def _number(value: float | None) -> str:
    return _figure(value, "{:.5g}")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)  # None: too large to be a number
