"""Charts as inline SVG without text: labels are HTML beside them, so that they keep their size on any screen. Pure.

The coordinates are stretched to the size of the page, and strokes are not (`vector-effect`). Colours are classes of the
stylesheet, because the content security policy permits no inline styles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

#: Size of the coordinate system.
WIDTH, HEIGHT = 1000, 100
#: Maximum of points of a line; more are averaged, since no screen shows them.
MAX_POINTS = 360
#: A line continues across so many missing values: on a loaded machine, a sample may be late.
JOINED_POINTS = 2


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart: values in equal intervals, oldest first; NaN: a gap."""

    name: str
    css: str  #: class of the stylesheet
    values: Sequence[float]
    is_filled: bool = False


@dataclass(frozen=True)
class Chart:
    """An SVG element, and the labels around it."""

    svg: Markup
    top: float  #: value at the upper edge; the lower edge is 0
    has_data: bool


def line_chart(title: str, lines: Sequence[ChartLine], least_top: float = 1.0) -> Chart:
    """Return a chart of lines from 0 to a round number above all values, at least `least_top`."""
    lines = [ChartLine(line.name, line.css, thin(line.values, MAX_POINTS), line.is_filled) for line in lines]
    known = [value for line in lines for value in line.values if math.isfinite(value)]
    top = round_up(max([least_top, *known]))
    grid = "".join(f'<path class="grid" d="M0 {y}H{WIDTH}"/>' for y in (0.5, HEIGHT / 2, HEIGHT - 0.5))
    drawn = "".join(_draw(line, top) for line in lines)
    label = escape(f"{title}: {'; '.join(_describe(line) for line in lines)}")
    svg = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{grid}{drawn}</svg>'
    )
    return Chart(Markup(svg), top, bool(known))  # noqa: S704 - numbers, class names of this program, an escaped label


def sparkline(values: Sequence[float], points: int = 60) -> Markup:
    """Return a small line without labels, hidden from screen readers: the numbers are beside it."""
    line = ChartLine("", "line-accent", thin(values, points), is_filled=True)
    top = max([1e-9, *(value for value in line.values if math.isfinite(value))]) * 1.1
    drawn = _draw(line, top)
    return Markup(  # noqa: S704 - numbers only
        f'<svg class="spark" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
    )


def thin(values: Sequence[float], most: int) -> Sequence[float]:
    """Return at most `most` values: averages of as many neighbours. A group of gaps only is a gap."""
    if len(values) <= most:
        return values
    size = math.ceil(len(values) / most)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return [_mean([value for value in group if math.isfinite(value)]) for group in groups]


def round_up(value: float) -> float:
    """Return the next of 1, 2, 3, 4, 5, 6, 8, 10 times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10, 20) if step * power >= value * (1 - 1e-9))


def _draw(line: ChartLine, top: float) -> str:
    step = WIDTH / max(len(line.values) - 1, 1)
    parts = []
    for part in _parts(line.values):
        points = [(index * step, HEIGHT - (HEIGHT - 1) * value / top) for index, value in part]
        if len(points) == 1:  # a line of no length is invisible
            points.append((points[0][0] + step / 2, points[0][1]))
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if line.is_filled:
            area = f"{path}L{points[-1][0]:.1f} {HEIGHT}L{points[0][0]:.1f} {HEIGHT}Z"
            parts.append(f'<path class="area {line.css}" d="{area}"/>')
        parts.append(f'<path class="line {line.css}" data-name="{escape(line.name)}" d="{path}"/>')
    return "".join(parts)


def _parts(values: Sequence[float]) -> list[list[tuple[int, float]]]:
    """Return the runs of values between gaps, with their positions. Gaps of at most `JOINED_POINTS` do not count."""
    parts: list[list[tuple[int, float]]] = []
    for index, value in enumerate(values):
        if not math.isfinite(value):
            continue
        if parts and index - parts[-1][-1][0] <= JOINED_POINTS + 1:
            parts[-1].append((index, value))
        else:
            parts.append([(index, value)])
    return parts


def _describe(line: ChartLine) -> str:
    known = [value for value in line.values if math.isfinite(value)]
    return f"{line.name} now {known[-1]:.3g}, at most {max(known):.3g}" if known else f"{line.name} without data"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
