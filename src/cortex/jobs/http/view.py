"""JSON of jobs, the same in every route and without secrets. Pure functions.

If the documentation and the behaviour of older versions differ in a name, the JSON has both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

from cortex.jobs.spec import SCHEDULED_FOR, JobRecord
from cortex.lifecycle import JobStatus
from cortex.masking import MASK, mask_known, mask_secrets, mask_spec, secret_values
from cortex.payloads.json_object import Json

#: Keys that a task does not have: it has no items, and so no batches.
_OF_BATCHES = (
    *("batch_timeout", "isolate_failures", "output", "sqs_dead_letter_queue", "source", "sqs_url", "total_batch_count"),
    *("batches_in_queue", "batch_metrics", "items", "dead_letters"),
)


@dataclass(frozen=True)
class WorkerCounts:
    """Number of a job's workers in each state."""

    pending: int = 0  #: not started, for lack of capacity
    initializing: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    stalled: int = 0  #: pending for long
    unknown: int = 0

    @classmethod
    def at_end(cls, record: JobRecord) -> WorkerCounts:
        """Return the counts of a job that is over."""
        if record.status in (JobStatus.SUCCEEDED, JobStatus.COMPLETED_WITH_FAILURES):
            return cls(succeeded=max(1, record.counts.workers))  # jobs of version 0.1.0 have no count of workers
        return cls(
            failed=int(record.origin.is_task and record.status in (JobStatus.WORKER_ERROR, JobStatus.WORKER_OOM))
        )


@dataclass(frozen=True)
class JobView:
    """A job with its endpoint and its workers."""

    record: JobRecord
    endpoint: str  #: address of its API
    workers: WorkerCounts = field(default_factory=WorkerCounts)


def spec_json(record: JobRecord) -> Json:
    """Return the job spec as the `job_spec` of the user's code, with its secrets."""
    origin, options = record.origin, record.options
    created_at = _time(record.created_at)
    spec = {
        "job_id": record.id,
        "api_name": origin.api,
        "kind": origin.kind,
        "workers": options.workers,
        "config": options.config,
        "timeout": options.timeout_s,
        "batch_timeout": options.batch_timeout_s,
        "max_attempts": options.max_attempts,
        "isolate_failures": options.isolate_failures,
        "output": options.output,
        "webhook": _masked(options.webhook),
        "sqs_dead_letter_queue": options.dead_letter_queue,
        "source": record.source,
        "api_id": origin.api_id,
        "spec_id": origin.spec_id,
        "predictor_id": origin.revision,
        "handler_id": origin.revision,
        "sqs_url": "",
        "total_batch_count": record.counts.batches,
        "start_time": created_at,
        "created_time": created_at,
        SCHEDULED_FOR: _time(record.source.get(SCHEDULED_FOR)),
    }
    return _for_kind(record, spec)


def masked_spec(record: JobRecord) -> tuple[Json, tuple[str, ...]]:
    """Return the job spec without its secrets, and the values of these and of the secrets of its API."""
    values = secret_values({"handler": {"config": record.options.config}}, {})
    values += secret_values(json.loads(record.origin.spec))
    spec: Json = mask_secrets(spec_json(record), values)
    return spec, values


def submitted_json(record: JobRecord) -> Json:
    """Return the response to a submission."""
    spec, values = masked_spec(record)
    return {**spec, "message": mask_known(record.message, values) or f"submitted job {record.id}"}


def status_json(view: JobView) -> Json:
    """Return a job's `job_status`: the fields of its spec, its status and its counts."""
    record = view.record
    counts = record.counts
    spec, values = masked_spec(record)
    status = {
        **spec,
        "status": record.status.code,
        "status_message": record.status.message,
        "message": mask_known(record.message, values),
        "traceback": mask_known(record.traceback, values),
        "running_since": _time(record.started_at),
        "end_time": _time(record.ended_at),
        "deadline": _time(record.deadline_at),
        "batches_in_queue": 0 if record.status.is_over else counts.open,
        "batch_metrics": {
            "succeeded": counts.succeeded,
            "failed": counts.failed,
            "average_time_per_batch": counts.average_s,
            "avg_time_per_batch": counts.average_s,
        },
        "worker_counts": asdict(view.workers),
        "items": {"total": counts.items, "succeeded": counts.succeeded_items, "failed": counts.failed_items},
        "failed_attempts": counts.failed_attempts,
        "dead_letters": counts.failed,
        "results": counts.results,
    }
    return _for_kind(record, status)


def job_json(view: JobView, is_owner: bool = True) -> Json:
    """Return a job with its endpoint and the API's spec at the time of the submission.

    Callers of the endpoint, who may be anybody, see only the name and kind of the API, not its configuration.
    """
    spec = masked_api_spec(view.record)
    shown = spec if is_owner else {key: spec[key] for key in ("name", "kind") if key in spec}
    return {"job_status": status_json(view), "endpoint": view.endpoint, "api_spec": shown}


def masked_api_spec(record: JobRecord) -> Json:
    """Return the spec of a job's API at the time of the submission, without secrets."""
    spec: Json = json.loads(record.origin.spec)
    spec.pop("as_written", None)
    return mask_spec(spec)


def jobs_json(views: Iterable[JobView]) -> list[Json]:
    """Return several jobs."""
    return [job_json(view) for view in views]


def _for_kind(record: JobRecord, data: Json) -> Json:
    if not record.origin.is_task:
        return data
    return {key: value for key, value in data.items() if key not in _OF_BATCHES}


def _masked(webhook: str | None) -> str | None:
    """Return scheme and host of a webhook; the rest of the URL may be a secret."""
    return None if webhook is None else f"{urlsplit(webhook).scheme}://{urlsplit(webhook).hostname}/{MASK}"


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
