"""`cortex refresh`: new replicas of the same specification."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import add_api, add_env, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser)
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="refresh also while an update is going on")
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Ask for it and print the operator's answer."""
    answer = client_of(context, arguments.env).refresh(arguments.api, arguments.force)
    if arguments.output == "json":
        context.console.json(answer)
    else:
        context.console.line(answer["message"])
    return 0
