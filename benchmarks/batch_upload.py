"""Measure a very large submission: `python -m benchmarks.batch_upload`.

Ten million integers are generated and sent as JSON lines in one POST through the gateway. Two workers consume them with
a method that does nothing. Meanwhile the operator's memory is sampled ten times per second.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tools import machine, processes, report, results
from benchmarks.tools.batch_client import Jobs, lines
from benchmarks.tools.cortex_cli import Cortex, groups
from benchmarks.tools.process_watch import Watch, memory_mb

ITEMS, BATCH_SIZE, WORKERS = 10_000_000, 100, 2
#: The first tenth of the upload may still fill caches; after it memory is flat if it grows by no more than this.
GROWTH_GOAL_MB = 16.0


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_upload", description=__doc__)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--workers", type=int, default=WORKERS)
    arguments = parser.parse_args()
    processes.adopt_orphans()
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="cortex-bench-", ignore_cleanup_errors=True) as folder:
        cortex = Cortex.in_folder(Path(folder))
        with cortex.up():
            cortex.deploy("batch_noop")
            found = _measure(cortex, arguments.items, arguments.batch_size, arguments.workers)
    results.write("batch-upload", _text(found), {"facts": facts, **found})


def _measure(cortex: Cortex, items: int, batch_size: int, workers: int) -> dict[str, Any]:
    jobs = Jobs(cortex.gateway_port, cortex.operator_port, cortex.home, "batch-noop")
    operator = cortex.status()["operator"]["pid"]
    idle_mb, _ = memory_mb(operator)
    cpu_before = _cpu(cortex)
    with Watch(operator) as watch:
        start_s = watch.now_s()
        job = jobs.submit_lines(lines(items), workers=workers, batch_size=batch_size)
        submitted_s = watch.now_s()
        cpu_submitted = _cpu(cortex)
        status = jobs.wait(job, every_s=0.5)
        end_s = watch.now_s()
    cpu_end = _cpu(cortex)
    if (status["status"], status["items"]["succeeded"]) != ("succeeded", items):
        raise SystemExit(f"the job did not succeed: {status}")
    submit_s, process_s = submitted_s - start_s, end_s - submitted_s
    upload = watch.between(start_s + submit_s / 10, submitted_s)
    work = watch.between(submitted_s, end_s)
    return {
        "items": items,
        "batches": status["total_batch_count"],
        "workers": workers,
        "submit_s": submit_s,
        "submitted_per_s": items / submit_s,
        "process_s": process_s,
        "processed_per_s": items / process_s,
        "batches_per_s": status["total_batch_count"] / process_s,
        "submit_cpu_us": {k: (cpu_submitted[k] - cpu_before[k]) / items * 1e6 for k in cpu_before},
        "process_cpu_us": {k: (cpu_end.get(k, 0) - cpu_submitted[k]) / items * 1e6 for k in cpu_submitted},
        "idle_mb": idle_mb,
        "early_mb": upload[0],
        "upload_peak_mb": max(upload),
        "growth_mb": max(upload) - upload[0],
        "work_peak_mb": max(work),
        "database_mb": sum(path.stat().st_size for path in cortex.home.glob("jobs.db*")) / 1e6,
        "samples": watch.samples,
    }


def _cpu(cortex: Cortex) -> dict[str, float]:
    """Return the CPU seconds of each part so far."""
    return {name: sum(processes.cpu_s(members).values()) for name, members in groups(cortex.status()).items()}


def _text(found: dict[str, Any]) -> str:
    goal = report.Goal(
        "operator's memory from a tenth of the upload to its end",
        f"+{GROWTH_GOAL_MB:g} MB at most",
        f"{found['growth_mb']:+.1f} MB ({found['early_mb']:.0f} → {found['upload_peak_mb']:.0f} MB)",
        found["growth_mb"] <= GROWTH_GOAL_MB,
    )
    cpu = ", ".join(f"{name} {value:.2f}" for name, value in found["submit_cpu_us"].items())
    rows = [
        ("submitted", f"{found['submitted_per_s']:,.0f} items/s ({found['submit_s']:.1f} s)"),
        (
            "processed, from the answer to the end of the job",
            f"{found['processed_per_s']:,.0f} items/s, {found['batches_per_s']:,.0f} batches/s "
            f"({found['process_s']:.1f} s)",
        ),
        ("operator idle before", f"{found['idle_mb']:.0f} MB"),
        ("operator's peak during the upload", f"{found['upload_peak_mb']:.0f} MB"),
        ("operator's peak while workers work", f"{found['work_peak_mb']:.0f} MB"),
        ("database at the end", f"{found['database_mb']:.0f} MB"),
        ("CPU µs per item submitted", cpu),
    ]
    title = f"# {found['items']:,} items uploaded in {found['batches']:,} batches, {found['workers']} workers"
    return f"{title}\n\n{report.goals_table([goal])}\n\n{report.table(('figure', ''), rows)}\n"


if __name__ == "__main__":
    main()
