"""How far the schedule of each API is, stored beside the jobs: a job and the tick it is for are written together.

Each function is part of a transaction. When something is due is `operator/jobs/schedules.py`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from sqlalchemy import Connection, delete, insert, select, update

from cortex.errors import ConflictError
from cortex.jobs.http.view import SCHEDULED_FOR
from cortex.jobs.records import Presence
from cortex.lifecycle import JobStatus
from cortex.state.job_tables import job_inputs, jobs, schedules

_UNFINISHED = tuple(status for status in JobStatus if not status.is_over)


@dataclass(frozen=True)
class Ticks:
    """What is known of one API's schedule; times are UNIX seconds."""

    key: str  #: tells schedules apart
    handled_at: float  #: what was due up to here is not to be submitted any more
    last_run_at: float | None = None  #: when the last job was due
    last_job_id: str | None = None
    error: str = ""  #: why the last one could not be submitted; empty: it was
    skipped: int = 0  #: how many were not wanted, as one before was not over
    last_skip_at: float | None = None  #: when the last of them was due
    last_skip_job_id: str | None = None  #: which job was not over then


_TICKS = [schedules.c[field.name] for field in fields(Ticks)]


def read_ticks(connection: Connection) -> dict[str, Ticks]:
    """Return what is known, by API."""
    return {row.api: Ticks(*row[1:]) for row in connection.execute(select(schedules.c.api, *_TICKS))}


def begin(connection: Connection, api: str, key: str, at: float) -> None:
    """Begin a schedule that is new or another one than before: nothing that was due up to `at` is submitted."""
    known = connection.execute(select(schedules.c.key).where(schedules.c.api == api)).first()
    if known is None:
        connection.execute(insert(schedules).values(api=api, key=key, handled_at=at))
    elif known.key != key:
        values = {"key": key, "handled_at": at, "error": "", "skipped": 0}
        values |= {"last_skip_at": None, "last_skip_job_id": None}
        connection.execute(update(schedules).where(schedules.c.api == api).values(**values))


def begin_anew(connection: Connection, api: str, at: float) -> None:
    """Have a schedule go on from `at`, though it came further: the clock was set back."""
    connection.execute(update(schedules).where(schedules.c.api == api).values(handled_at=at))


def take(connection: Connection, job_id: str, api: str, key: str, at: float, may_overlap: bool = True) -> None:
    """Note that a job was submitted for what was due at `at`.

    Raises: ConflictError if one was before, or if this one may not overlap with a run that is not over.
    """
    if not may_overlap and (other := _unfinished_run(connection, api, job_id)):
        raise ConflictError(f"{api} runs by its schedule already, as job {other}")
    values = {"handled_at": at, "last_run_at": at, "last_job_id": job_id, "error": ""}
    if not _advance(connection, api, key, at, values):
        raise ConflictError(f"the job of {api} that was due was submitted before")


def skip(connection: Connection, api: str, key: str, at: float, error: str) -> None:
    """Note that nothing can be submitted for what was due at `at`, ever."""
    _advance(connection, api, key, at, {"handled_at": at, "error": error})


def skip_overlapping(connection: Connection, api: str, key: str, at: float) -> str | None:
    """Pass over what was due at `at` if an earlier run of the schedule is not over; return the id of that job."""
    other = _unfinished_run(connection, api)
    if other is None:
        return None
    values = {"handled_at": at, "error": "", "skipped": schedules.c.skipped + 1}
    values |= {"last_skip_at": at, "last_skip_job_id": other}
    return other if _advance(connection, api, key, at, values) else None


def note(connection: Connection, api: str, error: str) -> None:
    """Say why what is due could not be submitted yet."""
    connection.execute(update(schedules).where(schedules.c.api == api).values(error=error))


def forget(connection: Connection, api: str) -> None:
    """Drop the schedule of an API that has none any more."""
    connection.execute(delete(schedules).where(schedules.c.api == api))


def _unfinished_run(connection: Connection, api: str, but: str = "") -> str | None:
    """Return the id of the newest job that a schedule submitted and that is not over, `but` for one."""
    query = select(jobs.c.id, job_inputs.c.source).join_from(jobs, job_inputs, job_inputs.c.number == jobs.c.number)
    unfinished = (jobs.c.api == api, jobs.c.presence == Presence.HERE, jobs.c.status.in_(_UNFINISHED), jobs.c.id != but)
    for row in connection.execute(query.where(*unfinished).order_by(jobs.c.number.desc())):
        if SCHEDULED_FOR in json.loads(row.source):
            return str(row.id)
    return None


def _advance(connection: Connection, api: str, key: str, at: float, values: dict[str, object]) -> bool:
    mine = (schedules.c.api == api, schedules.c.key == key, schedules.c.handled_at < at)
    return connection.execute(update(schedules).where(*mine).values(**values)).rowcount == 1
