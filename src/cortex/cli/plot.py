"""Curves as text: one panel per curve, columns over time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: Width of the figures on the left.
_AXIS = 9


def panel(
    title: str, values: Sequence[float | None], shown: Callable[[float], str], width: int = 72, height: int = 4
) -> list[str]:
    """Return the lines of one curve from 0 to its highest value, which each column shows the highest of.

    None is where there is no value.
    """
    columns = [_highest(values, column, min(width, len(values))) for column in range(min(width, len(values)))]
    top = max((value for value in columns if value is not None), default=0.0)
    lines = [title]
    for row in reversed(range(height)):
        label = shown(top) if row == height - 1 else shown(0.0) if row == 0 else ""
        cells = "".join(_cell(value, top, row, height) for value in columns)
        lines.append(f"{label:>{_AXIS}} │{cells}".rstrip())
    return lines


def time_axis(duration: str, columns: int, width: int = 72) -> str:
    """Return the line below the panels: from 0 to the end."""
    return f"{'':{_AXIS}} └0{duration:>{max(min(width, columns) - 1, 1)}}"


def _highest(values: Sequence[float | None], column: int, columns: int) -> float | None:
    part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
    return max((value for value in part if value is not None), default=None)


def _cell(value: float | None, top: float, row: int, height: int) -> str:
    if not value:
        return "_" if value == 0 and row == 0 else " "
    filled = value / top * height - row
    least = 1 if row == 0 else 0  # what is not 0 is seen
    return _EIGHTHS[min(8, max(least, round(filled * 8)))]
