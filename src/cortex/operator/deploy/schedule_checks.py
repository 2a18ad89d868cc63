"""Checks what schedules submit as it will be checked when they are due. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cortex.config.schema import Api
from cortex.config.violations import Violation
from cortex.errors import SubmissionError
from cortex.jobs.intake.submission import SubmissionLimits
from cortex.jobs.intake.task_submission import parse_body
from cortex.lifecycle import ApiKind


def submission_violations(api: Api) -> Iterator[Violation]:
    """Say what is wrong with what an API's schedule submits; of an empty submission nothing."""
    if api.schedule is None or not api.schedule.submission:
        return
    networking = api.networking
    limits = SubmissionLimits(networking.max_body_size, networking.max_batch_size, api.kind is ApiKind.TASK)
    try:
        parse_body(api.schedule.submission, limits)
    except SubmissionError as error:
        for line in str(error).splitlines():
            message, _, fix = line.partition("; ")
            yield Violation(("schedule.submission",), message, fix)
