"""Texts of pages: numbers, times, and text of users."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest

from cortex.operator.dashboard.rendering import ago, as_yaml, milliseconds, number, percent, printable, size

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (math.nan, "–"), (0, "0/s"), (0.256, "0.26/s"), (12.34, "12.3/s"), (1234, "1.23k/s"), (5e9, "5G/s")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value, "/s" if text.endswith("/s") else "") == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (math.nan, "–"), (0.0004, "0.4 ms"), (0.0123, "12.3 ms"), (1.5, "1.5 s")]
)
def test_durations_have_a_unit(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text


def test_sizes_and_parts_have_a_unit() -> None:
    assert [size(value) for value in (None, 10, 2048, 3 * 2**30, 2**51)] == ["–", "10 B", "2 KiB", "3 GiB", "2048 TiB"]
    assert [percent(value) for value in (None, math.nan, 0, 0.0125, 1)] == ["–", "–", "0%", "1.25%", "100%"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s ago"), (59, "59 s ago"), (61, "1 min ago"), (7200, "2 h ago"), (200_000, "2 d ago"), (-90, "in 1 min")],
)
def test_times_are_relative(seconds: int, text: str) -> None:
    assert ago(NOW - timedelta(seconds=seconds), NOW) == text
    assert ago((NOW - timedelta(seconds=seconds)).replace(tzinfo=None).isoformat(), NOW) == text
    assert ago(None, NOW) == "–"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x1bcb", "ab"),
        ("bell\x07 nul\x00 del\x7f", "bell␇ nul␀ del␡"),
        ("abc\u202edef", "abc�def"),
    ],
)
def test_text_of_users_has_no_control_characters(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_yaml_keeps_the_order_of_keys() -> None:
    assert as_yaml({"name": "iris", "config": {"b": 1, "a": "ü"}}) == "name: iris\nconfig:\n  b: 1\n  a: ü"
