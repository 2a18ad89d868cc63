"""Schedules with real stores and a settable clock. No operator runs, so jobs stay pending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from cortex.config.schema import Api
from cortex.engine.environment import Prepared
from cortex.engine.local import LocalEngine
from cortex.home import Home
from cortex.jobs.records import list_jobs
from cortex.jobs.spec import JobRecord
from cortex.jobs.store import JobStore
from cortex.operator.jobs.async_apis import AsyncApis
from cortex.operator.jobs.completion import JobLog
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.operator.jobs.reconciler import JobReconciler
from cortex.operator.jobs.schedules import Schedules
from cortex.operator.jobs.service import JobService
from cortex.operator.jobs.workers import JobWorkers
from cortex.operator.revisions.preparations import Preparations
from cortex.state.database import open_jobs_sqlite, open_sqlite
from cortex.state.queries.apis import ApiChange, ApiStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger

Clock = Callable[[], float]


def task_api(name: str = "train", **schedule: Any) -> Api:
    schedule = {"cron": "* * * * *"} | schedule
    handler = {"interface": "handler", "type": "python", "path": "task.py"}
    return Api.model_validate(
        {"name": name, "kind": "TaskAPI", "networking": {}, "handler": handler, "schedule": schedule}
    )


class ScheduleHarness:
    """Schedules with their stores and job service."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self.databases = open_sqlite(home.database_file), open_jobs_sqlite(home.jobs_database_file)
        self.apis = ApiStore(self.databases[0], now=lambda: datetime.fromtimestamp(clock(), UTC))
        self.store = JobStore(self.databases[1], clock)
        logger = Logger("test")
        preparations = Preparations(_reject_preparation, lambda: None, clock, logger)
        engine = LocalEngine(home, {}, logger)
        dispatcher = Dispatcher(self.store, asyncio.Event(), clock)
        workers = JobWorkers(engine, self.store, dispatcher, str, JobLog(home).line, logger, clock)
        reconciler = JobReconciler(home, self.apis, self.store, workers, preparations, {}, logger, clock)
        self.jobs = JobService(self.apis, self.store, reconciler, {}, lambda api: api.networking.endpoint)
        self.async_apis = AsyncApis(home, self.apis, self.store.workloads, engine, workers)
        self.schedules = Schedules(self.apis, self.store, self.jobs, logger, clock)

    def deploy(self, *apis: Api) -> None:
        self.apis.write([ApiChange(Revision(f"r-{api.name}", api, "p1"), "n", "s1") for api in apis])

    async def submit_due(self) -> None:
        """Submit all due runs and wait until they are stored."""
        await asyncio.gather(*await self.schedules.submit_due())

    async def submitted(self, api: str = "train") -> list[JobRecord]:
        """Return the submitted jobs, oldest first."""
        return list(reversed(await self.store.read(list_jobs, api, 100_000)))

    async def runs(self, api: str = "train") -> list[float]:
        """Return the due times of the submitted jobs."""
        return [job.source["scheduled_for"] for job in await self.submitted(api)]

    def dispose(self) -> None:
        for database in self.databases:
            database.dispose()


@asynccontextmanager
async def open_schedules(home: Home, clock: Clock) -> AsyncIterator[ScheduleHarness]:
    made = ScheduleHarness(home, clock)
    await made.store.startup()
    try:
        yield made
    finally:
        await made.store.shutdown()
        made.dispose()


async def _reject_preparation(revision: Revision) -> Prepared:
    raise AssertionError("no job starts in these tests")
