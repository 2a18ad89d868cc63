"""Data types of jobs, batches, leases and workloads, shared by operator, supervisors and job workers.

A job's input is cut into batches, numbered from 0 in the order of the input (`seq`). Job workers lease ranges of them
and report on a lease from its beginning to its end. A batch whose attempts are used up is a dead letter. A workload,
one request to an AsyncAPI, is a batch of its queue (`async_queue`).

Workers import this module, so it imports only the standard library and `lifecycle`.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cortex.lifecycle import ApiKind, JobStatus, WorkloadStatus

#: Default number of attempts before a batch is a dead letter, the first one included.
MAX_ATTEMPTS = 3

#: Number of a job's completion hook, the last range of its queue: the highest one whose key belongs to the job.
HOOK_SEQ = 2**32 - 1

#: Key in the stored source of a job that a schedule submitted: the due time, UNIX seconds.
SCHEDULED_FOR = "scheduled_for"
#: Key in the stored source of a job that was submitted through its API's endpoint, without a token of the operator.
FROM_ENDPOINT = "from_endpoint"
#: Key in the stored source of a job whose submission had this header, to continue its trace.
TRACEPARENT = "traceparent"


# Sources: where a job's items come from.


@dataclass(frozen=True)
class ItemList:
    """Items in the body of the submission."""

    items: list[Any]
    batch_size: int


@dataclass(frozen=True)
class FilePathLister:
    """The paths of files are the items."""

    paths: tuple[str, ...]  #: prefixes: `s3://…`, `gs://…`, or absolute local paths
    batch_size: int
    includes: tuple[str, ...] = ()  #: globs over the whole path; empty: all files
    excludes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DelimitedFiles(FilePathLister):
    """The JSON values inside files are the items."""


@dataclass(frozen=True)
class Upload:
    """Items arrive as lines of JSON in the body of the submission, which has its options in the query."""

    batch_size: int


@dataclass(frozen=True)
class RetryOf:
    """The items are the dead letters of an earlier job, in their batches."""

    job_id: str
    seq: int | None = None  #: only the dead letter with this number; None: all


@dataclass(frozen=True)
class TaskCall:
    """No items: the job is one call of a task, stored as one batch."""


Source = ItemList | FilePathLister | Upload | RetryOf | TaskCall

_FILE_SOURCES: dict[str, type[FilePathLister]] = {"file_path_lister": FilePathLister, "delimited_files": DelimitedFiles}


def source_to_json(source: Source) -> dict[str, Any]:
    """Return a source as the JSON that is stored with the job: enough to read files again, without the items."""
    if isinstance(source, RetryOf):
        only = {} if source.seq is None else {"seq": source.seq}
        return {"kind": "retry_of", "retry_of": source.job_id, **only}
    if isinstance(source, TaskCall):
        return {"kind": "task"}
    if isinstance(source, FilePathLister):
        kind = next(name for name, kind in _FILE_SOURCES.items() if kind is type(source))
        globs = {"includes": list(source.includes), "excludes": list(source.excludes)}
        return {"kind": kind, "paths": list(source.paths), **globs, "batch_size": source.batch_size}
    return {"kind": "item_list" if isinstance(source, ItemList) else "upload", "batch_size": source.batch_size}


def source_from_json(data: Mapping[str, Any]) -> Source:
    """Return the stored source; an item list has no items."""
    if "retry_of" in data:
        return RetryOf(data["retry_of"], data.get("seq"))
    kind = data["kind"]
    if kind == "task":
        return TaskCall()
    if kind in _FILE_SOURCES:
        globs = tuple(data["includes"]), tuple(data["excludes"])
        return _FILE_SOURCES[kind](tuple(data["paths"]), data["batch_size"], *globs)
    return ItemList([], data["batch_size"]) if kind == "item_list" else Upload(data["batch_size"])


def root_of(path: str, folders: Sequence[str]) -> str | None:
    """Return the folder of uploads that a local path is in: links in it must not lead out of it.

    `folders` are those of `networking.local_paths`, into which others may write. Elsewhere, links may lead anywhere.
    """
    return next((folder for folder in folders if path.startswith(f"{folder.rstrip('/')}/")), None)


# Jobs.


@dataclass(frozen=True)
class JobOptions:
    """Options of a submission, validated."""

    workers: int
    config: dict[str, Any] | None = None  #: merged over the API's; None: not given
    timeout_s: int | None = None  #: of the whole job, from its submission
    batch_timeout_s: float | None = None  #: of one batch; a process that exceeds it is killed, which is an attempt
    max_attempts: int = MAX_ATTEMPTS
    isolate_failures: bool = False  #: bisect a failing batch until only single failing items are dead letters
    output: str | None = None  #: prefix under which the results are written at the end
    webhook: str | None = None  #: address to notify when the job is over
    dead_letter_queue: dict[str, Any] | None = None  #: `sqs_dead_letter_queue` as submitted; only echoed


@dataclass(frozen=True)
class Submission:
    """A validated submission."""

    source: Source
    options: JobOptions


@dataclass(frozen=True)
class NewBatch:
    """A batch to store."""

    items: int
    payload: bytes  #: a JSON array of the items, without line breaks


#: The one batch of a task.
TASK_BATCH = NewBatch(1, b"[null]")


@dataclass(frozen=True)
class JobCounts:
    """Counts of a job's batches and items; each batch is in exactly one of succeeded, failed and open."""

    batches: int = 0
    items: int = 0
    succeeded: int = 0
    succeeded_items: int = 0
    failed: int = 0  #: dead letters
    failed_items: int = 0
    failed_attempts: int = 0  #: of any batch, deaths of workers included
    results: int = 0  #: batches whose method returned something
    seconds: float = 0.0  #: spent in successful calls, over all workers
    workers: int = 0  #: those that have constructed the user's class

    @property
    def open(self) -> int:
        """Return the number of unresolved batches."""
        return self.batches - self.succeeded - self.failed

    @property
    def average_s(self) -> float | None:
        """Return the time per successful batch, None before the first."""
        return self.seconds / self.succeeded if self.succeeded else None


@dataclass(frozen=True)
class JobOrigin:
    """The code that a job runs, fixed at its submission whatever is deployed later."""

    api: str
    api_id: str
    spec_id: str
    revision: str
    project_hash: str
    spec: str  #: the Api as JSON
    kind: str = ApiKind.BATCH

    @property
    def is_task(self) -> bool:
        """Return True if the job is one call of a task."""
        return self.kind == ApiKind.TASK


@dataclass(frozen=True)
class JobRecord:
    """A stored job."""

    id: str
    number: int  #: small and unique, the upper half of the keys of its batches
    origin: JobOrigin
    options: JobOptions
    source: dict[str, Any]  #: see `source_to_json`
    status: JobStatus
    created_at: float  #: UNIX seconds
    started_at: float | None = None  #: when the first worker began
    ended_at: float | None = None
    deadline_at: float | None = None
    message: str = ""  #: reason for the end, or what the job waits for
    traceback: str = ""
    counts: JobCounts = field(default_factory=JobCounts)


def job_id_at(unix_ns: int) -> str:
    """Return the id of a job submitted at that time: 16 hex digits that sort the newest first."""
    return f"{2**63 - 1 - unix_ns:016x}"


def batch_id(job_id: str, seq: int) -> str:
    """Return the UUID of a batch for the user's code; every attempt has the same one."""
    digest = hashlib.blake2b(f"{job_id}:{seq}".encode(), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest, version=4))


# Leases and reports.


@dataclass(frozen=True)
class LeasedBatch:
    """One batch of a lease."""

    seq: int
    payload: bytes


@dataclass(frozen=True)
class Lease:
    """Batches lent to a job worker, which resolves them in this order while its token is valid."""

    token: str
    batches: tuple[LeasedBatch, ...]

    @property
    def is_hook(self) -> bool:
        """Return True if the worker calls `on_job_complete`, the last range of a job."""
        return self.batches[-1].seq == HOOK_SEQ


@dataclass(frozen=True)
class BatchFailure:
    """A batch that raised an exception."""

    seq: int
    error: str  #: one line, `ValueError: bad weights`
    traceback: str = ""


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def error_kind(error: str) -> str:
    """Return an error without its numbers, in which the errors of different batches often differ."""
    return _NUMBER.sub("#", error)


@dataclass(frozen=True)
class Report:
    """Outcome of a lease's batches from the last report up to and including `upto`."""

    token: str
    upto: int
    failures: tuple[BatchFailure, ...] = ()  #: by seq, ascending; all other batches succeeded
    results: tuple[tuple[int, bytes], ...] = ()  #: (seq, JSON) of those that returned something
    seconds: float = 0.0  #: spent in the calls that succeeded


@dataclass(frozen=True)
class DeadLetter:
    """A batch whose attempts are used up."""

    seq: int
    first_item: int  #: position of its first item in the input, from 0
    items: int
    attempts: int
    error: str
    traceback: str
    failed_at: float  #: UNIX seconds
    payload: bytes


@dataclass(frozen=True)
class BatchResult:
    """The value that a batch returned."""

    seq: int
    first_item: int
    items: int
    value: bytes  #: JSON


# The operator's replies to workers.


@dataclass(frozen=True)
class Assignment:
    """A job for a job worker, and what it needs to run it."""

    job_id: str
    config: dict[str, Any]  #: the API's with the job's merged over it
    job_spec: dict[str, Any]
    api_spec: dict[str, Any]
    log_path: str
    lease_s: float  #: duration of a lease without a renewal
    batch_timeout_s: float | None = None
    traceparent: str = ""  #: header of the submission; empty without one


@dataclass(frozen=True)
class StopSignal:
    """The worker is no longer needed."""


@dataclass(frozen=True)
class LeaseReply:
    """The store's reply to reports, with the next lease."""

    lease: Lease | None = None
    lost: tuple[str, ...] = ()  #: tokens of the reports that are no longer valid
    is_done: bool = False  #: the job is neither pending nor running any more
    opens_at: float | None = None  #: without a lease: when the next retry is due, UNIX seconds


@dataclass(frozen=True)
class ExchangeReply:
    """The operator's reply to a worker's reports."""

    lease: Lease | None = None
    lost: tuple[str, ...] = ()
    is_done: bool = False  #: the job has no more work for this worker
    stop: bool = False


@dataclass(frozen=True)
class RenewalReply:
    """The operator's reply to a renewal."""

    lost: tuple[str, ...] = ()
    stop: bool = False


# Workloads of AsyncAPIs.

#: A batch travels as one line. In it a line break is `ESC n`, and ESC itself `ESC e`.
_ESCAPE, _ESCAPED_ESCAPE, _ESCAPED_BREAK = b"\x1b", b"\x1be", b"\x1bn"
#: In a line, the trace is a parameter of the content type, which workers of older versions ignore.
_TRACE_PARAMETER = "; cortex-traceparent="
#: Bytes of the id of a workload that follow from its idempotency key.
KEY_BYTES = 8


@dataclass(frozen=True)
class Workload:
    """One request to an AsyncAPI, its body unchanged."""

    id: uuid.UUID
    content_type: str
    body: bytes
    traceparent: str = ""  #: header of the request; empty without one

    def with_key(self, queue: str, key: str) -> Workload:
        """Return the workload with an id that follows from an idempotency key and the body; `queue` is a secret.

        Ids of the same key have the same `KEY_BYTES` at their beginning. So the unique index of the ids finds a
        submission that is repeated, in the transaction that stores it.
        """
        secret = queue.encode()
        begin = hashlib.blake2b(key.encode(), digest_size=KEY_BYTES, key=secret).digest()
        sent = hashlib.blake2b(self.content_type.encode() + b"\0" + self.body, digest_size=16 - KEY_BYTES, key=secret)
        return replace(self, id=uuid.UUID(bytes=begin + sent.digest(), version=4))

    def to_line(self) -> bytes:
        """Return bytes without a line break; `from_line` is the inverse."""
        trace = f"{_TRACE_PARAMETER}{self.traceparent}" if self.traceparent else ""
        content_type = f"{self.content_type}{trace}".encode(errors="replace")
        whole = b"\0".join((str(self.id).encode(), content_type, self.body))
        return whole.replace(_ESCAPE, _ESCAPED_ESCAPE).replace(b"\n", _ESCAPED_BREAK)

    @classmethod
    def from_line(cls, line: bytes) -> Workload:
        """Parse the result of `to_line`. Raises: ValueError."""
        whole = line.replace(_ESCAPED_BREAK, b"\n").replace(_ESCAPED_ESCAPE, _ESCAPE)
        name, content_type, body = whole.split(b"\0", 2)
        kind, _, traceparent = content_type.decode().partition(_TRACE_PARAMETER)
        return cls(uuid.UUID(name.decode()), kind, body, traceparent)


@dataclass(frozen=True)
class WorkloadView:
    """State of a workload."""

    id: uuid.UUID
    key: int  #: of its batch
    status: WorkloadStatus
    created_at: float  #: UNIX seconds
    ended_at: float | None = None
    value: bytes = b""  #: the result as JSON, or the error message
