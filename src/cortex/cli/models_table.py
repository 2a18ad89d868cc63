"""The models of one API as `cortex get` shows them: versions, and why others are not served."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from cortex.cli.age import age, stamp

#: The name of the one model of `path`, which the user gave none.
_UNNAMED = "_cortex_default"
_DETAIL_LINES = 20

Models = dict[str, Any]


def versions_table(models: Models) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows: one per version. The only model of `path` has no name to show."""
    rows = [
        [
            row["model"],
            row["version"] + _latest(row, models["replicas"]),
            stamp(datetime.fromisoformat(row["edited_at"])),
            _loaded(row, models["replicas"]),
        ]
        for row in models["versions"]
    ]
    headers = ["model name", "model version", "edit time", "loaded"]
    if all(row[0] == _UNNAMED for row in rows):
        return headers[1:], [row[1:] for row in rows]
    return headers, rows


def notes(models: Models, now: datetime) -> Iterator[str]:
    """Say what the table does not: what is left out of it, what is on its way, what is wrong."""
    hidden = models["version_count"] - len(models["versions"])
    if hidden > 0:
        yield f"and {hidden:,} more versions"
    if models["reloading"]:
        where = "" if models["replicas"] == 1 else f" in {_of(models['reloading'], models['replicas'])}"
        yield f"newer models are being loaded{where}"
    for problem in models["problems"]:
        yield from _problem(problem, models["replicas"], now)


def _problem(problem: Models, replicas: int, now: datetime) -> Iterator[str]:
    name = "" if problem["model"] in ("", _UNNAMED) else problem["model"]
    number = f"version {problem['version']}" if problem["version"] else ""
    what = " ".join(filter(None, (name, number))) or "models"
    since = f", for {age(datetime.fromisoformat(problem['since']), now)}" if problem["since"] else ""
    where = f", in {_of(problem['replicas'], replicas)}" if problem["replicas"] < replicas else ""
    yield f"problem with {what}{since}{where}: {problem['message']}"
    lines = problem["detail"].rstrip().splitlines()
    if len(lines) > _DETAIL_LINES:
        yield "    …"
    for line in lines[-_DETAIL_LINES:]:
        yield f"    {line}".rstrip()


def _latest(row: Models, replicas: int) -> str:
    if row["latest"] == replicas:
        return " (latest)"
    return f" (latest in {_of(row['latest'], replicas)})" if row["latest"] else ""


def _loaded(row: Models, replicas: int) -> str:
    if row["loaded"] in (0, replicas):
        return "yes" if row["loaded"] else "no"
    return _of(row["loaded"], replicas)


def _of(count: int, replicas: int) -> str:
    return f"{count} of {replicas} replica{'s' if replicas != 1 else ''}"
