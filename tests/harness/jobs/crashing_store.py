"""A process that uses a job store until it is killed, and prints each acknowledged change as a line of JSON.

Run as `python crashing_store.py DATABASE SEED [--keep-log]`. With `--keep-log` all changes stay in the write-ahead log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.event import listen

from cortex.errors import DatabaseUnavailableError
from cortex.jobs.batch_queue import add_hook
from cortex.jobs.lease_expiry import holders
from cortex.jobs.spec import HOOK_SEQ, BatchFailure, JobRecord, Report
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.state.database import open_jobs
from harness.jobs.job_checks import ORIGIN, new_batches, options


def print_event(event: str, job: str, **facts: Any) -> None:
    os.write(1, (json.dumps({"event": event, "job": job} | facts) + "\n").encode())


async def submit(store: JobStore, chance: random.Random) -> None:
    while True:
        if chance.random() < 0.5:
            count = chance.choice([3, 40, 1500])
            job = await store.create(ORIGIN, options(max_attempts=2), {}, new_batches(count, 2))
            print_event("created", job.id, batches=count)
            continue
        job = await store.create(ORIGIN, options(isolate_failures=True, max_attempts=1), {}, None)
        print_event("created", job.id, batches=0)
        total = 0
        for count in (30, 500, 7):
            await store.add_batches(job.id, new_batches(count, 4))
            total += count
            print_event("created", job.id, batches=total)
        await store.finish_enqueuing(job.id)


async def work(store: JobStore, worker: str, seed: int, chance: random.Random, executions: Iterator[int]) -> None:
    while True:
        active = [job for job in await store.active() if job.status is not JobStatus.ENQUEUING]
        completing = [job for job in active if job.status is JobStatus.COMPLETING]
        if active:
            await work_at(store, chance.choice(completing or active), worker, seed, chance, executions)
        await asyncio.sleep(0)


async def work_at(
    store: JobStore, job: JobRecord, worker: str, seed: int, chance: random.Random, executions: Iterator[int]
) -> None:
    reports: list[Report] = []
    for _ in range(chance.randrange(1, 30)):
        leased = await store.lease(job.id, worker, os.getpid(), reports, chance.choice([1, 8, 64]), 10**6)
        for report in reports:
            if report.token not in leased.lost:
                print_event("recorded", job.id, results={seq: value.decode() for seq, value in report.results})
                if report.upto == HOOK_SEQ:
                    print_event("over", job.id)
        if leased.is_done:
            await store.write(add_hook, job.id)
        if leased.lease is None:
            break
        seqs = [batch.seq for batch in leased.lease.batches]
        failed = [seq for seq in seqs if chance.random() < 0.05]
        value = f'"{seed} {worker} {next(executions)}"'.encode()
        returned = tuple((seq, value) for seq in seqs if seq not in failed and seq != HOOK_SEQ)
        reports = [Report(leased.lease.token, seqs[-1], tuple(BatchFailure(s, "ValueError") for s in failed), returned)]
        if chance.random() < 0.1:
            await store.release(worker, None, cause="killed")
    await store.release(worker, None)


async def retry_forever(do: Callable[[], Awaitable[None]]) -> None:
    """Repeat an operation, also after the database was unreachable; failed operations were not acknowledged."""
    while True:
        with contextlib.suppress(DatabaseUnavailableError):
            await do()


async def main() -> None:
    where: Path | str = sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1])
    seed = int(sys.argv[2])
    engine = open_jobs(where)
    if "--keep-log" in sys.argv:
        engine.dispose()
        listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA wal_autocheckpoint = 0"))
    store = JobStore(engine)
    await store.startup()
    for worker, _ in await store.read(holders):
        await store.release(worker, None, cause="killed")
    print_event("started", "")
    tasks = [retry_forever(partial(submit, store, random.Random(seed)))]
    for number in range(3):
        chance = random.Random(seed * 10 + number)
        tasks.append(retry_forever(partial(work, store, f"w{number}", seed, chance, itertools.count(1))))
    await asyncio.gather(*tasks)


asyncio.run(main())
