"""Tasks, and schedules of jobs, as `cortex get` shows them: rows and lines, from the operator's JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from cortex.cli.age import duration, stamp
from cortex.cli.jobs_table import API_COLUMNS, Column, Json, Table, elapsed, moment, rows_of
from cortex.lifecycle import ApiKind


def task_apis_table(env: str, apis: list[Json], now: datetime) -> Table:
    """Return headers and rows: one per API. Its status is there only where it is no longer, or not yet, live."""
    headers, rows = rows_of((_NAME, *API_COLUMNS), apis, now)
    return ["env", *headers], [[env, *row] for row in rows]


def tasks_table(jobs: list[Json], now: datetime) -> Table:
    """Return headers and rows: one per `job_status`."""
    return rows_of(_JOB_COLUMNS, jobs, now)


def is_task(job: Json) -> bool:
    """Tell whether a `job_status` is that of a task, which has no batches."""
    return bool(job.get("kind") == ApiKind.TASK)


def schedule_lines(schedule: Json, now: datetime) -> Iterator[str]:
    """Say when an API's jobs are submitted by themselves."""
    yield f"schedule: {schedule['cron']} ({schedule['timezone']})"
    if schedule["next_run"]:
        due = datetime.fromisoformat(schedule["next_run"])
        yield f"next run: {_shown(due)} (in {duration(max(0.0, (due - now).total_seconds()))})"
    else:
        yield "next run: never"
    if schedule["last_run"]:
        yield f"last run: {_shown(datetime.fromisoformat(schedule['last_run']))} (job {schedule['last_job_id']})"
    if schedule.get("skipped_runs"):
        skipped = _shown(datetime.fromisoformat(schedule["last_skipped"]))
        count = f"; {schedule['skipped_runs']:,} so far" if schedule["skipped_runs"] > 1 else ""
        yield f"last skipped: {skipped} (job {schedule['last_skipped_for']} was not over{count})"
    if schedule["error"]:
        yield f"the last one was not submitted: {schedule['error']}"


def _shown(at: datetime) -> str:
    return stamp(at).replace("UTC", at.tzname() or "UTC")


def _retried(job: Json) -> str:
    """Count the attempts that failed of a task that has several; of any other, its status says it."""
    return str(job["failed_attempts"] if job["max_attempts"] > 1 else 0)


_NAME: Column = ("task api", lambda api, now: str(api["spec"]["name"]), None)
_JOB_COLUMNS: tuple[Column, ...] = (
    ("task job id", lambda job, now: str(job["job_id"]), None),
    ("status", lambda job, now: str(job["status_message"]), None),
    ("failed attempts", lambda job, now: _retried(job), "0"),
    ("start time", lambda job, now: moment(job["start_time"]), None),
    ("duration", lambda job, now: elapsed(job, now), None),
)
