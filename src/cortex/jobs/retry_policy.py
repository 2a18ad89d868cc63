"""Retry policy: what happens to a failed batch, and which part of a finished job can be run again. Pure functions.

    leased ── raises, or its process dies ──> attempts + 1
        attempts < max_attempts                          RETRY        pending again, after a backoff
        attempts used up, isolate_failures, many items   SPLIT        two halves, each with fresh attempts
        attempts used up otherwise                       DEAD_LETTER  resolved as failed

A half of a split batch is split again at its first failure, until single items remain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cortex.errors import ConflictError, InputError
from cortex.jobs.spec import TASK_BATCH, BatchFailure, JobOptions, JobOrigin, JobRecord, NewBatch
from cortex.lifecycle import JobStatus

#: Longest backoff before another attempt.
MAX_DELAY_S = 60.0


class FailureAction(Enum):
    """The consequence of a failed attempt."""

    RETRY = auto()
    SPLIT = auto()
    DEAD_LETTER = auto()


@dataclass(frozen=True)
class FailedBatch:
    """A failed batch and its number of attempts, this one included."""

    failure: BatchFailure
    attempts: int
    is_part: bool
    items: int


def failure_action(failed: FailedBatch, max_attempts: int, isolate_failures: bool) -> FailureAction:
    """Return the consequence of a failure.

    A half of a split batch is split at once: one of its items is known to fail.
    """
    is_used_up = failed.attempts >= max_attempts
    if isolate_failures and failed.items > 1 and (failed.is_part or is_used_up):
        return FailureAction.SPLIT
    return FailureAction.DEAD_LETTER if is_used_up else FailureAction.RETRY


def delay_s(attempts: int) -> float:
    """Return the backoff after that many attempts."""
    return MAX_DELAY_S if attempts > 4 else float(3 ** (attempts - 1))


def split_payload(payload: bytes, items: int) -> tuple[bytes, bytes] | None:
    """Cut a JSON array of `items` items in two, the first half the smaller; return None if that is not possible.

    The text of each item is kept as it is: parsing and writing it again could change numbers.
    """
    try:
        texts = _item_texts(payload.decode())
    except (ValueError, RecursionError):  # orjson accepts deeper nesting than the standard library's parser
        return None
    if len(texts) != items:
        return None
    middle = items // 2
    left, right = (f"[{','.join(half)}]".encode() for half in (texts[:middle], texts[middle:]))
    return left, right


def batches_to_retry(old: JobRecord, origin: JobOrigin, options: JobOptions) -> Sequence[NewBatch] | None:
    """Return the batches of a job that retries `old`, or None if these are the dead letters of `old`.

    A task that did not succeed is called once more, whatever ended it. Unresolved batches of other jobs are not kept
    after the job's end. Raises: ConflictError, InputError.
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
    hint = "" if is_done else "; batches that were open when the job ended are not kept: submit their items again"
    raise ConflictError(f"job {old.id} has no dead letters{hint}")


def _item_texts(text: str) -> list[str]:
    """Return the text of each item of a JSON array. Raises: ValueError."""
    decoder, texts = json.JSONDecoder(), list[str]()
    position = _after_space(text, 0)
    if text[position : position + 1] != "[":
        raise ValueError("not an array")
    separator = "["
    while separator != "]":
        start = _after_space(text, position + 1)
        if separator == "[" and text[start : start + 1] == "]":
            return texts
        _, end = decoder.raw_decode(text, start)
        texts.append(text[start:end])
        position = _after_space(text, end)
        separator = text[position : position + 1]
        if separator not in (",", "]"):
            raise ValueError("not an array")
    return texts


def _after_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\n", "\r") and position < len(text):
        position += 1
    return position
