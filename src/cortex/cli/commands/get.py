"""`cortex get`: the status of all APIs, or of one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cortex.cli.age import age
from cortex.cli.arguments import add_api, add_env, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.cli.models_table import notes, versions_table
from cortex.client.api import Client
from cortex.errors import UserError

_WATCH_S = 2.0
_MS_PER_S = 1000.0

Api = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser, optional=True)
    add_env(parser)
    parser.add_argument("-w", "--watch", action="store_true", help=f"show it again every {_WATCH_S:.0f} seconds")
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Show once, or until interrupted."""
    client = client_of(context, arguments.env)
    while True:
        answer: Any = client.get_api(arguments.api) if arguments.api else client.list_apis()
        if arguments.watch:
            context.console.clear_screen()
        if arguments.output == "json":
            context.console.json(answer)
        elif arguments.api:
            _show_one(client, answer, context)
        else:
            _show_all(client, answer, context)
        context.console.flush()
        if not arguments.watch:
            return 0
        time.sleep(_WATCH_S)


def _show_all(client: Client, apis: list[Api], context: Context) -> None:
    if apis:
        context.console.table(*table(client.environment.name, apis, datetime.now(UTC)))
    else:
        context.console.line("no apis are deployed")


def _show_one(client: Client, api: Api, context: Context) -> None:
    console, status = context.console, api["status"]
    console.table(*table(client.environment.name, [api], datetime.now(UTC)))
    console.line(f"\nendpoint: {api['endpoint']}")
    if models := api.get("models"):
        _show_models(models, context)
    if failure := status.get("failure"):
        console.line()
        console.line(UserError(failure["message"], failure["traceback"]).in_full())
        if status["replica_counts"]["stale"]["ready"]:
            console.line("the version that was live before still serves")


def _show_models(models: dict[str, Any], context: Context) -> None:
    console = context.console
    if models["versions"]:
        console.line()
        console.table(*versions_table(models))
    lines = list(notes(models, datetime.now(UTC)))
    if lines:
        console.line()
    for line in lines:
        console.line(line)


#: Header, cell, and whether the column is hidden while every cell of it is zero.
_COLUMNS: tuple[tuple[str, Callable[[Api, datetime], str], bool], ...] = (
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


def table(env: str, apis: list[Api], now: datetime) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows; columns of failures are there only while there are some."""
    shown = [
        (header, cells)
        for header, cell, hides in _COLUMNS
        if (cells := [cell(api, now) for api in apis]) and not (hides and all(text in ("", "0") for text in cells))
    ]
    headers = ["env", *(header for header, _ in shown)]
    return headers, [[env, *(cells[index] or "0" for _, cells in shown)] for index in range(len(apis))]


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
