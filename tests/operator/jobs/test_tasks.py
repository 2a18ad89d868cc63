"""Status and workers of tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortex.jobs.lease_expiry import DEATH_ERROR
from cortex.jobs.spec import DeadLetter, JobRecord
from cortex.lifecycle import ApiKind, DeathCause, JobStatus
from cortex.operator.jobs.completion import task_end
from cortex.operator.jobs.plan import PlannedJob, StartWorker, StopWorker, plan_jobs
from cortex.operator.jobs.workers import VANISHED
from harness.jobs.planned_jobs import NOW, free_capacity, job, worker


def task(name: str = "a", *, max_attempts: int = 1, status: JobStatus = JobStatus.PENDING) -> PlannedJob:
    made = job(name, status=status, batches=1)
    origin = replace(made.record.origin, kind=ApiKind.TASK)
    options = replace(made.record.options, max_attempts=max_attempts)
    return replace(made, record=replace(made.record, origin=origin, options=options))


def record(max_attempts: int = 1) -> JobRecord:
    return task(max_attempts=max_attempts, status=JobStatus.COMPLETING).record


def letter(error: str, attempts: int = 1, traceback: str = "") -> DeadLetter:
    return DeadLetter(0, 0, 1, attempts, error, traceback, NOW, b"[null]")


def died(cause: str) -> str:
    return DEATH_ERROR.format(cause=cause)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("ValueError: bad weights", JobStatus.WORKER_ERROR),
        ("MemoryError: out of memory", JobStatus.WORKER_ERROR),
        (died("segmentation fault (SIGSEGV)"), JobStatus.WORKER_ERROR),
        (died(VANISHED), JobStatus.WORKER_ERROR),
        (died(f"{DeathCause.OUT_OF_MEMORY} (killed by the kernel)"), JobStatus.WORKER_OOM),
    ],
)
def test_the_status_of_a_task_follows_its_error(error: str, status: JobStatus) -> None:
    assert task_end(record(), [letter(error, traceback="File task.py")]) == (status, error, "File task.py")


def test_a_task_without_a_dead_letter_succeeded() -> None:
    assert task_end(record(), []) == (JobStatus.SUCCEEDED, "", "")


def test_the_message_of_a_retried_task_contains_its_attempts() -> None:
    _, message, _ = task_end(record(max_attempts=3), [letter("ValueError: bad", attempts=3)])
    assert message == "ValueError: bad (attempt 3 of 3)"


def test_a_completing_task_needs_no_worker() -> None:
    assert plan_jobs([task(status=JobStatus.COMPLETING)], [], free_capacity(4), NOW) == []


def test_each_task_has_a_worker_of_its_own() -> None:
    over = worker("w", "gone")
    assert plan_jobs([task()], [over], free_capacity(4), NOW) == [StartWorker("a"), StopWorker("w")]
    assert plan_jobs([task("a"), task("b")], [worker("w", "a")], free_capacity(4), NOW) == [StartWorker("b")]
