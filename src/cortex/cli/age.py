"""How long ago something was, in few letters."""

from __future__ import annotations

from datetime import datetime


def age(moment: datetime, now: datetime) -> str:
    """Return how long ago a moment was: `5s`, `3m`, `2h`, `4d`."""
    seconds = max(0, int((now - moment).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
