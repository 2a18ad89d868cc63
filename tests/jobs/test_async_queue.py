"""Queues of AsyncAPIs in a real database."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, update

from cortex.errors import BusyError, IdempotencyError, InputError
from cortex.jobs.async_queue import ENTRY_BYTES, KEPT_S, QueueState
from cortex.jobs.records import list_jobs, summarize
from cortex.jobs.spec import BatchFailure, LeaseReply, Report, Workload
from cortex.lifecycle import WorkloadStatus
from cortex.state.database import Where
from cortex.state.tables import KEYS_PER_JOB, batches, dead_letters, jobs, pending, results, workloads
from harness.jobs.job_store import StoreHarness, run_with_store
from harness.servers.upstream import eventually

pytestmark = pytest.mark.processes


@given(body=st.binary(), content_type=st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_a_workload_is_encoded_as_one_line_and_decoded(body: bytes, content_type: str) -> None:
    workload = Workload(uuid.uuid4(), content_type, body)
    line = workload.to_line()
    assert b"\n" not in line
    assert Workload.from_line(line) == workload


def test_a_workload_is_queued_leased_and_completed(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        name = await _add(harness, b"7")
        assert await _status(harness, name) is WorkloadStatus.IN_QUEUE
        leased = await _lease(harness)
        assert _bodies(leased) == [b"7"]
        assert await _status(harness, name) is WorkloadStatus.IN_PROGRESS
        harness.clock.now += 5
        await _lease(harness, _report(leased, results=[b'{"a":1}']), count=0)
        found = await harness.store.workloads.get("greet", name)
        assert found is not None
        assert (found.status, found.value) == (WorkloadStatus.COMPLETED, b'{"a":1}')
        assert (found.created_at, found.ended_at) == (1000.0, 1005.0)
        assert [harness.count(table) for table in (batches, results, dead_letters, pending)] == [0, 0, 0, 0]

    run_with_store(where, scenario)


def test_a_submission_with_a_key_is_stored_once(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        queues = harness.store.workloads

        async def add(body: bytes, key: str = "k", api: str = "greet") -> uuid.UUID:
            return await queues.add(api, Workload(uuid.uuid4(), "a/b", body), key)

        together = await asyncio.gather(
            *(add(b"7") for _ in range(3)), add(b"8"), add(b"7", "other"), add(b"7", ""), return_exceptions=True
        )
        name, error, other, without = together[0], *together[3:]
        assert together[:3] == [name] * 3 and isinstance(error, IdempotencyError)
        assert len({name, other, without, await add(b"7", api="hi")}) == 4
        assert (queues.count("greet"), queues.count("hi")) == (3, 1)
        leased = await _lease(harness)
        await _lease(harness, _report(leased, results=[b"1"]), count=0)
        assert await add(b"7") == name
        with pytest.raises(IdempotencyError):
            await add(b"8")
        assert await _status(harness, name) is WorkloadStatus.COMPLETED
        harness.clock.now += KEPT_S + 1
        await harness.store.clean()
        assert await add(b"8") != name
        assert queues.count("greet") == 3

    run_with_store(where, scenario)


def test_the_state_of_a_queue_and_its_latest_workloads_are_read(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        queues = harness.store.workloads
        assert await queues.states() == {}
        assert list(await queues.recent("greet", None, 10)) == []
        names = []
        for number in range(5):
            harness.clock.now += 1
            names.append(await _add(harness, b"%d" % number))
        assert await queues.states() == {"greet": QueueState(5, 0, 1001.0)}
        leased = await _lease(harness)
        await _lease(harness, _report(leased, results=[b"1"]), count=0)
        leased = await _lease(harness)
        await _lease(harness, _report(leased, error="ValueError: bad"), count=0)
        await _lease(harness)
        assert await queues.states() == {"greet": QueueState(2, 1, 1004.0)}
        found = await queues.recent("greet", None, 10)
        assert [view.id for view in found] == names[::-1]
        assert [view.status for view in found] == [
            WorkloadStatus.IN_QUEUE,
            WorkloadStatus.IN_QUEUE,
            WorkloadStatus.IN_PROGRESS,
            WorkloadStatus.FAILED,
            WorkloadStatus.COMPLETED,
        ]
        assert [view.value for view in found] == [b"", b"", b"", b"ValueError: bad", b"1"]
        for status in WorkloadStatus:
            expected = [view for view in found if view.status is status]
            assert list(await queues.recent("greet", status, 10)) == expected
            assert list(await queues.recent("greet", status, 1)) == expected[:1]

    run_with_store(where, scenario)


def test_a_workload_that_raised_is_not_retried(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        names = [await _add(harness, b"1"), await _add(harness, b"2")]
        for name in names:
            leased = await _lease(harness)
            await _lease(harness, _report(leased, error="ValueError: bad \udcff"), count=0)
            found = await harness.store.workloads.get("greet", name)
            assert found is not None
            assert (found.status, found.value) == (WorkloadStatus.FAILED, b"ValueError: bad ?")
        assert harness.store.workloads.count("greet") == 0

    run_with_store(where, scenario)


def test_a_workload_fails_after_three_deaths_of_its_worker(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        name = await _add(harness, b"1")
        for _ in range(3):
            assert await _status(harness, name) is WorkloadStatus.IN_QUEUE
            harness.clock.now += 60
            assert (await _lease(harness)).lease is not None
            await harness.store.release("w", 1, "segmentation fault")
        found = await harness.store.workloads.get("greet", name)
        assert found is not None
        assert found.status is WorkloadStatus.FAILED
        assert found.value == b"the worker's process died: segmentation fault"
        assert harness.store.workloads.count("greet") == 0
        assert harness.count(dead_letters) == 0

    run_with_store(where, scenario)


def test_a_queue_continues_after_it_was_empty_and_after_a_restart(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        for round in range(3):
            names = await asyncio.gather(*(_add(harness, b"%d" % n) for n in range(40)))
            assert harness.store.workloads.count("greet") == 40
            done = 0
            while done < 40:
                leased = await _lease(harness, count=100)
                assert leased.lease is not None
                assert len(leased.lease.batches) <= 3  # the rest is left for other workers
                await _lease(harness, _report(leased, results=[b"{}"] * len(leased.lease.batches)), count=0)
                done += len(leased.lease.batches)
            assert (await _lease(harness)).is_done is False
            assert {await _status(harness, name) for name in names} == {WorkloadStatus.COMPLETED}
            if round == 1:
                await harness.reopen()
        assert harness.count(pending) == 0
        assert harness.store.workloads.count("greet") == 0

    run_with_store(where, scenario)


def test_a_duplicate_or_late_report_changes_nothing(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        name = await _add(harness, b"1")
        lost = await _lease(harness)
        await harness.store.release("w", 1)
        leased = await _lease(harness, worker="v")
        assert (await _lease(harness, _report(lost, results=[b'{"by":"w"}']), count=0)).lost
        report = _report(leased, results=[b'{"by":"v"}'])
        await _lease(harness, report, worker="v", count=0)
        await _lease(harness, report, worker="v", count=0)
        found = await harness.store.workloads.get("greet", name)
        assert found is not None
        assert found.value == b'{"by":"v"}'

    run_with_store(where, scenario)


def test_queues_are_not_listed_or_cleaned_as_jobs(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        await _add(harness, b"1")
        (api,) = harness.store.workloads.apis
        queue = await harness.store.workloads.open(api)
        assert await harness.store.get(queue.job_id) is None
        assert not await harness.store.active()
        assert not await harness.store.read(list_jobs, api)
        assert not await harness.store.read(summarize)
        assert not await harness.store.clean(keep=0)
        assert harness.store.workloads.count(api) == 1

    run_with_store(where, scenario)


def test_queues_have_separate_workloads(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        name = await _add(harness, b"1")
        await harness.store.workloads.open("other")
        assert await harness.store.workloads.get("other", name) is None
        assert await harness.store.workloads.get("nobody", name) is None
        assert await harness.store.workloads.get("greet", uuid.uuid4()) is None
        await harness.store.workloads.close("greet")
        assert await harness.store.workloads.get("greet", name) is None
        await harness.store.clean()
        assert [harness.count(table) for table in (batches, workloads, pending)] == [0, 0, 0]
        assert harness.count(jobs) == 1

    run_with_store(where, scenario)


def test_a_queue_out_of_sequence_numbers_restarts_once_it_is_empty(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        old = await _add(harness, b"1")
        await _lease(harness, _report(await _lease(harness), results=[b"{}"]), count=0)
        with harness.engine.begin() as connection:
            connection.execute(update(jobs).values(next_seq=KEYS_PER_JOB - 2))
        assert await _status(harness, await _add(harness, b"2")) is WorkloadStatus.IN_QUEUE
        harness.clock.now += KEPT_S + 1
        await harness.store.clean()
        assert await _status(harness, old) is None
        with pytest.raises(InputError):  # numbers must not restart while lower ones are open
            await _add(harness, b"3")
        await _lease(harness, _report(await _lease(harness), results=[b"{}"]), count=0)
        names = [await _add(harness, b"%d" % number) for number in (4, 5)]
        assert [harness.count(table) for table in (batches, pending)] == [2, 1]
        assert _bodies(await _lease(harness, count=2)) == [b"4"]
        assert _bodies(await _lease(harness)) == [b"5"]
        assert {await _status(harness, name) for name in names} == {WorkloadStatus.IN_PROGRESS}
        assert harness.store.workloads.count("greet") == 2

    run_with_store(where, scenario)


def test_ended_workloads_are_deleted_after_a_week(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        names = [await _add(harness, b"1"), await _add(harness, b"2")]
        await _lease(harness, _report(await _lease(harness), results=[b"{}"]), count=0)
        harness.clock.now += KEPT_S - 1
        await harness.store.clean()
        assert await _status(harness, names[0]) is WorkloadStatus.COMPLETED
        harness.clock.now += 2
        await harness.store.clean()
        assert await _status(harness, names[0]) is None
        assert await _status(harness, names[1]) is WorkloadStatus.IN_QUEUE

    run_with_store(where, scenario)


def test_waiting_callers_return_when_the_workload_ends(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        name = await _add(harness, b"1")
        waiting = [asyncio.create_task(harness.store.workloads.get("greet", name, wait_s=60)) for _ in range(3)]
        leased = await _lease(harness)
        assert not any(task.done() for task in waiting)
        await _lease(harness, _report(leased, results=[b"{}"]), count=0)
        assert {found.status for found in await asyncio.gather(*waiting) if found} == {WorkloadStatus.COMPLETED}
        assert not harness.store.workloads._waiting

    run_with_store(where, scenario)


def test_added_workloads_are_announced(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        announced: list[tuple[str, int]] = []
        await harness.store.workloads.startup(lambda job_id, count: announced.append((job_id, count)))
        await asyncio.gather(*(_add(harness, b"1") for _ in range(20)))
        queue = await harness.store.workloads.open("greet")
        assert {job_id for job_id, _ in announced} == {queue.job_id}
        assert sum(count for _, count in announced) == 20

    run_with_store(where, scenario)


def test_workloads_whose_transaction_failed_are_not_counted(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        entered, gate = threading.Event(), threading.Event()

        def block(connection: Connection) -> None:
            entered.set()
            gate.wait()

        def roll_back(connection: Connection) -> None:
            connection.exec_driver_sql("ROLLBACK")  # as SQLite does when the disk is full

        await _add(harness, b"1")
        writer = harness.store.workloads._writer
        blocking = asyncio.create_task(writer.run(block))
        await asyncio.to_thread(entered.wait)
        adding = asyncio.create_task(_add(harness, b"2"))  # this and the next one wait, and get one transaction
        while harness.store.workloads._new or not harness.store.workloads._storing:
            await asyncio.sleep(0)
        failing = asyncio.create_task(writer.run(roll_back))
        await asyncio.sleep(0)
        gate.set()
        outcomes = await asyncio.gather(blocking, adding, failing, return_exceptions=True)
        assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, True, True]
        assert harness.store.workloads.count("greet") == 1

    run_with_store(where, scenario)


def test_outcomes_of_the_oldest_workloads_make_room_and_open_ones_do_not(where: Where) -> None:
    async def scenario(harness: StoreHarness) -> None:
        limit, one = harness.store.workloads.limit, 1000 + ENTRY_BYTES
        names = []
        for number in range(10):
            await eventually(lambda: _is_admitted(harness, one, 5 * one))
            names.append(await _add(harness, bytes(1000)))
            if number < 7:
                leased = await _lease(harness)
                await _lease(harness, _report(leased, results=[b"1" * 1000]), count=0)
        known = [await _status(harness, name) for name in names]
        removed = known.count(None)
        completed = [WorkloadStatus.COMPLETED] * (7 - removed)
        assert known == [None] * removed + completed + [WorkloadStatus.IN_QUEUE] * 3
        assert removed >= 4

        async def is_empty_of_outcomes() -> bool:
            with pytest.raises(BusyError):  # the room that is made is too little
                limit.admit("greet", 3 * one, 5 * one)
            harness.clock.now += 1
            return await _status(harness, names[6]) is None

        await eventually(is_empty_of_outcomes)

    run_with_store(where, scenario)


async def _is_admitted(harness: StoreHarness, size_bytes: int, max_bytes: int) -> bool:
    """Try to store; room is made in the background."""
    harness.clock.now += 1
    with suppress(BusyError):
        harness.store.workloads.limit.admit("greet", size_bytes, max_bytes)
        return True
    return False


async def _add(harness: StoreHarness, body: bytes) -> uuid.UUID:
    workload = Workload(uuid.uuid4(), "application/json", body)
    await harness.store.workloads.add("greet", workload)
    return workload.id


async def _lease(harness: StoreHarness, *reports: Report, count: int = 1, worker: str = "w") -> LeaseReply:
    queue = await harness.store.workloads.open("greet")
    return await harness.store.lease(queue.job_id, worker, 1, reports, count, 10**6)


async def _status(harness: StoreHarness, name: uuid.UUID) -> WorkloadStatus | None:
    found = await harness.store.workloads.get("greet", name)
    return found.status if found else None


def _bodies(leased: LeaseReply) -> list[bytes]:
    return [Workload.from_line(batch.payload).body for batch in leased.lease.batches] if leased.lease else []


def _report(leased: LeaseReply, results: Sequence[bytes] = (), error: str | None = None) -> Report:
    assert leased.lease is not None
    seqs = [batch.seq for batch in leased.lease.batches]
    failures = tuple(BatchFailure(seq, error) for seq in seqs) if error is not None else ()
    return Report(leased.lease.token, seqs[-1], failures, tuple(zip(seqs, results, strict=False)))
