"""Jobs and the APIs that run them as `cortex get` shows them: rows and lines, from the operator's JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from cortex.cli.age import age, duration, stamp
from cortex.cli.job_progress import Progress, counted
from cortex.cli.output import printable

#: Of what many dead letters have in common, this many kinds of errors are shown, each cut to a line.
_ERROR_KINDS = 5
_ERROR_LENGTH = 160
_MS_PER_S = 1000.0

Json = dict[str, Any]
#: Header, cell, and the text that hides the column while every cell of it is that.
Column = tuple[str, Callable[[Json, datetime], str], str | None]
Table = tuple[list[str], list[list[str]]]


def batch_apis_table(env: str, apis: list[Json], now: datetime) -> Table:
    """Return headers and rows: one per API. Its status is there only where it is no longer, or not yet, live."""
    headers, rows = rows_of((_NAME, *API_COLUMNS), apis, now)
    return ["env", *headers], [[env, *row] for row in rows]


def jobs_table(jobs: list[Json], now: datetime) -> Table:
    """Return headers and rows: one per `job_status`."""
    return rows_of(_JOB_COLUMNS, jobs, now)


def batches_table(job: Json, now: datetime) -> Table:
    """Return what became of the batches of a job."""
    return rows_of(_BATCH_COLUMNS, [job], now)


def workers_table(job: Json, now: datetime) -> Table:
    """Return how the workers of a job are."""
    return rows_of(_WORKER_COLUMNS, [job], now)


def head_lines(job: Json, now: datetime) -> Iterator[str]:
    """Say which job it is, how it is, and since when."""
    yield f"job id: {job['job_id']}"
    why = f" ({job['message']})" if job["message"] else ""
    yield f"status: {job['status_message']}{why}"
    yield f"start time: {moment(job['start_time'])}"
    yield f"end time: {moment(job['end_time'])}"
    yield f"duration: {elapsed(job, now)}"


def error_lines(letters: list[Json], total: int) -> Iterator[str]:
    """Summarise the errors of a job's first dead letters."""
    kinds: dict[str, list[Json]] = {}
    for letter in letters:
        kinds.setdefault(_cut(letter["error"]), []).append(letter)
    for error, same in sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:_ERROR_KINDS]:
        first = same[0]
        items = counted(first["items"], "item", "items")
        where = f"batch {first['seq']}, {items} from item {first['first_item']} on"
        yield f"  {len(same)} × {error} (first: {where})"
    if total > len(letters):
        yield f"  … of the first {len(letters):,} of {total:,}"


def ending(job: Json) -> str:
    """Say in one line how a job ended."""
    took = _seconds(job)
    time = f" in {duration(took)}" if took is not None else ""
    if job["status"] == "succeeded" and "batch_metrics" not in job:
        return f"job {job['job_id']} succeeded{time}"
    if job["status"] in ("succeeded", "completed_with_failures"):
        return _resolved(job, time)
    why = f": {job['message']}" if job["message"] else ""
    return f"job {job['job_id']}: {job['status_message']}{time}{why}"


def _resolved(job: Json, time: str) -> str:
    metrics, items = job["batch_metrics"], job["items"]
    if job["status"] == "succeeded":
        done = f"{counted(metrics['succeeded'], 'batch', 'batches')}, {counted(items['succeeded'], 'item', 'items')}"
        return f"job {job['job_id']} succeeded: {done}{time}"
    failed = f"{metrics['failed']:,} of {counted(job['total_batch_count'], 'batch', 'batches')} failed"
    lost = counted(items["failed"], "item", "items")
    return f"job {job['job_id']} completed with failures{time}: {failed} for good, with {lost}"


def rows_of(columns: Iterable[Column], rows: list[Json], now: datetime) -> Table:
    """Return headers and rows, without the columns that are hidden."""
    shown = [
        (header, cells)
        for header, cell, hidden in columns
        if (cells := [cell(row, now) for row in rows]) and not (hidden is not None and set(cells) == {hidden})
    ]
    return [header for header, _ in shown], [[cells[index] for _, cells in shown] for index in range(len(rows))]


_NAME: Column = ("batch api", lambda api, now: str(api["spec"]["name"]), None)
#: Of an API of any kind that runs jobs, behind its name.
API_COLUMNS: tuple[Column, ...] = (
    ("status", lambda api, now: str(api["status"]["message"]), "live"),
    ("running jobs", lambda api, now: str(api.get("running_jobs", 0)), None),
    ("latest job id", lambda api, now: str(api.get("latest_job_id") or "-"), None),
    ("last update", lambda api, now: age(datetime.fromisoformat(api["last_updated"]), now), None),
)
_JOB_COLUMNS: tuple[Column, ...] = (
    ("job id", lambda job, now: str(job["job_id"]), None),
    ("status", lambda job, now: str(job["status_message"]), None),
    ("progress", lambda job, now: _progress(job), None),
    ("failed attempts", lambda job, now: str(job["failed_attempts"]), "0"),
    ("dead letters", lambda job, now: str(job["dead_letters"]), "0"),
    ("start time", lambda job, now: moment(job["start_time"]), None),
    ("duration", lambda job, now: elapsed(job, now), None),
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


def _worker_column(name: str, hidden: str | None) -> Column:
    return name, lambda job, now: str(job["worker_counts"].get(name, 0)), hidden


_WORKER_COLUMNS: tuple[Column, ...] = (
    ("requested", lambda job, now: str(job["workers"]), None),
    _worker_column("pending", "0"),
    _worker_column("initializing", "0"),
    _worker_column("stalled", "0"),
    _worker_column("running", None),
    _worker_column("failed", "0"),
    _worker_column("succeeded", None),
)


def _progress(job: Json) -> str:
    progress = Progress.of(job)
    return f"{progress.batches}/{progress.total_batches}"


def moment(text: str | None) -> str:
    """Show a point of time of the operator's."""
    return stamp(datetime.fromisoformat(text)) if text else "-"


def _seconds(job: Json, now: datetime | None = None) -> float | None:
    end = datetime.fromisoformat(job["end_time"]) if job["end_time"] else now
    return None if end is None else (end - datetime.fromisoformat(job["start_time"])).total_seconds()


def elapsed(job: Json, now: datetime) -> str:
    """Show how long a job took, or has taken until now."""
    return duration(_seconds(job, now) or 0.0)


def _average(job: Json) -> str:
    average_s = job["batch_metrics"]["average_time_per_batch"]
    if average_s is None:
        return "-"
    if average_s >= 1:
        return f"{average_s:.1f} s"
    average_ms = average_s * _MS_PER_S
    return f"{average_ms:.0f} ms" if average_ms >= 1 else "<1 ms"


def _cut(error: str) -> str:
    line = next(iter(error.splitlines()), "") or "an error without a message"
    line = printable(line)
    return line if len(line) <= _ERROR_LENGTH else f"{line[:_ERROR_LENGTH]}…"
