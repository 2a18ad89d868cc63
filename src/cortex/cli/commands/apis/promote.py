"""`cortex promote`: end the trial of an API's newest revision in its favour."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import add_api, add_env, add_output
from cortex.cli.session import Session


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    add_env(parser)
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Send the request and print the operator's message."""
    answer = session.client(arguments.env).promote(arguments.api)
    if arguments.output == "json":
        session.console.json(answer)
    else:
        session.console.line(answer["message"])
    return 0
