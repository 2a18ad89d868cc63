"""What of a job that is over can be run again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.errors import ConflictError, InputError
from cortex.jobs.spec import TASK_BATCH, JobOrigin, JobRecord, NewBatch, Options
from cortex.lifecycle import JobStatus


def batches_again(old: JobRecord, origin: JobOrigin, options: Options) -> Sequence[NewBatch] | None:
    """Return the batches of a new job that does again what an old one left; None: they are its dead letters.

    Of a task that did not succeed, that is its one call, whatever ended it. Batches of other jobs that were not done
    when they were ended are not kept. Raises: ConflictError, InputError.
    """
    if not old.status.is_over:
        raise ConflictError(f"job {old.id} is {old.status.message}; it can be retried once it is over")
    if origin.is_task and options.workers != 1:
        raise InputError(f"workers: a task runs on one worker (got {options.workers}); leave it out")
    if old.counts.failed:
        return None
    if old.origin.is_task and origin.is_task and old.status is not JobStatus.SUCCEEDED:
        return [TASK_BATCH]
    is_done = old.counts.succeeded == old.counts.batches
    hint = "" if is_done else "; what it had not done when it ended is not kept: submit that again"
    raise ConflictError(f"job {old.id} has no dead letters{hint}")
