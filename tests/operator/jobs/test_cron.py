"""Due times of cron expressions: a table that includes clock changes, and properties of all expressions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.operator.jobs.schedules import Cron

BERLIN = "Europe/Berlin"


def at(text: str, zone: str = "UTC", fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


@pytest.mark.parametrize(
    ("cron", "zone", "after", "due"),
    [
        ("* * * * *", "UTC", "2025-01-01 00:00", "2025-01-01 00:01"),
        ("*/15 * * * *", "UTC", "2025-01-01 00:01", "2025-01-01 00:15"),
        ("0 3 * * *", "UTC", "2025-01-01 03:00", "2025-01-02 03:00"),
        ("0 3 * * *", BERLIN, "2025-01-01 02:59", "2025-01-01 03:00"),
        ("30 6 * * MON-FRI", "America/New_York", "2025-01-03 06:30", "2025-01-06 06:30"),
        ("0 0 1 * *", "Asia/Tokyo", "2025-01-31 12:00", "2025-02-01 00:00"),
        ("0 0 29 2 *", "UTC", "2025-01-01 00:00", "2028-02-29 00:00"),
        # The omitted hour: due at its end.
        ("30 2 * * *", BERLIN, "2025-03-30 01:59", "2025-03-30 03:00"),
        ("30 2 * * *", BERLIN, "2025-03-30 03:00", "2025-03-31 02:30"),
        ("0 * * * *", BERLIN, "2025-03-30 01:30", "2025-03-30 03:00"),
    ],
)
def test_next_run_follows_the_local_time(cron: str, zone: str, after: str, due: str) -> None:
    assert Cron(cron, zone).next_after(at(after, zone)) == at(due, zone)


def test_a_daily_run_is_due_once_in_a_repeated_hour() -> None:
    cron = Cron("30 2 * * *", BERLIN)
    first, second = at("2025-10-26 02:30", BERLIN), at("2025-10-26 02:30", BERLIN, fold=1)
    assert second - first == 3600
    assert cron.next_after(at("2025-10-26 01:00", BERLIN)) == first
    for moment in (first, second - 900, second, second + 900):
        assert cron.next_after(moment) == at("2025-10-27 02:30", BERLIN)
        assert cron.last_until(moment, since=first - 86_400) == first
        assert cron.last_until(moment, since=first) is None


def test_an_hourly_run_is_due_in_both_repeated_hours() -> None:
    cron = Cron("15 * * * *", BERLIN)
    moment = at("2025-10-26 02:00", BERLIN)
    for _ in range(3):
        due = cron.next_after(moment)
        assert due is not None
        assert due - moment in (900, 3600)
        moment = due
    assert moment == at("2025-10-26 03:15", BERLIN)


def test_last_until_returns_the_latest_run() -> None:
    cron, since = Cron("* * * * *"), at("2024-01-01 00:00")
    assert cron.last_until(at("2025-06-01 12:00") + 30, since) == at("2025-06-01 12:00")


def test_last_until_finds_runs_of_any_age() -> None:
    cron = Cron("0 0 29 2 *")
    assert cron.last_until(at("2027-12-31 00:00"), since=0) == at("2024-02-29 00:00")


_MOMENTS = st.integers(int(at("2020-01-01 00:00")), int(at("2035-01-01 00:00"))).map(float)
_CRONS = st.builds(
    Cron,
    st.sampled_from(
        [
            "* * * * *",
            "*/7 * * * *",
            "0 * * * *",
            "30 2 * * *",
            "15,45 1-3 * * *",
            "0 0 * * SUN",
            "5 4 1 * *",
            "0 */6 * * *",
        ]
    ),
    st.sampled_from(["UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "America/Sao_Paulo"]),
)


@given(_CRONS, _MOMENTS)
def test_next_after_is_the_inverse_of_last_until(cron: Cron, moment: float) -> None:
    due = cron.next_after(moment)
    assert due is not None and due > moment
    assert cron.last_until(due, since=moment) == due
    assert cron.last_until(due - 1, since=moment) is None


@given(_CRONS, _MOMENTS, st.integers(1, 50))
def test_last_until_equals_repeated_next_after(cron: Cron, since: float, hours: int) -> None:
    until, last, moment = since + hours * 3600, None, since
    while (due := cron.next_after(moment)) is not None and due <= until:
        last = moment = due
    assert cron.last_until(until, since) == last


@given(_MOMENTS)
def test_a_daily_run_is_due_once_per_local_day(moment: float) -> None:
    """Between two local midnights there is exactly one run, across all clock changes."""
    zone = ZoneInfo(BERLIN)
    midnight = datetime.fromtimestamp(moment, zone).replace(hour=0, minute=0, second=0, microsecond=0)
    begin = midnight.timestamp() - 1
    following = (midnight + timedelta(days=1)).astimezone(UTC).timestamp() - 1
    cron = Cron("30 2 * * *", BERLIN)
    due = cron.next_after(begin)
    assert due is not None and due <= following
    after = cron.next_after(due)
    assert after is not None and after > following
