"""A store of jobs on a database of its own, with a clock that tests set."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import Engine, func, select

from cortex.jobs.spec import BatchFailure, JobRecord, LeaseReply, Report
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.state.database import Where, open_jobs
from harness.jobs.job_checks import ORIGIN, check_jobs, new_batches, options


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Place:
    """A database with a store over it."""

    def __init__(self, where: Where) -> None:
        self.where, self.clock = where, Clock()
        self.engine: Engine = open_jobs(where)
        self.store = JobStore(self.engine, self.clock)

    async def reopen(self) -> None:
        await self.close()
        self.engine = open_jobs(self.where)
        self.store = JobStore(self.engine, self.clock)
        await self.store.startup()

    async def close(self) -> None:
        await self.store.shutdown()
        self.engine.dispose()

    def count(self, table: Any) -> int:
        with self.engine.begin() as connection:
            return int(connection.execute(select(func.count()).select_from(table)).scalar_one())

    async def create(self, count: int = 3, items: int = 1, **changed: Any) -> JobRecord:
        return await self.store.create(ORIGIN, options(**changed), {"kind": "items"}, new_batches(count, items))

    async def finish(self, job: JobRecord, *failed: int, status: JobStatus = JobStatus.SUCCEEDED) -> None:
        """Resolve every batch with a result, except those that fail, and end the job."""
        reports: list[Report] = []
        while not (leased := await self.lease(job, *reports)).is_done:
            if leased.lease is None:
                self.clock.now += 60
                reports = []
                continue
            seqs = [batch.seq for batch in leased.lease.batches]
            lost = tuple(BatchFailure(seq, "ValueError: bad") for seq in seqs if seq in failed)
            returned = tuple((seq, b"%d" % seq) for seq in seqs if seq not in failed)
            reports = [Report(leased.lease.token, seqs[-1], lost, returned)]
        assert await self.store.change(job.id, status)

    async def lease(self, job: JobRecord, *reports: Report, count: int = 100, worker: str = "w") -> LeaseReply:
        return await self.store.lease(job.id, worker, 1, reports, count, 10**6)


def run(where: Where, use: Callable[[Place], Awaitable[None]]) -> None:
    async def work() -> None:
        place = Place(where)
        await place.store.startup()
        try:
            await use(place)
            with place.engine.begin() as connection:
                check_jobs(connection, has_results=False)
        finally:
            await place.close()

    asyncio.run(work())
