"""Migrations from the first schema to the current one; each runs once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from sqlalchemy import Connection, delete, insert, inspect, select, update

from cortex.state.tables import (
    KEYS_PER_JOB,
    api_history,
    api_keys,
    api_versions,
    apis,
    audit_log,
    batches,
    drifts,
    facts,
    first_key,
    folded_replicas,
    job_marks,
    job_metadata,
    jobs,
    leases,
    metric_totals,
    operator_tokens,
    pending,
    project_parts,
    schedules,
    serving_revisions,
    signatures,
    truth_hours,
    truths,
    workloads,
)


def _create_apis(connection: Connection) -> None:
    for table in (apis, serving_revisions, api_versions):
        table.create(connection)


def _add_replicas(connection: Connection) -> None:
    if "replicas" not in {column["name"] for column in inspect(connection).get_columns(apis.name)}:
        connection.exec_driver_sql("ALTER TABLE apis ADD COLUMN replicas INTEGER")


def _create_metrics(connection: Connection) -> None:
    for table in (metric_totals, folded_replicas):
        table.create(connection)


def _create_tracking(connection: Connection) -> None:
    for table in (drifts, truths, truth_hours):
        table.create(connection)


def _create_jobs(connection: Connection) -> None:
    job_metadata.create_all(connection)


def _add_schedules(connection: Connection) -> None:
    schedules.create(connection, checkfirst=True)


def _add_workloads(connection: Connection) -> None:
    workloads.create(connection, checkfirst=True)


def _add_skipped_runs(connection: Connection) -> None:
    there = {column["name"] for column in inspect(connection).get_columns(schedules.name)}
    for column in ("skipped INTEGER DEFAULT '0' NOT NULL", "last_skip_at FLOAT", "last_skip_job_id VARCHAR(16)"):
        if column.split()[0] not in there:
            connection.exec_driver_sql(f"ALTER TABLE schedules ADD COLUMN {column}")


def _queue_hooks(connection: Connection) -> None:
    """Make each completion hook that has begun the last range of its job's queue, or end its job if it has ended.

    Until now, three marks held its lease, the number of processes that had died in it, and its outcome.
    """
    names = ("hook", "hook_deaths", "hook_outcome")
    now, seq = time.time(), KEYS_PER_JOB - 1
    for job in connection.execute(select(jobs).where(jobs.c.status == "completing")).all():
        of_job = select(job_marks).where(job_marks.c.number == job.number, job_marks.c.name.in_(names))
        marks = {mark.name: mark.value for mark in connection.execute(of_job)}
        if not marks:
            continue
        if "hook_outcome" in marks:
            outcome = json.loads(marks["hook_outcome"])
            end = {"status": "succeeded", "message": "", "traceback": outcome["traceback"], "ended_at": now}
            if outcome["error"]:
                end |= {"status": "worker_error", "message": f"on_job_complete raised {outcome['error']}"}
            elif job.failed:
                message = f"{job.failed} of {job.batches} batches are dead letters"
                end |= {"status": "completed_with_failures", "message": message}
            connection.execute(update(jobs).where(jobs.c.number == job.number).values(end))
            continue
        row = {"key": first_key(job.number) + seq, "items": 0, "first_item": job.items, "payload": b""}
        connection.execute(insert(batches).values(row))
        values = {"number": job.number, "last": seq, "attempts": int(marks.get("hook_deaths", "0")), "is_part": False}
        if holder := marks.get("hook"):
            held = {"next": seq, "expires_at": now, **json.loads(holder)}  # the operator renews all leases as it starts
            connection.execute(insert(leases).values({**values, **held}))
        else:
            connection.execute(insert(pending).values({**values, "first": seq, "not_before": 0.0}))
    connection.execute(delete(job_marks).where(job_marks.c.name.in_(names)))


def _create_facts(connection: Connection) -> None:
    facts.create(connection)


def _create_keys(connection: Connection) -> None:
    api_keys.create(connection)


def _create_projects(connection: Connection) -> None:
    project_parts.create(connection)


def _create_tokens(connection: Connection) -> None:
    for table in (operator_tokens, audit_log):
        table.create(connection)


def _create_history(connection: Connection) -> None:
    """Begin each API's history with the revision that serves and, if it is another one, the newest revision."""
    api_history.create(connection)
    columns = ("revision", "spec", "project_hash")
    newest = [apis.c[name] for name in ("name", *columns, "nonce", "api_id", "updated_at")]
    served = [serving_revisions.c[name].label(f"serving_{name}") for name in columns]
    query = select(*newest, *served).outerjoin(serving_revisions, serving_revisions.c.api == apis.c.name)
    for row in connection.execute(query).all():
        entry = {
            "api": row.name,
            "nonce": row.nonce,
            "api_id": row.api_id,
            "action": "upgrade",
            "deployed_at": row.updated_at,
            "changes": "[]",
        }
        number = 1
        if row.serving_revision not in (None, row.revision):
            serving = {name: getattr(row, f"serving_{name}") for name in columns}
            connection.execute(insert(api_history).values(**entry, **serving, number=1, live_at=row.updated_at))
            number = 2
        target = {name: getattr(row, name) for name in columns}
        live_at = row.updated_at if row.serving_revision == row.revision else None
        connection.execute(insert(api_history).values(**entry, **target, number=number, live_at=live_at))


def _create_signatures(connection: Connection) -> None:
    signatures.create(connection)


def _mark_new_fields(connection: Connection) -> None:
    """Change nothing but the number: older versions then refuse the database, whose specs may have new fields."""


Migration = Callable[[Connection], None]

#: Migration N is item N-1. Append only: a released migration never changes.
MIGRATIONS: tuple[Migration, ...] = (
    _create_apis,
    _add_replicas,
    _create_metrics,
    _create_tracking,
    _create_facts,
    _create_keys,
    _create_projects,
    _create_tokens,
    _create_history,
    _create_signatures,
    _mark_new_fields,
)
JOB_MIGRATIONS: tuple[Migration, ...] = (
    _create_jobs,
    _add_schedules,
    _add_workloads,
    _add_skipped_runs,
    _queue_hooks,
)
