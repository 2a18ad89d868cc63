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
from cortex.jobs.queries import read_dead_letters, read_results
from cortex.jobs.records import (
    Visibility,
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
from cortex.jobs.spec import TASK_BATCH, BatchFailure, NewBatch, Report
from cortex.lifecycle import ApiKind, JobStatus
from cortex.state.database import Where, open_jobs_sqlite
from cortex.state.tables import batches, job_inputs, jobs
from harness.jobs.job_checks import ORIGIN, new_batches, options
from harness.jobs.store_place import Place, run


def test_the_database_is_private_and_durable_and_gives_space_back(tmp_path: Path) -> None:
    engine = open_jobs_sqlite(tmp_path / "jobs.db")
    with engine.connect() as connection:
        pragmas = ("journal_mode", "synchronous", "auto_vacuum")
        values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas]
        assert values == ["wal", 2, 2]
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    engine.dispose()


def test_a_job_is_read_as_it_was_stored(where: Where) -> None:
    async def use(place: Place) -> None:
        wanted = options(config={"a": [1, None]}, timeout_s=60, max_attempts=2, output="s3://x/y", webhook="http://h")
        created = await place.store.create(ORIGIN, wanted, {"kind": "items"}, new_batches(4, 25))
        await place.reopen()
        job = await place.store.get(created.id)
        assert job == created
        assert (job.origin, job.options, job.source) == (ORIGIN, wanted, {"kind": "items"})
        assert (job.status, job.created_at, job.deadline_at) == (JobStatus.PENDING, 1000.0, 1060.0)
        assert (job.counts.batches, job.counts.items, job.counts.open) == (4, 100, 4)
        assert len(job.id) == 16
        assert await place.store.get("f" * 16) is None

    run(where, use)


def test_nothing_is_stored_of_a_submission_without_batches_or_that_breaks_off(where: Where) -> None:
    def broken(count: int) -> Iterator[NewBatch]:
        yield from new_batches(count)
        raise InputError("item 7 is too large")

    async def use(place: Place) -> None:
        with pytest.raises(InputError, match="no data was found"):
            await place.store.create(ORIGIN, options(), {}, [])
        for count in (0, 10, 2500):
            with pytest.raises(InputError, match="item 7"):
                await place.store.create(ORIGIN, options(), {}, broken(count))
        assert await place.store.active() == []
        await place.store.clean()
        assert [place.count(table) for table in (jobs, job_inputs, batches)] == [0, 0, 0]

    run(where, use)


@pytest.mark.parametrize("count", [999, 1000, 1001, 2000, 3210])
def test_a_job_of_many_batches_is_seen_only_whole(where: Where, count: int) -> None:
    async def use(place: Place) -> None:
        creating = asyncio.ensure_future(place.create(count))
        while not creating.done():
            assert all(job.counts.batches == count for job in await place.store.active())
        job = await creating
        assert (job.status, job.counts.batches, place.count(batches)) == (JobStatus.PENDING, count, count)
        await place.finish(job)

    run(where, use)


def test_a_job_that_was_not_completely_stored_is_deleted_after_a_crash(where: Where) -> None:
    async def use(place: Place) -> None:
        with place.engine.begin() as connection:
            insert_job(connection, "1" * 16, ORIGIN, options(), {}, 1000.0, Visibility.STORING)
        await place.reopen()
        await place.store.clean()
        assert place.count(jobs) == 0

    run(where, use)


def test_batches_follow_until_enqueuing_is_finished(where: Where) -> None:
    async def use(place: Place) -> None:
        store = place.store
        job = await store.create(ORIGIN, options(), {}, None)
        assert job.status is JobStatus.ENQUEUING
        assert (await place.lease(job)).is_done
        await store.add_batches(job.id, new_batches(1500, 2))
        await store.add_batches(job.id, [])
        await store.reset_batches(job.id)
        assert place.count(batches) == 0
        await store.add_batches(job.id, new_batches(2, 2))
        await store.add_batches(job.id, [NewBatch(3, b"[7,8,9]")])
        job = await store.finish_enqueuing(job.id)
        assert (job.status, job.counts.batches, job.counts.items) == (JobStatus.PENDING, 3, 7)
        leased = await place.lease(job)
        assert leased.lease is not None
        assert [batch.payload for batch in leased.lease.batches] == [b"[0,1]", b"[2,3]", b"[7,8,9]"]
        for late in (store.add_batches(job.id, new_batches(1)), store.reset_batches(job.id)):
            with pytest.raises(ConflictError, match="accepts no more batches: it is running"):
                await late
        with pytest.raises(NotFoundError):
            await store.add_batches("f" * 16, new_batches(1))

    run(where, use)


def test_enqueuing_nothing_fails_the_job(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.store.create(ORIGIN, options(), {}, None)
        job = await place.store.finish_enqueuing(job.id)
        assert job.status is JobStatus.ENQUEUE_FAILED
        assert (job.message, job.ended_at) == ("unable to enqueue batches because no data was found", 1000.0)

    run(where, use)


def test_a_status_changes_only_as_the_table_of_transitions_allows(where: Where) -> None:
    async def use(place: Place) -> None:
        store, job = place.store, await place.create()
        assert not await store.change(job.id, JobStatus.SUCCEEDED)
        assert not await store.change("f" * 16, JobStatus.STOPPED)
        held = (await place.lease(job, count=1)).lease
        assert held is not None
        place.clock.now = 1005.0
        assert await store.change(job.id, JobStatus.WORKER_ERROR, "it broke", "Traceback")
        assert not await store.change(job.id, JobStatus.STOPPED, "no")
        found = await store.get(job.id)
        assert found is not None
        assert (found.status, found.message, found.traceback) == (JobStatus.WORKER_ERROR, "it broke", "Traceback")
        assert (found.started_at, found.ended_at) == (1000.0, 1005.0)
        assert await store.read(holders) == set()
        assert (await place.lease(job, Report(held.token, 0))).lost == (held.token,)

    run(where, use)


def test_a_message_is_stored_while_a_job_is_pending(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.create()
        await place.store.write(set_message, job.id, "waits for a GPU")
        assert (await place.store.get(job.id)).message == "waits for a GPU"  # type: ignore[union-attr]
        await place.lease(job)
        await place.store.write(set_message, job.id, "too late")
        assert (await place.store.get(job.id)).message == ""  # type: ignore[union-attr]

    run(where, use)


def test_jobs_are_listed_the_newest_first_and_counted(where: Where) -> None:
    async def use(place: Place) -> None:
        created = [await place.create() for _ in range(4)]  # all at the same time of the clock
        ids = [job.id for job in created]
        assert ids == sorted(ids, reverse=True)
        await place.finish(created[0])
        store = place.store
        assert [job.id for job in await store.read(list_jobs, "digits", 3)] == ids[:0:-1]
        assert await store.read(list_jobs, "other") == []
        assert [job.id for job in await store.active()] == ids[1:]
        statuses = Counter(job.status for job in await store.read(list_jobs, "digits"))
        assert statuses == {JobStatus.SUCCEEDED: 1, JobStatus.PENDING: 3}
        summary = (await store.read(summarize))["digits"]
        assert (summary.running, summary.latest) == (3, ids[-1])

    run(where, use)


def test_inputs_of_active_jobs_are_read_once(where: Where) -> None:
    async def use(place: Place) -> None:
        store = place.store
        jobs = [await place.create(config={"large": number}) for number in range(2)]
        for _ in range(2):
            assert await store.active() == jobs
        first, again = await store.active(), await store.active()
        assert [job.options is same.options for job, same in zip(first, again, strict=True)] == [True, True]
        await store.change(jobs[0].id, JobStatus.STOPPED)
        assert await store.active() == jobs[1:]
        await store.delete_job(jobs[1].id)
        assert await store.active() == []
        job = await place.create(config={"large": 2})
        assert await store.active() == [job]

    run(where, use)


def test_results_and_dead_letters_are_read_in_pieces_by_seq(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.create(50, items=2, max_attempts=1)
        await place.finish(job, 7, 9, 30, status=JobStatus.COMPLETED_WITH_FAILURES)
        found, after = [], -1
        while piece := await place.store.read(read_results, job.id, after, limit=9):
            assert len(piece) <= 9
            found += piece
            after = piece[-1].seq
        assert [(result.seq, result.first_item, result.items, result.value) for result in found] == [
            (seq, seq * 2, 2, b"%d" % seq) for seq in range(50) if seq not in (7, 9, 30)
        ]
        assert [letter.seq for letter in await place.store.read(read_dead_letters, job.id)] == [7, 9, 30]
        assert [letter.seq for letter in await place.store.read(read_dead_letters, job.id, 7, 1)] == [9]
        assert (
            await place.store.read(read_results, "f" * 16) == await place.store.read(read_dead_letters, "f" * 16) == []
        )

    run(where, use)


def test_large_results_come_a_few_megabytes_at_a_time(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.create(9)
        held = (await place.lease(job)).lease
        assert held is not None
        value = b'"' + b"x" * 1_500_000 + b'"'
        await place.lease(job, Report(held.token, 8, results=tuple((seq, value) for seq in range(9))))
        assert [result.seq for result in await place.store.read(read_results, job.id)] == [0, 1]
        assert [result.seq for result in await place.store.read(read_results, job.id, 6)] == [7, 8]

    run(where, use)


@pytest.mark.parametrize("end", [JobStatus.STOPPED, JobStatus.TIMED_OUT, JobStatus.WORKER_ERROR])
def test_a_task_that_did_not_succeed_is_run_again_whatever_ended_it(where: Where, end: JobStatus) -> None:
    async def use(place: Place) -> None:
        store, origin = place.store, replace(ORIGIN, kind=ApiKind.TASK)
        wanted = options(config={"a": 1}, timeout_s=60)
        job = await store.create(origin, wanted, {"kind": "task"}, [TASK_BATCH])
        with pytest.raises(ConflictError, match="is pending; it can be retried once it is over"):
            await store.retry(job.id, origin, wanted)
        await store.change(job.id, end)
        await store.clean()
        with pytest.raises(InputError, match="a task runs on one worker"):
            await store.retry(job.id, origin, replace(wanted, workers=4))
        place.clock.now += 100
        again = await store.retry(job.id, origin, wanted)
        assert (again.status, again.options, again.deadline_at) == (JobStatus.PENDING, wanted, place.clock.now + 60)
        assert again.source == {"kind": "retry_of", "retry_of": job.id}
        leased = await place.lease(again)
        assert leased.lease is not None
        assert [batch.payload for batch in leased.lease.batches] == [TASK_BATCH.payload]
        await place.lease(again, Report(leased.lease.token, 0))
        await store.change(again.id, JobStatus.SUCCEEDED)
        with pytest.raises(ConflictError, match="has no dead letters$"):
            await store.retry(again.id, origin, wanted)

    run(where, use)


def test_open_batches_of_a_job_that_is_over_are_not_kept(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.create(3)
        await place.store.change(job.id, JobStatus.STOPPED)
        with pytest.raises(
            ConflictError, match="has no dead letters; batches that were open when the job ended are not kept"
        ):
            await place.store.retry(job.id, ORIGIN, options())

    run(where, use)


def test_a_retry_is_a_new_job_of_the_dead_letters(where: Where) -> None:
    async def use(place: Place) -> None:
        store, job = place.store, await place.create(700, items=3, max_attempts=1)
        with pytest.raises(ConflictError, match="once it is over"):
            await store.retry(job.id, ORIGIN, options())
        failed = list(range(0, 700, 2))
        await place.finish(job, *failed, status=JobStatus.COMPLETED_WITH_FAILURES)
        again = await store.retry(job.id, ORIGIN, options(workers=4))
        assert (again.status, again.options.workers) == (JobStatus.PENDING, 4)
        assert (again.counts.batches, again.counts.items) == (350, 1050)
        leased = await place.lease(again, count=3)
        assert leased.lease is not None
        assert [batch.payload for batch in leased.lease.batches] == [b"[0,1,2]", b"[6,7,8]", b"[12,13,14]"]
        await store.release("w", None)
        await place.finish(again)
        assert [result.first_item for result in await store.read(read_results, again.id, 340)] == [
            seq * 6 for seq in range(341, 350)
        ]
        with pytest.raises(ConflictError, match="has no dead letters"):
            await store.retry(again.id, ORIGIN, options())
        with pytest.raises(NotFoundError):
            await store.retry("f" * 16, ORIGIN, options())

    run(where, use)


def test_leases_outlast_an_operator_that_was_away(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.create()
        held = (await place.lease(job)).lease
        assert held is not None
        place.clock.now += 3600
        await place.reopen()
        assert await place.store.expire() == 0
        assert await place.store.read(holders) == {("w", 1)}
        assert (await place.lease(job, Report(held.token, 2))).is_done

    run(where, use)


def test_leases_are_renewed_after_a_pause_of_the_machine(where: Where) -> None:
    async def use(place: Place) -> None:
        await place.lease(await place.create())
        for pause, expired in ((3600, 0), (9, 0), (9, 0), (9, 0), (9, 1), (-500, 0)):
            place.clock.now += pause
            assert await place.store.expire() == expired

    run(where, use)


def test_a_clock_that_is_set_back_delays_no_attempt_for_longer_than_usual(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.create(1)
        held = (await place.lease(job)).lease
        assert held is not None
        await place.lease(job, Report(held.token, 0, (BatchFailure(0, "ValueError: bad"),)), count=0)
        await place.store.expire()
        place.clock.now -= 3600
        await place.store.expire()
        assert (await place.lease(job)).opens_at == place.clock.now + 60
        place.clock.now += 60
        assert (await place.lease(job)).lease

    run(where, use)


def test_assignments_and_marks_are_remembered(where: Where) -> None:
    async def use(place: Place) -> None:
        job = await place.create()
        await place.store.write(put_assignment, "w", "a" * 16)
        await place.store.write(put_assignment, "w", job.id)
        await place.store.write(put_assignment, "x", job.id)
        await place.store.write(put_assignment, "x", None)
        await place.store.write(put_mark, job.id, "webhook", "due")
        await place.store.write(put_mark, job.id, "webhook", "told")
        await place.store.write(put_mark, job.id, "part", "3")
        await place.store.write(put_mark, "f" * 16, "part", "3")
        await place.reopen()
        assert await place.store.read(read_assignments) == {"w": job.id}
        assert await place.store.read(read_marks, job.id) == {"webhook": "told", "part": "3"}
        assert await place.store.read(ids_marked, "webhook", "told") == [job.id]
        assert await place.store.read(ids_marked, "webhook", "due") == []

    run(where, use)
