"""Parse and validate single values: strings, ranges, quantities, durations, cron expressions and time zones.

Each function takes a value from YAML or JSON and returns it in our units, or raises the error made by `problem`. No
function depends on the field that it validates.
"""

from __future__ import annotations

import json
import math
import re
import zoneinfo
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeVar

from cronsim import CronSim, CronSimError
from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

from cortex.projects.dotenv import RESERVED_PREFIX
from cortex.spelling import nearest

#: Attribute of a validator with the JSON Schema of what it accepts.
ACCEPTED = "json_schema"
#: A message and its fix.
NULL = ("cannot be null", "specify a value, or remove the key to use the default value")

_SHOWN_LENGTH = 80
#: Fit into 64 bits in nanoseconds and in bytes, even when added up.
_MAX_SECONDS = 100 * 365 * 24 * 3600
_MAX_BYTES = 2**62
_DECIMAL_UNITS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_UNITS = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}))(?:([A-Za-z]{0,2})|[eE]([+-]?[0-9]{1,2}))"
)
_DURATION_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15})(ns|us|µs|ms|s|m|h)")
_BOUNDS = {
    "above": "exclusiveMinimum",
    "at_least": "minimum",
    "below": "exclusiveMaximum",
    "at_most": "maximum",
    "multiple_of": "multipleOf",
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


Validator = TypeVar("Validator", bound=Callable[..., Any])
_CORES_SCHEMA = r"^\s*\+?([0-9]+\.?[0-9]*|\.[0-9]+)([num]|[eE][+-]?[0-9]{1,2})?\s*$"
_QUANTITY_SCHEMA = r"^\s*\+?([0-9]+\.?[0-9]*|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?\s*$"
_DURATION_SCHEMA = r"^(0|([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h))+$"


def accepts(**schema: Any) -> Callable[[Validator], Validator]:
    """Attach the JSON Schema of the values that a validator accepts, for editors; `json_schema.py` collects them."""

    def attach(validator: Validator) -> Validator:
        setattr(validator, ACCEPTED, schema)
        return validator

    return attach


def problem(message: str, fix: str = "") -> PydanticCustomError:
    """Return the error to raise for an invalid value; `validate.py` extracts message and fix."""
    return PydanticCustomError("value", "{text}", {"text": message, "fix": fix})


def quote(value: object) -> str:
    """Format a value as shortened JSON: strings in quotes, so that `"5"` and `5` differ."""
    try:
        shown = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, float) else f"{value:g}"
    except RecursionError:
        shown = "[…]" if isinstance(value, list) else "{…}"
    return shown if len(shown) <= _SHOWN_LENGTH else shown[: _SHOWN_LENGTH - 1] + "…"


def dashed(name: str) -> str:
    """Convert a name to lower case letters, numbers and single inner dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def wrong_type(
    value: object, expected: str, fix: str = "", fix_of: Callable[[str], str] | None = None
) -> PydanticCustomError:
    """Return the error for a value of the wrong type; `expected` includes its article.

    `fix_of` returns the fix for a number or boolean from its text in the file: `0755` is 493, and `NO` is false.
    """
    if value is None:
        return problem(*NULL)
    if fix_of is not None and isinstance(value, bool | int | float):
        fix = fix_of(str(value).lower() if isinstance(value, bool) else str(value))
    message = f"{quote(value)}: invalid type (expected {expected})"
    return PydanticCustomError("value", "{text}", {"text": message, "fix": fix, "expected": expected, "fix_of": fix_of})


@accepts(type="string", pattern=r"\S")
def text(value: object) -> str:
    """Validate a non-empty string."""
    if not isinstance(value, str):
        raise wrong_type(value, "a string", "write text", lambda written: f"write {json.dumps(written)}")
    if not value.strip():
        raise problem("cannot be empty", "write something, or remove the key")
    if "\0" in value:
        raise problem(f"{quote(value)} cannot contain a null character", "remove it")
    return value


def enum(*allowed: str, synonyms: Mapping[str, str] | None = None) -> Callable[[object], str]:
    """Return a validator for one of several words; `synonyms` maps words in lower case to the one that they mean."""

    @accepts(enum=list(allowed))
    def read(value: object) -> str:
        if value in allowed and isinstance(value, str):
            return value
        if value is None:
            raise wrong_type(value, "a string")
        meant = allowed[0] if len(allowed) == 1 else None
        if meant is None and isinstance(value, str):
            meant = (synonyms or {}).get(value.lower()) or nearest(value, allowed)
        choice = " or ".join(quote(word) for word in allowed)
        raise problem(f"invalid value (got {quote(value)}, must be {choice})", f"write {quote(meant or allowed[0])}")

    return read


def _check_range(
    value: float,
    shown: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    bounds = (
        (above, "greater than", "above", above is None or value > above),
        (at_least, "greater than or equal to", "of at least", at_least is None or value >= at_least),
        (below, "less than", "below", below is None or value < below),
        (at_most, "less than or equal to", "of at most", at_most is None or value <= at_most),
    )
    wanted = " and ".join(f"{words} {bound:g}" for bound, _, words, _ in bounds if bound is not None)
    for bound, words, _, holds in bounds:
        if not holds:
            raise problem(f"must be {words} {bound:g} (got {shown})", f"write a number {wanted}")


def _range_schema(**bounds: float | None) -> dict[str, float]:
    return {_BOUNDS[name]: bound for name, bound in bounds.items() if bound is not None}


def integer(
    *, above: int | None = None, at_least: int | None = None, at_most: int | None = None
) -> Callable[[object], int]:
    """Return a validator for integers in a range; `2.0` and `true` are rejected."""

    @accepts(type="integer", **_range_schema(above=above, at_least=at_least, at_most=at_most))
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            digits = isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value)
            raise wrong_type(value, "an integer", f"write {value} without quotes" if digits else "write a whole number")
        _check_range(value, str(value), above=above, at_least=at_least, at_most=at_most)
        return value

    return read


def number(
    *, above: float | None = None, at_least: float | None = None, below: float | None = None
) -> Callable[[object], float]:
    """Return a validator for finite numbers in a range."""

    def is_in_range(value: float) -> bool:
        try:
            _check_range(value, "", above=above, at_least=at_least, below=below)
        except PydanticCustomError:
            return False
        return True

    def fix_of(value: object) -> str:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?%", value):
            meant = fraction(value)
            if is_in_range(meant):
                return f"write {meant:g}"
        return f"write a number, such as {1.5 if is_in_range(1.5) else 0.5}"

    @accepts(type="number", **_range_schema(above=above, at_least=at_least, below=below))
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise wrong_type(value, "a number", fix_of(value))
        _check_range(value, quote(value), above=above, at_least=at_least, below=below)
        return float(value)

    return read


def parse_quantity(value: object) -> Decimal | None:
    """Parse a Kubernetes quantity: `200m`, `1.5`, `512Mi`, `1e3` or a number; None if it is invalid."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        return None
    amount, unit, exponent = str(match[1]), match[2] or "", int(match[3] or 0)
    if unit in _BINARY_UNITS:
        return Decimal(amount) * Decimal(1024) ** _BINARY_UNITS[unit]
    if unit not in _DECIMAL_UNITS:
        return None
    return Decimal(amount).scaleb(_DECIMAL_UNITS[unit] + exponent)


def _quantity(value: object, examples: str, units: Mapping[str, str]) -> Decimal:
    """Parse a positive quantity; `units` maps the first letter of units that people write to the right ones."""
    if value is None or isinstance(value, bool | list | dict):
        raise wrong_type(value, "a string or a number", f"write something like {examples}")
    amount = parse_quantity(value)
    if amount is None:
        written = re.fullmatch(r"([0-9.]+) ?([a-z])[a-z]*", str(value).lower())
        unit = units.get(written[2]) if written else None
        fix = f"write something like {examples}"
        if written and unit is not None:
            fix = f'write "{written[1]}{unit}"' if unit else f"write {written[1]}"
        raise problem(f"{quote(value)}: invalid quantity", fix)
    if amount <= 0:
        raise problem(f"must be greater than 0 (got {value})", f"write something like {examples}")
    return amount


@accepts(anyOf=[{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": _CORES_SCHEMA}])
def cores(value: object) -> float:
    """Parse a CPU quantity into cores: `200m` is 0.2. Suffixes of memory are rejected, such as `500M` and `500Mi`."""
    examples = '"500m" or 2'
    amount = _quantity(value, examples, {"m": "m", "c": "", "v": ""})  # millicores, cores, vCPUs
    if memory := re.fullmatch(r"\+?([0-9.]+)([kKMGTPE]i?)", str(value).strip()):
        fix = f'write "{memory[1]}m"' if memory[2][0] == "M" else f"write something like {examples}"
        raise problem(f"{quote(value)}: invalid quantity of CPU ({memory[2]} is a suffix of memory)", fix)
    return float(amount)


@accepts(
    anyOf=[
        {"type": "number", "exclusiveMinimum": 0, "maximum": _MAX_BYTES},
        {"type": "string", "pattern": _QUANTITY_SCHEMA},
    ]
)
def memory_bytes(value: object) -> int:
    """Parse a memory quantity into bytes: `1Ki` is 1024."""
    size = math.ceil(_quantity(value, '"512Mi" or "2Gi"', {letter: f"{letter.upper()}i" for letter in "kmgtp"}))
    if size > _MAX_BYTES:
        raise problem(f"must be at most 4Ei (got {quote(value)})", "write a smaller amount")
    return size


def duration_s(
    *,
    above: float | None = None,
    at_least: float | None = None,
    multiple_of: float | None = None,
    example: str | None = None,
) -> Callable[[object], float]:
    """Return a validator for durations in seconds: `500ms`, `1m30s`, or a number of seconds."""
    bounds = _range_schema(above=above, at_least=at_least, multiple_of=multiple_of)

    @accepts(anyOf=[{"type": "number", **bounds}, {"type": "string", "pattern": _DURATION_SCHEMA}])
    def read(value: object) -> float:
        seconds = _seconds(value)
        shown = str(value)
        for bound, words, holds in (
            (above, "greater than", above is None or seconds > above),
            (at_least, "greater than or equal to", at_least is None or seconds >= at_least),
        ):
            if bound is not None and not holds:
                fix = f"write something like {example or f'{bound + 10:g}s'}"
                raise problem(f"must be {words} {bound:g}s (got {shown})", fix)
        if multiple_of is not None and seconds % multiple_of:
            near = max(round(seconds / multiple_of), 1) * multiple_of
            raise problem(f"must be a multiple of {multiple_of:g}s (got {shown})", f"write {near:g}s")
        return seconds

    return read


def _seconds(value: object) -> float:
    if value is None or isinstance(value, bool | list | dict):
        raise wrong_type(value, "a duration", 'write something like "30s" or "5m"')
    if isinstance(value, int | float):
        seconds = float(value) if abs(value) < 1e12 else math.inf
    else:
        sign, written = (-1.0, str(value)[1:]) if str(value).startswith("-") else (1.0, str(value))
        parts = list(_DURATION_PART.finditer(written))
        seconds = sign * sum(float(part[1]) * _SECONDS[part[2]] for part in parts)
        if not parts or "".join(part[0] for part in parts) != written:
            seconds = 0.0 if written == "0" else math.nan
    if not math.isfinite(seconds):
        raise problem(f"{quote(value)}: invalid duration", 'write something like "30s", "500ms" or "5m"')
    if abs(seconds) > _MAX_SECONDS:
        raise problem(f"must be at most {_MAX_SECONDS // 3600}h (got {value})", "write a shorter time")
    return round(seconds, 9)


@accepts(anyOf=[{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^([0-9]+|0*(100|[0-9]{1,2})%)$"}])
def percent_or_count(value: object) -> str:
    """Validate an integer of at least 0, or `0%` to `100%`; return it as a string."""
    written = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(written, str):
        raise wrong_type(value, "a string or an integer", "write something like 1 or 25%")
    if re.fullmatch(r"[0-9]{1,9}", written):
        return str(int(written))
    if re.fullmatch(r"[0-9]{1,3}%", written) and int(written[:-1]) <= 100:
        return f"{int(written[:-1])}%"
    raise problem(
        f"{quote(value)} must be an integer of at least 0 or a percentage from 0% to 100%",
        "write something like 1 or 25%",
    )


def percentage(*, above: float | None = None, at_most: float = 100, whole: bool = False) -> Callable[[object], str]:
    """Return a validator of percentages such as `0.5%`, which stay text; see `fraction`."""
    example = "10%" if whole else "10% or 0.5%"

    @accepts(type="string", pattern=r"^[0-9]+%$" if whole else r"^[0-9]+(\.[0-9]+)?%$")
    def read(value: object) -> str:
        digits = r"[0-9]{1,9}" if whole else r"[0-9]{1,9}(\.[0-9]{1,9})?"
        if not isinstance(value, str) or not re.fullmatch(f"{digits}%", value):
            kind = "whole percentage" if whole else "percentage"
            raise problem(f"{quote(value)} must be a {kind}", f"write something like {example}")
        number = float(value[:-1])
        if number > at_most or (above is not None and number <= above):
            low = f"more than {above:g}%" if above is not None else "at least 0%"
            raise problem(f"must be {low} and at most {at_most:g}% (got {value})", f"write something like {example}")
        return f"{number:.9g}%"

    return read


def fraction(percentage: str) -> float:
    """Return 0.005 for `0.5%`."""
    return float(percentage.rstrip("%")) / 100


@accepts(type="boolean")
def true_or_false(value: object) -> bool:
    """Validate a boolean."""
    if not isinstance(value, bool):
        raise wrong_type(value, "true or false", "write true or false")
    return value


@accepts(type="object")
def a_map(value: object) -> dict[str, object]:
    """Validate a map; `document.py` ensures that its keys are strings and its values fit JSON."""
    if not isinstance(value, dict):
        raise wrong_type(value, "a map", 'write "key: value" lines below it')
    return value


@accepts(type="string", pattern=f"^(?!{RESERVED_PREFIX})[^=]+$")
def env_name(value: object) -> str:
    """Validate the name of an environment variable that users may set."""
    name = text(value)
    if name.startswith(RESERVED_PREFIX):
        raise problem(f"{quote(name)} cannot start with CORTEX_ (such names are reserved)", "rename the variable")
    if "=" in name:
        raise problem(f'{quote(name)} cannot contain "="', "write name: value")
    return name


@accepts(type="string")
def env_value(value: object) -> str:
    """Validate the value of an environment variable, which may be empty."""
    return value if value == "" and isinstance(value, str) else text(value)


@accepts(type="array", minItems=1)
def a_list(value: object) -> list[object]:
    """Validate a non-empty list."""
    if not isinstance(value, list):
        raise wrong_type(value, "a list", 'write "- item" lines below it')
    if not value:
        raise problem("cannot be empty", "remove the key")
    return value


#: Validation context for stored data: skip checks that depend on this machine, such as its time zone database.
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


@accepts(type="string", pattern=r"^\s*(@[A-Za-z]+|\S+(\s+\S+){4})\s*$")
def cron_expression(value: object) -> str:
    """Validate a cron expression of five fields and normalize its spaces; aliases such as `@daily` are expanded."""
    written = text(value).strip().lower() if str(value).strip().startswith("@") else text(value)
    if written.startswith("@"):
        if written not in _ALIASES:
            near = nearest(written, _ALIASES)
            raise problem(f"{quote(value)} is not a cron expression", f'did you mean "{near}"?' if near else _EXAMPLE)
        return _ALIASES[written]
    fields = written.split()
    if len(fields) != _FIELDS:
        raise problem(f"{quote(value)} is not a cron expression: it has {len(fields)} fields, not {_FIELDS}", _EXAMPLE)
    expression = " ".join(fields)
    try:
        next(CronSim(expression, _NEVER))
    except CronSimError as error:
        reason = str(error)
        raise problem(f"{quote(value)} is not a cron expression: {reason[:1].lower()}{reason[1:]}", _EXAMPLE) from None
    except StopIteration:
        raise problem(f"{quote(value)} never matches a date", _EXAMPLE) from None
    return expression


@accepts(type="string", pattern=r"\S")
def time_zone(value: object, info: ValidationInfo) -> str:
    """Validate the name of a time zone against this machine's database, unless the data was stored earlier."""
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
        raise problem(f"{quote(name)} is not a known time zone", fix) from None
    return name
