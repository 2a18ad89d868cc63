"""`cortex audit`: show the changes that clients of the operator requested."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, timedelta

from cortex.cli.arguments import add_env, add_output, seconds_of
from cortex.cli.session import Session
from cortex.errors import InputError

_MAX_LIMIT = 10_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--api", metavar="API", help="show only the changes of this API, deployed or not")
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="show only later changes: an age such as 30m, 24h or 7d, or a time such as 2026-01-31 or 2026-01-31T12:00"
        " (UTC unless it has an offset)",
    )
    parser.add_argument(
        "--limit", metavar="N", type=_limit, default=100, help="number of changes, 1 to 10000 (default: 100)"
    )
    add_env(parser)
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Show the changes, the newest first."""
    since = None if arguments.since is None else _time(arguments.since)
    entries = session.client(arguments.env).audit_log(arguments.api, since, arguments.limit)
    if arguments.output == "json":
        session.console.json(entries)
        return 0
    rows = [
        [
            entry["at"][:19],
            entry["token"] or "-",
            entry["address"],
            entry["action"],
            entry["api"] or "-",
            entry["result"],
            entry["detail"],
        ]
        for entry in entries
    ]
    session.console.table(["time (UTC)", "token", "address", "action", "api", "result", "detail"], rows)
    if len(entries) == arguments.limit:
        session.console.note(f"only the last {arguments.limit:,} changes are shown; use --limit N for more")
    return 0


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= _MAX_LIMIT):
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {_MAX_LIMIT:,} (got {text})")
    return int(text)


def _time(text: str) -> datetime:
    if text[-1:] in ("s", "m", "h", "d"):
        return datetime.now(UTC) - timedelta(seconds=seconds_of("--since", text))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"--since {text}: must be an age such as 24h or a time such as 2026-01-31T12:00") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
