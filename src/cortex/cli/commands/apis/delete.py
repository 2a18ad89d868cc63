"""`cortex delete`: delete an API or stop a job."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from cortex.cli.arguments import add_api, add_env, add_job, add_output
from cortex.cli.output import format_count
from cortex.cli.session import Session
from cortex.client.client import Client
from cortex.errors import InputError
from cortex.payloads.json_object import Json

#: Without a terminal, deleting an API with more ready replicas requires `--force`.
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
    """Delete the API, after confirmation if it is in use, or stop the job."""
    client = session.client(arguments.env)
    if arguments.job:
        answer = client.stop_job(arguments.api, arguments.job, arguments.keep_cache)
    else:
        if not arguments.force:
            _confirm(client, arguments, session)
        answer = client.delete(arguments.api, arguments.keep_cache, arguments.force)
    if arguments.output == "json":
        session.console.json(answer)
    else:
        session.console.line(answer["message"])
    return 0


def _confirm(client: Client, arguments: argparse.Namespace, session: Session) -> None:
    """Ask before the deletion of an API that is in use. Without a terminal, refuse it if the API has many replicas.

    Raises: InputError if it is refused.
    """
    api = client.get_api(arguments.api)
    name, ready = arguments.api, _ready_replicas(api)
    if not session.is_interactive:
        if ready > _MANY_REPLICAS:
            raise InputError(f"{name} has {ready} ready replicas; delete it with --force")
        return
    uses = list(_uses(api, ready, arguments.keep_cache))
    if uses and not session.confirm(f"{name} {' and '.join(uses)}; delete it?"):
        raise InputError("nothing was deleted")


def _uses(api: Json, ready: int, keeps_jobs: bool) -> Iterator[str]:
    """Yield what a deletion would end or delete."""
    if ready:
        yield f"has {format_count(ready, 'ready replica', 'ready replicas')}"
    elif api["status"]["status_code"] == "live":
        yield "is live"
    if api.get("task_job_statuses") or api.get("batch_job_statuses"):
        running = api.get("running_jobs", 0)
        jobs = f"has jobs, {running} of them running" if running else "has jobs"
        yield jobs if keeps_jobs else f"{jobs}, which will be deleted with their results"
    if workloads := api.get("open_workloads"):
        yield f"has {format_count(workloads, 'unfinished workload', 'unfinished workloads')}"


def _ready_replicas(api: Json) -> int:
    counts = api["status"]["replica_counts"]
    return int(counts["updated"]["ready"] + counts["stale"]["ready"])
