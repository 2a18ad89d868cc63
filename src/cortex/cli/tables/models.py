"""Table of the model versions of an API, with notes about problems."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from cortex.cli.output import Table, format_age, format_time

#: Internal name of the only model of an API with `path`.
_UNNAMED = "_cortex_default"
_DETAIL_LINES = 20

Models = dict[str, Any]


def versions_table(models: Models) -> Table:
    """Return a table with one row per version. The name column is omitted for the only model of `path`."""
    rows = [
        [
            row["model"],
            row["version"] + _latest(row, models["replicas"]),
            format_time(datetime.fromisoformat(row["edited_at"])),
            _loaded(row, models["replicas"]),
        ]
        for row in models["versions"]
    ]
    headers = ["model name", "model version", "edit time", "loaded"]
    if all(row[0] == _UNNAMED for row in rows):
        return headers[1:], [row[1:] for row in rows]
    return headers, rows


def model_notes(models: Models, now: datetime) -> Iterator[str]:
    """Yield notes about omitted versions, versions that are being loaded, and problems."""
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
    since = f", for {format_age(datetime.fromisoformat(problem['since']), now)}" if problem["since"] else ""
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
