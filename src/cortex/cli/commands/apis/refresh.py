"""`cortex refresh`: replace all replicas of an API by new ones with the same specification."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import add_api, add_env, add_output
from cortex.cli.session import Session


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="refresh even if an update is in progress")
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Send the request and print the operator's message."""
    answer = session.client(arguments.env).refresh(arguments.api, arguments.force)
    if arguments.output == "json":
        session.console.json(answer)
    else:
        session.console.line(answer["message"])
    return 0
