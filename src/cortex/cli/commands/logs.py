"""`cortex logs`: what the replicas of an API wrote, past ones too."""

from __future__ import annotations

import argparse

from cortex.cli.arguments import add_api, add_env
from cortex.cli.connect import client_of
from cortex.cli.context import Context


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser)
    add_env(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what will be written")
    parser.add_argument("--replica", metavar="ID", help="show only one replica; `cortex status` lists their ids")
    parser.add_argument("--tail", metavar="N", type=int, help="show only the last N lines")


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Print lines as they come."""
    client = client_of(context, arguments.env)
    for line in client.api_logs(arguments.api, arguments.follow, arguments.replica, arguments.tail):
        context.console.line(line)
        if arguments.follow:
            context.console.flush()
    return 0
