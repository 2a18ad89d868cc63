"""Schedules over real stores, with a clock that tests set; no operator runs, so no job begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cortex.config.schema import Api
from cortex.engine.environment import Prepared
from cortex.engine.local import LocalEngine
from cortex.home import Home
from cortex.jobs.records import list_jobs
from cortex.jobs.spec import JobRecord
from cortex.jobs.store import JobStore
from cortex.operator.jobs.schedules import Schedules
from cortex.operator.jobs.service import JobService
from cortex.operator.jobs.supervisor import JobSupervisor
from cortex.operator.replicas.preparations import Preparations
from cortex.state.apis import ApiChange, ApiStore, Target
from cortex.state.database import open_jobs_sqlite, open_sqlite
from cortex.telemetry import Logger

Clock = Callable[[], float]


def task_api(name: str = "train", **schedule: Any) -> Api:
    schedule = {"cron": "* * * * *"} | schedule
    handler = {"interface": "handler", "type": "python", "path": "task.py"}
    return Api.model_validate(
        {"name": name, "kind": "TaskAPI", "networking": {}, "handler": handler, "schedule": schedule}
    )


class Scene:
    """All objects that a schedule uses."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        home = Home(folder)
        home.create()
        self._databases = open_sqlite(home.database_file), open_jobs_sqlite(home.jobs_database_file)
        self.apis = ApiStore(self._databases[0], now=lambda: datetime.fromtimestamp(clock(), UTC))
        self.store = JobStore(self._databases[1], clock)
        logger = Logger("test")
        preparations = Preparations(_never, lambda: None, clock, logger)
        engine = LocalEngine(home, {}, logger)
        supervisor = JobSupervisor(home, self.apis, self.store, engine, preparations, {}, str, logger, clock)
        self.jobs = JobService(self.apis, self.store, supervisor, {}, lambda api: api.networking.endpoint)
        self.schedules = Schedules(self.apis, self.store, self.jobs, logger, clock)

    def deploy(self, *apis: Api) -> None:
        self.apis.write([ApiChange(Target(f"r-{api.name}", api, "p1"), "n", "s1") for api in apis])

    async def submit_due(self) -> None:
        """Submit all due jobs, and wait for the end."""
        await asyncio.gather(*await self.schedules.submit_due())

    async def submitted(self, api: str = "train") -> list[JobRecord]:
        """Return the jobs that were submitted, the oldest first."""
        return list(reversed(await self.store.read(list_jobs, api, 100_000)))

    async def runs(self, api: str = "train") -> list[float]:
        """Return the times at which the jobs were due."""
        return [job.source["scheduled_for"] for job in await self.submitted(api)]

    def dispose(self) -> None:
        for database in self._databases:
            database.dispose()


@asynccontextmanager
async def scene(folder: Path, clock: Clock) -> AsyncIterator[Scene]:
    made = Scene(folder, clock)
    await made.store.startup()
    try:
        yield made
    finally:
        await made.store.shutdown()
        made.dispose()


async def _never(target: Target) -> Prepared:
    raise AssertionError("nothing runs here")
