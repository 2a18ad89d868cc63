"""Watches a job to its end, and shows what it was."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from cortex.cli.context import Context
from cortex.cli.job_progress import Pace, Progress, bar, progress_line
from cortex.cli.jobs_table import batches_table, ending, error_lines, head_lines, workers_table
from cortex.cli.tasks_table import is_task
from cortex.client.client import Client
from cortex.client.jobs import PATIENCE_S, is_over
from cortex.errors import CortexError, OperatorUnavailableError

#: A short job is seen to end at once; a long one costs the operator little.
_FIRST_POLL_S = 0.1
_LAST_POLL_S = 0.5
#: Where there is no terminal, a line is written when the status changes, or what is waited for, and this often while it
#: tells of progress.
_LINE_S = 10.0
#: Dead letters come with their payloads; of more, nobody reads the errors here.
_LETTERS = 20

Job = dict[str, Any]


def watch(client: Client, api: str, job_id: str, context: Context) -> Job:
    """Show how far a job is until it is over; return it then. An operator that is started anew is waited for."""
    shown = _Shown(context)
    pace, pause_s, away_since = Pace(), _FIRST_POLL_S, 0.0
    try:
        while True:
            now_s = time.monotonic()
            try:
                job = client.get_job(api, job_id)
            except OperatorUnavailableError:
                away_since = away_since or now_s
                if now_s - away_since > PATIENCE_S:
                    raise
                shown.away()
            else:
                away_since = 0.0
                status = job["job_status"]
                if is_over(status):
                    return job
                if status["status"] == "running":
                    pace.observe(now_s, Progress.of(status))
                shown.show(status, pace, now_s)
            time.sleep(pause_s)
            pause_s = min(_LAST_POLL_S, 1.2 * pause_s)
    except KeyboardInterrupt:
        context.console.note(f"the job goes on; `cortex get {api} {job_id}` shows how")
        raise
    finally:
        context.console.clear_progress()


def show_job(client: Client, api: str, job: Job, context: Context) -> None:
    """Print all that is known of a job."""
    console, status, now = context.console, job["job_status"], datetime.now(UTC)
    for line in head_lines(status, now):
        console.line(line)
    if not is_task(status):
        console.line()
        console.line(console.styled("batches", "bold"))
        console.table(*batches_table(status, now))
        console.line()
        console.line(console.styled("workers", "bold"))
        console.table(*workers_table(status, now))
    console.line(f"\nendpoint: {job['endpoint']}")
    if status["traceback"]:
        console.line()
        console.line(status["traceback"].rstrip())
    if lines := _errors(client, api, status):
        console.line("\ndead letters:")
        for line in lines:
            console.line(line)
    _advise(api, status, context)


def tell_end(client: Client, api: str, job: Job, context: Context) -> None:
    """Say how a job that was watched ended and, if not well, why and what shows more."""
    console, status = context.console, job["job_status"]
    if status["status"] == "succeeded":
        console.line(ending(status))
        return
    if status["traceback"]:
        console.note(status["traceback"].rstrip())
    console.error(ending(status))
    for line in _errors(client, api, status):
        console.note(line)
    _advise(api, status, context)


def exit_code(job: Job) -> int:
    """Return what the exit code tells of a job that is over."""
    return 0 if job["job_status"]["status"] == "succeeded" else 1


class _Shown:
    """What the user was told last."""

    def __init__(self, context: Context) -> None:
        self._console = context.console
        self._status = self._message = self._line = ""
        self._told_s = 0.0
        encoding = getattr(self._console.err, "encoding", None) or ""
        self._has_blocks = encoding.lower().startswith("utf")

    def show(self, status: dict[str, Any], pace: Pace, now_s: float) -> None:
        if self._console.err_is_terminal:
            drawn = bar(Progress.of(status).share, has_blocks=self._has_blocks)
            self._console.progress(progress_line(status, pace, drawn))
        elif self._is_news(status, now_s) and (line := progress_line(status, pace)) != self._line:
            self._console.note(f"{status['job_id']}: {line}")
            self._told_s, self._line = now_s, line
        # What a job waits for is unknown for a moment while that is tried again.
        self._status, self._message = status["status"], status["message"] or self._message

    def _is_news(self, status: dict[str, Any], now_s: float) -> bool:
        if status["status"] != self._status:
            return True
        if status["status"] == "pending":
            return status["message"] not in ("", self._message)
        return now_s - self._told_s >= _LINE_S

    def away(self) -> None:
        text = "the operator does not answer; waiting for it"
        self._console.progress(text)
        if not self._console.err_is_terminal and self._status != text:
            self._console.note(text)
        self._status = self._line = text


def _errors(client: Client, api: str, status: dict[str, Any]) -> list[str]:
    if not status.get("dead_letters"):
        return []
    try:
        letters = list(islice(client.dead_letters(api, status["job_id"]), _LETTERS))
    except CortexError:  # deleted meanwhile, say: the numbers are shown without
        return []
    return list(error_lines(letters, status["dead_letters"]))


def _advise(api: str, status: dict[str, Any], context: Context) -> None:
    console, job = context.console, f"{api} {status['job_id']}"
    if status.get("dead_letters"):
        console.note(f"`cortex get {job} --dead-letters` prints what failed, with tracebacks")
        if is_over(status):
            console.note(f"`cortex submit {api} --retry-failed {status['job_id']}` runs it again")
    if status["status"] in ("worker_error", "worker_oom", "unexpected_error"):
        console.note(f"`cortex logs {job}` shows what its workers wrote")
    if is_task(status) and is_over(status) and status["status"] != "succeeded":
        console.note(f"`cortex submit {api} --retry-failed {status['job_id']}` runs it again")
    if status["results"]:
        what = "task" if is_task(status) else "batches"
        console.note(f"`cortex get {job} --results` prints what the {what} returned")
