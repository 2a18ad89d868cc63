"""Measure the rate at which batches are leased and reported, with SQLite or PostgreSQL: no HTTP, no user code.

Run `python -m benchmarks.leases [--database URL] [--batches N] [--per-lease N] [--workers N]`. Each worker repeatedly
reports its lease and requests the next. Recorded batches are on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from cortex.jobs.spec import JobOptions, JobOrigin, NewBatch, Report
from cortex.jobs.store import JobStore
from cortex.state.database import open_jobs, parse_where, shown

_ORIGIN = JobOrigin("leases", "api-1", "spec-1", "rev-1", "hash-1", "{}")


async def _work(store: JobStore, job_id: str, worker: str, per_lease: int) -> int:
    reports: list[Report] = []
    done = 0
    while True:
        leased = await store.lease(job_id, worker, 1, reports, per_lease, 10**7)
        if leased.lease is None:
            return done
        seqs = [batch.seq for batch in leased.lease.batches]
        done += len(seqs)
        reports = [Report(leased.lease.token, seqs[-1], (), tuple((seq, b"1") for seq in seqs))]


async def _measure(store: JobStore, count: int, per_lease: int, workers: int) -> float:
    await store.startup()
    batch = NewBatch(10, b"[0,1,2,3,4,5,6,7,8,9]")
    job = await store.create(_ORIGIN, JobOptions(workers=workers), {}, [batch] * count)
    started = time.perf_counter()
    done = await asyncio.gather(*(_work(store, job.id, f"w{number}", per_lease) for number in range(workers)))
    took = time.perf_counter() - started
    assert sum(done) == count
    await store.delete_job(job.id)
    await store.shutdown()
    return count / took


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leases", description=__doc__)
    parser.add_argument("--database", default="", help="PostgreSQL URL (default: SQLite in a temporary folder)")
    parser.add_argument("--batches", type=int, default=50_000)
    parser.add_argument("--per-lease", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = parse_where(given.database) if given.database else Path(folder) / "jobs.db"
        engine = open_jobs(where)
        rate = asyncio.run(_measure(JobStore(engine), given.batches, given.per_lease, given.workers))
        engine.dispose()
        print(f"{shown(where)}: {rate:,.0f} batches/s, {given.per_lease} per lease, {given.workers} workers")


if __name__ == "__main__":
    main()
