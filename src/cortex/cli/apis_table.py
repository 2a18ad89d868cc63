"""APIs that have replicas, and splitters, as `cortex get` shows them: rows, from the operator's JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from cortex.cli.age import age

_MS_PER_S = 1000.0

Api = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
#: Header, cell, and whether the column is hidden while every cell of it is zero.
_Column = tuple[str, Callable[[Api, datetime], str], bool]
_COLUMNS: tuple[_Column, ...] = (
    ("realtime api", lambda api, now: api["spec"]["name"], False),
    ("status", lambda api, now: api["status"]["message"], False),
    ("up-to-date", lambda api, now: str(_counts(api)["updated"]["ready"]), False),
    ("stale", lambda api, now: str(_counts(api)["stale"]["ready"]), True),
    ("requested", lambda api, now: str(_counts(api)["requested"]), False),
    ("failed", lambda api, now: str(_failed(api)), True),
    ("last update", lambda api, now: age(datetime.fromisoformat(api["last_updated"]), now), False),
    ("avg request", lambda api, now: _average(api), False),
    ("2XX", lambda api, now: _responses(api, "2xx") or "-", False),
    ("4XX", lambda api, now: _responses(api, "4xx"), True),
    ("5XX", lambda api, now: _responses(api, "5xx"), True),
)


#: Of an AsyncAPI: its requests say nothing of its work.
_ASYNC_COLUMNS: tuple[_Column, ...] = (
    ("async api", *_COLUMNS[0][1:]),
    *_COLUMNS[1:7],
    ("workloads", lambda api, now: str(api.get("open_workloads") or 0), False),
)


def async_apis_table(env: str, apis: list[Api], now: datetime) -> Table:
    """Return headers and rows of AsyncAPIs, with how many workloads are not over."""
    return table(env, apis, now, _ASYNC_COLUMNS)


def table(env: str, apis: list[Api], now: datetime, columns: Sequence[_Column] = _COLUMNS) -> Table:
    """Return headers and rows; columns of failures are there only while there are some."""
    shown = [
        (header, cells)
        for header, cell, hides in columns
        if (cells := [cell(api, now) for api in apis]) and not (hides and all(text in ("", "0") for text in cells))
    ]
    headers = ["env", *(header for header, _ in shown)]
    return headers, [[env, *(cells[index] or "0" for _, cells in shown)] for index in range(len(apis))]


#: Of one API behind a splitter; what it gets comes first.
_TARGET_COLUMNS: tuple[_Column, ...] = (
    ("apis", _COLUMNS[0][1], False),
    ("weights", lambda api, now: api["weight"], False),
    *(_COLUMNS[index] for index in (1, 4, 6, 7, 8, 10)),
)


def splitters_table(env: str, apis: list[Api], now: datetime) -> Table:
    """Return headers and rows: one per TrafficSplitter."""
    headers = ["env", "traffic splitter", "apis", "last update"]
    return headers, [
        [env, api["spec"]["name"], _shares(api), age(datetime.fromisoformat(api["last_updated"]), now)] for api in apis
    ]


def targets_table(env: str, splitter: Api, apis: list[Api], now: datetime) -> Table:
    """Return headers and rows: one per API that a splitter names, in its order. `apis` are all that there are."""
    there = {api["spec"]["name"]: api for api in apis}
    rows = [
        {**there[share["name"]], "weight": _share(share)}
        for share in splitter["spec"]["apis"]
        if share["name"] in there
    ]
    return table(env, rows, now, _TARGET_COLUMNS)


def _shares(splitter: Api) -> str:
    return " ".join(f"{share['name']}:{_share(share)}" for share in splitter["spec"]["apis"])


def _share(share: Api) -> str:
    return f"{share['weight']}{' (shadow)' if share['shadow'] else ''}"


def _counts(api: Api) -> dict[str, Any]:
    counts: dict[str, Any] = api["status"]["replica_counts"]
    return counts


def _failed(api: Api) -> int:
    updated = _counts(api)["updated"]
    return sum(int(updated.get(name, 0)) for name in ("failed", "killed", "killed_oom"))


def _responses(api: Api, kind: str) -> str:
    count = api["metrics"].get("requests", {}).get(kind, 0)
    return str(count) if count else ""


def _average(api: Api) -> str:
    average_ms = api["metrics"].get("average_ms")
    if average_ms is None:
        return "-"
    if average_ms < 1:
        return "<1 ms"
    return f"{average_ms:.0f} ms" if average_ms < _MS_PER_S else f"{average_ms / _MS_PER_S:.1f} s"
