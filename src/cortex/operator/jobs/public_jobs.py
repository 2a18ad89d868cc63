"""Jobs for callers of an endpoint, who have shown no token: they may name only what the API's file opens to them.

Anyone on the machine, and any web page open on it, can reach the gateway; on the disk, the operator can read and write
whatever its user can.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from cortex.errors import SubmissionError
from cortex.jobs.http.view import JobView
from cortex.jobs.intake.submission import SubmissionLimits
from cortex.jobs.spec import DelimitedFiles, FilePathLister, JobRecord, Submission
from cortex.operator.jobs.service import Jobs


class PublicJobs:
    """The jobs as the gateway's callers have them."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def limits(self, api: str) -> SubmissionLimits:
        """Return the bounds of a submission to an API. Raises: NotFoundError."""
        return self._jobs.limits(api)

    async def submit(self, api: str, submission: Submission, items: AsyncIterator[bytes] | None = None) -> JobRecord:
        """Store a job. Raises: as `Jobs.submit`; SubmissionError for a local path that is not open to it."""
        self._check(api, submission)
        return await self._jobs.submit(api, submission, items)

    async def dry_run(self, api: str, submission: Submission) -> AsyncIterator[str]:
        """Check a submission as if it were made. Raises: as `submit`."""
        self._check(api, submission)
        async for line in self._jobs.dry_run(api, submission):
            yield line

    async def get(self, api: str, job_id: str) -> JobView:
        """Return one job. Raises: NotFoundError."""
        return await self._jobs.get(api, job_id)

    async def stop(self, api: str, job_id: str) -> None:
        """Stop a job. Raises: NotFoundError, ConflictError."""
        await self._jobs.stop(api, job_id)

    def _check(self, api: str, submission: Submission) -> None:
        problems = list(closed_paths(submission, self._jobs.local_paths(api)))
        if problems:
            raise SubmissionError("; ".join(problems))


def closed_paths(submission: Submission, folders: Sequence[str]) -> Iterator[str]:
    """Say which local paths of a submission are outside of `folders`. Paths and folders are without `..`."""
    named: list[tuple[str, str]] = []
    if isinstance(submission.source, FilePathLister):
        section = "delimited_files" if isinstance(submission.source, DelimitedFiles) else "file_path_lister"
        named += [(section, path) for path in submission.source.paths]
    if submission.options.output is not None:
        named.append(("output", submission.options.output))
    for field, path in named:
        # Paths are prefixes: without the slash, /data would be /database, too.
        is_open = any(path.startswith(f"{folder.rstrip('/')}/") for folder in folders)
        if path.startswith("/") and not is_open:
            fix = "use `cortex submit`, or add its folder to networking.local_paths of the API"
            ending = f'; write "{path}/"' if path in folders else f"; {fix}"
            yield f'{field}: the local path "{path}" is not open to this endpoint{ending}'
