"""Says when a cron expression is due, in a time zone with its changes of the clock. Pure; times are UNIX seconds.

Where the clock is put forward, what was due in the hour that is left out is due at its end; where it is put back, what
names an hour is due once, and what is due every hour, or every few minutes, in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

from cronsim import CronSim

from cortex.config.schema import Schedule

#: What was due last is looked for in a time so long, then in one twice as long, and so on.
_FIRST_LOOK_S = 2 * 3600.0


@dataclass(frozen=True)
class Cron:
    """When something is due."""

    expression: str
    timezone: str = "UTC"

    @classmethod
    def of(cls, schedule: Schedule) -> Cron:
        """Return that of an API's schedule."""
        return cls(schedule.cron, schedule.timezone)

    @property
    def key(self) -> str:
        """Return a text that another one does not have."""
        return f"{self.expression} {self.timezone}"

    def next_after(self, moment: float) -> float | None:
        """Return when it is due first after `moment`; None: never."""
        return next(self._after(moment), None)

    def last_until(self, moment: float, since: float) -> float | None:
        """Return when it was due last after `since` up to `moment`; None: it was not."""
        look_s = _FIRST_LOOK_S
        while since < moment:
            begin = max(since, moment - look_s)
            last = None
            for due in self._after(begin):
                if due > moment:
                    break
                last = due
            if last is not None or begin == since:
                return last
            look_s *= 2
        return None

    def _after(self, moment: float) -> Iterator[float]:
        """Yield every time at which it is due after `moment`, in order."""
        last = moment
        for found in CronSim(self.expression, datetime.fromtimestamp(moment, zone(self.timezone))):
            due = found.timestamp()
            # In the hour that comes twice the library names its first run, which may be over.
            if due > last:
                last = due
                yield due


def zone(name: str) -> tzinfo:
    """Return a time zone; UTC also where the machine knows none. Raises: ZoneInfoNotFoundError."""
    return UTC if name == "UTC" else ZoneInfo(name)
