"""Points and lengths of time, in few letters."""

from __future__ import annotations

from datetime import datetime


def age(moment: datetime, now: datetime) -> str:
    """Return how long ago a moment was: `5s`, `3m`, `2h`, `4d`."""
    seconds = max(0, int((now - moment).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def duration(seconds: float) -> str:
    """Return a length of time with its two largest units: `0.4s`, `12s`, `3m 5s`, `2h 0m`, `4d 7h`."""
    if seconds < 1:
        return f"{max(0.0, seconds):.1f}s"
    whole = int(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller}{smaller_unit}"
    return f"{whole}s"


def stamp(moment: datetime) -> str:
    """Return a point of time as tables show it."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
