"""A store of jobs on a database of its own, opened for a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cortex.jobs.store import JobStore
from cortex.state.database import open_jobs_sqlite


@asynccontextmanager
async def opened_store(folder: Path) -> AsyncIterator[JobStore]:
    """Open the store in a folder, and close it at the end."""
    engine = open_jobs_sqlite(folder / "jobs.db")
    store = JobStore(engine)
    await store.startup()
    try:
        yield store
    finally:
        await store.shutdown()
        engine.dispose()
