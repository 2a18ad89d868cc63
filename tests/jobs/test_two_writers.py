"""TwoOperators operators write to one PostgreSQL database concurrently, as in a failover: nothing is done twice."""

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
from cortex.jobs.records import Presence, mark_deleted
from cortex.jobs.spec import Lease, LeaseReply, Report
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.state.database import open_jobs
from cortex.state.tables import jobs, leases
from harness.jobs.job_checks import ORIGIN, check_jobs, new_batches, options, put_job
from harness.servers.postgres import Postgres
from harness.wait import wait_until

pytestmark = pytest.mark.processes

NOW = 1000.0
T, U = TypeVar("T"), TypeVar("U")


class TwoOperators:
    """TwoOperators operators' connections to one database."""

    def __init__(self, server: Postgres, url: str) -> None:
        self.server, self.url = server, url
        self.one: Engine = open_jobs(url)
        self.other: Engine = open_jobs(url)

    def overlap(self, first: Callable[[Connection], T], second: Callable[[Connection], U]) -> tuple[T, U]:
        """Start `second` before the transaction of `first` is committed; return both results."""
        with ThreadPoolExecutor(1) as pool:
            with self.one.begin() as connection:
                done = first(connection)
                pending = pool.submit(self._do, second)
                wait_until(lambda: pending.done() or self._has_lock_waiter())
            return done, pending.result(30)

    def do(self, work: Callable[[Connection], T]) -> T:
        with self.one.begin() as connection:
            return work(connection)

    def check(self) -> None:
        self.do(partial(check_jobs, has_results=False))

    def _do(self, work: Callable[[Connection], T]) -> T:
        with self.other.begin() as connection:
            return work(connection)

    def _has_lock_waiter(self) -> bool:
        here = "datname = current_database() AND wait_event_type = 'Lock'"
        with self.server.connect(self.url.rpartition("/")[2]) as connection:
            return connection.execute(f"SELECT 1 FROM pg_stat_activity WHERE {here}").fetchone() is not None


@pytest.fixture
def two(postgres: Postgres, postgresql_url: str) -> Iterator[TwoOperators]:
    both = TwoOperators(postgres, postgresql_url)
    yield both
    both.one.dispose()
    both.other.dispose()


def exchange_of(job: str, worker: str, *reports: Report, count: int = 1) -> Callable[[Connection], LeaseReply]:
    return lambda connection: exchange(connection, job, worker, 1, reports, count, 10**6, NOW)


def require_lease(leased: LeaseReply) -> Lease:
    assert leased.lease is not None
    return leased.lease


def full_report(lease: Lease) -> Report:
    return Report(lease.token, lease.batches[-1].seq)


def status(connection: Connection) -> str:
    found: str = connection.execute(select(jobs.c.status)).scalar_one()
    return found


def test_concurrent_reports_of_the_last_two_batches_complete_the_job(two: TwoOperators) -> None:
    job = two.do(lambda connection: put_job(connection, 2))
    one, other = (require_lease(two.do(exchange_of(job, worker))) for worker in "ab")
    two.overlap(exchange_of(job, "a", full_report(one), count=0), exchange_of(job, "b", full_report(other), count=0))
    assert two.do(status) == JobStatus.COMPLETING
    two.check()


def test_concurrent_requests_lease_different_batches(two: TwoOperators) -> None:
    job = two.do(lambda connection: put_job(connection, 6))
    one, other = two.overlap(exchange_of(job, "a", count=4), exchange_of(job, "b", count=4))
    assert [batch.seq for batch in require_lease(one).batches] == [0, 1, 2, 3]
    assert [batch.seq for batch in require_lease(other).batches] == [4, 5]
    two.check()


def test_concurrent_duplicate_reports_count_once(two: TwoOperators) -> None:
    job = two.do(lambda connection: put_job(connection, 2))
    lease = require_lease(two.do(exchange_of(job, "a")))
    again = exchange_of(job, "a", full_report(lease), count=0)
    assert two.overlap(again, again)[1].lost == (lease.token,)
    two.check()


def test_a_lease_that_expires_during_its_report_is_recorded_once(two: TwoOperators) -> None:
    job = two.do(lambda connection: put_job(connection, 2))
    lease = require_lease(two.do(exchange_of(job, "a")))
    two.overlap(exchange_of(job, "a", full_report(lease), count=0), lambda connection: expire(connection, NOW + 100))
    assert [batch.seq for batch in require_lease(two.do(exchange_of(job, "b", count=9))).batches] == [1]
    two.check()


@pytest.mark.parametrize("is_deleted_first", [True, False])
def test_a_job_deleted_during_a_lease_request_has_no_lease(two: TwoOperators, is_deleted_first: bool) -> None:
    job = two.do(lambda connection: put_job(connection, 2))

    def delete(connection: Connection) -> list[str]:
        return mark_deleted(connection, [job])

    if is_deleted_first:
        assert two.overlap(delete, exchange_of(job, "a"))[1].is_done
    else:
        two.overlap(exchange_of(job, "a"), delete)
    assert two.do(lambda connection: connection.execute(select(leases)).all()) == []
    assert two.do(lambda connection: connection.execute(select(jobs.c.presence)).scalar_one()) == Presence.DELETED


def test_a_due_run_is_submitted_once_by_two_operators(two: TwoOperators) -> None:
    two.do(partial(schedule_state.start, api=ORIGIN.api, key="k", at=0.0))

    def submit(connection: Connection) -> str:
        job = put_job(connection, 1)
        schedule_state.claim(connection, job, ORIGIN.api, "k", 60.0)
        return job

    with pytest.raises(ConflictError, match="submitted before"):
        two.overlap(submit, submit)
    assert len(two.do(lambda connection: connection.execute(select(jobs)).all())) == 1


def test_two_stores_lease_batches_of_one_job(two: TwoOperators) -> None:
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
