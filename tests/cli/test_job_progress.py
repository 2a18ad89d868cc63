"""Progress and speed of a job in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.cli.output import format_number
from cortex.cli.progress import JobSpeed, bar, progress_line
from cortex.cli.tables.jobs import JobProgress
from cortex.lifecycle import JobStatus
from harness.jobs.job_data import status


def speed(*seen: tuple[float, int], total: int = 100) -> JobSpeed:
    made = JobSpeed()
    for moment, batches in seen:
        made.observe(moment, JobProgress(batches, total, batches * 10))
    return made


def test_speed_is_measured_from_observed_batches() -> None:
    made = speed((100.0, 10), (102.0, 30))

    assert (made.batches_per_s, made.items_per_s, made.remaining_s) == (10, 100, 7)


def test_speed_is_measured_over_the_last_seconds() -> None:
    slow_at_first = speed(*((float(second), second) for second in range(100)), total=10_000)
    for second in range(100, 120):
        slow_at_first.observe(float(second), JobProgress(100 + (second - 100) * 50, 10_000, 0))

    assert slow_at_first.batches_per_s == pytest.approx(50)


def test_speed_is_unknown_until_a_batch_is_done() -> None:
    for made in (speed(), speed((1.0, 5)), speed((1.0, 5), (1.0, 9)), speed((1.0, 5), (9.0, 5))):
        assert (made.batches_per_s, made.remaining_s) == (0, None)


@given(share=st.floats(-1, 2), cells=st.integers(1, 60), has_blocks=st.booleans())
def test_a_progress_bar_is_full_only_at_the_end(share: float, cells: int, has_blocks: bool) -> None:
    drawn = bar(share, cells, has_blocks)

    assert len(drawn) == (cells if has_blocks else cells + 2)
    assert (drawn == bar(1, cells, has_blocks)) == (share >= 1)


def test_a_progress_bar_grows_by_eighths_of_a_character() -> None:
    assert bar(0, 4) == "░░░░"
    assert bar(0.5, 4) == "██░░"
    assert bar(0.53125, 4) == "██▏░"
    assert bar(0.5, 4, has_blocks=False) == "[##..]"


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.25, "0.25"), (3.44, "3.4"), (812.3, "812"), (1234, "1.2k"), (81_000, "81k"), (1_340_000, "1.3M"), (2e7, "20M")],
)
def test_rates_are_formatted_briefly(number: float, shown: str) -> None:
    assert format_number(number) == shown


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (status(JobStatus.ENQUEUING, batches=0), "enqueuing"),
        (status(JobStatus.ENQUEUING), "enqueuing, 100 batches so far"),
        (status(JobStatus.PENDING, message="waits for 2 CPUs"), "pending, 100 batches, waits for 2 CPUs"),
        (status(JobStatus.PENDING, message="can't be built:\nerror: none"), "pending, 100 batches, can't be built:"),
        (status(), "running 0 %, 0 of 100 batches"),
        (status(succeeded=29), "running 29 %, 29 of 100 batches"),
        (status(succeeded=30), "running 30 %, 30 of 100 batches, 10 batches/s, 100 items/s, 7s left"),
        (
            status(succeeded=20, failed=10),
            "running 30 %, 30 of 100 batches, 10 batches/s, 100 items/s, 7s left, 10 dead letters",
        ),
        (status(succeeded=99, failed=1), "running 100 %, 100 of 100 batches, completing, 1 dead letter"),
        (status(batches=100_000, succeeded=99_999), "running 99 %, 99,999 of 100,000 batches"),
    ],
)
def test_a_progress_line_contains_all_figures(shown: dict[str, object], line: str) -> None:
    made = speed((0.0, 10), (2.0, 30)) if "batches/s" in line else JobSpeed()

    assert progress_line(shown, made) == line


def test_the_progress_bar_is_between_status_and_share() -> None:
    assert progress_line(status(succeeded=50), JobSpeed(), "[#.]") == "running [#.] 50 %, 50 of 100 batches"
