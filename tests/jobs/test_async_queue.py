"""The queues of AsyncAPIs over a real database."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update

from cortex.errors import InputError
from cortex.jobs.async_queue import KEPT_S
from cortex.jobs.records import list_jobs, summarize
from cortex.jobs.spec import BatchFailure, LeaseReply, Report, Workload
from cortex.lifecycle import WorkloadStatus
from cortex.state.database import Where
from cortex.state.tables import KEYS_PER_JOB, batches, dead_letters, jobs, pending, results, workloads
from harness.jobs.store_place import Place, run


@given(body=st.binary(), content_type=st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_workload_is_one_line_and_reads_back(body: bytes, content_type: str) -> None:
    workload = Workload(uuid.uuid4(), content_type, body)
    line = workload.to_line()
    assert b"\n" not in line
    assert Workload.from_line(line) == workload


def test_workload_goes_through_its_queue(where: Where) -> None:
    async def use(place: Place) -> None:
        name = await _add(place, b"7")
        assert await _status(place, name) is WorkloadStatus.IN_QUEUE
        leased = await _lease(place)
        assert _bodies(leased) == [b"7"]
        assert await _status(place, name) is WorkloadStatus.IN_PROGRESS
        place.clock.now += 5
        await _lease(place, _report(leased, results=[b'{"a":1}']), count=0)
        found = await place.store.workloads.get("greet", name)
        assert found is not None
        assert (found.status, found.value) == (WorkloadStatus.COMPLETED, b'{"a":1}')
        assert (found.created_at, found.ended_at) == (1000.0, 1005.0)
        assert [place.count(table) for table in (batches, results, dead_letters, pending)] == [0, 0, 0, 0]

    run(where, use)


def test_exception_is_final(where: Where) -> None:
    async def use(place: Place) -> None:
        names = [await _add(place, b"1"), await _add(place, b"2")]
        for name in names:
            leased = await _lease(place)
            await _lease(place, _report(leased, error="ValueError: bad \udcff"), count=0)
            found = await place.store.workloads.get("greet", name)
            assert found is not None
            assert (found.status, found.value) == (WorkloadStatus.FAILED, b"ValueError: bad ?")
        assert place.store.workloads.count("greet") == 0

    run(where, use)


def test_death_is_tried_again_then_final(where: Where) -> None:
    async def use(place: Place) -> None:
        name = await _add(place, b"1")
        for _ in range(3):
            assert await _status(place, name) is WorkloadStatus.IN_QUEUE
            place.clock.now += 60
            assert (await _lease(place)).lease is not None
            await place.store.release("w", 1, "segmentation fault")
        found = await place.store.workloads.get("greet", name)
        assert found is not None
        assert found.status is WorkloadStatus.FAILED
        assert found.value == b"the worker's process died: segmentation fault"
        assert place.store.workloads.count("greet") == 0
        assert place.count(dead_letters) == 0

    run(where, use)


def test_queue_goes_on_after_it_was_empty_and_after_a_restart(where: Where) -> None:
    async def use(place: Place) -> None:
        for round in range(3):
            names = await asyncio.gather(*(_add(place, b"%d" % n) for n in range(40)))
            assert place.store.workloads.count("greet") == 40
            done = 0
            while done < 40:
                leased = await _lease(place, count=100)
                assert leased.lease is not None
                assert len(leased.lease.batches) <= 3  # a share of what is open: others may come for the rest
                await _lease(place, _report(leased, results=[b"{}"] * len(leased.lease.batches)), count=0)
                done += len(leased.lease.batches)
            assert (await _lease(place)).is_done is False
            assert {await _status(place, name) for name in names} == {WorkloadStatus.COMPLETED}
            if round == 1:
                await place.reopen()
        assert place.count(pending) == 0
        assert place.store.workloads.count("greet") == 0

    run(where, use)


def test_report_that_comes_twice_or_too_late_changes_nothing(where: Where) -> None:
    async def use(place: Place) -> None:
        name = await _add(place, b"1")
        lost = await _lease(place)
        await place.store.release("w", 1)
        leased = await _lease(place, worker="v")
        assert (await _lease(place, _report(lost, results=[b'{"by":"w"}']), count=0)).lost
        report = _report(leased, results=[b'{"by":"v"}'])
        await _lease(place, report, worker="v", count=0)
        await _lease(place, report, worker="v", count=0)
        found = await place.store.workloads.get("greet", name)
        assert found is not None
        assert found.value == b'{"by":"v"}'

    run(where, use)


def test_queues_are_no_jobs(where: Where) -> None:
    async def use(place: Place) -> None:
        await _add(place, b"1")
        (api,) = place.store.workloads.apis
        standing = await place.store.workloads.open(api)
        assert await place.store.get(standing.job_id) is None
        assert not await place.store.active()
        assert not await place.store.read(list_jobs, api)
        assert not await place.store.read(summarize)
        assert not await place.store.clean(keep=0)
        assert place.store.workloads.count(api) == 1

    run(where, use)


def test_queues_do_not_share_workloads(where: Where) -> None:
    async def use(place: Place) -> None:
        name = await _add(place, b"1")
        await place.store.workloads.open("other")
        assert await place.store.workloads.get("other", name) is None
        assert await place.store.workloads.get("nobody", name) is None
        assert await place.store.workloads.get("greet", uuid.uuid4()) is None
        await place.store.workloads.close("greet")
        assert await place.store.workloads.get("greet", name) is None
        await place.store.clean()
        assert [place.count(table) for table in (batches, workloads, pending)] == [0, 0, 0]
        assert place.count(jobs) == 1

    run(where, use)


def test_queue_that_has_used_up_its_numbers_begins_anew(where: Where) -> None:
    async def use(place: Place) -> None:
        old = await _add(place, b"1")
        await _lease(place, _report(await _lease(place), results=[b"{}"]), count=0)
        with place.engine.begin() as connection:
            connection.execute(update(jobs).values(next_seq=KEYS_PER_JOB - 2))
        assert await _status(place, await _add(place, b"2")) is WorkloadStatus.IN_QUEUE  # what is old can be asked for
        place.clock.now += KEPT_S + 1
        await place.store.clean()
        assert await _status(place, old) is None
        with pytest.raises(InputError):  # numbers must not begin anew below what is open
            await _add(place, b"3")
        await _lease(place, _report(await _lease(place), results=[b"{}"]), count=0)
        names = [await _add(place, b"%d" % number) for number in (4, 5)]
        assert [place.count(table) for table in (batches, pending)] == [2, 1]
        assert _bodies(await _lease(place, count=2)) == [b"4"]
        assert _bodies(await _lease(place)) == [b"5"]
        assert {await _status(place, name) for name in names} == {WorkloadStatus.IN_PROGRESS}
        assert place.store.workloads.count("greet") == 2

    run(where, use)


def test_ended_workloads_are_kept_for_a_week(where: Where) -> None:
    async def use(place: Place) -> None:
        names = [await _add(place, b"1"), await _add(place, b"2")]
        await _lease(place, _report(await _lease(place), results=[b"{}"]), count=0)
        place.clock.now += KEPT_S - 1
        await place.store.clean()
        assert await _status(place, names[0]) is WorkloadStatus.COMPLETED
        place.clock.now += 2
        await place.store.clean()
        assert await _status(place, names[0]) is None
        assert await _status(place, names[1]) is WorkloadStatus.IN_QUEUE

    run(where, use)


def test_waiting_ends_with_the_workload(where: Where) -> None:
    async def use(place: Place) -> None:
        name = await _add(place, b"1")
        waiting = [asyncio.create_task(place.store.workloads.get("greet", name, wait_s=60)) for _ in range(3)]
        leased = await _lease(place)
        assert not any(task.done() for task in waiting)
        await _lease(place, _report(leased, results=[b"{}"]), count=0)
        assert {found.status for found in await asyncio.gather(*waiting) if found} == {WorkloadStatus.COMPLETED}
        assert not place.store.workloads._waiting

    run(where, use)


def test_new_workloads_are_told(where: Where) -> None:
    async def use(place: Place) -> None:
        told: list[tuple[str, int]] = []
        await place.store.workloads.startup(lambda job_id, count: told.append((job_id, count)))
        await asyncio.gather(*(_add(place, b"1") for _ in range(20)))
        standing = await place.store.workloads.open("greet")
        assert {job_id for job_id, _ in told} == {standing.job_id}
        assert sum(count for _, count in told) == 20

    run(where, use)


async def _add(place: Place, body: bytes) -> uuid.UUID:
    workload = Workload(uuid.uuid4(), "application/json", body)
    await place.store.workloads.add("greet", workload)
    return workload.id


async def _lease(place: Place, *reports: Report, count: int = 1, worker: str = "w") -> LeaseReply:
    standing = await place.store.workloads.open("greet")
    return await place.store.lease(standing.job_id, worker, 1, reports, count, 10**6)


async def _status(place: Place, name: uuid.UUID) -> WorkloadStatus | None:
    found = await place.store.workloads.get("greet", name)
    return found.status if found else None


def _bodies(leased: LeaseReply) -> list[bytes]:
    return [Workload.from_line(batch.payload).body for batch in leased.lease.batches] if leased.lease else []


def _report(leased: LeaseReply, results: Sequence[bytes] = (), error: str | None = None) -> Report:
    assert leased.lease is not None
    seqs = [batch.seq for batch in leased.lease.batches]
    failures = tuple(BatchFailure(seq, error) for seq in seqs) if error is not None else ()
    return Report(leased.lease.token, seqs[-1], failures, tuple(zip(seqs, results, strict=False)))
