"""`cortex get`: show all APIs, one API with its jobs, or one job."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from cortex.cli.arguments import add_api, add_env, add_job, add_output
from cortex.cli.progress import exit_code, show_job, watch
from cortex.cli.session import Session
from cortex.cli.tables.apis import apis_table, kind_of, memory_table, previous_version_note, targets_table
from cortex.cli.tables.canary import canary_notes, is_tried, show_canary
from cortex.cli.tables.jobs import jobs_table, schedule_lines, tasks_table
from cortex.cli.tables.models import model_notes, versions_table
from cortex.cli.tables.scaling import shortage_note, show_scaling
from cortex.cli.tables.tracker import show_tracker
from cortex.client.client import Client
from cortex.errors import UsageError, UserError
from cortex.lifecycle import ApiKind
from cortex.payloads.json_object import Json

_WATCH_S = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser, optional=True)
    add_job(parser)
    add_env(parser)
    parser.add_argument(
        "-w",
        "--watch",
        action="store_true",
        help=f"refresh every {_WATCH_S:.0f} seconds; for a job, show its progress until it ends",
    )
    parser.add_argument(
        "--why", action="store_true", help="show the decisions of the autoscaler and about a canary, and their reasons"
    )
    parser.add_argument("--results", action="store_true", help="print the results of the job's batches as NDJSON")
    parser.add_argument("--dead-letters", action="store_true", help="print the batches that failed for good as NDJSON")
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Show the status once, or until interrupted. With `--watch` of a job, return 0 if the job succeeds."""
    if (arguments.results or arguments.dead_letters) and not arguments.job:
        raise UsageError("--results and --dead-letters require a job: `cortex get API JOB --results`")
    if arguments.why and (arguments.job or not arguments.api):
        raise UsageError("--why requires an API and no job: `cortex get API --why`")
    client = session.client(arguments.env)
    return _run_job(client, arguments, session) if arguments.job else _run_apis(client, arguments, session)


def _run_job(client: Client, arguments: argparse.Namespace, session: Session) -> int:
    api, job_id = arguments.api, arguments.job
    if arguments.results or arguments.dead_letters:
        for block in _streamed(client, arguments):
            session.console.raw(block)
        return 0
    job = watch(client, api, job_id, session) if arguments.watch else client.get_job(api, job_id)
    if arguments.output == "json":
        session.console.json(job)
    else:
        show_job(client, api, job, session)
    return exit_code(job) if arguments.watch else 0


def _streamed(client: Client, arguments: argparse.Namespace) -> Iterator[bytes]:
    if arguments.results:
        yield from client.raw_job_results(arguments.api, arguments.job)
    if arguments.dead_letters:
        yield from client.raw_dead_letters(arguments.api, arguments.job)


def _run_apis(client: Client, arguments: argparse.Namespace, session: Session) -> int:
    while True:
        answer = _answer(client, arguments)
        if arguments.watch:
            session.console.clear_screen()
        if arguments.output == "json":
            session.console.json(answer)
        elif arguments.why:
            if answer.get("canary"):  # older operators send none
                show_canary(answer, session.console)
                session.console.line()
            show_scaling(answer, session.console)
        elif arguments.api:
            _show_one(client, answer, session)
        else:
            _show_all(client, answer, session)
        session.console.flush()
        if not arguments.watch:
            return 0
        time.sleep(_WATCH_S)


def _answer(client: Client, arguments: argparse.Namespace) -> Any:
    if arguments.why:
        return client.get_scaling(arguments.api)
    return client.get_api(arguments.api) if arguments.api else client.list_apis()


def _show_all(client: Client, apis: list[Json], session: Session) -> None:
    console, env, now = session.console, client.environment.name, datetime.now(UTC)
    if not apis:
        console.line("no APIs are deployed")
        return
    kinds = {kind: [api for api in apis if kind_of(api) == kind] for kind in ApiKind}
    for number, (kind, some) in enumerate((kind, some) for kind, some in kinds.items() if some):
        if number:
            console.line()
        console.table(*apis_table(kind, env, some, now))
    for number, note in enumerate(note for api in apis if (note := shortage_note(api))):
        if not number:
            console.line()
        console.line(note)


def _show_one(client: Client, api: Json, session: Session) -> None:
    console, status, now = session.console, api["status"], datetime.now(UTC)
    env = client.environment.name
    console.table(*apis_table(kind_of(api), env, [api], now))
    if kind_of(api).runs_jobs:
        _show_jobs(api, now, session)
    if kind_of(api) is ApiKind.SPLITTER:
        console.line()
        console.table(*targets_table(env, api, client.list_apis(), now))
    console.line(f"\nendpoint: {api['endpoint']}")
    if docs := api.get("docs"):  # operators of an older version have none
        console.line(f"docs:     {docs}")
    if number := api.get("revision_number"):  # older operators send none
        console.line(f"revision: {number}{_live_revision(api, number)}")
    for line in canary_notes(api):
        console.line(line)
    if note := shortage_note(api):
        console.line(note)
    if recording := api.get("recording"):
        console.line(_recording_line(recording))
    if tracked := api.get("tracker"):
        show_tracker(tracked, api["spec"]["name"], console, now)
    if models := api.get("models"):
        _show_models(models, session)
    if memory := api.get("memory"):  # older operators send none
        console.line()
        console.table(*memory_table(memory))
    if waits_for := status.get("waits_for"):  # operators of an older version have none
        console.line(f"\n{waits_for}")
    if failure := status.get("failure"):
        console.line()
        console.line(UserError(failure["message"], failure["traceback"]).in_full())
        if note := previous_version_note(api):
            console.line(note)


def _recording_line(recording: Json) -> str:
    unrecorded = {reason: number for reason, number in recording["unrecorded"].items() if number}
    beyond = unrecorded.pop("max_cpu", 0)
    left_out = f", left out because of max_cpu: {beyond:,}" if beyond else ""
    missing = ", ".join(f"{number:,} {reason}" for reason, number in unrecorded.items())
    lost = f", not recorded: {missing} (`cortex logs` shows why)" if missing else ""
    return f"recorded: {recording['recorded']:,} requests{left_out}{lost}"


def _live_revision(api: Json, newest: int) -> str:
    live = api["live_revision_number"]
    if live == newest:
        return ""
    if not live:
        return " (never live)"
    serves = is_tried(api) or api["status"]["replica_counts"]["stale"]["ready"]
    return f" (revision {live} {'is live' if serves else 'was live last'})"


def _show_jobs(api: Json, now: datetime, session: Session) -> None:
    session.console.line()
    is_task = kind_of(api) is ApiKind.TASK
    if jobs := api.get("task_job_statuses" if is_task else "batch_job_statuses"):
        session.console.table(*(tasks_table if is_task else jobs_table)(jobs, now))
    else:
        submission = "" if is_task else " JOB.json"
        session.console.line(f"no jobs yet; `cortex submit {api['spec']['name']}{submission}` submits one")
    if schedule := api.get("schedule"):
        session.console.line()
        for line in schedule_lines(schedule, now):
            session.console.line(line)


def _show_models(models: Json, session: Session) -> None:
    console = session.console
    if models["versions"]:
        console.line()
        console.table(*versions_table(models))
    lines = list(model_notes(models, datetime.now(UTC)))
    if lines:
        console.line()
    for line in lines:
        console.line(line)
