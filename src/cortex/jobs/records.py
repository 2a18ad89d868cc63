"""Rows of jobs: the records made of them, and the ledger that a transaction updates.

Statuses and counts of a job with leased batches change only through its ledger. Each function runs inside a
transaction of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    select,
    update,
)

from cortex.jobs.spec import FROM_ENDPOINT, JobCounts, JobOptions, JobOrigin, JobRecord
from cortex.lifecycle import JOB_TRANSITIONS, JobStatus
from cortex.processes.codec import decode
from cortex.state.tables import (
    KEYS_PER_JOB,
    assignments,
    batches,
    dead_letters,
    job_inputs,
    job_marks,
    jobs,
    leases,
    results,
)


class Presence(StrEnum):
    """Presence of a job in lists and queues; the values in the database are those of version 0.1.0."""

    STORING = "arriving"  #: its batches are being stored; its submission is not acknowledged yet
    VISIBLE = "here"
    ASYNC_QUEUE = "standing"  #: the queue of an AsyncAPI, which no list shows; see `async_queue`
    DELETED = "gone"  #: `cleanup` removes its rows


#: The mark of a job with a webhook, and its values: the webhook is due, or sent.
WEBHOOK, DUE, SENT = "webhook", "due", "told"
#: Least size that a job counts as, because each takes work of the operator.
MIN_JOB_BYTES = 16 * 1024
#: Prefix of the marks of a job's workers that have constructed the user's class; the end of their id follows.
WORKER = "worker:"


@dataclass(frozen=True)
class JobSummary:
    """Summary of the jobs of one API."""

    running: int  #: number of jobs that are not over
    latest: str  #: id of the newest job


@dataclass(frozen=True)
class StoredJob:
    """Size of a job: its input, results and dead letters."""

    id: str
    is_over: bool
    size_bytes: int


@dataclass(frozen=True)
class JobInputs:
    """The immutable part of a job, which may be large because of its configuration."""

    origin: JobOrigin
    options: JobOptions
    source: dict[str, Any]


_OVER = tuple(status for status in JobStatus if status.is_over)
_VISIBLE = jobs.c.presence == Presence.VISIBLE
_WORKERS = (
    select(func.count())
    .where(job_marks.c.number == jobs.c.number, job_marks.c.name.startswith(WORKER))
    .scalar_subquery()
    .label("workers")
)
_RECORD = (
    select(jobs, _WORKERS, job_inputs.c.origin, job_inputs.c.options, job_inputs.c.source)
    .join_from(jobs, job_inputs, job_inputs.c.number == jobs.c.number)
    .where(_VISIBLE)
)


def insert_job(
    connection: Connection,
    job_id: str,
    origin: JobOrigin,
    options: JobOptions,
    source: dict[str, Any],
    now: float,
    presence: Presence = Presence.VISIBLE,
) -> int:
    """Store a job without batches in the status `enqueuing`; return its number."""
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
    if options.webhook is not None:  # set at once: an operator may end the job and crash before it could set the mark
        connection.execute(insert(job_marks).values(number=key.number, name=WEBHOOK, value=DUE))
    return int(key.number)


def make_visible(connection: Connection, number: int) -> None:
    """Make a job visible."""
    connection.execute(update(jobs).where(jobs.c.number == number).values(presence=Presence.VISIBLE))


def mark_deleted(connection: Connection, job_ids: Sequence[str]) -> list[str]:
    """Mark visible jobs as deleted and return their ids; `cleanup` removes their rows."""
    found = connection.execute(select(jobs.c.id, jobs.c.number).where(_VISIBLE, jobs.c.id.in_(job_ids))).all()
    numbers = [row.number for row in found]
    connection.execute(delete(leases).where(leases.c.number.in_(numbers)))
    connection.execute(update(jobs).where(jobs.c.number.in_(numbers)).values(presence=Presence.DELETED))
    return [row.id for row in found]


def read_job(connection: Connection, job_id: str) -> JobRecord | None:
    """Return a visible job, or None."""
    row = connection.execute(_RECORD.where(jobs.c.id == job_id)).first()
    return _record(row) if row else None


@dataclass(frozen=True)
class JobFilter:
    """Filter of a list of jobs; without values, it matches all."""

    api: str | None = None
    statuses: Collection[JobStatus] = ()  #: empty: all
    before: int | None = None  #: only jobs with a lower number than this one


def list_jobs(connection: Connection, chosen: str | JobFilter, limit: int = 10) -> list[JobRecord]:
    """Return the newest of the chosen jobs, or of those of an API, the newest first."""
    chosen = JobFilter(chosen) if isinstance(chosen, str) else chosen
    query = _RECORD
    if chosen.api is not None:
        query = query.where(jobs.c.api == chosen.api)
    if chosen.statuses:
        query = query.where(jobs.c.status.in_(chosen.statuses))
    if chosen.before is not None:
        query = query.where(jobs.c.number < chosen.before)
    return [_record(row) for row in connection.execute(query.order_by(jobs.c.number.desc()).limit(limit))]


def active_jobs(connection: Connection, known: dict[str, JobInputs]) -> list[JobRecord]:
    """Return all jobs that are not over, the oldest first.

    Every pass of the control loop lists them, so `known` caches their inputs between two calls.
    """
    active = [status for status in JobStatus if not status.is_over]
    of_active = select(jobs, _WORKERS).where(_VISIBLE, jobs.c.status.in_(active))
    rows = connection.execute(of_active.order_by(jobs.c.number)).all()
    for job_id in known.keys() - {row.id for row in rows}:
        del known[job_id]
    for row in rows:
        if row.id not in known:
            found = connection.execute(select(job_inputs).where(job_inputs.c.number == row.number)).one()
            known[row.id] = _inputs(found)
    return [_record(row, known[row.id]) for row in rows]


def summarize(connection: Connection) -> dict[str, JobSummary]:
    """Return a summary of the jobs of each API."""
    running = func.sum(case((jobs.c.status.in_(_OVER), 0), else_=1))
    newest = (
        select(jobs.c.api, func.max(jobs.c.number).label("number"), running.label("running"))
        .where(_VISIBLE)
        .group_by(jobs.c.api)
        .subquery()
    )
    query = select(newest.c.api, newest.c.running, jobs.c.id).join_from(newest, jobs, jobs.c.number == newest.c.number)
    return {row.api: JobSummary(int(row.running), row.id) for row in connection.execute(query)}


def count_by_status(connection: Connection) -> dict[str, dict[str, int]]:
    """Count the jobs of each API by the code of their status."""
    query = select(jobs.c.api, jobs.c.status, func.count()).where(_VISIBLE).group_by(jobs.c.api, jobs.c.status)
    counts: dict[str, dict[str, int]] = {}
    for api, status, number in connection.execute(query):
        code = JobStatus(status).code
        of_api = counts.setdefault(api, {})
        of_api[code] = of_api.get(code, 0) + number
    return counts


def ids_of_api(connection: Connection, api: str) -> list[str]:
    """Return the ids of all jobs of an API, the newest first."""
    return list(
        connection.execute(
            select(jobs.c.id).where(_VISIBLE, jobs.c.api == api).order_by(jobs.c.number.desc())
        ).scalars()
    )


def ids_beyond(connection: Connection, keep: int) -> list[str]:
    """Return the ids of jobs that are over, except for the newest `keep` of each API."""
    rank = func.row_number().over(partition_by=jobs.c.api, order_by=jobs.c.number.desc()).label("rank")
    ranked = select(jobs.c.id, rank).where(_VISIBLE, jobs.c.status.in_(_OVER)).subquery()
    return list(connection.execute(select(ranked.c.id).where(ranked.c.rank > keep)).scalars())


def sizes_from_endpoint(connection: Connection, api: str) -> list[StoredJob]:
    """Return the sizes of an API's jobs that came through its endpoint, the oldest first."""
    first = cast(jobs.c.number, BigInteger) * KEYS_PER_JOB
    size: ColumnElement[Any] = func.length(job_inputs.c.origin) + func.length(job_inputs.c.options)
    for column in (batches.c.payload, results.c.value, dead_letters.c.payload):
        of_job = column.table.c.key.between(first, first + (KEYS_PER_JOB - 1))
        size += func.coalesce(select(func.sum(func.length(column))).where(of_job).scalar_subquery(), 0)
    query = (
        select(jobs.c.id, jobs.c.status, size.label("size"))
        .join_from(jobs, job_inputs, job_inputs.c.number == jobs.c.number)
        .where(_VISIBLE, jobs.c.api == api, job_inputs.c.source.contains(json.dumps({FROM_ENDPOINT: True})[1:-1]))
        .order_by(jobs.c.number)
    )
    return [
        StoredJob(row.id, JobStatus(row.status).is_over, max(MIN_JOB_BYTES, int(row.size)))
        for row in connection.execute(query)
    ]


def set_message(connection: Connection, job_id: str, message: str) -> None:
    """Store the reason why a pending job does not run; ignored once it is not pending."""
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.status == JobStatus.PENDING, jobs.c.message != message)
        .values(message=message)
    )


def put_assignment(connection: Connection, worker: str, job_id: str | None) -> None:
    """Store the job that a job worker is assigned to, or None."""
    connection.execute(delete(assignments).where(assignments.c.worker == worker))
    if job_id is not None:
        connection.execute(insert(assignments).values(worker=worker, job_id=job_id))


def read_assignments(connection: Connection) -> dict[str, str]:
    """Return the id of the job that each job worker is assigned to."""
    return {row.worker: row.job_id for row in connection.execute(select(assignments))}


def put_mark(connection: Connection, job_id: str, name: str, value: str) -> None:
    """Set a mark, a named value of a job; ignored if the job is deleted."""
    number = connection.execute(select(jobs.c.number).where(_VISIBLE, jobs.c.id == job_id)).scalar()
    if number is None:
        return
    connection.execute(delete(job_marks).where(job_marks.c.number == number, job_marks.c.name == name))
    connection.execute(insert(job_marks).values(number=number, name=name, value=value))


def read_marks(connection: Connection, job_id: str) -> dict[str, str]:
    """Return the marks of a job."""
    query = select(job_marks.c.name, job_marks.c.value).join_from(jobs, job_marks, job_marks.c.number == jobs.c.number)
    return {row.name: row.value for row in connection.execute(query.where(_VISIBLE, jobs.c.id == job_id))}


def ids_marked(connection: Connection, name: str, value: str) -> list[str]:
    """Return the ids of the jobs whose mark `name` has that value."""
    query = select(jobs.c.id).join_from(jobs, job_marks, job_marks.c.number == jobs.c.number)
    marked = query.where(_VISIBLE, job_marks.c.name == name, job_marks.c.value == value)
    return list(connection.execute(marked).scalars())


_COUNTS: Sequence[str] = tuple(JobCounts.__dataclass_fields__)


def _inputs(row: Row[Any]) -> JobInputs:
    # Unknown keys, those of a newer version that ran meanwhile, are ignored.
    origin, options = decode(JobOrigin, json.loads(row.origin)), decode(JobOptions, json.loads(row.options))
    return JobInputs(origin, options, json.loads(row.source))


def _record(row: Row[Any], inputs: JobInputs | None = None) -> JobRecord:
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
        counts=JobCounts(**{name: values[name] for name in _COUNTS}),
    )


#: Columns that a ledger reads and writes; `_READ` adds those that it only reads.
_LEDGER_COUNTS = (
    *("next_seq", "batches", "items", "succeeded", "succeeded_items", "failed", "failed_items"),
    *("failed_attempts", "results", "seconds"),
)
_CHANGING = (*_LEDGER_COUNTS, "status", "started_at", "ended_at", "message", "traceback")
_READ = [jobs.c[name] for name in ("number", "max_attempts", "isolate_failures", *_CHANGING)]

_HAS_LEDGER = jobs.c.presence.in_((Presence.VISIBLE, Presence.ASYNC_QUEUE))
_BY_ID = select(*_READ).where(jobs.c.id == bindparam("job_id"), _HAS_LEDGER).with_for_update()
_BY_NUMBER = select(*_READ).where(jobs.c.number == bindparam("job"), _HAS_LEDGER).with_for_update()
_WRITE = update(jobs).where(jobs.c.number == bindparam("job")).values({n: bindparam(f"new_{n}") for n in _CHANGING})
_DELETE_LEASES = delete(leases).where(leases.c.number == bindparam("job"))


@dataclass
class JobLedger:
    """Status and counts of a job during one transaction: read once, changed in memory, written once."""

    number: int
    max_attempts: int
    isolate_failures: bool
    next_seq: int
    batches: int
    items: int
    succeeded: int
    succeeded_items: int
    failed: int
    failed_items: int
    failed_attempts: int
    results: int
    seconds: float
    status: JobStatus
    started_at: float | None
    ended_at: float | None
    message: str
    traceback: str
    _read: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def is_leasable(self) -> bool:
        """Return True if batches of the job, or its completion hook, can be leased and reported."""
        return self.status in (JobStatus.PENDING, JobStatus.RUNNING, JobStatus.COMPLETING)

    @property
    def open(self) -> int:
        """Count the unresolved batches."""
        return self.batches - self.succeeded - self.failed

    def move(self, status: JobStatus, now: float, message: str = "", traceback: str = "") -> bool:
        """Change the status, message and times; return False if `JOB_TRANSITIONS` does not allow it."""
        if status not in JOB_TRANSITIONS[self.status]:
            return False
        self.status, self.message, self.traceback = status, message, traceback
        if status is JobStatus.RUNNING:
            self.started_at = now
        if status.is_over:
            self.ended_at = now
        return True

    def save(self, connection: Connection, now: float) -> None:
        """Write the changes. A running job without open batches becomes `completing`."""
        if self.status is JobStatus.RUNNING and not self.open:
            self.move(JobStatus.COMPLETING, now)
        if self._changing() == self._read:
            return
        values = {f"new_{name}": value for name, value in zip(_CHANGING, self._changing(), strict=True)}
        connection.execute(_WRITE, {"job": self.number, **values})
        if self.status.is_over:
            connection.execute(_DELETE_LEASES, {"job": self.number})
        self._read = self._changing()

    def _changing(self) -> tuple[Any, ...]:
        return (
            *(self.next_seq, self.batches, self.items, self.succeeded, self.succeeded_items),
            *(self.failed, self.failed_items, self.failed_attempts, self.results, self.seconds),
            *(self.status, self.started_at, self.ended_at, self.message, self.traceback),
        )


def open_ledger(connection: Connection, job_id: str) -> JobLedger | None:
    """Return the ledger of a job, or None if there is no such job."""
    return _ledger(connection.execute(_BY_ID, {"job_id": job_id}).first())


def open_numbered_ledger(connection: Connection, number: int) -> JobLedger | None:
    """Return the ledger of the job with that number, or None."""
    return _ledger(connection.execute(_BY_NUMBER, {"job": number}).first())


def _ledger(row: Row[Any] | None) -> JobLedger | None:
    if row is None:
        return None
    values = {**row._mapping, "status": JobStatus(row.status)}
    ledger = JobLedger(**values)
    ledger._read = ledger._changing()
    return ledger
