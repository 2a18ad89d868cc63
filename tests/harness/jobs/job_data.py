"""APIs and jobs in the JSON format of the operator; jobs are built with its own encoder."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from cortex.jobs.http.view import JobView, WorkerCounts, job_json
from cortex.jobs.spec import JobCounts, JobOptions, JobOrigin, JobRecord
from cortex.lifecycle import ApiKind, JobStatus

#: The submission time of every job in this module.
BEGAN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
JOB_ID = "7ffff0000000abcd"

_RECORD = JobRecord(
    id=JOB_ID,
    number=1,
    origin=JobOrigin("sum", "a1", "s1", "r1", "p1", '{"name": "sum", "kind": "BatchAPI"}'),
    options=JobOptions(workers=2),
    source={},
    status=JobStatus.RUNNING,
    created_at=BEGAN.timestamp(),
    started_at=BEGAN.timestamp() + 1,
    counts=JobCounts(batches=100, items=1000),
)


def api(
    name: str = "sum", kind: ApiKind = ApiKind.REALTIME, ready: int = 1, code: str = "live", **changes: Any
) -> dict[str, Any]:
    """Return an API; `changes` replace its sections, or are added."""
    counts = {"requested": ready, "updated": {"ready": ready}, "stale": {"ready": 0}}
    return {
        "spec": {"name": name, "kind": kind},
        "status": {"status_code": code, "message": code, "replica_counts": counts, "failure": None},
        "metrics": {},
        "endpoint": f"http://127.0.0.1:8888/{name}",
        "last_updated": BEGAN.isoformat(),
        **changes,
    }


def job(status: JobStatus = JobStatus.RUNNING, workers: WorkerCounts | None = None, **changes: Any) -> dict[str, Any]:
    """Return a job of 100 batches and 1000 items; `changes` apply to its record or to its counts."""
    counts = {name: changes.pop(name) for name in list(changes) if name in JobCounts.__dataclass_fields__}
    if status.is_over:
        changes.setdefault("ended_at", _RECORD.created_at + 20)
    record = replace(_RECORD, status=status, counts=replace(_RECORD.counts, **counts), **changes)
    return job_json(JobView(record, "http://127.0.0.1:8888/sum", workers or WorkerCounts(running=2)))


def status(status: JobStatus = JobStatus.RUNNING, **changes: Any) -> dict[str, Any]:
    """Return the `job_status` of a job as made by `job`."""
    shown: dict[str, Any] = job(status, **changes)["job_status"]
    return shown


def letter(seq: int, error: str, items: int = 10) -> dict[str, Any]:
    """Return a dead letter."""
    return {
        "batch_id": f"b{seq}",
        "seq": seq,
        "first_item": seq * items,
        "items": items,
        "attempts": 3,
        "error": error,
        "traceback": f"Traceback\n{error}\n",
        "failed_at": BEGAN.isoformat(),
        "payload": [0] * items,
    }
