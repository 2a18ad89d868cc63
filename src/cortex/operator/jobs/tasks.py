"""What is different in the job of a task: it has one batch, which runs once, and whose end is the job's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.jobs.lease_expiry import DEATH_ERROR
from cortex.jobs.spec import DeadLetter, JobRecord
from cortex.lifecycle import DeathCause, JobStatus

#: Of a task that was inside a worker that is gone without a word: what it did by then is not known.
VANISHED = "its worker is gone, with the machine or by `cortex down`; what it had done by then is not known"

_OUT_OF_MEMORY = DEATH_ERROR.format(cause=DeathCause.OUT_OF_MEMORY.value)


def task_end(job: JobRecord, letters: Sequence[DeadLetter]) -> tuple[JobStatus, str, str]:
    """Return the status of a task that has run, with message and traceback; `letters` are its dead letters."""
    if not letters:
        return JobStatus.SUCCEEDED, "", ""
    letter = letters[0]
    status = JobStatus.WORKER_OOM if letter.error.startswith(_OUT_OF_MEMORY) else JobStatus.WORKER_ERROR
    attempts = f" (attempt {letter.attempts} of {job.options.max_attempts})" if job.options.max_attempts > 1 else ""
    return status, letter.error + attempts, letter.traceback
