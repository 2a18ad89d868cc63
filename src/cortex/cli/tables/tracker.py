"""Tables of an API's tracked predictions: distribution, drift, and accuracy against feedback."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from cortex.cli.output import Console, Table, format_age, format_time

#: Maximum number of hours with feedback in the table.
_SHOWN_HOURS = 12

Tracked = dict[str, Any]


def show_tracker(tracked: Tracked, api: str, console: Console, now: datetime) -> None:
    """Print predictions, drift and accuracy."""
    console.line()
    if _has_predictions(tracked):
        console.table(*predictions_table(tracked))
    for line in tracker_notes(tracked, api, now):
        console.line(line)
    if truth := tracked["truth"]:
        console.line()
        console.table(*accuracy_table(truth))


def _has_predictions(tracked: Tracked) -> bool:
    """Return whether there are predictions. The count of the first number is stored before its quantiles."""
    return bool(tracked["predictions"]) and ("classes" in tracked or tracked["regression"] is not None)


def predictions_table(tracked: Tracked) -> Table:
    """Return a table with one row per class, or one row for a regression."""
    if (numbers := tracked.get("regression")) is not None:
        quantiles = numbers["quantiles"]
        headers = ["predictions", "min", *(f"{100 * float(q):g}%" for q in quantiles), "max", "avg"]
        shown = [numbers["min"], *quantiles.values(), numbers["max"], numbers["avg"]]
        return headers, [[str(numbers["count"]), *map(_number, shown)]]
    total = tracked["predictions"]
    rows = [[name or '""', str(count), f"{count / total:.1%}"] for name, count in tracked["classes"].items()]
    return ["class", "count", "share"], rows


def tracker_notes(tracked: Tracked, api: str, now: datetime) -> Iterator[str]:
    """Yield notes about omitted classes, untracked predictions and drift."""
    if not _has_predictions(tracked):
        yield "no predictions yet"
    hidden = tracked.get("class_count", 0) - len(tracked.get("classes", ()))
    if hidden > 0:
        yield f"and {hidden:,} more classes"
    if untracked := tracked["untracked"]:
        yield f"{untracked:,} could not be tracked; `cortex logs {api}` shows the reason"
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
    ago = format_age(datetime.fromisoformat(last["at"]), now)
    return (
        f"{word}, {ago} ago: PSI {drift['psi']:.4f} {sign} {drift['threshold']:.4f} over {last['count']:,} "
        f"predictions; {drift['windows_with_drift']:,} of {drift['windows']:,} windows drifted, "
        f"at most {drift['false_alarm_rate']:.2%} are expected by chance"
    )


def _awaited(drift: dict[str, Any], came: str, become: str) -> str:
    """Describe the pending predictions and their purpose. The operator evaluates them every few seconds."""
    pending, window = drift["pending"], drift["window"]
    if pending < window:
        return f"{pending:,} {came}; {window:,} or more {become}"
    return f"{pending:,} {came}; they {become} within seconds"


def accuracy_table(truth: dict[str, Any]) -> Table:
    """Return a table of accuracy: one row for all hours, then one per hour for the last ones."""
    named = (
        ("accuracy", "accuracy", "{:.2%}"),
        ("mean_error", "mean error", "{:.5g}"),
        ("mean_absolute_error", "mean absolute error", "{:.5g}"),
        ("root_mean_squared_error", "root mean squared error", "{:.5g}"),
    )
    shown = [(key, header, form) for key, header, form in named if key in truth]
    rows = [("all", truth)]
    rows += [(format_time(datetime.fromisoformat(hour["hour"])), hour) for hour in truth["hours"][-_SHOWN_HOURS:]]
    headers = ["hour", "known truth", *(header for _, header, _ in shown)]
    return headers, [[name, str(of["count"]), *(_figure(of[key], form) for key, _, form in shown)] for name, of in rows]


def _number(value: float | None) -> str:
    return _figure(value, "{:.5g}")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)  # None: too large for a JSON number
