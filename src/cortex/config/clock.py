"""Readers of what says when jobs are run by the clock: cron expressions and time zones."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime

from cronsim import CronSim, CronSimError
from pydantic import ValidationInfo

from cortex.config.values import nearest, problem, quote, text

#: The context in which something is read that was checked when it was stored, by a machine that may have known more.
STORED = {"is_stored": True}

_EXAMPLE = 'write something like "0 3 * * *": minute, hour, day of the month, month, day of the week'
_FIELDS = 5
_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_NEVER = datetime(2000, 1, 1, tzinfo=UTC)


def cron_expression(value: object) -> str:
    """Read a cron expression of five fields, one space between two; `@daily` and the like come back as such."""
    written = text(value).strip().lower() if str(value).strip().startswith("@") else text(value)
    if written.startswith("@"):
        if written not in _ALIASES:
            near = nearest(written, _ALIASES)
            raise problem(f"{quote(value)} is no cron expression", f'did you mean "{near}"?' if near else _EXAMPLE)
        return _ALIASES[written]
    fields = written.split()
    if len(fields) != _FIELDS:
        raise problem(f"{quote(value)} is no cron expression: it has {len(fields)} fields, not {_FIELDS}", _EXAMPLE)
    expression = " ".join(fields)
    try:
        next(CronSim(expression, _NEVER))
    except CronSimError as error:
        reason = str(error)
        raise problem(f"{quote(value)} is no cron expression: {reason[:1].lower()}{reason[1:]}", _EXAMPLE) from None
    except StopIteration:
        raise problem(f"{quote(value)} never comes", _EXAMPLE) from None
    return expression


def time_zone(value: object, info: ValidationInfo) -> str:
    """Read the name of a time zone that this machine knows, or knew."""
    name = text(value)
    if info.context == STORED:
        return name
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        zones = zoneinfo.available_timezones()
        cities = {zone.rpartition("/")[2]: zone for zone in sorted(zones) if "/" in zone}
        near = nearest(name, zones) or cities.get(nearest(name, cities) or "")
        fix = f"write {quote(near)}" if near else 'write something like "Europe/Berlin" or "UTC"'
        raise problem(f"{quote(name)} is no time zone", fix) from None
    return name
