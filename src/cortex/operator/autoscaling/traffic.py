"""Traffic for simulations: requests per second over time, from a file or a named shape. Pure."""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from cortex.errors import InputError

_TIME, _RATE = "time_s", "requests_per_s"
#: Number of steps of a named shape.
_STEPS = 240


@dataclass(frozen=True)
class Trace:
    """Request rates. Each one lasts until the time of the next; the last one ends at `duration_s`."""

    times_s: tuple[float, ...]
    rates: tuple[float, ...]
    duration_s: float

    def rate(self, at_s: float) -> float:
        """Return the requests per second at one time; 0 before the first."""
        index = bisect_right(self.times_s, at_s) - 1
        return self.rates[index] if index >= 0 else 0.0

    def mean_rate(self, start_s: float, end_s: float) -> float:
        """Return the average requests per second between two times."""
        return (self._until(end_s) - self._until(start_s)) / (end_s - start_s)

    @property
    def requests(self) -> float:
        """Total number of requests."""
        return self._until(self.duration_s)

    @cached_property
    def _before(self) -> tuple[float, ...]:
        """Number of requests before each time."""
        lengths = (end - start for start, end in pairwise(self.times_s))
        return tuple(
            accumulate((rate * length for rate, length in zip(self.rates, lengths, strict=False)), initial=0.0)
        )

    def _until(self, at_s: float) -> float:
        index = bisect_right(self.times_s, at_s) - 1
        return self._before[index] + self.rates[index] * (at_s - self.times_s[index]) if index >= 0 else 0.0


def read_trace(text: str, name: str) -> Trace:
    """Read CSV with the columns `time_s,requests_per_s`, or NDJSON with these keys. Raises: InputError."""
    points = list(_ndjson(text, name) if text.lstrip().startswith("{") else _csv(text, name))
    if len(points) < 2:
        raise InputError(f"{name}: a trace needs at least two entries: the last one marks its end")
    for number, ((before, _), (time_s, _)) in enumerate(pairwise(points), 2):
        if time_s <= before:
            raise InputError(f"{name}: {_TIME} must grow from line to line (entry {number} has {time_s:g})")
    first = points[0][0]
    times, rates = zip(*((time_s - first, rate) for time_s, rate in points), strict=True)
    return Trace(times[:-1], rates[:-1], times[-1])


def shaped(shape: str, base: float, peak: float, duration_s: float) -> Trace:
    """Return a trace of a named shape; `base` and `peak` are requests per second. Raises: InputError."""
    if not (base >= 0 and peak >= base and peak > 0 and duration_s > 0):
        raise InputError("a shape needs a peak above 0, a base from 0 to the peak, and a duration above 0")
    step_s = duration_s / _STEPS
    times = tuple(index * step_s for index in range(_STEPS))
    rates = tuple(base + (peak - base) * SHAPES[shape]((time_s + step_s / 2) / duration_s) for time_s in times)
    return Trace(times, rates, duration_s)


def _spike(at: float) -> float:
    return 1.0 if 0.3 <= at < 0.5 else 0.0


def _ramp(at: float) -> float:
    """Rise in the first half, then stay constant, and fall in the last tenth."""
    return min(1.0, at / 0.5, (1 - at) / 0.1)


def _diurnal(at: float) -> float:
    """Follow a day from midnight to midnight, with the peak in the afternoon."""
    return (0.5 - 0.5 * math.cos(2 * math.pi * (at - 0.1))) ** 2


#: Functions from the elapsed share of the duration to a level between base (0) and peak (1).
SHAPES: Mapping[str, Callable[[float], float]] = {"spike": _spike, "ramp": _ramp, "diurnal": _diurnal}


def _csv(text: str, name: str) -> Iterable[tuple[float, float]]:
    reader = csv.DictReader(text.splitlines())
    if not {_TIME, _RATE} <= set(reader.fieldnames or ()):
        raise InputError(f"{name}: the first line must name the columns {_TIME},{_RATE}")
    return [_point(row, f"{name}:{reader.line_num}") for row in reader]


def _ndjson(text: str, name: str) -> Iterable[tuple[float, float]]:
    points = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{name}:{number}: this is not JSON: {error}") from None
        points.append(_point(row, f"{name}:{number}"))
    return points


def _point(row: Any, place: str) -> tuple[float, float]:
    try:
        time_s, rate = (float(row[key]) for key in (_TIME, _RATE))
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{place}: {_TIME} and {_RATE} must be numbers") from None
    if not (math.isfinite(time_s) and math.isfinite(rate) and rate >= 0):
        raise InputError(f"{place}: {_TIME} must be finite, and {_RATE} finite and not negative")
    return time_s, rate
