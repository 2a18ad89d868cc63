"""Charts: coordinates, gaps, round scales, escaped labels."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.operator.dashboard.charts import HEIGHT, MAX_POINTS, WIDTH, ChartLine, line_chart, round_up, sparkline, thin

VALUES = st.lists(st.one_of(st.floats(0, 1e9), st.just(math.nan)), max_size=800)


@pytest.mark.parametrize(("missing", "lines"), [(1, 1), (2, 1), (3, 2), (9, 2)])
def test_a_gap_of_more_than_two_values_divides_a_line(missing: int, lines: int) -> None:
    svg = line_chart("Load", [ChartLine("all", "line-accent", [1, 2, *[math.nan] * missing, 3, 4])]).svg
    assert len(re.findall(r'class="line line-accent"', svg)) == lines
    assert "all now 4, at most 4" in svg


def test_without_values_the_label_says_so() -> None:
    chart = line_chart("Load", [ChartLine("all", "line-accent", [math.nan])])
    assert not chart.has_data
    assert "all without data" in chart.svg


def test_texts_in_labels_are_escaped() -> None:
    svg = line_chart('"><script>', [ChartLine("<b>", "line-accent", [1])]).svg
    assert "<script>" not in svg
    assert "<b>" not in svg
    ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 1), (0.003, 0.003), (21, 30), (1, 1), (1.01, 2), (7, 8), (9, 10), (99, 100), (101, 200), (math.inf, 1)],
)
def test_scales_end_at_round_numbers(value: float, expected: float) -> None:
    assert round_up(value) == pytest.approx(expected)


@given(VALUES)
def test_every_point_is_inside_the_chart(values: list[float]) -> None:
    chart = line_chart("Load", [ChartLine("all", "line-accent", values, is_filled=True)])
    for x, y in re.findall(r"(?<=[ML])(-?[\d.]+) (-?[\d.]+)", chart.svg):
        if float(x) or float(y):
            assert 0 <= float(x) <= WIDTH * 1.5
            assert -0.1 <= float(y) <= HEIGHT
    ElementTree.fromstring(chart.svg)
    ElementTree.fromstring(sparkline(values))
    assert chart.top >= max((value for value in values if math.isfinite(value)), default=0)


@given(VALUES)
def test_long_lines_keep_their_gaps_and_their_range(values: list[float]) -> None:
    found = thin(values, MAX_POINTS)
    assert len(found) <= MAX_POINTS
    known, kept = ([value for value in each if math.isfinite(value)] for each in (values, found))
    assert bool(known) == bool(kept)
    assert not kept or min(known) * 0.999 <= min(kept) <= max(kept) <= max(known) * 1.001
