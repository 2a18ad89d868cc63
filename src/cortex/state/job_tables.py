"""The tables of jobs, in a database of their own, and nothing that runs a statement.

Nothing refers to a job by foreign key: what belongs to a deleted job goes in small steps, once the job is out of sight.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, Table

from cortex.state.columns import Key, Words

job_metadata = MetaData()

#: The rows of one job's batches, results and dead letters lie side by side: their key is the job's number times this,
#: plus the batch's number in its job.
KEYS_PER_JOB = 2**32


def first_key(number: int) -> int:
    """Return the key of a job's batch 0."""
    return number * KEYS_PER_JOB


#: What changes of a job, a narrow row that is written with every report.
jobs = Table(
    "jobs",
    job_metadata,
    Column("number", Integer, primary_key=True),
    Column("id", Words(16), nullable=False, unique=True),
    Column("api", Words(64), nullable=False),
    Column("presence", Words(16), nullable=False),  # Presence
    Column("is_emptied", Boolean, nullable=False, default=False),  # over, and its payloads are gone
    Column("status", Words(32), nullable=False),  # JobStatus
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
    Column("message", Words, nullable=False, default=""),
    Column("traceback", Words, nullable=False, default=""),
    Index("jobs_by_api", "api", "number"),
    Index("jobs_by_status", "status"),
    sqlite_autoincrement=True,  # the number of a deleted job, whose rows may still be there, is never given again
)

#: What a job was submitted with; never changes.
job_inputs = Table(
    "job_inputs",
    job_metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("origin", Words, nullable=False),  # JobOrigin as JSON
    Column("options", Words, nullable=False),  # Options as JSON
    Column("source", Words, nullable=False),  # JSON
)

#: Every batch of a job that is not over, resolved ones too.
batches = Table(
    "batches",
    job_metadata,
    Column("key", Key, primary_key=True, autoincrement=False),
    Column("items", Integer, nullable=False),
    Column("first_item", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),  # last: sums over the others don't read it
)

#: Batches that nobody works at, as ranges: the next to be leased first. A batch with attempts, or a part, is a range
#: of one.
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

#: Ranges that workers work at, the oldest with the lowest id; what is before `next` was resolved.
leases = Table(
    "leases",
    job_metadata,
    Column("id", Key, primary_key=True),
    Column("token", Words(32), nullable=False, unique=True),
    Column("number", Integer, nullable=False, index=True),
    Column("worker", Words(128), nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("next", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("is_part", Boolean, nullable=False),
    Column("expires_at", Float, nullable=False),
)

#: What batches returned. Position and number of items are repeated here: the batch goes when the job is over.
results = Table(
    "results",
    job_metadata,
    Column("key", Key, primary_key=True, autoincrement=False),
    Column("first_item", BigInteger, nullable=False),
    Column("items", Integer, nullable=False),
    Column("value", LargeBinary, nullable=False),  # JSON
)

#: Batches that were given up.
dead_letters = Table(
    "dead_letters",
    job_metadata,
    Column("key", Key, primary_key=True, autoincrement=False),
    Column("first_item", BigInteger, nullable=False),
    Column("items", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("error", Words, nullable=False),
    Column("traceback", Words, nullable=False),
    Column("failed_at", Float, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

#: What was sent to an AsyncAPI, until some days after its end; a batch of the API's standing job has the same key.
workloads = Table(
    "workloads",
    job_metadata,
    Column("key", Key, primary_key=True, autoincrement=False),
    Column("id", LargeBinary(16), nullable=False, unique=True),  # the bytes of its UUID
    Column("created_at", Float, nullable=False),
    Column("status", Words(16)),  # WorkloadStatus of its end; until then it is in what its batch is in
    Column("ended_at", Float),
    Column("value", LargeBinary),  # the result as JSON, or the words of the error
    Index("workloads_by_end", "ended_at"),
)

#: Small facts about a job that its supervisor must not forget.
job_marks = Table(
    "job_marks",
    job_metadata,
    Column("number", Integer, primary_key=True),
    Column("name", Words(64), primary_key=True),
    Column("value", Words, nullable=False),
)

#: Which worker works for which job.
assignments = Table(
    "assignments",
    job_metadata,
    Column("worker", Words(128), primary_key=True),
    Column("job_id", Words(16), nullable=False),
)

#: How far the schedule of each API is: what is due up to `handled_at` was submitted, or is not wanted.
schedules = Table(
    "schedules",
    job_metadata,
    Column("api", Words(64), primary_key=True),
    Column("key", Words, nullable=False),  # of the schedule; another one begins anew
    Column("handled_at", Float, nullable=False),
    Column("last_run_at", Float),  # when the last job was due
    Column("last_job_id", Words(16)),
    Column("error", Words, nullable=False, default=""),  # why the last one could not be submitted
    Column("skipped", Integer, nullable=False, default=0, server_default="0"),  # runs, as one before was not over
    Column("last_skip_at", Float),  # when the last of them was due
    Column("last_skip_job_id", Words(16)),  # which job was not over then
)
