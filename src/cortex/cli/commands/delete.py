"""`cortex delete`: delete an API or stop a job."""

from __future__ import annotations

import argparse
import sys

from cortex.cli.arguments import add_api, add_env, add_job, add_output
from cortex.cli.session import Session
from cortex.client.client import Client
from cortex.errors import InputError

#: Deleting an API with more ready replicas requires confirmation.
_MANY_REPLICAS = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    add_job(parser)
    add_env(parser)
    parser.add_argument("-f", "--force", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "-c",
        "--keep-cache",
        action="store_true",
        help="keep the jobs of the API, their results, and the list of its versions",
    )
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Delete the API, after confirmation if it has many replicas, or stop the job."""
    client = session.client(arguments.env)
    if arguments.job:
        answer = client.stop_job(arguments.api, arguments.job, arguments.keep_cache)
    else:
        if not arguments.force:
            _confirm(client, arguments.api, session)
        answer = client.delete(arguments.api, arguments.keep_cache, arguments.force)
    if arguments.output == "json":
        session.console.json(answer)
    else:
        session.console.line(answer["message"])
    return 0


def _confirm(client: Client, api: str, session: Session) -> None:
    counts = client.get_api(api)["status"]["replica_counts"]
    ready = counts["updated"]["ready"] + counts["stale"]["ready"]
    if ready <= _MANY_REPLICAS:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise InputError(f"{api} has {ready} ready replicas; delete it with --force")
    session.console.err.write(f"{api} has {ready} ready replicas; delete it? [y/N] ")
    session.console.err.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("nothing was deleted")
