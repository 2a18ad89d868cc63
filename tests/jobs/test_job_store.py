"""Jobs in a real database: creation, status changes, listing, results and retries."""

from __future__ import annotations

import asyncio
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.errors import ConflictError, InputError, NotFoundError
from cortex.jobs.lease_expiry import holders
from cortex.jobs.queries import ErrorGroup, group_errors, read_dead_letters, read_results
from cortex.jobs.records import (
    JobFilter,
    Presence,
    ids_marked,
    insert_job,
    list_jobs,
    put_assignment,
    put_mark,
    read_assignments,
    read_marks,
    set_message,
    summarize,
)
from cortex.jobs.spec import TASK_BATCH, BatchFailure, JobRecord, NewBatch, Report
from cortex.lifecycle import ApiKind, JobStatus
from cortex.state.database import Where, open_jobs_sqlite
from cortex.state.tables import batches, job_inputs, jobs
from harness.jobs.job_checks import ORIGIN, new_batches, options
from harness.jobs.job_store import StoreHarness, run_with_store


def test_the_database_is_private_durable_and_vacuumed(tmp_path: Path, real_databases: None) -> None:
    engine = open_jobs_sqlite(tmp_path / "jobs.db")
    with engine.connect() as connection:
        pragmas = ("journal_mode", "synchronous", "auto_vacuum")
        values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas]
        assert values == ["wal", 2, 2]
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    engine.dispose()


def test_a_job_is_read_as_it_was_stored(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        wanted = options(config={"a": [1, None]}, timeout_s=60, max_attempts=2, output="s3://x/y", webhook="http://h")
        created = await harness.store.create(ORIGIN, wanted, {"kind": "items"}, new_batches(4, 25))
        await harness.reopen()
        job = await harness.store.get(created.id)
        assert job == created
        assert (job.origin, job.options, job.source) == (ORIGIN, wanted, {"kind": "items"})
        assert (job.status, job.created_at, job.deadline_at) == (JobStatus.PENDING, 1000.0, 1060.0)
        assert (job.counts.batches, job.counts.items, job.counts.open) == (4, 100, 4)
        assert len(job.id) == 16
        assert await harness.store.get("f" * 16) is None

    run_with_store(where, scenario)


def test_an_empty_or_failed_submission_stores_nothing(where: Where) -> None:
    def broken(count: int) -> Iterator[NewBatch]:
        yield from new_batches(count)
        raise InputError("item 7 is too large")

    async def scenario(harness: StoreHarness) -> None:
        with pytest.raises(InputError, match="no data was found"):
            await harness.store.create(ORIGIN, options(), {}, [])
        for count in (0, 10, 2500):
            with pytest.raises(InputError, match="item 7"):
                await harness.store.create(ORIGIN, options(), {}, broken(count))
        assert await harness.store.active() == []
        await harness.store.clean()
        assert [harness.count(table) for table in (jobs, job_inputs, batches)] == [0, 0, 0]

    run_with_store(where, scenario)


@pytest.mark.parametrize("count", [1000, 2001])  # batches are stored a thousand at a time
def test_a_job_becomes_visible_once_all_batches_are_stored(where: Where, count: int) -> None:
    async def scenario(harness: StoreHarness) -> None:
        creating = asyncio.ensure_future(harness.create(count))
        while not creating.done():
            assert all(job.counts.batches == count for job in await harness.store.active())
        job = await creating
        assert (job.status, job.counts.batches, harness.count(batches)) == (JobStatus.PENDING, count, count)
        await harness.finish(job)

    run_with_store(where, scenario)


def test_an_incompletely_stored_job_is_deleted_after_a_crash(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        with harness.engine.begin() as connection:
            insert_job(connection, "1" * 16, ORIGIN, options(), {}, 1000.0, Presence.STORING)
        await harness.reopen()
        await harness.store.clean()
        assert harness.count(jobs) == 0

    run_with_store(where, scenario)


def test_batches_are_added_until_enqueuing_is_finished(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store = harness.store
        job = await store.create(ORIGIN, options(), {}, None)
        assert job.status is JobStatus.ENQUEUING
        assert (await harness.lease(job)).is_done
        await store.add_batches(job.id, new_batches(1500, 2))
        await store.add_batches(job.id, [])
        await store.reset_batches(job.id)
        assert harness.count(batches) == 0
        await store.add_batches(job.id, new_batches(2, 2))
        await store.add_batches(job.id, [NewBatch(3, b"[7,8,9]")])
        job = await store.finish_enqueuing(job.id)
        assert (job.status, job.counts.batches, job.counts.items) == (JobStatus.PENDING, 3, 7)
        leased = await harness.lease(job)
        assert leased.lease is not None
        assert [batch.payload for batch in leased.lease.batches] == [b"[0,1]", b"[2,3]", b"[7,8,9]"]
        for late in (store.add_batches(job.id, new_batches(1)), store.reset_batches(job.id)):
            with pytest.raises(ConflictError, match="accepts no more batches: it is running"):
                await late
        with pytest.raises(NotFoundError):
            await store.add_batches("f" * 16, new_batches(1))

    run_with_store(where, scenario)


def test_a_job_without_batches_fails_when_enqueuing_is_finished(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.store.create(ORIGIN, options(), {}, None)
        job = await harness.store.finish_enqueuing(job.id)
        assert job.status is JobStatus.ENQUEUE_FAILED
        assert (job.message, job.ended_at) == ("unable to enqueue batches because no data was found", 1000.0)

    run_with_store(where, scenario)


def test_rejects_status_changes_outside_the_transition_table(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store, job = harness.store, await harness.create()
        assert not await store.change(job.id, JobStatus.SUCCEEDED)
        assert not await store.change("f" * 16, JobStatus.STOPPED)
        held = (await harness.lease(job, count=1)).lease
        assert held is not None
        harness.clock.now = 1005.0
        assert await store.change(job.id, JobStatus.WORKER_ERROR, "it broke", "Traceback")
        assert not await store.change(job.id, JobStatus.STOPPED, "no")
        found = await store.get(job.id)
        assert found is not None
        assert (found.status, found.message, found.traceback) == (JobStatus.WORKER_ERROR, "it broke", "Traceback")
        assert (found.started_at, found.ended_at) == (1000.0, 1005.0)
        assert await store.read(holders) == set()
        assert (await harness.lease(job, Report(held.token, 0))).lost == (held.token,)

    run_with_store(where, scenario)


def test_a_message_is_stored_only_while_a_job_is_pending(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.create()
        await harness.store.write(set_message, job.id, "waits for a GPU")
        assert (await harness.store.get(job.id)).message == "waits for a GPU"  # type: ignore[union-attr]
        await harness.lease(job)
        await harness.store.write(set_message, job.id, "too late")
        assert (await harness.store.get(job.id)).message == ""  # type: ignore[union-attr]

    run_with_store(where, scenario)


def test_jobs_are_listed_newest_first_and_counted(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        created = [await harness.create() for _ in range(4)]  # all with the same time
        ids = [job.id for job in created]
        assert ids == sorted(ids, reverse=True)
        await harness.finish(created[0])
        store = harness.store
        assert [job.id for job in await store.read(list_jobs, "digits", 3)] == ids[:0:-1]
        assert await store.read(list_jobs, "other") == []
        assert [job.id for job in await store.active()] == ids[1:]
        statuses = Counter(job.status for job in await store.read(list_jobs, "digits"))
        assert statuses == {JobStatus.SUCCEEDED: 1, JobStatus.PENDING: 3}
        summary = (await store.read(summarize))["digits"]
        assert (summary.running, summary.latest) == (3, ids[-1])

    run_with_store(where, scenario)


def test_inputs_of_active_jobs_are_read_once(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store = harness.store
        jobs = [await harness.create(config={"large": number}) for number in range(2)]
        for _ in range(2):
            assert await store.active() == jobs
        first, again = await store.active(), await store.active()
        assert [job.options is same.options for job, same in zip(first, again, strict=True)] == [True, True]
        await store.change(jobs[0].id, JobStatus.STOPPED)
        assert await store.active() == jobs[1:]
        await store.delete_job(jobs[1].id)
        assert await store.active() == []
        job = await harness.create(config={"large": 2})
        assert await store.active() == [job]

    run_with_store(where, scenario)


def test_results_and_dead_letters_are_read_in_pages_by_seq(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.create(50, items=2, max_attempts=1)
        await harness.finish(job, 7, 9, 30, status=JobStatus.COMPLETED_WITH_FAILURES)
        found, after = [], -1
        while piece := await harness.store.read(read_results, job.id, after, limit=9):
            assert len(piece) <= 9
            found += piece
            after = piece[-1].seq
        assert [(result.seq, result.first_item, result.items, result.value) for result in found] == [
            (seq, seq * 2, 2, b"%d" % seq) for seq in range(50) if seq not in (7, 9, 30)
        ]
        assert [letter.seq for letter in await harness.store.read(read_dead_letters, job.id)] == [7, 9, 30]
        assert [letter.seq for letter in await harness.store.read(read_dead_letters, job.id, 7, 1)] == [9]
        assert (
            await harness.store.read(read_results, "f" * 16)
            == await harness.store.read(read_dead_letters, "f" * 16)
            == []
        )

    run_with_store(where, scenario)


def test_a_page_of_large_results_is_limited_in_bytes(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.create(9)
        held = (await harness.lease(job)).lease
        assert held is not None
        value = b'"' + b"x" * 1_500_000 + b'"'
        await harness.lease(job, Report(held.token, 8, results=tuple((seq, value) for seq in range(9))))
        assert [result.seq for result in await harness.store.read(read_results, job.id)] == [0, 1]
        assert [result.seq for result in await harness.store.read(read_results, job.id, 6)] == [7, 8]

    run_with_store(where, scenario)


@pytest.mark.parametrize("end", [JobStatus.STOPPED, JobStatus.TIMED_OUT, JobStatus.WORKER_ERROR])
def test_an_unsuccessful_task_can_be_retried(where: Where, end: JobStatus) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store, origin = harness.store, replace(ORIGIN, kind=ApiKind.TASK)
        wanted = options(config={"a": 1}, timeout_s=60)
        job = await store.create(origin, wanted, {"kind": "task"}, [TASK_BATCH])
        with pytest.raises(ConflictError, match="is pending; it can be retried once it is over"):
            await store.retry(job.id, origin, wanted)
        await store.change(job.id, end)
        await store.clean()
        with pytest.raises(InputError, match="a task runs on one worker"):
            await store.retry(job.id, origin, replace(wanted, workers=4))
        harness.clock.now += 100
        again = await store.retry(job.id, origin, wanted)
        assert (again.status, again.options, again.deadline_at) == (JobStatus.PENDING, wanted, harness.clock.now + 60)
        assert again.source == {"kind": "retry_of", "retry_of": job.id}
        leased = await harness.lease(again)
        assert leased.lease is not None
        assert [batch.payload for batch in leased.lease.batches] == [TASK_BATCH.payload]
        await harness.lease(again, Report(leased.lease.token, 0))
        await store.change(again.id, JobStatus.SUCCEEDED)
        with pytest.raises(ConflictError, match="has no dead letters$"):
            await store.retry(again.id, origin, wanted)

    run_with_store(where, scenario)


def test_open_batches_of_an_ended_job_cannot_be_retried(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.create(3)
        await harness.store.change(job.id, JobStatus.STOPPED)
        with pytest.raises(
            ConflictError, match="has no dead letters; batches that were open when the job ended are not kept"
        ):
            await harness.store.retry(job.id, ORIGIN, options())

    run_with_store(where, scenario)


def test_a_retry_creates_a_job_of_the_dead_letters(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store, job = harness.store, await harness.create(700, items=3, max_attempts=1)
        with pytest.raises(ConflictError, match="once it is over"):
            await store.retry(job.id, ORIGIN, options())
        failed = list(range(0, 700, 2))
        await harness.finish(job, *failed, status=JobStatus.COMPLETED_WITH_FAILURES)
        again = await store.retry(job.id, ORIGIN, options(workers=4))
        assert (again.status, again.options.workers) == (JobStatus.PENDING, 4)
        assert (again.counts.batches, again.counts.items) == (350, 1050)
        leased = await harness.lease(again, count=3)
        assert leased.lease is not None
        assert [batch.payload for batch in leased.lease.batches] == [b"[0,1,2]", b"[6,7,8]", b"[12,13,14]"]
        await store.release("w", None)
        await harness.finish(again)
        assert [result.first_item for result in await store.read(read_results, again.id, 340)] == [
            seq * 6 for seq in range(341, 350)
        ]
        one = await store.retry(job.id, ORIGIN, options(), seq=4)
        assert (one.counts.batches, one.source["seq"]) == (1, 4)
        leased = await harness.lease(one)
        assert leased.lease is not None
        assert [batch.payload for batch in leased.lease.batches] == [b"[12,13,14]"]
        for seq in (5, 10**9):
            with pytest.raises(NotFoundError, match=f"has no dead letter {seq}"):
                await store.retry(job.id, ORIGIN, options(), seq=seq)
        with pytest.raises(ConflictError, match="has no dead letters"):
            await store.retry(again.id, ORIGIN, options())
        with pytest.raises(NotFoundError):
            await store.retry("f" * 16, ORIGIN, options())

    run_with_store(where, scenario)


def test_jobs_are_listed_by_api_and_status_and_continued_after_a_number(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        created = [await harness.create() for _ in range(4)]
        await harness.finish(created[1])

        async def listed(chosen: JobFilter, limit: int = 10) -> list[int]:
            return [created.index(found) for found in await harness.store.read(list_jobs, chosen, limit)]

        created[1] = (await harness.store.read(list_jobs, JobFilter(statuses=[JobStatus.SUCCEEDED])))[0]
        assert await listed(JobFilter()) == [3, 2, 1, 0]
        assert await listed(JobFilter("digits"), 2) == [3, 2]
        assert await listed(JobFilter("digits", before=created[2].number)) == [1, 0]
        assert await listed(JobFilter(statuses={JobStatus.PENDING, JobStatus.RUNNING})) == [3, 2, 0]
        assert await listed(JobFilter("letters")) == []

    run_with_store(where, scenario)


def test_errors_of_dead_letters_that_differ_in_numbers_are_grouped(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store, job = harness.store, await harness.create(5, items=2, max_attempts=1)
        lease = (await harness.lease(job)).lease
        assert lease is not None
        errors = ["KeyError: 'a'", "bad row 1 at 0x7f00", "bad row 22 at 0xAB", "bad row 3 at 0x1"]
        failures = tuple(BatchFailure(seq, error) for seq, error in enumerate(errors))
        await harness.lease(job, Report(lease.token, 4, failures))
        rows = ErrorGroup("bad row 1 at 0x7f00", 1, 3, 6)
        assert await store.read(group_errors, job.id) == [rows, ErrorGroup("KeyError: 'a'", 0, 1, 2)]
        assert len(await store.read(group_errors, job.id, 1)) == 1
        assert await store.read(group_errors, "f" * 16) == []

    run_with_store(where, scenario)


def test_leases_survive_a_long_absence_of_the_operator(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.create()
        held = (await harness.lease(job)).lease
        assert held is not None
        harness.clock.now += 3600
        await harness.reopen()
        assert await harness.store.expire() == 0
        assert await harness.store.read(holders) == {("w", 1)}
        assert (await harness.lease(job, Report(held.token, 2))).is_done

    run_with_store(where, scenario)


def test_leases_are_extended_after_the_machine_was_suspended(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        await harness.lease(await harness.create())
        for pause, expired in ((3600, 0), (9, 0), (9, 0), (9, 0), (9, 1), (-500, 0)):
            harness.clock.now += pause
            assert await harness.store.expire() == expired

    run_with_store(where, scenario)


def test_a_clock_set_back_delays_retries_by_at_most_the_longest_backoff(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.create(1)
        held = (await harness.lease(job)).lease
        assert held is not None
        await harness.lease(job, Report(held.token, 0, (BatchFailure(0, "ValueError: bad"),)), count=0)
        await harness.store.expire()
        harness.clock.now -= 3600
        await harness.store.expire()
        assert (await harness.lease(job)).opens_at == harness.clock.now + 60
        harness.clock.now += 60
        assert (await harness.lease(job)).lease

    run_with_store(where, scenario)


def test_assignments_and_marks_are_stored(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        job = await harness.create()
        await harness.store.write(put_assignment, "w", "a" * 16)
        await harness.store.write(put_assignment, "w", job.id)
        await harness.store.write(put_assignment, "x", job.id)
        await harness.store.write(put_assignment, "x", None)
        await harness.store.write(put_mark, job.id, "webhook", "due")
        await harness.store.write(put_mark, job.id, "webhook", "told")
        await harness.store.write(put_mark, job.id, "part", "3")
        await harness.store.write(put_mark, "f" * 16, "part", "3")
        await harness.reopen()
        assert await harness.store.read(read_assignments) == {"w": job.id}
        assert await harness.store.read(read_marks, job.id) == {"webhook": "told", "part": "3"}
        assert await harness.store.read(ids_marked, "webhook", "told") == [job.id]
        assert await harness.store.read(ids_marked, "webhook", "due") == []

    run_with_store(where, scenario)


def test_the_oldest_ended_jobs_from_the_endpoint_make_room(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        store, size = harness.store, 100_000
        batch = NewBatch(1, b"[" + b"1" * (size - 2) + b"]")

        async def create(source: dict[str, bool]) -> JobRecord:
            return await store.create(ORIGIN, options(max_attempts=1), source, [batch])

        own, running = await create({}), await create({"from_endpoint": True})
        ended = [await create({"from_endpoint": True}) for _ in range(3)]
        for job in (own, *ended):
            await harness.finish(job, 0)  # a dead letter has the items
        remaining = await store._make_room("digits", 10 * size, 9 * size)
        assert 4 * size < remaining < 10 * size
        assert await store._make_room("digits", 6 * size, 5 * size) < 6 * size
        known = [await store.get(job.id) is not None for job in (own, running, *ended)]
        assert known[:2] == [True, True]
        assert 0 < sum(known[2:]) < 3
        assert known[2:] == sorted(known[2:])
        assert size < await store._make_room("digits", 0, 0) < 2 * size
        assert [await store.get(job.id) is not None for job in (own, running, *ended)] == [True, True] + [False] * 3
        assert sorted(await store.clean()) == sorted(job.id for job in ended)
        assert await store._make_room("other", 0, 0) == 0

    run_with_store(where, scenario)
