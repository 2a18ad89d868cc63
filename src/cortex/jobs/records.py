"""Rows of jobs and the records that are made of them; knows nothing of how batches are given to workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, case, delete, func, insert, select, update

from cortex.jobs.spec import Counts, JobOrigin, JobRecord, Options
from cortex.lifecycle import JobStatus
from cortex.state.job_tables import assignments, job_inputs, job_marks, jobs, leases


class Presence(StrEnum):
    """Whether a job can be seen; the value is stored."""

    ARRIVING = "arriving"  #: its batches are being stored; nobody was told of it yet
    HERE = "here"
    STANDING = "standing"  #: the queue of an AsyncAPI: batches come and go, and nobody sees it as a job
    GONE = "gone"  #: deleted; its rows are going


#: The fact about a job with a webhook that says whether it was told of the job's end.
WEBHOOK, DUE, TOLD = "webhook", "due", "told"


@dataclass(frozen=True)
class ApiJobs:
    """The jobs of one API in short."""

    running: int  #: those that are not over
    latest: str  #: the id of the newest


@dataclass(frozen=True)
class Inputs:
    """What was submitted: large where a configuration is, and the same for ever."""

    origin: JobOrigin
    options: Options
    source: dict[str, Any]


_OVER = tuple(status for status in JobStatus if status.is_over)
_HERE = jobs.c.presence == Presence.HERE
_RECORD = (
    select(jobs, job_inputs.c.origin, job_inputs.c.options, job_inputs.c.source)
    .join_from(jobs, job_inputs, job_inputs.c.number == jobs.c.number)
    .where(_HERE)
)


def insert_job(
    connection: Connection,
    job_id: str,
    origin: JobOrigin,
    options: Options,
    source: dict[str, Any],
    now: float,
    presence: Presence = Presence.HERE,
) -> int:
    """Store a job that has no batches yet, as one that is enqueuing; return its number."""
    values = {
        "id": job_id,
        "api": origin.api,
        "presence": presence,
        "status": JobStatus.ENQUEUING,
        "created_at": now,
        "deadline_at": now + options.timeout_s if options.timeout_s is not None else None,
        "max_attempts": options.max_attempts,
        "isolate_failures": options.isolate_failures,
    }
    key = connection.execute(insert(jobs).values(values)).inserted_primary_key
    assert key is not None
    inputs = {"origin": asdict(origin), "options": asdict(options), "source": source}
    texts = {name: json.dumps(value) for name, value in inputs.items()}
    connection.execute(insert(job_inputs).values(number=key.number, **texts))
    if options.webhook is not None:  # from the beginning: no operator may end the job and die before it has noted it
        connection.execute(insert(job_marks).values(number=key.number, name=WEBHOOK, value=DUE))
    return int(key.number)


def reveal(connection: Connection, number: int) -> None:
    """Let a job be seen."""
    connection.execute(update(jobs).where(jobs.c.number == number).values(presence=Presence.HERE))


def hide(connection: Connection, job_ids: Sequence[str]) -> list[str]:
    """Take jobs out of sight for good and return the ids of those that were in it; their rows are the sweeper's."""
    found = connection.execute(select(jobs.c.id, jobs.c.number).where(_HERE, jobs.c.id.in_(job_ids))).all()
    numbers = [row.number for row in found]
    connection.execute(delete(leases).where(leases.c.number.in_(numbers)))
    connection.execute(update(jobs).where(jobs.c.number.in_(numbers)).values(presence=Presence.GONE))
    return [row.id for row in found]


def read_job(connection: Connection, job_id: str) -> JobRecord | None:
    """Return one job, or None."""
    row = connection.execute(_RECORD.where(jobs.c.id == job_id)).first()
    return _record(row) if row else None


def list_jobs(connection: Connection, api: str, limit: int) -> list[JobRecord]:
    """Return the newest jobs of an API, the newest first."""
    rows = connection.execute(_RECORD.where(jobs.c.api == api).order_by(jobs.c.number.desc()).limit(limit))
    return [_record(row) for row in rows]


def active_jobs(connection: Connection, known: dict[str, Inputs]) -> list[JobRecord]:
    """Return all jobs that are not over, the oldest first.

    They are asked for in every pass of the control loop, so `known` keeps their inputs between two calls.
    """
    active = [status for status in JobStatus if not status.is_over]
    rows = connection.execute(select(jobs).where(_HERE, jobs.c.status.in_(active)).order_by(jobs.c.number)).all()
    for job_id in known.keys() - {row.id for row in rows}:
        del known[job_id]
    for row in rows:
        if row.id not in known:
            found = connection.execute(select(job_inputs).where(job_inputs.c.number == row.number)).one()
            known[row.id] = _inputs(found)
    return [_record(row, known[row.id]) for row in rows]


def summarize(connection: Connection) -> dict[str, ApiJobs]:
    """Return the jobs of each API in short."""
    running = func.sum(case((jobs.c.status.in_(_OVER), 0), else_=1))
    newest = (
        select(jobs.c.api, func.max(jobs.c.number).label("number"), running.label("running"))
        .where(_HERE)
        .group_by(jobs.c.api)
        .subquery()
    )
    query = select(newest.c.api, newest.c.running, jobs.c.id).join_from(newest, jobs, jobs.c.number == newest.c.number)
    return {row.api: ApiJobs(int(row.running), row.id) for row in connection.execute(query)}


def count_by_status(connection: Connection) -> dict[str, dict[str, int]]:
    """Count the jobs of each API by the code of their status."""
    query = select(jobs.c.api, jobs.c.status, func.count()).where(_HERE).group_by(jobs.c.api, jobs.c.status)
    counts: dict[str, dict[str, int]] = {}
    for api, status, number in connection.execute(query):
        code = JobStatus(status).code
        of_api = counts.setdefault(api, {})
        of_api[code] = of_api.get(code, 0) + number
    return counts


def ids_of_api(connection: Connection, api: str) -> list[str]:
    """Return the ids of all jobs of an API, the newest first."""
    return list(
        connection.execute(select(jobs.c.id).where(_HERE, jobs.c.api == api).order_by(jobs.c.number.desc())).scalars()
    )


def ids_beyond(connection: Connection, keep: int) -> list[str]:
    """Return the ids of jobs that are over, without the newest `keep` of each API."""
    rank = func.row_number().over(partition_by=jobs.c.api, order_by=jobs.c.number.desc()).label("rank")
    ranked = select(jobs.c.id, rank).where(_HERE, jobs.c.status.in_(_OVER)).subquery()
    return list(connection.execute(select(ranked.c.id).where(ranked.c.rank > keep)).scalars())


def set_message(connection: Connection, job_id: str, message: str) -> None:
    """Say what a pending job waits for; ignored once it is not pending."""
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.status == JobStatus.PENDING, jobs.c.message != message)
        .values(message=message)
    )


def put_assignment(connection: Connection, worker: str, job_id: str | None) -> None:
    """Remember for which job a worker works; None: for none."""
    connection.execute(delete(assignments).where(assignments.c.worker == worker))
    if job_id is not None:
        connection.execute(insert(assignments).values(worker=worker, job_id=job_id))


def read_assignments(connection: Connection) -> dict[str, str]:
    """Return which worker works for which job."""
    return {row.worker: row.job_id for row in connection.execute(select(assignments))}


def put_mark(connection: Connection, job_id: str, name: str, value: str) -> None:
    """Store a small fact about a job; ignored where the job is gone."""
    number = connection.execute(select(jobs.c.number).where(_HERE, jobs.c.id == job_id)).scalar()
    if number is None:
        return
    connection.execute(delete(job_marks).where(job_marks.c.number == number, job_marks.c.name == name))
    connection.execute(insert(job_marks).values(number=number, name=name, value=value))


def read_marks(connection: Connection, job_id: str) -> dict[str, str]:
    """Return the small facts about a job."""
    query = select(job_marks.c.name, job_marks.c.value).join_from(jobs, job_marks, job_marks.c.number == jobs.c.number)
    return {row.name: row.value for row in connection.execute(query.where(_HERE, jobs.c.id == job_id))}


def ids_marked(connection: Connection, name: str, value: str) -> list[str]:
    """Return the ids of the jobs whose fact `name` has that value."""
    query = select(jobs.c.id).join_from(jobs, job_marks, job_marks.c.number == jobs.c.number)
    marked = query.where(_HERE, job_marks.c.name == name, job_marks.c.value == value)
    return list(connection.execute(marked).scalars())


_COUNTS: Sequence[str] = tuple(Counts.__dataclass_fields__)


def _inputs(row: Row[Any]) -> Inputs:
    origin, options = JobOrigin(**json.loads(row.origin)), Options(**json.loads(row.options))
    return Inputs(origin, options, json.loads(row.source))


def _record(row: Row[Any], inputs: Inputs | None = None) -> JobRecord:
    values, inputs = row._mapping, inputs or _inputs(row)
    return JobRecord(
        id=row.id,
        number=row.number,
        origin=inputs.origin,
        options=inputs.options,
        source=inputs.source,
        status=JobStatus(row.status),
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        deadline_at=row.deadline_at,
        message=row.message,
        traceback=row.traceback,
        counts=Counts(**{name: values[name] for name in _COUNTS}),
    )
