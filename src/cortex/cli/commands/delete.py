"""`cortex delete`: an API and its replicas; or the stop of a job."""

from __future__ import annotations

import argparse
import sys

from cortex.cli.arguments import add_api, add_env, add_job, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.client.client import Client
from cortex.errors import InputError

#: Deleting an API with more ready replicas than this is asked about.
_MANY_REPLICAS = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser)
    add_job(parser)
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="do not ask")
    parser.add_argument("-c", "--keep-cache", action="store_true", help="keep the history of what was deployed")
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Delete after a question, if many replicas serve; a job is stopped without one."""
    client = client_of(context, arguments.env)
    if arguments.job:
        answer = client.stop_job(arguments.api, arguments.job, arguments.keep_cache)
    else:
        if not arguments.force:
            _confirm(client, arguments.api, context)
        answer = client.delete(arguments.api, arguments.keep_cache, arguments.force)
    if arguments.output == "json":
        context.console.json(answer)
    else:
        context.console.line(answer["message"])
    return 0


def _confirm(client: Client, api: str, context: Context) -> None:
    counts = client.get_api(api)["status"]["replica_counts"]
    ready = counts["updated"]["ready"] + counts["stale"]["ready"]
    if ready <= _MANY_REPLICAS:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise InputError(f"{api} has {ready} ready replicas; delete it with --force")
    context.console.err.write(f"{api} has {ready} ready replicas; delete it? [y/N] ")
    context.console.err.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("nothing was deleted")
