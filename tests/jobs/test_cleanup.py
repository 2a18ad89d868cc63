"""Removal of deleted jobs and of payloads of ended jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.jobs.queries import read_results
from cortex.jobs.records import put_mark, summarize
from cortex.jobs.spec import BatchFailure, LeaseReply, NewBatch, Report
from cortex.lifecycle import JobStatus
from cortex.state.database import Where
from cortex.state.tables import batches, dead_letters, job_marks, job_metadata, jobs, pending, results
from harness.jobs.job_checks import ORIGIN, options
from harness.jobs.job_store import StoreHarness, run_with_store

pytestmark = pytest.mark.heavy


def test_a_deleted_job_is_invisible_at_once_and_its_rows_are_removed(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store, kept, dropped = harness.store, await harness.create(), await harness.create(2000, max_attempts=1)
        held = (await harness.lease(dropped)).lease
        assert held is not None
        await store.write(put_mark, dropped.id, "part", "1")
        await harness.lease(dropped, Report(held.token, 1, (BatchFailure(0, "bad"),), ((1, b"1"),)))
        assert await store.delete_job(dropped.id) == [dropped.id]
        assert await store.delete_job(dropped.id) == []
        assert await store.get(dropped.id) is None
        assert (await harness.lease(dropped, Report(held.token, 2))) == LeaseReply(lost=(held.token,), is_done=True)
        await store.clean()
        counts = {name: harness.count(table) for name, table in job_metadata.tables.items()}
        assert counts == {"jobs": 1, "job_inputs": 1, "batches": 3, "pending": 1} | dict.fromkeys(
            ("leases", "results", "dead_letters", "job_marks", "assignments", "schedules", "workloads"), 0
        )
        assert await store.delete_api("digits") == [kept.id]
        assert await store.read(summarize) == {}

    run_with_store(where, scenario)


def test_a_deletion_continues_after_a_restart(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.create(5000)
        await harness.store.delete_job(job.id)
        await harness.reopen()
        await harness.store.clean()
        assert harness.count(batches) == harness.count(jobs) == 0

    run_with_store(where, scenario)


def test_cleaning_deletes_payloads_of_ended_jobs_and_the_oldest_ended_jobs(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        active = await harness.create(max_attempts=1)
        over = [await harness.create(max_attempts=1) for _ in range(4)]
        for job in over:
            await harness.finish(job, 1, status=JobStatus.COMPLETED_WITH_FAILURES)
        stopped = await harness.create()
        await harness.store.change(stopped.id, JobStatus.STOPPED)
        deleted = await harness.store.clean(keep=3)
        assert set(deleted) == {over[0].id, over[1].id}
        assert [harness.count(table) for table in (jobs, batches, pending)] == [4, 3, 1]
        assert [harness.count(table) for table in (results, dead_letters, job_marks)] == [4, 2, 0]
        assert len(await harness.store.read(read_results, over[3].id)) == 2
        assert (await harness.store.retry(over[3].id, ORIGIN, options())).counts.batches == 1
        assert (await harness.lease(active)).lease is not None

    run_with_store(where, scenario)


def test_cleaning_shrinks_the_database_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex.jobs.cleanup.KEPT_PAGES", 16)

    async def scenario(harness: StoreHarness) -> None:
        big = [NewBatch(1, b'["' + b"x" * 100_000 + b'"]')] * 100
        job = await harness.store.create(ORIGIN, options(), {}, big)
        await harness.store.change(job.id, JobStatus.STOPPED)
        await harness.store.clean()
        with harness.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA page_count").scalar_one() < 100

    run_with_store(tmp_path / "jobs.db", scenario)
