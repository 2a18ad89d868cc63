"""`cortex get`: the status of all APIs, of one with its jobs, or of one job."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from cortex.cli.apis_table import Api, Table, async_apis_table, splitters_table, table, targets_table
from cortex.cli.arguments import UsageError, add_api, add_env, add_job, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.cli.jobs_table import batch_apis_table, jobs_table
from cortex.cli.models_table import notes, versions_table
from cortex.cli.scaling_table import show_scaling
from cortex.cli.tasks_table import schedule_lines, task_apis_table, tasks_table
from cortex.cli.tracker_table import show_tracker
from cortex.cli.watch import exit_code, show_job, watch
from cortex.client.client import Client
from cortex.errors import UserError
from cortex.lifecycle import ApiKind

_WATCH_S = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser, optional=True)
    add_job(parser)
    add_env(parser)
    parser.add_argument(
        "-w",
        "--watch",
        action="store_true",
        help=f"show it again every {_WATCH_S:.0f} seconds; of a job, show its progress until it is over",
    )
    parser.add_argument("--why", action="store_true", help="show why an API has as many replicas as it has")
    parser.add_argument("--results", action="store_true", help="print what the job's batches returned, as NDJSON")
    parser.add_argument("--dead-letters", action="store_true", help="print the batches that were given up, as NDJSON")
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Show once, or until interrupted, or until the job is over; then the exit code tells whether it succeeded."""
    if (arguments.results or arguments.dead_letters) and not arguments.job:
        raise UsageError("--results and --dead-letters belong to a job: `cortex get API JOB --results`")
    if arguments.why and (arguments.job or not arguments.api):
        raise UsageError("--why belongs to one API: `cortex get API --why`")
    client = client_of(context, arguments.env)
    return _run_job(client, arguments, context) if arguments.job else _run_apis(client, arguments, context)


def _run_job(client: Client, arguments: argparse.Namespace, context: Context) -> int:
    api, job_id = arguments.api, arguments.job
    if arguments.results or arguments.dead_letters:
        for block in _streamed(client, arguments):
            context.console.raw(block)
        return 0
    job = watch(client, api, job_id, context) if arguments.watch else client.get_job(api, job_id)
    if arguments.output == "json":
        context.console.json(job)
    else:
        show_job(client, api, job, context)
    return exit_code(job) if arguments.watch else 0


def _streamed(client: Client, arguments: argparse.Namespace) -> Iterator[bytes]:
    if arguments.results:
        yield from client.raw_job_results(arguments.api, arguments.job)
    if arguments.dead_letters:
        yield from client.raw_dead_letters(arguments.api, arguments.job)


def _run_apis(client: Client, arguments: argparse.Namespace, context: Context) -> int:
    while True:
        answer = _answer(client, arguments)
        if arguments.watch:
            context.console.clear_screen()
        if arguments.output == "json":
            context.console.json(answer)
        elif arguments.why:
            show_scaling(answer, context.console)
        elif arguments.api:
            _show_one(client, answer, context)
        else:
            _show_all(client, answer, context)
        context.console.flush()
        if not arguments.watch:
            return 0
        time.sleep(_WATCH_S)


def _answer(client: Client, arguments: argparse.Namespace) -> Any:
    if arguments.why:
        return client.get_scaling(arguments.api)
    return client.get_api(arguments.api) if arguments.api else client.list_apis()


def _show_all(client: Client, apis: list[Api], context: Context) -> None:
    console, env, now = context.console, client.environment.name, datetime.now(UTC)
    if not apis:
        console.line("no apis are deployed")
        return
    kinds = {kind: [api for api in apis if _kind(api) == kind] for kind in ApiKind}
    for number, (kind, some) in enumerate((kind, some) for kind, some in kinds.items() if some):
        if number:
            console.line()
        console.table(*_apis_table(kind)(env, some, now))


def _show_one(client: Client, api: Api, context: Context) -> None:
    console, status, now = context.console, api["status"], datetime.now(UTC)
    env = client.environment.name
    console.table(*_apis_table(_kind(api))(env, [api], now))
    if _kind(api).runs_jobs:
        _show_jobs(api, now, context)
    if _kind(api) is ApiKind.SPLITTER:
        console.line()
        console.table(*targets_table(env, api, client.list_apis(), now))
    console.line(f"\nendpoint: {api['endpoint']}")
    if tracked := api.get("tracker"):
        show_tracker(tracked, api["spec"]["name"], console, now)
    if models := api.get("models"):
        _show_models(models, context)
    if failure := status.get("failure"):
        console.line()
        console.line(UserError(failure["message"], failure["traceback"]).in_full())
        if status["replica_counts"]["stale"]["ready"]:
            console.line("the version that was live before still serves")


def _show_jobs(api: Api, now: datetime, context: Context) -> None:
    context.console.line()
    is_task = _kind(api) is ApiKind.TASK
    if jobs := api.get("task_job_statuses" if is_task else "batch_job_statuses"):
        context.console.table(*(tasks_table if is_task else jobs_table)(jobs, now))
    else:
        submission = "" if is_task else " JOB.json"
        context.console.line(f"no jobs yet; `cortex submit {api['spec']['name']}{submission}` submits one")
    if schedule := api.get("schedule"):
        context.console.line()
        for line in schedule_lines(schedule, now):
            context.console.line(line)


def _kind(api: Api) -> ApiKind:
    try:
        return ApiKind(api["spec"].get("kind", ApiKind.REALTIME))
    except ValueError:  # of a newer operator
        return ApiKind.REALTIME


def _apis_table(kind: ApiKind) -> Callable[[str, list[Api], datetime], Table]:
    tables = {
        ApiKind.BATCH: batch_apis_table,
        ApiKind.TASK: task_apis_table,
        ApiKind.ASYNC: async_apis_table,
        ApiKind.SPLITTER: splitters_table,
    }
    return tables.get(kind, table)


def _show_models(models: dict[str, Any], context: Context) -> None:
    console = context.console
    if models["versions"]:
        console.line()
        console.table(*versions_table(models))
    lines = list(notes(models, datetime.now(UTC)))
    if lines:
        console.line()
    for line in lines:
        console.line(line)
