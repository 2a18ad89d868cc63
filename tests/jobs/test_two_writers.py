"""Two operators write to one PostgreSQL database at the same moment, as in a failover: nothing is done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest
from sqlalchemy import Connection, Engine, select

from cortex.errors import ConflictError
from cortex.jobs import schedule_state
from cortex.jobs.batch_queue import exchange
from cortex.jobs.lease_expiry import expire
from cortex.jobs.records import Visibility, mark_deleted
from cortex.jobs.spec import Lease, LeaseReply, Report
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.state.database import open_jobs
from cortex.state.tables import jobs, leases
from harness.jobs.job_checks import ORIGIN, check_jobs, new_batches, options, put_job
from harness.servers.postgres import Postgres
from harness.wait import wait_until

NOW = 1000.0
T, U = TypeVar("T"), TypeVar("U")


class Two:
    """Two operators' connections to one database."""

    def __init__(self, server: Postgres, url: str) -> None:
        self.server, self.url = server, url
        self.one: Engine = open_jobs(url)
        self.other: Engine = open_jobs(url)

    def overlap(self, first: Callable[[Connection], T], second: Callable[[Connection], U]) -> tuple[T, U]:
        """Do `first` and, before it is committed, begin with `second`; return what both return."""
        with ThreadPoolExecutor(1) as pool:
            with self.one.begin() as connection:
                done = first(connection)
                doing = pool.submit(self._do, second)
                wait_until(lambda: doing.done() or self._someone_waits())
            return done, doing.result(30)

    def do(self, work: Callable[[Connection], T]) -> T:
        with self.one.begin() as connection:
            return work(connection)

    def check(self) -> None:
        self.do(partial(check_jobs, has_results=False))

    def _do(self, work: Callable[[Connection], T]) -> T:
        with self.other.begin() as connection:
            return work(connection)

    def _someone_waits(self) -> bool:
        here = "datname = current_database() AND wait_event_type = 'Lock'"
        with self.server.connect(self.url.rpartition("/")[2]) as connection:
            return connection.execute(f"SELECT 1 FROM pg_stat_activity WHERE {here}").fetchone() is not None


@pytest.fixture
def two(postgres: Postgres, postgresql_url: str) -> Iterator[Two]:
    both = Two(postgres, postgresql_url)
    yield both
    both.one.dispose()
    both.other.dispose()


def ask(job: str, worker: str, *reports: Report, count: int = 1) -> Callable[[Connection], LeaseReply]:
    return lambda connection: exchange(connection, job, worker, 1, reports, count, 10**6, NOW)


def lease_of(leased: LeaseReply) -> Lease:
    assert leased.lease is not None
    return leased.lease


def all_of(lease: Lease) -> Report:
    return Report(lease.token, lease.batches[-1].seq)


def status(connection: Connection) -> str:
    found: str = connection.execute(select(jobs.c.status)).scalar_one()
    return found


def test_the_last_two_batches_reported_at_once_complete_the_job(two: Two) -> None:
    job = two.do(lambda connection: put_job(connection, 2))
    one, other = (lease_of(two.do(ask(job, worker))) for worker in "ab")
    two.overlap(ask(job, "a", all_of(one), count=0), ask(job, "b", all_of(other), count=0))
    assert two.do(status) == JobStatus.COMPLETING
    two.check()


def test_batches_asked_for_twice_at_once_are_leased_once(two: Two) -> None:
    job = two.do(lambda connection: put_job(connection, 6))
    one, other = two.overlap(ask(job, "a", count=4), ask(job, "b", count=4))
    assert [batch.seq for batch in lease_of(one).batches] == [0, 1, 2, 3]
    assert [batch.seq for batch in lease_of(other).batches] == [4, 5]
    two.check()


def test_a_report_that_is_sent_twice_at_once_counts_once(two: Two) -> None:
    job = two.do(lambda connection: put_job(connection, 2))
    lease = lease_of(two.do(ask(job, "a")))
    again = ask(job, "a", all_of(lease), count=0)
    assert two.overlap(again, again)[1].lost == (lease.token,)
    two.check()


def test_a_lease_that_expires_while_it_is_reported_is_recorded_once(two: Two) -> None:
    job = two.do(lambda connection: put_job(connection, 2))
    lease = lease_of(two.do(ask(job, "a")))
    two.overlap(ask(job, "a", all_of(lease), count=0), lambda connection: expire(connection, NOW + 100))
    assert [batch.seq for batch in lease_of(two.do(ask(job, "b", count=9))).batches] == [1]
    two.check()


@pytest.mark.parametrize("is_deleted_first", [True, False])
def test_a_job_deleted_while_a_worker_asks_for_it_has_no_lease(two: Two, is_deleted_first: bool) -> None:
    job = two.do(lambda connection: put_job(connection, 2))

    def delete(connection: Connection) -> list[str]:
        return mark_deleted(connection, [job])

    if is_deleted_first:
        assert two.overlap(delete, ask(job, "a"))[1].is_done
    else:
        two.overlap(ask(job, "a"), delete)
    assert two.do(lambda connection: connection.execute(select(leases)).all()) == []
    assert two.do(lambda connection: connection.execute(select(jobs.c.presence)).scalar_one()) == Visibility.DELETED


def test_what_is_due_is_submitted_once_by_two_schedules(two: Two) -> None:
    two.do(partial(schedule_state.start, api=ORIGIN.api, key="k", at=0.0))

    def submit(connection: Connection) -> str:
        job = put_job(connection, 1)
        schedule_state.claim(connection, job, ORIGIN.api, "k", 60.0)
        return job

    with pytest.raises(ConflictError, match="submitted before"):
        two.overlap(submit, submit)
    assert len(two.do(lambda connection: connection.execute(select(jobs)).all())) == 1


def test_two_stores_work_through_one_job_together(two: Two) -> None:
    async def work(store: JobStore, job: str, worker: str) -> list[int]:
        done: list[int] = []
        reports: list[Report] = []
        while not (leased := await store.lease(job, worker, 1, reports, 3, 10**6)).is_done:
            assert not leased.lost
            reports = []
            if leased.lease is not None:
                seqs = [batch.seq for batch in leased.lease.batches]
                done += seqs
                reports = [Report(leased.lease.token, seqs[-1], (), tuple((seq, b"1") for seq in seqs))]
        return done

    async def use() -> None:
        stores = [JobStore(engine) for engine in (two.one, two.other)]
        for store in stores:
            await store.startup()
        job = await stores[0].create(ORIGIN, options(), {}, new_batches(100))
        done = await asyncio.gather(*(work(stores[n % 2], job.id, f"w{n}") for n in range(4)))
        assert sorted(seq for each in done for seq in each) == list(range(100))
        found = await stores[1].get(job.id)
        assert found is not None and found.status is JobStatus.COMPLETING
        for store in stores:
            await store.shutdown()

    asyncio.run(use())
    two.check()
