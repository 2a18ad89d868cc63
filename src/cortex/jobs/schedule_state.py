"""State of each API's schedule, stored beside the jobs so that one transaction stores a job and claims its run.

Each function runs inside a transaction of the caller. `operator/jobs/schedules.py` computes when a run is due.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from sqlalchemy import Connection, delete, insert, select, update

from cortex.errors import ConflictError
from cortex.jobs.records import Presence
from cortex.jobs.spec import SCHEDULED_FOR
from cortex.lifecycle import JobStatus
from cortex.state.tables import job_inputs, jobs, schedules

_UNFINISHED = tuple(status for status in JobStatus if not status.is_over)


@dataclass(frozen=True)
class ScheduleState:
    """State of one API's schedule; times are UNIX seconds."""

    key: str  #: identifies the schedule; a changed schedule has another key
    handled_at: float  #: runs that were due up to here are submitted, skipped or failed
    last_run_at: float | None = None  #: due time of the last submitted run
    last_job_id: str | None = None
    error: str = ""  #: error of the last submission; empty if it succeeded
    skipped: int = 0  #: number of runs skipped because an earlier run was not over
    last_skip_at: float | None = None  #: due time of the last skipped run
    last_skip_job_id: str | None = None  #: the job that was not over then


_STATE_COLUMNS = [schedules.c[field.name] for field in fields(ScheduleState)]


def read_schedules(connection: Connection) -> dict[str, ScheduleState]:
    """Return the state of every schedule by API."""
    return {row.api: ScheduleState(*row[1:]) for row in connection.execute(select(schedules.c.api, *_STATE_COLUMNS))}


def start(connection: Connection, api: str, key: str, at: float) -> None:
    """Start a new or changed schedule: runs that were due up to `at` are not submitted."""
    known = connection.execute(select(schedules.c.key).where(schedules.c.api == api)).first()
    if known is None:
        connection.execute(insert(schedules).values(api=api, key=key, handled_at=at))
    elif known.key != key:
        values = {"key": key, "handled_at": at, "error": "", "skipped": 0}
        values |= {"last_skip_at": None, "last_skip_job_id": None}
        connection.execute(update(schedules).where(schedules.c.api == api).values(**values))


def restart(connection: Connection, api: str, at: float) -> None:
    """Continue a schedule from `at`, although later runs were handled: the clock was set back."""
    connection.execute(update(schedules).where(schedules.c.api == api).values(handled_at=at))


def claim(connection: Connection, job_id: str, api: str, key: str, at: float, may_overlap: bool = True) -> None:
    """Record that a job was submitted for the run that was due at `at`.

    Raises: ConflictError if the run was claimed before, or may not overlap with a run that is not over.
    """
    if not may_overlap and (other := _unfinished_run(connection, api, job_id)):
        raise ConflictError(f"{api} is already running by its schedule, as job {other}")
    values = {"handled_at": at, "last_run_at": at, "last_job_id": job_id, "error": ""}
    if not _advance(connection, api, key, at, values):
        raise ConflictError(f"the scheduled run of {api} was submitted before")


def record_run(connection: Connection, job_id: str, api: str, at: float, may_overlap: bool = True) -> None:
    """Record that a user ran the schedule at `at`, besides the runs that are due.

    Raises: ConflictError if it may not overlap with a run that is not over.
    """
    if not may_overlap and (other := _unfinished_run(connection, api, job_id)):
        raise ConflictError(f"{api} is already running by its schedule, as job {other}, and has `overlap: skip`")
    values = {"last_run_at": at, "last_job_id": job_id, "error": ""}
    connection.execute(update(schedules).where(schedules.c.api == api).values(**values))


def fail(connection: Connection, api: str, key: str, at: float, error: str) -> None:
    """Record that the run that was due at `at` can never be submitted."""
    _advance(connection, api, key, at, {"handled_at": at, "error": error})


def skip_overlapping(connection: Connection, api: str, key: str, at: float) -> str | None:
    """Skip the run that is due at `at` if an earlier run is not over; return the id of that job."""
    other = _unfinished_run(connection, api)
    if other is None:
        return None
    values = {"handled_at": at, "error": "", "skipped": schedules.c.skipped + 1}
    values |= {"last_skip_at": at, "last_skip_job_id": other}
    return other if _advance(connection, api, key, at, values) else None


def set_error(connection: Connection, api: str, error: str) -> None:
    """Store the error of a submission that will be tried again."""
    connection.execute(update(schedules).where(schedules.c.api == api).values(error=error))


def remove(connection: Connection, api: str) -> None:
    """Remove the schedule of an API."""
    connection.execute(delete(schedules).where(schedules.c.api == api))


def _unfinished_run(connection: Connection, api: str, but: str = "") -> str | None:
    """Return the id of the newest scheduled job that is not over, except for job `but`."""
    query = select(jobs.c.id, job_inputs.c.source).join_from(jobs, job_inputs, job_inputs.c.number == jobs.c.number)
    of_api = (jobs.c.api == api, jobs.c.presence == Presence.VISIBLE)
    unfinished = query.where(*of_api, jobs.c.status.in_(_UNFINISHED), jobs.c.id != but)
    for row in connection.execute(unfinished.order_by(jobs.c.number.desc())):
        if SCHEDULED_FOR in json.loads(row.source):
            return str(row.id)
    return None


def _advance(connection: Connection, api: str, key: str, at: float, values: dict[str, object]) -> bool:
    not_handled = (schedules.c.api == api, schedules.c.key == key, schedules.c.handled_at < at)
    return connection.execute(update(schedules).where(*not_handled).values(**values)).rowcount == 1
