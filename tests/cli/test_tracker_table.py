"""Tables and lines about tracked predictions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from cortex.cli.output import Console
from cortex.cli.tables.tracker import accuracy_table, predictions_table, show_tracker, tracker_notes

NOW = datetime(2026, 3, 1, 12, 0, 9, tzinfo=UTC)

DRIFT: dict[str, Any] = {
    "baseline": "the first predictions", "problem": "", "baseline_count": 1000, "window": 1000, "pending": 17,
    "false_alarm_rate": 0.001, "is_drift": False, "psi": 0.0123, "threshold": 0.0557, "windows": 1200,
    "windows_with_drift": 1,
    "last_windows": [{"at": "2026-03-01T12:00:04+00:00", "count": 1003, "psi": 0.0123, "threshold": 0.0557}],
}  # fmt: skip
CLASSES: dict[str, Any] = {
    "model_type": "classification", "predictions": 8, "untracked": 0, "classes": {"cat": 5, "": 3}, "class_count": 2,
    "truth": None, "drift": DRIFT,
}  # fmt: skip


def notes(**changes: Any) -> list[str]:
    return list(tracker_notes(CLASSES | changes, "iris", NOW))


def test_classes_have_a_row_each() -> None:
    assert predictions_table(CLASSES) == (["class", "count", "share"], [["cat", "5", "62.5%"], ['""', "3", "37.5%"]])


def test_numbers_have_one_row() -> None:
    numbers = {"count": 9, "min": -1.0, "max": 1234567.0, "avg": 1 / 3, "quantiles": {"0.05": 0.5, "0.5": 2.0}}

    assert predictions_table({"predictions": 9, "regression": numbers}) == (
        ["predictions", "min", "5%", "50%", "max", "avg"],
        [["9", "-1", "0.5", "2", "1.2346e+06", "0.33333"]],
    )


def test_figures_that_overflow_are_shown_as_a_dash() -> None:
    numbers = {"count": 2, "min": 1.7e308, "max": 1.7e308, "avg": None, "quantiles": {}}
    errors = {"count": 1, "mean_error": None, "hours": []}

    assert predictions_table({"predictions": 2, "regression": numbers})[1] == [["2", "1.7e+308", "1.7e+308", "-"]]
    assert accuracy_table(errors)[1] == [["all", "1", "-"]]


def test_classes_and_predictions_outside_the_table_are_counted() -> None:
    assert notes(class_count=1002, untracked=1234)[:2] == [
        "and 1,000 more classes",
        "1,234 could not be tracked; `cortex logs iris` shows the reason",
    ]
    assert notes(predictions=0)[0] == "no predictions yet"


def test_an_incomplete_first_number_is_shown_as_no_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    tracked = {key: value for key, value in CLASSES.items() if not key.startswith("class")}
    tracked |= {"model_type": "regression", "predictions": 1, "regression": None}

    show_tracker(tracked, "iris", Console.of({}), NOW)

    assert "no predictions yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "drift: no, 5s ago: PSI 0.0123 <= 0.0557 over 1,003 predictions; 1 of 1,200 windows drifted, "
            "at most 0.10% are expected by chance",
        ),
        (
            {"is_drift": True, "psi": 0.5},
            "drift: yes, 5s ago: PSI 0.5000 > 0.0557 over 1,003 predictions; 1 of 1,200 windows drifted, "
            "at most 0.10% are expected by chance",
        ),
        (
            {"psi": None},
            "drift: not known yet, the baseline has 1,000 predictions, and 17 have come since; "
            "1,000 or more are compared with it",
        ),
        ({"baseline_count": 0}, "drift: not known yet, 17 predictions so far; 1,000 or more become the baseline"),
        (
            {"baseline_count": 0, "pending": 1440},
            "drift: not known yet, 1,440 predictions so far; they become the baseline within seconds",
        ),
    ],
    ids=["no", "yes", "no window", "no baseline", "not looked yet"],
)
def test_drift_is_described_in_one_line(changes: dict[str, Any], line: str) -> None:
    assert notes(drift=DRIFT | changes) == [line]


def test_an_unusable_baseline_is_reported() -> None:
    assert notes(drift=DRIFT | {"problem": "b.json is no baseline"})[0] == "b.json is no baseline"


def test_accuracy_is_shown_in_total_and_by_hour() -> None:
    hours = [{"hour": f"2026-03-01T{hour:02}:00:00+00:00", "count": 2, "accuracy": 0.5} for hour in range(20)]

    headers, rows = accuracy_table({"count": 40, "accuracy": 0.5, "hours": hours})

    assert headers == ["hour", "known truth", "accuracy"]
    assert rows[0] == ["all", "40", "50.00%"]
    assert rows[-1] == ["2026-03-01 19:00:00 UTC", "2", "50.00%"]
    assert len(rows) == 13


def test_errors_of_numbers_are_shown() -> None:
    errors = {"count": 4, "mean_error": -0.5, "mean_absolute_error": 0.75, "root_mean_squared_error": 1.0}

    assert accuracy_table({**errors, "hours": []}) == (
        ["hour", "known truth", "mean error", "mean absolute error", "root mean squared error"],
        [["all", "4", "-0.5", "0.75", "1"]],
    )
