"""Writes what the operator has to say of a job into the job's own logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cortex.engine.log_writer import LogWriter
from cortex.home import Home
from cortex.jobs.spec import JobRecord
from cortex.lifecycle import JobStatus

_FILE = "job.log"


class JobLog:
    """The operator's own lines, beside those of the workers."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def folder(self, api: str, job_id: str) -> Path:
        """Return where the logs of a job are, one file per worker and one of the operator's."""
        return self._home.logs_dir / api / job_id

    def line(self, api: str, job_id: str, text: str) -> None:
        """Write a line."""
        writer = LogWriter(self.folder(api, job_id) / _FILE)
        writer.line(0, "s", text)
        writer.close()

    def of(self, job: JobRecord) -> Callable[[str], None]:
        """Return what writes lines of one job."""
        return lambda text: self.line(job.origin.api, job.id, text)

    def ended(self, job: JobRecord) -> None:
        """Write how a job ended."""
        counts = job.counts
        text = job.status.message
        if not job.origin.is_task:
            text += f": {counts.succeeded} of {counts.batches} batches succeeded, {counts.failed} failed"
        if job.message and job.status not in (JobStatus.SUCCEEDED, JobStatus.STOPPED):
            text += f"; {job.message}"
        self.line(job.origin.api, job.id, text + (f"\n{job.traceback}" if job.traceback else ""))
