"""Removal of deleted jobs, and of payloads of jobs that are over."""

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
from harness.jobs.store_place import Place, run

pytestmark = pytest.mark.heavy


def test_a_deleted_job_is_invisible_at_once_and_its_rows_are_removed(where: Where) -> None:
    async def use(place: Place) -> None:
        store, kept, dropped = place.store, await place.create(), await place.create(2000, max_attempts=1)
        held = (await place.lease(dropped)).lease
        assert held is not None
        await store.write(put_mark, dropped.id, "part", "1")
        await place.lease(dropped, Report(held.token, 1, (BatchFailure(0, "bad"),), ((1, b"1"),)))
        assert await store.delete_job(dropped.id) == [dropped.id]
        assert await store.delete_job(dropped.id) == []
        assert await store.get(dropped.id) is None
        assert (await place.lease(dropped, Report(held.token, 2))) == LeaseReply(lost=(held.token,), is_done=True)
        await store.clean()
        counts = {name: place.count(table) for name, table in job_metadata.tables.items()}
        assert counts == {"jobs": 1, "job_inputs": 1, "batches": 3, "pending": 1} | dict.fromkeys(
            ("leases", "results", "dead_letters", "job_marks", "assignments", "schedules", "workloads"), 0
        )
        assert await store.delete_api("digits") == [kept.id]
        assert await store.read(summarize) == {}

    run(where, use)


def test_a_deletion_goes_on_after_a_restart(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.create(5000)
        await place.store.delete_job(job.id)
        await place.reopen()
        await place.store.clean()
        assert place.count(batches) == place.count(jobs) == 0

    run(where, use)


def test_cleaning_drops_payloads_of_jobs_that_are_over_and_the_oldest_of_these(where: Where) -> None:
    async def use(place: Place) -> None:
        active = await place.create(max_attempts=1)
        over = [await place.create(max_attempts=1) for _ in range(4)]
        for job in over:
            await place.finish(job, 1, status=JobStatus.COMPLETED_WITH_FAILURES)
        stopped = await place.create()
        await place.store.change(stopped.id, JobStatus.STOPPED)
        deleted = await place.store.clean(keep=3)
        assert set(deleted) == {over[0].id, over[1].id}
        assert [place.count(table) for table in (jobs, batches, pending)] == [4, 3, 1]
        assert [place.count(table) for table in (results, dead_letters, job_marks)] == [4, 2, 0]
        assert len(await place.store.read(read_results, over[3].id)) == 2
        assert (await place.store.retry(over[3].id, ORIGIN, options())).counts.batches == 1
        assert (await place.lease(active)).lease is not None

    run(where, use)


def test_space_goes_back_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex.jobs.cleanup.KEPT_PAGES", 16)

    async def use(place: Place) -> None:
        big = [NewBatch(1, b'["' + b"x" * 100_000 + b'"]')] * 100
        job = await place.store.create(ORIGIN, options(), {}, big)
        await place.store.change(job.id, JobStatus.STOPPED)
        await place.store.clean()
        with place.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA page_count").scalar_one() < 100

    run(tmp_path / "jobs.db", use)
