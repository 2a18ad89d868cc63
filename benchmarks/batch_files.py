"""Measure jobs over files in S3: `python -m benchmarks.batch_files`.

First 20,000 small objects: a dry run with globs, then a job over their paths. Then a 2 GB file of JSON lines, which the
operator streams into batches while its memory is sampled. The endpoint is OpenStack Swift on this machine
(`scripts/test-services` installs it), so it shares the CPU with the system under test.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from benchmarks.tools import machine, report, results
from benchmarks.tools.batch_client import Jobs
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.paths import REPOSITORY
from benchmarks.tools.process_watch import Watch, memory_mb

BUCKET = "batch"
OBJECTS, BYTES, WORKERS = 20_000, 2_000_000_000, 2
PATHS_PER_BATCH, LINES_PER_BATCH = 10, 500
#: How far the operator's peak may be above its idle memory while it streams a file of any size.
GROWTH_GOAL_MB = 128.0
_LINE = '{{"id": {0}, "text": "' + "lorem ipsum dolor sit amet " * 14 + '"}}\n'
_AT_ONCE = 16
Rows = list[tuple[str, str]]


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_files", description=__doc__)
    parser.add_argument("--objects", type=int, default=OBJECTS)
    parser.add_argument("--bytes", type=int, default=BYTES)
    arguments = parser.parse_args()
    facts = machine.facts()
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from harness.servers import s3

    if not s3.is_installed():
        raise SystemExit("Swift is not installed: sh scripts/test-services")
    with tempfile.TemporaryDirectory(prefix="cortex-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        server = s3.SwiftServer(folder / "swift")
        try:
            server.start()
            server.create_bucket(BUCKET)
            os.environ.update({name: value for name, value in server.environ.items() if name != "HOME"})
            cortex = Cortex.in_folder(folder / "cortex")
            with cortex.up():
                cortex.deploy("batch_count")
                found = _listing(cortex, arguments.objects) | _streaming(cortex, arguments.bytes)
        finally:
            server.stop()
    results.write("batch-files", _text(found), {"facts": facts, **found})


def _listing(cortex: Cortex, count: int) -> dict[str, Any]:
    keys = [
        f"photos/{n % 100:02}/{'thumb-' if n % 10 == 0 else ''}{n:06}.{'txt' if n % 4 == 3 else 'jpg'}"
        for n in range(count)
    ]
    start = time.monotonic()
    asyncio.run(_put_all(keys))
    print(f"{count} objects put in {time.monotonic() - start:.0f} s", flush=True)
    wanted = sorted(f"s3://{BUCKET}/{key}" for key in keys if key.endswith(".jpg") and "thumb" not in key)
    lister = {
        "s3_paths": [f"s3://{BUCKET}/photos/"],
        "includes": [f"s3://{BUCKET}/photos/**.jpg"],
        "excludes": [f"s3://{BUCKET}/**/thumb-*"],
        "batch_size": PATHS_PER_BATCH,
    }
    body = {"workers": WORKERS, "file_path_lister": lister}
    jobs = _jobs(cortex)
    start = time.monotonic()
    *listed, verdict = jobs.dry_run(body)
    dry_run_s = time.monotonic() - start
    if sorted(listed) != wanted or verdict != "validations passed":
        raise SystemExit(f"the dry run listed {len(listed)} paths, not {len(wanted)}, and ended with {verdict}")
    job, enqueued_s, total_s, peak_mb, idle_mb = _run(cortex, jobs, body)
    _check(jobs, job, len(wanted))
    return {
        "objects": count,
        "matching": len(wanted),
        "dry_run_s": dry_run_s,
        "list_enqueue_s": enqueued_s,
        "list_job_s": total_s,
        "list_peak_mb": peak_mb,
        "list_idle_mb": idle_mb,
    }


def _streaming(cortex: Cortex, size: int) -> dict[str, Any]:
    count = size // len(_LINE.format(0))
    start = time.monotonic()
    obstore.put(S3Store(BUCKET, client_options={"allow_http": True}), "large/values.json", _pieces(count))
    print(f"a file of {size / 1e6:.0f} MB put in {time.monotonic() - start:.0f} s", flush=True)
    files = {"s3_paths": [f"s3://{BUCKET}/large/"], "batch_size": LINES_PER_BATCH}
    jobs = _jobs(cortex)
    job, enqueued_s, total_s, peak_mb, idle_mb = _run(cortex, jobs, {"workers": WORKERS, "delimited_files": files})
    _check(jobs, job, count)
    return {
        "bytes": size,
        "values": count,
        "stream_enqueue_s": enqueued_s,
        "stream_mb_per_s": size / 1e6 / enqueued_s,
        "stream_job_s": total_s,
        "stream_peak_mb": peak_mb,
        "stream_idle_mb": idle_mb,
        "database_mb": sum(path.stat().st_size for path in cortex.home.glob("jobs.db*")) / 1e6,
    }


def _run(cortex: Cortex, jobs: Jobs, body: dict[str, Any]) -> tuple[str, float, float, float, float]:
    """Submit and wait; return the job, seconds until it was enqueued and over, and the operator's peak and idle MB."""
    operator = cortex.status()["operator"]["pid"]
    idle_mb, _ = memory_mb(operator)
    enqueued: list[float] = []
    with Watch(operator) as watch:
        job = jobs.submit(body)

        def seen(status: dict[str, Any]) -> None:
            if not enqueued and status["status"] != "enqueuing":
                enqueued.append(watch.now_s())

        status = jobs.wait(job, every_s=0.1, seen=seen)
        total_s = watch.now_s()
    if status["status"] != "succeeded":
        raise SystemExit(f"the job did not succeed: {status}")
    return job, enqueued[0], total_s, max(rss for _, rss, _ in watch.samples), idle_mb


def _check(jobs: Jobs, job: str, items: int) -> None:
    """Check that every item was in exactly one batch."""
    found = sum(each["result"] for each in jobs.results(job))
    if found != items:
        raise SystemExit(f"the batches had {found} items, not {items}")


async def _put_all(keys: list[str]) -> None:
    store = S3Store(BUCKET, client_options={"allow_http": True})
    left = iter(keys)

    async def put() -> None:
        for key in left:
            await obstore.put_async(store, key, b"x")

    await asyncio.gather(*(put() for _ in range(_AT_ONCE)))


def _pieces(count: int) -> Iterator[bytes]:
    step = 10_000
    for start in range(0, count, step):
        yield "".join(map(_LINE.format, range(start, min(start + step, count)))).encode()


def _jobs(cortex: Cortex) -> Jobs:
    return Jobs(cortex.gateway_port, cortex.operator_port, cortex.home, "batch-count")


def _text(found: dict[str, Any]) -> str:
    growth_mb = found["stream_peak_mb"] - found["stream_idle_mb"]
    goal = report.Goal(
        f"operator's peak while it streams {found['bytes'] / 1e9:g} GB, above idle",
        f"+{GROWTH_GOAL_MB:g} MB at most",
        f"{growth_mb:+.0f} MB ({found['stream_idle_mb']:.0f} → {found['stream_peak_mb']:.0f} MB)",
        growth_mb <= GROWTH_GOAL_MB,
    )
    rows: Rows = [
        (f"dry run over {found['objects']:,} objects, {found['matching']:,} match", f"{found['dry_run_s']:.1f} s"),
        ("a job over their paths: enqueued, over", f"{found['list_enqueue_s']:.1f} s, {found['list_job_s']:.1f} s"),
        ("operator's peak meanwhile", f"{found['list_peak_mb']:.0f} MB ({found['list_idle_mb']:.0f} MB before)"),
        (
            f"one file of {found['values']:,} values: enqueued",
            f"{found['stream_enqueue_s']:.1f} s, {found['stream_mb_per_s']:.0f} MB/s",
        ),
        ("the job over it", f"{found['stream_job_s']:.1f} s"),
        ("database at the end", f"{found['database_mb']:.0f} MB"),
    ]
    return f"# Jobs over files in S3\n\n{report.goals_table([goal])}\n\n{report.table(('figure', ''), rows)}\n"


if __name__ == "__main__":
    main()
