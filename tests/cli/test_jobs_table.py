"""Tables and lines about jobs and their APIs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from cortex.cli.output import format_duration
from cortex.cli.tables.apis import apis_table
from cortex.cli.tables.jobs import (
    batches_table,
    error_lines,
    jobs_table,
    outcome_line,
    summary_lines,
    workers_table,
)
from cortex.lifecycle import ApiKind, JobStatus
from harness.jobs.job_data import BEGAN, JOB_ID, api, letter, status

NOW = BEGAN + timedelta(seconds=65)


def batch_api(name: str = "sum", **changes: Any) -> dict[str, Any]:
    return api(name, ApiKind.BATCH, **{"running_jobs": 0, "latest_job_id": None, **changes})


def test_apis_that_run_jobs_have_their_own_columns() -> None:
    assert apis_table(
        ApiKind.BATCH, "local", [batch_api(running_jobs=2, latest_job_id=JOB_ID), batch_api("new")], NOW
    ) == (
        ["env", "batch api", "running jobs", "latest job id", "last update"],
        [["local", "sum", "2", JOB_ID, "1m"], ["local", "new", "0", "-", "1m"]],
    )


def test_the_status_column_is_shown_while_an_api_is_not_live() -> None:
    headers, rows = apis_table(
        ApiKind.BATCH, "local", [batch_api(), batch_api("new", status={"message": "error"})], NOW
    )

    assert headers[1:3] == ["batch api", "status"]
    assert [row[2] for row in rows] == ["live", "error"]


def test_columns_of_failed_batches_are_shown_only_with_failures() -> None:
    done, running = status(JobStatus.SUCCEEDED, succeeded=100), status(succeeded=20)

    assert jobs_table([running, done], NOW) == (
        ["job id", "status", "progress", "start time", "duration"],
        [
            [JOB_ID, "running", "20/100", "2026-03-01 12:00:00 UTC", "1m 5s"],
            [JOB_ID, "succeeded", "100/100", "2026-03-01 12:00:00 UTC", "20s"],
        ],
    )
    failing = status(failed=3, failed_attempts=9)
    headers, rows = jobs_table([done, failing], NOW)
    assert [row[headers.index("failed attempts")] for row in rows] == ["0", "9"]
    assert [row[headers.index("dead letters")] for row in rows] == ["0", "3"]
    assert rows[1][headers.index("progress")] == "3/100"


def test_batches_are_counted_by_outcome() -> None:
    assert batches_table(status(), NOW) == (
        ["total", "succeeded", "avg time per batch", "items"],
        [["100", "0", "-", "1000"]],
    )
    shown = status(succeeded=50, failed=1, failed_attempts=4, results=20, seconds=0.6)
    assert batches_table(shown, NOW) == (
        ["total", "succeeded", "dead letters", "failed attempts", "results", "avg time per batch", "items"],
        [["100", "50", "1", "4", "20", "12 ms", "1000"]],
    )


@pytest.mark.parametrize(("seconds", "shown"), [(0.0001, "<1 ms"), (0.0123, "12 ms"), (1.26, "1.3 s"), (90, "90.0 s")])
def test_the_average_batch_duration_is_formatted_briefly(seconds: float, shown: str) -> None:
    headers, (row,) = batches_table(status(succeeded=1, seconds=seconds), NOW)

    assert row[headers.index("avg time per batch")] == shown


def test_worker_states_without_workers_are_omitted() -> None:
    assert workers_table(status(), NOW) == (["requested", "running", "succeeded"], [["2", "2", "0"]])


def test_a_job_summary_contains_its_message_and_times() -> None:
    waiting = status(JobStatus.PENDING, message="waits for 2 CPUs")

    assert list(summary_lines(waiting, NOW)) == [
        f"job id: {JOB_ID}",
        "status: pending (waits for 2 CPUs)",
        "start time: 2026-03-01 12:00:00 UTC",
        "end time: -",
        "duration: 1m 5s",
    ]
    assert "end time: 2026-03-01 12:00:20 UTC" in list(summary_lines(status(JobStatus.STOPPED), NOW))


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (
            status(JobStatus.SUCCEEDED, succeeded=100, succeeded_items=1000),
            "succeeded: 100 batches, 1,000 items in 20s",
        ),
        (
            status(JobStatus.COMPLETED_WITH_FAILURES, succeeded=98, failed=2, failed_items=20),
            "completed with failures in 20s: 2 of 100 batches failed for good, with 20 items",
        ),
        (
            status(JobStatus.WORKER_OOM, message="worker 1: out of memory"),
            "out of memory in 20s: worker 1: out of memory",
        ),
        (status(JobStatus.STOPPED), "stopped in 20s"),
    ],
)
def test_the_outcome_line_contains_outcome_and_reason(shown: dict[str, Any], line: str) -> None:
    assert outcome_line(shown).removeprefix(f"job {JOB_ID}").lstrip(": ") == line


def test_errors_of_dead_letters_are_grouped_most_frequent_first() -> None:
    letters = [letter(3, "ValueError: bad"), letter(7, "KeyError: 'x'\nmore"), letter(9, "KeyError: 'x'", items=1)]
    letters += [letter(seq, f"OSError: item {seq} at 0x{seq}f") for seq in (10, 11, 12)]

    assert list(error_lines(letters, 6)) == [
        "  3 × OSError: item 10 at 0x10f (first: items 101 to 110 of the input)",
        "  2 × KeyError: 'x' (first: items 71 to 80 of the input)",
        "  1 × ValueError: bad (first: items 31 to 40 of the input)",
    ]


def test_the_half_of_a_divided_batch_is_located_in_the_input_and_not_by_a_number() -> None:
    half = {**letter(24, "ValueError: bad", items=1), "first_item": 1199}

    assert list(error_lines([half], 1)) == ["  1 × ValueError: bad (first: item 1,200 of the input)"]


def test_the_list_of_errors_is_limited_in_number_and_length() -> None:
    lines = list(error_lines([letter(seq, "ABCDEFGHIJKLMNOPQRST"[seq] + "x" * 10_000) for seq in range(20)], 1234))

    assert len(lines) == 6
    assert max(map(len, lines)) < 250
    assert lines[-1] == "  … of the first 20 of 1,234"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0.0s"), (0.44, "0.4s"), (59.9, "59s"), (60, "1m 0s"), (3599, "59m 59s"), (7260, "2h 1m"), (360000, "4d 4h")],
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown
