"""Tables of both databases in SQLAlchemy Core, and the column types and statements that differ between dialects.

`metadata` has the state of the installation, `job_metadata` the jobs. `migrations` creates the tables.

No table refers to a job by foreign key: a deleted job disappears at once, and its rows are removed in small steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    insert,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.types import TypeDecorator, TypeEngine

#: Only INTEGER can be a rowid in SQLite, where it has 64 bits; in other databases it has 32, which is too few.
Key = BigInteger().with_variant(Integer, "sqlite")


class PortableText(TypeDecorator[str]):
    """Text sorted by code point, of any length in every database, as SQLite has it.

    PostgreSQL cannot store the character 0 in text; it is replaced by U+FFFD.
    """

    impl = String
    cache_ok = True

    def __init__(self, length: int | None = None) -> None:
        super().__init__(length)
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the type for a dialect."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(Text(collation="C"))
        return dialect.type_descriptor(String(self.length) if self.length else Text())

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the value to store."""
        if value is not None and dialect.name == "postgresql" and "\0" in value:
            return value.replace("\0", "\ufffd")
        return value


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows with the same columns, none of which is text."""
    if connection.dialect.name != "postgresql":
        connection.execute(insert(table), rows)
    elif rows:  # one array per column: a short statement for any number of rows
        names = tuple(rows[0])
        connection.exec_driver_sql(
            _unnesting(table, names, connection.dialect), tuple([row[name] for row in rows] for name in names)
        )


@cache
def _unnesting(table: Table, names: tuple[str, ...], dialect: Dialect) -> str:
    arrays = ", ".join(f"%s::{table.c[name].type.compile(dialect)}[]" for name in names)
    columns = ", ".join(f'"{name}"' for name in names)
    return f"INSERT INTO {table.name} ({columns}) SELECT * FROM unnest({arrays})"


def insert_for(connection: Connection, table: Table) -> Any:
    """Return the dialect's INSERT with its `on_conflict_…` methods."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415 - operators with SQLite save 3 MB

        return postgresql.insert(table)
    return sqlite.insert(table)


metadata = MetaData()

#: One row: the number of the last migration that was applied.
schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

#: The desired state of each API.
apis = Table(
    "apis",
    metadata,
    Column("name", PortableText(64), primary_key=True),
    Column("kind", PortableText(32), nullable=False),
    Column("deployment", PortableText(255)),
    Column("spec", PortableText, nullable=False),  # Api as JSON
    Column("project_hash", PortableText(64), nullable=False),
    Column("nonce", PortableText(32), nullable=False),  # changed by `refresh` so that the revision changes
    Column("revision", PortableText(64), nullable=False),
    Column("spec_id", PortableText(64), nullable=False),
    Column("api_id", PortableText(128), nullable=False),
    Column("created_at", Float, nullable=False),  # UNIX seconds
    Column("updated_at", Float, nullable=False),
    Column("failure_message", PortableText),
    Column("failure_traceback", PortableText),
    Column("replicas", Integer),  # desired number; NULL until the autoscaler or a patch sets it
)

#: The last revision of an API that became ready; it keeps running while a newer one can't start.
serving_revisions = Table(
    "serving_revisions",
    metadata,
    Column("api", PortableText(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("revision", PortableText(64), nullable=False),
    Column("spec", PortableText, nullable=False),
    Column("project_hash", PortableText(64), nullable=False),
)

#: Every version of an API that was ever deployed; kept after a delete that keeps the cache.
api_versions = Table(
    "api_versions",
    metadata,
    Column("api_id", PortableText(128), primary_key=True),
    Column("api", PortableText(64), nullable=False),
    Column("deployed_at", Float, nullable=False),
    Index("api_versions_by_api", "api"),
)

#: The last changes of each API; each can be deployed again.
api_history = Table(
    "api_history",
    metadata,
    Column("api", PortableText(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),  # from 1
    Column("revision", PortableText(64), nullable=False),
    Column("spec", PortableText, nullable=False),  # Api as JSON
    Column("project_hash", PortableText(64), nullable=False),
    Column("nonce", PortableText(32), nullable=False),
    Column("api_id", PortableText(128), nullable=False),
    Column("action", PortableText(64), nullable=False),
    Column("deployed_at", Float, nullable=False),  # UNIX seconds
    Column("deployed_by", PortableText(255)),
    Column("changes", PortableText, nullable=False),  # a list of lines as JSON
    Column("live_at", Float),  # NULL: it never became ready
)

#: Signatures of the APIs' revisions that became ready.
signatures = Table(
    "signatures",
    metadata,
    Column("api", PortableText(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("revision", PortableText(64), primary_key=True),
    Column("signature", PortableText, nullable=False),  # ApiSignature as JSON
)

#: API keys, only their hashes.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", PortableText(32), primary_key=True),
    Column("name", PortableText(255), nullable=False),
    Column("apis", PortableText, nullable=False),  # a list of names as JSON; empty: all
    Column("digest", PortableText(64), nullable=False),  # SHA-256, hexadecimal
    Column("created_at", Float, nullable=False),  # UNIX seconds
)

#: Operator tokens besides the one of the home, only their hashes.
operator_tokens = Table(
    "operator_tokens",
    metadata,
    Column("id", PortableText(32), primary_key=True),
    Column("name", PortableText(255), nullable=False, unique=True),
    Column("scope", PortableText(16), nullable=False),  # TokenScope
    Column("api", PortableText(64)),  # the only API that it permits to read or change; NULL: all
    Column("digest", PortableText(64), nullable=False),  # SHA-256, hexadecimal
    Column("created_at", Float, nullable=False),  # UNIX seconds
    Column("expires_at", Float),  # UNIX seconds; NULL: never
)

#: Changes that clients of the operator requested, the refused ones included.
audit_log = Table(
    "audit_log",
    metadata,
    Column("number", Key, primary_key=True),  # ascending
    Column("at", Float, nullable=False),  # UNIX seconds
    Column("token", PortableText(255)),  # its name; NULL: the client had no valid token
    Column("address", PortableText(64), nullable=False),
    Column("action", PortableText(32), nullable=False),
    Column("api", PortableText(64)),  # NULL: it concerns no API
    Column("result", PortableText(16), nullable=False),  # AuditResult
    Column("detail", PortableText, nullable=False),
    Index("audit_log_by_api", "api", "number"),
)

#: Metric totals of an API's replicas that ended, one row per series.
metric_totals = Table(
    "metric_totals",
    metadata,
    Column("api", PortableText(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("key", PortableText, primary_key=True),  # worker.monitoring.metrics.series_key
    Column("value", Float, nullable=False),
    sqlite_with_rowid=False,
)

#: Replicas whose metrics are in the totals although their files may still exist.
folded_replicas = Table("folded_replicas", metadata, Column("replica", PortableText(128), primary_key=True))

#: Drift of an API's predictions.
drifts = Table(
    "drifts",
    metadata,
    Column("api", PortableText(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("data", PortableText, nullable=False),  # Drift as JSON
)

#: Ground truth of predictions, from feedback.
truths = Table(
    "truths",
    metadata,
    Column("api", PortableText(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("request_id", PortableText(64), primary_key=True),
    Column("model_type", PortableText(16), nullable=False),
    Column("hour", Integer, nullable=False),  # of the prediction, in hours of UNIX time
    Column("prediction", PortableText(32), nullable=False),  # a number, or the hash of a class
    Column("error", Float, nullable=False),  # prediction less truth; of a class, 1 where it is wrong
    Index("truths_by_hour", "hour"),
    sqlite_with_rowid=False,
)

#: Sums of the truths by hour, changed with them.
truth_hours = Table(
    "truth_hours",
    metadata,
    Column("api", PortableText(64), ForeignKey("apis.name", ondelete="CASCADE"), primary_key=True),
    Column("model_type", PortableText(16), primary_key=True),
    Column("hour", Integer, primary_key=True),
    Column("told", Integer, nullable=False),  # number of truths
    Column("error", Float, nullable=False),
    Column("absolute", Float, nullable=False),
    Column("squared", Float, nullable=False),
    sqlite_with_rowid=False,
)

#: Key-value settings of the installation, such as its secret.
facts = Table(
    "facts",
    metadata,
    Column("name", PortableText(64), primary_key=True),
    Column("value", PortableText, nullable=False),
)

#: Archives of projects in parts, used if several operators share the database.
project_parts = Table(
    "project_parts",
    metadata,
    Column("hash", PortableText(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)


job_metadata = MetaData()

#: The key of a batch, its result or its dead letter is the job's number times this plus the batch's number, so that the
#: rows of a job are adjacent.
KEYS_PER_JOB = 2**32


def first_key(number: int) -> int:
    """Return the key of a job's batch 0."""
    return number * KEYS_PER_JOB


#: The changing part of a job: a narrow row that every report updates.
jobs = Table(
    "jobs",
    job_metadata,
    Column("number", Integer, primary_key=True),
    Column("id", PortableText(16), nullable=False, unique=True),
    Column("api", PortableText(64), nullable=False),
    Column("presence", PortableText(16), nullable=False),  # Presence
    Column("is_emptied", Boolean, nullable=False, default=False),  # over, and its payloads are gone
    Column("status", PortableText(32), nullable=False),  # JobStatus
    Column("created_at", Float, nullable=False),  # UNIX seconds, as all times here
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("deadline_at", Float),
    Column("max_attempts", Integer, nullable=False),
    Column("isolate_failures", Boolean, nullable=False),
    Column("next_seq", BigInteger, nullable=False, default=0),
    Column("batches", BigInteger, nullable=False, default=0),
    Column("items", BigInteger, nullable=False, default=0),
    Column("succeeded", BigInteger, nullable=False, default=0),
    Column("succeeded_items", BigInteger, nullable=False, default=0),
    Column("failed", BigInteger, nullable=False, default=0),
    Column("failed_items", BigInteger, nullable=False, default=0),
    Column("failed_attempts", BigInteger, nullable=False, default=0),
    Column("results", BigInteger, nullable=False, default=0),
    Column("seconds", Float, nullable=False, default=0.0),
    Column("message", PortableText, nullable=False, default=""),
    Column("traceback", PortableText, nullable=False, default=""),
    Index("jobs_by_api", "api", "number"),
    Index("jobs_by_status", "status"),
    sqlite_autoincrement=True,  # numbers of deleted jobs, whose rows may still exist, are never reused
)

#: The immutable part of a job.
job_inputs = Table(
    "job_inputs",
    job_metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("origin", PortableText, nullable=False),  # JobOrigin as JSON
    Column("options", PortableText, nullable=False),  # Options as JSON
    Column("source", PortableText, nullable=False),  # JSON
)

#: Every batch of a job that is not over, resolved ones too.
batches = Table(
    "batches",
    job_metadata,
    Column("key", Key, primary_key=True, autoincrement=False),
    Column("items", Integer, nullable=False),
    Column("first_item", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),  # last, so that sums over the other columns don't read it
)

#: Ranges of unleased batches, ordered by their lease order. A batch with attempts, or a part, is a range of one.
pending = Table(
    "pending",
    job_metadata,
    Column("number", Integer, primary_key=True),
    Column("not_before", Float, primary_key=True),  # 0 unless it failed
    Column("first", BigInteger, primary_key=True),
    Column("last", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("is_part", Boolean, nullable=False),
    sqlite_with_rowid=False,
)

#: Leased ranges, the oldest with the lowest id; batches before `next` are resolved.
leases = Table(
    "leases",
    job_metadata,
    Column("id", Key, primary_key=True),
    Column("token", PortableText(32), nullable=False, unique=True),
    Column("number", Integer, nullable=False, index=True),
    Column("worker", PortableText(128), nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("next", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("is_part", Boolean, nullable=False),
    Column("expires_at", Float, nullable=False),
)

#: Results of batches. Position and number of items are copied, since the batch is deleted when the job is over.
results = Table(
    "results",
    job_metadata,
    Column("key", Key, primary_key=True, autoincrement=False),
    Column("first_item", BigInteger, nullable=False),
    Column("items", Integer, nullable=False),
    Column("value", LargeBinary, nullable=False),  # JSON
)

#: Batches whose attempts are used up.
dead_letters = Table(
    "dead_letters",
    job_metadata,
    Column("key", Key, primary_key=True, autoincrement=False),
    Column("first_item", BigInteger, nullable=False),
    Column("items", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("error", PortableText, nullable=False),
    Column("traceback", PortableText, nullable=False),
    Column("failed_at", Float, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

#: Workloads of AsyncAPIs, until some days after their end. The batch in the API's queue has the same key.
workloads = Table(
    "workloads",
    job_metadata,
    Column("key", Key, primary_key=True, autoincrement=False),
    Column("id", LargeBinary(16), nullable=False, unique=True),  # the bytes of its UUID
    Column("created_at", Float, nullable=False),
    Column("status", PortableText(16)),  # final WorkloadStatus; NULL while the batch is open
    Column("ended_at", Float),
    Column("value", LargeBinary),  # the result as JSON, or the error message
    Index("workloads_by_end", "ended_at"),
)

#: Marks: named values that the operator keeps with a job.
job_marks = Table(
    "job_marks",
    job_metadata,
    Column("number", Integer, primary_key=True),
    Column("name", PortableText(64), primary_key=True),
    Column("value", PortableText, nullable=False),
)

#: Assignment of job workers to jobs.
assignments = Table(
    "assignments",
    job_metadata,
    Column("worker", PortableText(128), primary_key=True),
    Column("job_id", PortableText(16), nullable=False),
)

#: State of each API's schedule: runs that were due up to `handled_at` are submitted, skipped or failed.
schedules = Table(
    "schedules",
    job_metadata,
    Column("api", PortableText(64), primary_key=True),
    Column(
        "key", PortableText, nullable=False
    ),  # of the schedule; a changed schedule has another key, and starts again
    Column("handled_at", Float, nullable=False),
    Column("last_run_at", Float),  # when the last job was due
    Column("last_job_id", PortableText(16)),
    Column("error", PortableText, nullable=False, default=""),  # why the last one could not be submitted
    Column("skipped", Integer, nullable=False, default=0, server_default="0"),  # runs, as one before was not over
    Column("last_skip_at", Float),  # when the last of them was due
    Column("last_skip_job_id", PortableText(16)),  # which job was not over then
)
