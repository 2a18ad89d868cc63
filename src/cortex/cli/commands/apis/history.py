"""`cortex history`: list the revisions of an API that `cortex rollback` can deploy again."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from cortex.cli.arguments import add_api, add_env, add_output
from cortex.cli.output import Column, build_table, format_age
from cortex.cli.session import Session
from cortex.payloads.json_object import Json

#: Digits of a project's hash that are shown.
_HASH_DIGITS = 12


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    add_env(parser)
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Print the revisions, the newest first, and what each changed."""
    console = session.console
    history = session.client(arguments.env).history(arguments.api)
    if arguments.output == "json":
        console.json(history)
        return 0
    console.table(*build_table(_COLUMNS, history, datetime.now(UTC)))
    for entry in history:
        if entry["changes"]:
            console.line()
            console.line(f"changes of revision {entry['number']}:")
        for line in entry["changes"]:
            console.line(f"  {line}")
    return 0


def _status(entry: Json, now: datetime) -> str:
    if outcome := entry.get("canary"):  # older operators send none
        return f"canary: {outcome}"
    if entry["is_live"]:
        return "live"
    return "was live" if entry["live_at"] else "never live"


_COLUMNS: tuple[Column, ...] = (
    ("revision", lambda entry, now: str(entry["number"]), None),
    ("status", _status, None),
    ("deployed", lambda entry, now: format_age(datetime.fromisoformat(entry["deployed_at"]), now), None),
    ("by", lambda entry, now: entry["deployed_by"] or "-", "-"),
    ("action", lambda entry, now: entry["action"], None),
    ("files", lambda entry, now: entry["project"][:_HASH_DIGITS], None),
)
