"""Job stores on databases of their own, optionally with a clock that tests set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, func, select

from cortex.jobs.spec import BatchFailure, JobRecord, LeaseReply, Report
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.state.database import Where, open_jobs, open_jobs_sqlite
from harness.jobs.job_checks import ORIGIN, check_jobs, new_batches, options


class Clock:
    """A clock with a settable time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class StoreHarness:
    """A job store with its database and clock."""

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
        """Report a result for every batch, or a failure for those in `failed`, and end the job with `status`."""
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


def run_with_store(where: Where, scenario: Callable[[StoreHarness], Awaitable[None]]) -> None:
    """Run a scenario with a new store; check the invariants of its database at the end."""

    async def run() -> None:
        harness = StoreHarness(where)
        await harness.store.startup()
        try:
            await scenario(harness)
            with harness.engine.begin() as connection:
                check_jobs(connection, has_results=False)
        finally:
            await harness.close()

    asyncio.run(run())


@asynccontextmanager
async def open_job_store(folder: Path) -> AsyncIterator[JobStore]:
    """Open the store in a folder, and close it at the end."""
    engine = open_jobs_sqlite(folder / "jobs.db")
    store = JobStore(engine)
    await store.startup()
    try:
        yield store
    finally:
        await store.shutdown()
        engine.dispose()
