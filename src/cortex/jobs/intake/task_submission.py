"""Checks what is submitted to a TaskAPI: one call of the user's task, so there is little to say. Reads no storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.errors import SubmissionError
from cortex.jobs.intake.fields import Fields, a_flat_map, integer
from cortex.jobs.intake.submission import SubmissionLimits, load, parse_submission, timeout_of, webhook_of
from cortex.jobs.spec import Options, Submission, TaskCall

_MAX_ATTEMPTS = 1000
_EXAMPLE = '{"config": {"key": "value"}, "timeout": 3600}'


def parse_body(data: bytes | Mapping[str, Any], limits: SubmissionLimits) -> Submission:
    """Read a submission to an API of any kind that runs jobs. Raises: SubmissionError."""
    return parse_task(data, limits) if limits.is_task else parse_submission(data, limits)


def parse_task(data: bytes | Mapping[str, Any], limits: SubmissionLimits) -> Submission:
    """Read a submission to a TaskAPI; an empty body says that all is as in `cortex.yaml`. Raises: SubmissionError."""
    if isinstance(data, bytes):
        data = load(data, limits, _EXAMPLE) if data.strip() else {}
    body = Fields(data, [])
    body.read("workers", integer(1, 1), 'write "workers": 1, or leave it out: a task runs on one worker')
    options = Options(
        workers=1,
        config=body.read("config", a_flat_map, 'write "config": {"key": "value"}'),
        timeout_s=timeout_of(body),
        # Once: what a task did before it failed is known to nobody but its user.
        max_attempts=body.read("max_attempts", integer(1, _MAX_ATTEMPTS), 'write "max_attempts": 1') or 1,
        webhook=webhook_of(body),
    )
    if body.problems:
        raise SubmissionError("\n".join(body.problems))
    return Submission(TaskCall(), options)
