"""What a job is, from its submission to its last result: plain data that every part of the job machinery shares.

A job's input is cut into *batches*, numbered from 0 in the order of the input (`seq`). Workers get them by *leases*: a
token for a range of batches, resolved from its beginning to its end. A batch that failed too often is a *dead letter*.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, field
from typing import Any

from cortex.lifecycle import ApiKind, JobStatus

#: Attempts that a batch has before it is a dead letter, the first one counted.
MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class ItemList:
    """Items that came with the submission."""

    items: list[Any]
    batch_size: int


@dataclass(frozen=True)
class FilePathLister:
    """The paths of files are the items."""

    paths: tuple[str, ...]  #: prefixes: `s3://…`, `gs://…`, or absolute local paths
    batch_size: int
    includes: tuple[str, ...] = ()  #: globs over the whole path; none means all
    excludes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DelimitedFiles(FilePathLister):
    """The JSON values inside files are the items."""


@dataclass(frozen=True)
class Upload:
    """Items follow as lines of JSON while the submission is being made."""

    batch_size: int


@dataclass(frozen=True)
class RetryOf:
    """The items are the dead letters of an earlier job, in their batches."""

    job_id: str


@dataclass(frozen=True)
class TaskCall:
    """There are no items: the job is one call of a task, a batch by itself."""


Source = ItemList | FilePathLister | Upload | RetryOf | TaskCall


@dataclass(frozen=True)
class Options:
    """How a job is run; all of it is in the submission, checked."""

    workers: int
    config: dict[str, Any] | None = None  #: merged over the API's; None: not given
    timeout_s: int | None = None  #: of the whole job, from its submission
    batch_timeout_s: float | None = None  #: of one batch: the process that runs it longer is ended, which is an attempt
    max_attempts: int = MAX_ATTEMPTS
    isolate_failures: bool = False  #: bisect a failing batch until only the guilty items are dead letters
    output: str | None = None  #: prefix under which the results are written at the end
    webhook: str | None = None  #: address that is told when the job is over
    dead_letter_queue: dict[str, Any] | None = None  #: `sqs_dead_letter_queue` as submitted; only echoed


@dataclass(frozen=True)
class Submission:
    """A whole submission, checked."""

    source: Source
    options: Options


@dataclass(frozen=True)
class NewBatch:
    """A batch to store."""

    items: int
    payload: bytes  #: a JSON array of the items, without line breaks


#: The one batch of a task.
TASK_BATCH = NewBatch(1, b"[null]")


@dataclass(frozen=True)
class Counts:
    """What became of the batches and items of a job; each batch is in exactly one of succeeded, failed and open."""

    batches: int = 0
    items: int = 0
    succeeded: int = 0
    succeeded_items: int = 0
    failed: int = 0  #: dead letters
    failed_items: int = 0
    failed_attempts: int = 0  #: of any batch, deaths of workers included
    results: int = 0  #: batches whose method returned something
    seconds: float = 0.0  #: spent in successful calls, over all workers

    @property
    def open(self) -> int:
        """Count the batches that still have to be resolved."""
        return self.batches - self.succeeded - self.failed

    @property
    def average_s(self) -> float | None:
        """Return the time per successful batch, None before the first."""
        return self.seconds / self.succeeded if self.succeeded else None


@dataclass(frozen=True)
class JobOrigin:
    """Which code a job runs: fixed at its submission, whatever is deployed later."""

    api: str
    api_id: str
    spec_id: str
    revision: str
    project_hash: str
    spec: str  #: the Api as JSON
    kind: str = ApiKind.BATCH

    @property
    def is_task(self) -> bool:
        """Tell whether the job is one call of a task."""
        return self.kind == ApiKind.TASK


@dataclass(frozen=True)
class JobRecord:
    """A job as it is stored."""

    id: str
    number: int  #: small and unique, the upper half of the keys of its batches
    origin: JobOrigin
    options: Options
    source: dict[str, Any]  #: the submission's source without its items, for those who look and to begin anew
    status: JobStatus
    created_at: float  #: UNIX seconds
    started_at: float | None = None  #: when the first worker began
    ended_at: float | None = None
    deadline_at: float | None = None
    message: str = ""  #: why it ended as it did, or what it waits for
    traceback: str = ""
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True)
class LeasedBatch:
    """One batch of a lease."""

    seq: int
    payload: bytes


@dataclass(frozen=True)
class Lease:
    """A right to resolve some batches, in this order; worth nothing once its token is."""

    token: str
    batches: tuple[LeasedBatch, ...]


@dataclass(frozen=True)
class BatchFailure:
    """A batch that raised."""

    seq: int
    error: str  #: one line, `ValueError: bad weights`
    traceback: str = ""


@dataclass(frozen=True)
class Report:
    """What a worker did of one lease: everything from where it last reported up to `upto`, that included."""

    token: str
    upto: int
    failures: tuple[BatchFailure, ...] = ()  #: by seq, ascending; all others succeeded
    results: tuple[tuple[int, bytes], ...] = ()  #: (seq, JSON) of those that returned something
    seconds: float = 0.0  #: spent in the calls that succeeded


@dataclass(frozen=True)
class DeadLetter:
    """A batch that was given up."""

    seq: int
    first_item: int  #: position of its first item in the input, from 0
    items: int
    attempts: int
    error: str
    traceback: str
    failed_at: float  #: UNIX seconds
    payload: bytes


@dataclass(frozen=True)
class Result:
    """What a batch returned."""

    seq: int
    first_item: int
    items: int
    value: bytes  #: JSON


@dataclass(frozen=True)
class Assignment:
    """The job that a worker is given."""

    job_id: str
    config: dict[str, Any]  #: the API's with the job's merged over it
    job_spec: dict[str, Any]
    api_spec: dict[str, Any]
    log_path: str
    lease_s: float  #: how long a lease holds without being renewed
    batch_timeout_s: float | None = None


def job_id_at(unix_ns: int) -> str:
    """Return the id of a job submitted at that time: 16 hex digits that sort the newest first."""
    return f"{2**63 - 1 - unix_ns:016x}"


def batch_id(job_id: str, seq: int) -> str:
    """Return the uuid that the user's code knows a batch by; each attempt has the same."""
    digest = hashlib.blake2b(f"{job_id}:{seq}".encode(), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest, version=4))
