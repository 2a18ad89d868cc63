"""`cortex rollback`: deploy an earlier revision of an API again."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import add_api, add_env, add_output
from cortex.cli.rollout import report_failure, show_result, wait
from cortex.cli.session import Session
from cortex.cli.tables.canary import canary_notes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    parser.add_argument(
        "revision",
        metavar="REVISION",
        nargs="?",
        type=_revision,
        help="number of a revision in `cortex history`; default: the one that was live before the newest",
    )
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="roll back even if an update is in progress")
    add_output(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the API is live")


def _revision(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = f"{text!r} is not the number of a revision, such as 3; `cortex history API` lists them"
        raise argparse.ArgumentTypeError(message) from None


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Roll back; return 0 if the API becomes live."""
    as_json = arguments.output == "json"
    client = session.client(arguments.env)
    result = client.rollback(arguments.api, arguments.revision, arguments.force)
    if not as_json:
        show_result(result, session)
    outcome = None
    try:
        if not arguments.no_wait:
            outcome = wait(client, arguments.api, session)
    except KeyboardInterrupt:
        session.console.note("the rollback continues; `cortex get` shows its status")
        raise
    if outcome is not None and not outcome.is_live:
        result["error"] = report_failure(outcome.api, session)
    elif outcome is not None and not as_json:
        live = session.console.styled("live", "green")
        session.console.line(f"{arguments.api} is {live} ({outcome.seconds:.1f} s)")
        for line in canary_notes(outcome.api):
            session.console.line(f"  {line}")
    if as_json:
        session.console.json(result)
    return 1 if result["error"] else 0
