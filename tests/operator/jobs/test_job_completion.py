"""Completion of jobs during a database outage and across a crash of the operator."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cortex.home import Home
from cortex.jobs.spec import HOOK_SEQ, Assignment, JobOptions, JobOrigin, JobRecord, NewBatch, Report
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.operator.jobs.completion import JobCompletion, JobLog
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.state.database import JOB_MIGRATIONS, open_sqlite
from cortex.telemetry import Logger
from harness.wait import PATIENCE_S

ORIGIN = JobOrigin("sum", "api-id", "spec-id", "r1", "project", "{}")
#: A database that is locked says so soon.
PRAGMAS = ("busy_timeout = 20", "journal_mode = WAL")


@dataclass
class Scene:
    """Dispatcher and completion without an engine, and the worker `w`, process 7."""

    folder: Path
    store: JobStore
    dispatcher: Dispatcher
    completion: JobCompletion

    async def resolved(
        self, options: JobOptions, source: dict[str, bool] | None = None, networking: dict[str, list[str]] | None = None
    ) -> JobRecord:
        """Return a job whose only batch has succeeded."""
        origin = replace(ORIGIN, spec=json.dumps({"networking": networking or {}}))
        job = await self.store.create(origin, options, source or {}, [NewBatch(1, b"[1]")])
        self.dispatcher.assign("w", Assignment(job.id, {}, {}, {}, "log", 30.0))
        leased = await self.dispatcher.exchange("w", 7, job.id, (), 1, 1000, 0)
        assert leased.lease is not None
        report = Report(leased.lease.token, 0, results=((0, b'"one"'),))
        await self.dispatcher.exchange("w", 7, job.id, (report,), 0, 0, 0)
        record = await self.store.get(job.id)
        assert record is not None and record.status is JobStatus.COMPLETING
        return record

    async def ended(self, job: JobRecord) -> JobRecord:
        """Complete a job as the control loop does, pass after pass, with its worker."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                record = await self.store.get(job.id)
                assert record is not None
                if record.status.is_over:
                    return record
                self.completion.begin(record, lambda: None)
                asked = await self.dispatcher.exchange("w", 7, job.id, (), 1, 1000, 0.05)
                if asked.lease:
                    await self.dispatcher.exchange("w", 7, job.id, (Report(asked.lease.token, HOOK_SEQ),), 0, 0, 0)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Scene]:
    engine = open_sqlite(folder / "jobs.db", JOB_MIGRATIONS, PRAGMAS)
    store, logger = JobStore(engine), Logger("test")
    await store.startup()
    dispatcher = Dispatcher(store, asyncio.Event())
    completion = JobCompletion(store, JobLog(Home(folder)), {}, logger)
    try:
        yield Scene(folder, store, dispatcher, completion)
    finally:
        await completion.shutdown()
        await store.shutdown()
        engine.dispose()


async def test_stores_the_end_of_a_job_after_a_database_outage(tmp_path: Path) -> None:
    async with opened(tmp_path) as made:
        job = await made.resolved(JobOptions(1, output=str(tmp_path / "out")))
        with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            failed = asyncio.Event()
            made.completion.begin(job, failed.set)
            part = tmp_path / "out" / job.id / "part-00000.ndjson"
            async with asyncio.timeout(PATIENCE_S):
                while not part.exists():
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # neither marks nor statuses can be stored
            other.execute("ROLLBACK")
        assert (await made.ended(job)).status is JobStatus.SUCCEEDED
        assert json.loads(part.read_text())["result"] == "one"


async def told(folder: Path, webhook: Callable[[str], Awaitable[None]]) -> bytes:
    """Run `webhook` with a URL and return the request posted to it."""
    bodies: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        bodies.put_nowait(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(receive, "127.0.0.1", 0) as server:
        await webhook(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        async with asyncio.timeout(PATIENCE_S):
            return await bodies.get()


async def test_the_next_operator_sends_an_unsent_webhook(tmp_path: Path) -> None:
    jobs: list[str] = []

    async def webhook(url: str) -> None:
        async with opened(tmp_path) as first:
            jobs.append((await first.ended(await first.resolved(JobOptions(1, webhook=url)))).id)
        second = await stack.enter_async_context(opened(tmp_path))
        await second.completion.startup()

    async with AsyncExitStack() as stack:
        body = json.loads(await told(tmp_path, webhook))
    assert body["job_status"]["job_id"] == jobs[0]
    assert body["job_status"]["status"] == "succeeded"


async def test_sends_a_webhook_with_integers_of_any_size(tmp_path: Path) -> None:
    async def webhook(url: str) -> None:
        made = await stack.enter_async_context(opened(tmp_path))
        made.completion.notify_end(await made.ended(await made.resolved(JobOptions(1, {"n": 10**40}, webhook=url))))

    async with AsyncExitStack() as stack:
        body = json.loads(await told(tmp_path, webhook))
    assert body["job_status"]["config"] == {"n": 10**40}


@pytest.mark.parametrize(("hosts", "sent"), [([], 0), (["127.0.0.0/8"], 1)])
async def test_a_webhook_from_the_endpoint_reaches_no_private_address(
    tmp_path: Path, hosts: list[str], sent: int
) -> None:
    arrived: list[object] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async with opened(tmp_path) as made, await asyncio.start_server(receive, "127.0.0.1", 0) as server:
        options = JobOptions(1, webhook=f"http://localhost:{server.sockets[0].getsockname()[1]}/")
        ended = await made.ended(await made.resolved(options, {"from_endpoint": True}, {"webhook_hosts": hosts}))
        made.completion.notify_end(ended)
        log = tmp_path / "logs/sum" / ended.id / "job.log"
        words = "which is not public; use `cortex submit`"
        async with asyncio.timeout(PATIENCE_S):
            while not arrived and not (log.exists() and words in log.read_text()):
                await asyncio.sleep(0.01)
    assert len(arrived) == sent
