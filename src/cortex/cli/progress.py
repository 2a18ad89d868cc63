"""Progress of a job: watch it until it ends, and report its outcome."""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime
from itertools import islice

from cortex.cli.output import format_count, format_duration, format_number
from cortex.cli.session import Session
from cortex.cli.tables.jobs import (
    JobProgress,
    batches_table,
    error_lines,
    is_task,
    outcome_line,
    summary_lines,
    workers_table,
)
from cortex.client.client import Client
from cortex.client.jobs import OPERATOR_RESTART_TIMEOUT_S, is_over
from cortex.errors import CortexError, OperatorUnavailableError
from cortex.payloads.json_object import Json

#: Polls begin frequently, for short jobs, and become less frequent, to spare the operator.
_FIRST_POLL_S = 0.1
_LAST_POLL_S = 0.5
#: Without a terminal, a line is printed when the status or its message changes, and while running at this interval.
_LINE_INTERVAL_S = 10.0
#: Maximum number of dead letters that are fetched for the summary of errors.
_LETTERS = 20

_WINDOW_S = 15.0  #: period over which speed is measured
_BAR_CELLS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"


def watch(client: Client, api: str, job_id: str, session: Session) -> Json:
    """Print the progress of a job until it ends, then return it. A restart of the operator is tolerated."""
    display = _Display(session)
    speed, pause_s, unavailable_since = JobSpeed(), _FIRST_POLL_S, 0.0
    try:
        while True:
            now_s = time.monotonic()
            try:
                job = client.get_job(api, job_id)
            except OperatorUnavailableError:
                unavailable_since = unavailable_since or now_s
                if now_s - unavailable_since > OPERATOR_RESTART_TIMEOUT_S:
                    raise
                display.show_unavailable()
            else:
                unavailable_since = 0.0
                status = job["job_status"]
                if is_over(status):
                    return job
                if status["status"] == "running":
                    speed.observe(now_s, JobProgress.of(status))
                display.show(status, speed, now_s)
            time.sleep(pause_s)
            pause_s = min(_LAST_POLL_S, 1.2 * pause_s)
    except KeyboardInterrupt:
        session.console.note(f"the job continues; `cortex get {api} {job_id}` shows its status")
        raise
    finally:
        session.console.clear_progress()


def show_job(client: Client, api: str, job: Json, session: Session) -> None:
    """Print all details of a job."""
    console, status, now = session.console, job["job_status"], datetime.now(UTC)
    for line in summary_lines(status, now):
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
    _print_hints(api, status, session)


def report_outcome(client: Client, api: str, job: Json, session: Session) -> None:
    """Print the outcome of a job; after a failure, also its errors and the commands that show more."""
    console, status = session.console, job["job_status"]
    if status["status"] == "succeeded":
        console.line(outcome_line(status))
        return
    if status["traceback"]:
        console.note(status["traceback"].rstrip())
    console.error(outcome_line(status))
    for line in _errors(client, api, status):
        console.note(line)
    _print_hints(api, status, session)


def exit_code(job: Json) -> int:
    """Return 0 if the job succeeded, otherwise 1."""
    return 0 if job["job_status"]["status"] == "succeeded" else 1


class _Display:
    """Progress display: one line that is updated on a terminal, otherwise lines with changes."""

    def __init__(self, session: Session) -> None:
        self._console = session.console
        self._status = self._message = self._line = ""
        self._printed_s = 0.0
        encoding = getattr(self._console.err, "encoding", None) or ""
        self._has_blocks = encoding.lower().startswith("utf")

    def show(self, status: Json, speed: JobSpeed, now_s: float) -> None:
        if self._console.err_is_terminal:
            drawn = bar(JobProgress.of(status).share, has_blocks=self._has_blocks)
            self._console.progress(progress_line(status, speed, drawn))
        elif self._has_changed(status, now_s) and (line := progress_line(status, speed)) != self._line:
            self._console.note(f"{status['job_id']}: {line}")
            self._printed_s, self._line = now_s, line
        # The message of a pending job is empty for a moment while the operator retries.
        self._status, self._message = status["status"], status["message"] or self._message

    def _has_changed(self, status: Json, now_s: float) -> bool:
        if status["status"] != self._status:
            return True
        if status["status"] == "pending":
            return status["message"] not in ("", self._message)
        return now_s - self._printed_s >= _LINE_INTERVAL_S

    def show_unavailable(self) -> None:
        text = "the operator does not answer; waiting for it"
        self._console.progress(text)
        if not self._console.err_is_terminal and self._status != text:
            self._console.note(text)
        self._status = self._line = text


def _errors(client: Client, api: str, status: Json) -> list[str]:
    if not status.get("dead_letters"):
        return []
    try:
        letters = list(islice(client.dead_letters(api, status["job_id"]), _LETTERS))
    except CortexError:  # for example, the job was deleted in the meantime
        return []
    return list(error_lines(letters, status["dead_letters"]))


def _print_hints(api: str, status: Json, session: Session) -> None:
    console, job = session.console, f"{api} {status['job_id']}"
    if status.get("dead_letters"):
        console.note(f"`cortex get {job} --dead-letters` prints the failed batches with tracebacks")
        if is_over(status):
            console.note(f"`cortex submit {api} --retry-failed {status['job_id']}` runs it again")
    if status["status"] in ("worker_error", "worker_oom", "unexpected_error"):
        console.note(f"`cortex logs {job}` shows the output of its workers")
    if is_task(status) and is_over(status) and status["status"] != "succeeded":
        console.note(f"`cortex submit {api} --retry-failed {status['job_id']}` runs it again")
    if status["results"]:
        what = "task" if is_task(status) else "batches"
        console.note(f"`cortex get {job} --results` prints the results of the {what}")


class JobSpeed:
    """Speed of a job over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, JobProgress]] = deque()

    def observe(self, now_s: float, progress: JobProgress) -> None:
        """Record the progress at a time of the monotonic clock."""
        self._samples.append((now_s, progress))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - _WINDOW_S:
            self._samples.popleft()

    @property
    def batches_per_s(self) -> float:
        """Batches per second; 0 if unknown."""
        return self._per_second([progress.batches for _, progress in self._samples])

    @property
    def items_per_s(self) -> float:
        """Items per second; 0 if unknown."""
        return self._per_second([progress.items for _, progress in self._samples])

    @property
    def remaining_s(self) -> float | None:
        """Remaining time at this speed; None if unknown."""
        if not self.batches_per_s:
            return None
        _, progress = self._samples[-1]
        return (progress.total_batches - progress.batches) / self.batches_per_s

    def _per_second(self, counts: list[int]) -> float:
        if len(counts) < 2 or self._samples[-1][0] <= self._samples[0][0]:
            return 0.0
        return max(0.0, (counts[-1] - counts[0]) / (self._samples[-1][0] - self._samples[0][0]))


def bar(share: float, cells: int = _BAR_CELLS, has_blocks: bool = True) -> str:
    """Return a progress bar for a share from 0 to 1; without `has_blocks`, in ASCII."""
    share = min(1.0, max(0.0, share))
    if not has_blocks:
        done = int(share * cells)
        return f"[{'#' * done}{'.' * (cells - done)}]"
    eighths = int(share * cells * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if full < cells else "")).ljust(cells, "░").replace(" ", "░")


def progress_line(status: Json, speed: JobSpeed, drawn: str = "") -> str:
    """Return one line with status, progress and speed of a job. `drawn`: a progress bar to include."""
    progress = JobProgress.of(status)
    word, message = str(status["status_message"]), str(status["message"]).partition("\n")[0]
    if "batch_metrics" not in status:
        return _joined(word, [message])
    if status["status"] == "enqueuing":
        return _joined(word, [f"{progress.total_batches:,} batches so far" if progress.total_batches else ""])
    if status["status"] != "running":
        return _joined(word, [format_count(progress.total_batches, "batch", "batches"), message])
    parts = [
        f"{progress.batches:,} of {progress.total_batches:,} batches",
        f"{format_number(speed.batches_per_s)} batches/s, {format_number(speed.items_per_s)} items/s"
        if speed.batches_per_s
        else "",
        _remaining(progress, speed),
        format_count(status["dead_letters"], "dead letter", "dead letters") if status["dead_letters"] else "",
        "" if progress.batches else message,
    ]
    # Rounded down, so that an unfinished job is never shown as 100 %.
    percent = progress.batches * 100 // max(1, progress.total_batches)
    return _joined(f"{word} {drawn}{' ' if drawn else ''}{percent} %", parts)


def _remaining(progress: JobProgress, speed: JobSpeed) -> str:
    if progress.total_batches and progress.batches >= progress.total_batches:
        return "completing"
    return "" if speed.remaining_s is None else f"{format_duration(speed.remaining_s)} left"


def _joined(word: str, parts: list[str]) -> str:
    return ", ".join([word, *filter(None, parts)])
