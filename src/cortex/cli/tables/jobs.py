"""Tables and lines of jobs and tasks: list, details, errors, outcome, schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from cortex.cli.output import Column, Table, build_table, format_average, format_count, format_duration, format_time
from cortex.jobs.spec import error_kind
from cortex.lifecycle import ApiKind
from cortex.payloads.json_object import Json
from cortex.terminal import printable

#: Maximum number of different errors in a summary of dead letters, and of characters of each.
_ERROR_KINDS = 5
_ERROR_LENGTH = 160
_MS_PER_S = 1000.0


@dataclass(frozen=True)
class JobProgress:
    """Number of batches and items that have succeeded or failed for good."""

    batches: int
    total_batches: int
    items: int

    @classmethod
    def of(cls, status: Json) -> JobProgress:
        """Return the progress of a `job_status`; a task has no batches."""
        if "batch_metrics" not in status:
            return cls(0, 0, 0)
        batches, items = status["batch_metrics"], status["items"]
        return cls(
            batches["succeeded"] + batches["failed"], status["total_batch_count"], items["succeeded"] + items["failed"]
        )

    @property
    def share(self) -> float:
        """Finished fraction of the batches, from 0 to 1."""
        return min(1.0, self.batches / self.total_batches) if self.total_batches else 0.0


def is_task(job: Json) -> bool:
    """Return whether a `job_status` is that of a task."""
    return bool(job.get("kind") == ApiKind.TASK)


def jobs_table(jobs: list[Json], now: datetime) -> Table:
    """Return a table with one row per `job_status` of a BatchAPI."""
    return build_table(_JOB_COLUMNS, jobs, now)


def tasks_table(jobs: list[Json], now: datetime) -> Table:
    """Return a table with one row per `job_status` of a TaskAPI."""
    return build_table(_TASK_COLUMNS, jobs, now)


def batches_table(job: Json, now: datetime) -> Table:
    """Return a table with the numbers of a job's batches."""
    return build_table(_BATCH_COLUMNS, [job], now)


def workers_table(job: Json, now: datetime) -> Table:
    """Return a table with the numbers of a job's workers."""
    return build_table(_WORKER_COLUMNS, [job], now)


def summary_lines(job: Json, now: datetime) -> Iterator[str]:
    """Yield the lines with id, status and times of a job."""
    yield f"job id: {job['job_id']}"
    why = f" ({job['message']})" if job["message"] else ""
    yield f"status: {job['status_message']}{why}"
    yield f"start time: {_moment(job['start_time'])}"
    yield f"end time: {_moment(job['end_time'])}"
    yield f"duration: {_elapsed(job, now)}"


def error_lines(letters: list[Json], total: int) -> Iterator[str]:
    """Yield a summary of the errors of a job's first dead letters; those that differ only in numbers are one."""
    kinds: dict[str, list[Json]] = {}
    for letter in letters:
        kinds.setdefault(error_kind(_shorten(letter["error"])), []).append(letter)
    for same in sorted(kinds.values(), key=len, reverse=True)[:_ERROR_KINDS]:
        first = same[0]
        yield f"  {len(same)} × {_shorten(first['error'])} (first: {_items(first)} of the input)"
    if total > len(letters):
        yield f"  … of the first {len(letters):,} of {total:,}"


def outcome_line(job: Json) -> str:
    """Return one line with the outcome of a job that has ended."""
    took = _seconds(job)
    time = f" in {format_duration(took)}" if took is not None else ""
    if job["status"] == "succeeded" and "batch_metrics" not in job:
        return f"job {job['job_id']} succeeded{time}"
    if job["status"] in ("succeeded", "completed_with_failures"):
        return _batches_outcome(job, time)
    why = f": {job['message']}" if job["message"] else ""
    return f"job {job['job_id']}: {job['status_message']}{time}{why}"


def schedule_lines(schedule: Json, now: datetime) -> Iterator[str]:
    """Yield the lines of an API's schedule: next, last and skipped runs."""
    yield f"schedule: {schedule['cron']} ({schedule['timezone']})"
    if schedule["next_run"]:
        due = datetime.fromisoformat(schedule["next_run"])
        yield f"next run: {_zoned(due)} (in {format_duration(max(0.0, (due - now).total_seconds()))})"
    else:
        yield "next run: never"
    if schedule["last_run"]:
        yield f"last run: {_zoned(datetime.fromisoformat(schedule['last_run']))} (job {schedule['last_job_id']})"
    if schedule.get("skipped_runs"):
        skipped = _zoned(datetime.fromisoformat(schedule["last_skipped"]))
        count = f"; {schedule['skipped_runs']:,} so far" if schedule["skipped_runs"] > 1 else ""
        yield f"last skipped: {skipped} (job {schedule['last_skipped_for']} had not ended{count})"
    if schedule["error"]:
        yield f"the last run was not submitted: {schedule['error']}"


def _batches_outcome(job: Json, time: str) -> str:
    metrics, items = job["batch_metrics"], job["items"]
    if job["status"] == "succeeded":
        batches = format_count(metrics["succeeded"], "batch", "batches")
        return f"job {job['job_id']} succeeded: {batches}, {format_count(items['succeeded'], 'item', 'items')}{time}"
    failed = f"{metrics['failed']:,} of {format_count(job['total_batch_count'], 'batch', 'batches')} failed"
    lost = format_count(items["failed"], "item", "items")
    return f"job {job['job_id']} completed with failures{time}: {failed} for good, with {lost}"


def _worker_column(name: str, hidden: str | None) -> Column:
    return name, lambda job, now: str(job["worker_counts"].get(name, 0)), hidden


def _progress(job: Json) -> str:
    progress = JobProgress.of(job)
    return f"{progress.batches}/{progress.total_batches}"


def _moment(text: str | None) -> str:
    return format_time(datetime.fromisoformat(text)) if text else "-"


def _zoned(at: datetime) -> str:
    return format_time(at).replace("UTC", at.tzname() or "UTC")


def _seconds(job: Json, now: datetime | None = None) -> float | None:
    end = datetime.fromisoformat(job["end_time"]) if job["end_time"] else now
    return None if end is None else (end - datetime.fromisoformat(job["start_time"])).total_seconds()


def _elapsed(job: Json, now: datetime) -> str:
    return format_duration(_seconds(job, now) or 0.0)


def _average(job: Json) -> str:
    average_s = job["batch_metrics"]["average_time_per_batch"]
    return format_average(None if average_s is None else average_s * _MS_PER_S)


def _failed_attempts(job: Json) -> str:
    """Return the failed attempts of a task with retries; without retries, its status already shows the failure."""
    return str(job["failed_attempts"] if job["max_attempts"] > 1 else 0)


def _items(letter: Json) -> str:
    """Return the position of a batch in the input, counted from 1; the halves of divided batches have no number."""
    first, count = letter["first_item"] + 1, letter["items"]
    return f"item {first:,}" if count == 1 else f"items {first:,} to {first + count - 1:,}"


def _shorten(error: str) -> str:
    line = next(iter(error.splitlines()), "") or "an error without a message"
    line = printable(line)
    return line if len(line) <= _ERROR_LENGTH else f"{line[:_ERROR_LENGTH]}…"


_START_TIME: Column = ("start time", lambda job, now: _moment(job["start_time"]), None)
_DURATION: Column = ("duration", _elapsed, None)
_STATUS: Column = ("status", lambda job, now: str(job["status_message"]), None)
_JOB_COLUMNS: tuple[Column, ...] = (
    ("job id", lambda job, now: str(job["job_id"]), None),
    _STATUS,
    ("progress", lambda job, now: _progress(job), None),
    ("failed attempts", lambda job, now: str(job["failed_attempts"]), "0"),
    ("dead letters", lambda job, now: str(job["dead_letters"]), "0"),
    _START_TIME,
    _DURATION,
)
_TASK_COLUMNS: tuple[Column, ...] = (
    ("task job id", lambda job, now: str(job["job_id"]), None),
    _STATUS,
    ("failed attempts", lambda job, now: _failed_attempts(job), "0"),
    _START_TIME,
    _DURATION,
)
_BATCH_COLUMNS: tuple[Column, ...] = (
    ("total", lambda job, now: str(job["total_batch_count"]), None),
    ("succeeded", lambda job, now: str(job["batch_metrics"]["succeeded"]), None),
    ("dead letters", lambda job, now: str(job["dead_letters"]), "0"),
    ("failed attempts", lambda job, now: str(job["failed_attempts"]), "0"),
    ("results", lambda job, now: str(job["results"]), "0"),
    ("avg time per batch", lambda job, now: _average(job), None),
    ("items", lambda job, now: str(job["items"]["total"]), None),
)
_WORKER_COLUMNS: tuple[Column, ...] = (
    ("requested", lambda job, now: str(job["workers"]), None),
    _worker_column("pending", "0"),
    _worker_column("initializing", "0"),
    _worker_column("stalled", "0"),
    _worker_column("running", None),
    _worker_column("failed", "0"),
    _worker_column("succeeded", None),
)
