"""Stored schedules: a run is claimed once, in the transaction of its job."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import inspect

from cortex.errors import ConflictError
from cortex.jobs import schedule_state
from cortex.jobs.records import list_jobs
from cortex.jobs.schedule_state import ScheduleState, read_schedules
from cortex.jobs.spec import SCHEDULED_FOR
from cortex.lifecycle import JobStatus
from cortex.state.database import JOB_MIGRATIONS, Where, open_jobs_sqlite, open_sqlite
from harness.jobs.job_checks import ORIGIN, new_batches, options
from harness.jobs.job_store import StoreHarness, run_with_store


def start_schedule() -> partial[None]:
    return partial(schedule_state.start, api="train", key="k", at=100.0)


@pytest.mark.parametrize("batches", [1, 2500, None])
def test_a_run_is_claimed_once_and_creates_one_job(where: Where, batches: int | None) -> None:
    async def scenario(harness: StoreHarness) -> None:
        await harness.store.write(start_schedule())
        extra_writes = partial(schedule_state.claim, api="train", key="k", at=160.0)
        made = None if batches is None else new_batches(batches)
        job = await harness.store.create(ORIGIN, options(), {}, made, extra_writes)
        with pytest.raises(ConflictError, match="was submitted before"):
            await harness.store.create(ORIGIN, options(), {}, made, extra_writes)
        await harness.reopen()
        assert [found.id for found in await harness.store.read(list_jobs, ORIGIN.api)] == [job.id]
        assert await harness.store.read(read_schedules) == {"train": ScheduleState("k", 160.0, 160.0, job.id)}

    run_with_store(where, scenario)


def test_starting_an_existing_schedule_keeps_its_state(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store = harness.store
        await store.write(start_schedule())
        await store.write(partial(schedule_state.fail, api="train", key="k", at=200.0, error="bad"))
        await store.write(start_schedule())
        await store.write(partial(schedule_state.fail, api="train", key="other", at=300.0, error="of another"))
        assert await store.read(read_schedules) == {"train": ScheduleState("k", 200.0, error="bad")}
        await store.write(partial(schedule_state.start, api="train", key="new", at=150.0))
        assert await store.read(read_schedules) == {"train": ScheduleState("new", 150.0)}
        await store.write(partial(schedule_state.remove, api="train"))
        assert await store.read(read_schedules) == {}

    run_with_store(where, scenario)


def test_a_run_that_must_not_overlap_is_skipped_or_rejected_while_another_is_active(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store = harness.store
        skip = partial(schedule_state.skip_overlapping, api=ORIGIN.api, key="k")
        await store.write(partial(schedule_state.start, api=ORIGIN.api, key="k", at=100.0))
        by_hand = await store.create(ORIGIN, options(), {}, new_batches(1))
        assert await store.write(partial(skip, at=160.0)) is None  # a job that a user submitted is not a run
        extra_writes = partial(schedule_state.claim, api=ORIGIN.api, key="k", at=160.0, may_overlap=False)
        job = await store.create(ORIGIN, options(), {SCHEDULED_FOR: 160.0}, new_batches(1), extra_writes)
        with pytest.raises(ConflictError, match=f"is already running by its schedule, as job {job.id}"):
            later = partial(schedule_state.claim, api=ORIGIN.api, key="k", at=220.0, may_overlap=False)
            await store.create(ORIGIN, options(), {SCHEDULED_FOR: 220.0}, new_batches(1), later)
        assert await store.write(partial(skip, at=220.0)) == job.id
        assert await store.write(partial(skip, at=220.0)) is None  # the run was already skipped
        await harness.reopen()
        known = ScheduleState("k", 220.0, 160.0, job.id, "", 1, 220.0, job.id)
        assert (await harness.store.read(read_schedules))[ORIGIN.api] == known
        assert [found.id for found in await harness.store.read(list_jobs, ORIGIN.api)] == [job.id, by_hand.id]
        await harness.store.change(job.id, JobStatus.STOPPED)
        assert await harness.store.write(partial(skip, at=280.0)) is None
        await harness.store.write(partial(schedule_state.start, api=ORIGIN.api, key="new", at=300.0))
        assert (await harness.store.read(read_schedules))[ORIGIN.api] == ScheduleState("new", 300.0, 160.0, job.id)

    run_with_store(where, scenario)


def test_migration_adds_the_columns_of_skipped_runs_and_keeps_schedules(tmp_path: Path) -> None:
    old = open_sqlite(tmp_path / "jobs.db", JOB_MIGRATIONS[:3])
    with old.begin() as connection:
        for column in ("skipped", "last_skip_at", "last_skip_job_id"):
            connection.exec_driver_sql(f"ALTER TABLE schedules DROP COLUMN {column}")
        connection.exec_driver_sql("INSERT INTO schedules (api, key, handled_at, error) VALUES ('train', 'k', 100, '')")
    old.dispose()
    new = open_jobs_sqlite(tmp_path / "jobs.db")
    with new.connect() as connection:
        assert schedule_state.read_schedules(connection) == {"train": ScheduleState("k", 100.0)}
    new.dispose()


def test_migration_adds_the_table_of_schedules(tmp_path: Path) -> None:
    old = open_sqlite(tmp_path / "jobs.db", JOB_MIGRATIONS[:1])
    with old.begin() as connection:
        for table in ("schedules", "workloads"):
            connection.exec_driver_sql(f"DROP TABLE IF EXISTS {table}")
    old.dispose()
    new = open_jobs_sqlite(tmp_path / "jobs.db")
    assert "schedules" in inspect(new).get_table_names()
    new.dispose()
