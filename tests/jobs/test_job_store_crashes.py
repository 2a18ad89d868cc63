"""Crashes of the store: acknowledged changes survive, and nothing is stored twice or partially."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from cortex.jobs.records import Presence
from cortex.lifecycle import JobStatus
from cortex.state.database import Where, open_jobs, open_jobs_sqlite
from cortex.state.tables import first_key, jobs, results
from harness import HARNESS
from harness.jobs.job_checks import check_jobs
from harness.servers.postgres import Postgres

pytestmark = [pytest.mark.processes, pytest.mark.long]

KILLS = 8


class Acknowledged:
    """The changes that the store acknowledged."""

    def __init__(self) -> None:
        self.batches: dict[str, int] = {}
        self.results: dict[str, dict[int, str]] = defaultdict(dict)
        self.over: set[str] = set()

    def add(self, line: bytes) -> None:
        event = json.loads(line)
        if event["event"] == "created":
            self.batches[event["job"]] = event["batches"]
        elif event["event"] == "recorded":
            for seq, value in event["results"].items():
                assert self.results[event["job"]].setdefault(int(seq), value) == value, "recorded twice"
        elif event["event"] == "over":
            assert event["job"] not in self.over, "completed twice"
            self.over.add(event["job"])

    def check(self, connection: Connection) -> None:
        stored = {job.id: job for job in connection.execute(select(jobs).where(jobs.c.presence == Presence.VISIBLE))}
        for job_id, count in self.batches.items():
            assert stored[job_id].next_seq >= count
        for job_id, recorded in self.results.items():
            base = first_key(stored[job_id].number)
            is_of_job = results.c.key.between(base, first_key(stored[job_id].number + 1) - 1)
            found = {row.key - base: row.value.decode() for row in connection.execute(select(results).where(is_of_job))}
            assert recorded.items() <= found.items()
        for job_id in self.over:
            assert JobStatus(stored[job_id].status).is_over


def start_store(database: Where, seed: int, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HARNESS / "jobs" / "crashing_store.py"), str(database), str(seed), *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)


def run_and_kill(database: Where, seed: int, acknowledged: Acknowledged, lines: int, *arguments: str) -> None:
    """Kill a process a random time after it has printed `lines` lines."""
    with start_store(database, seed, *arguments) as process:
        assert process.stdout is not None
        killer = threading.Timer(random.Random(seed).random() * 0.1, process.kill)
        for number, line in enumerate(process.stdout):
            if line.endswith(b"\n"):
                acknowledged.add(line)
            if number == lines:
                killer.start()
        killer.cancel()
    assert process.returncode == -9, "the process ended by itself"


def test_a_store_that_is_killed_repeatedly_loses_no_acknowledged_change(where: Where) -> None:
    acknowledged = Acknowledged()
    for seed in range(KILLS if isinstance(where, Path) else KILLS // 2):
        run_and_kill(where, seed, acknowledged, random.Random(seed).randrange(60))
        engine = open_jobs(where)
        with engine.begin() as connection:
            if isinstance(where, Path):
                assert connection.exec_driver_sql("PRAGMA quick_check").scalar_one() == "ok"
            check_jobs(connection)
            acknowledged.check(connection)
        engine.dispose()
    assert len(acknowledged.batches) > KILLS // 2
    assert sum(map(len, acknowledged.results.values())) > 500


def test_a_postgresql_server_that_is_killed_repeatedly_loses_no_acknowledged_change() -> None:
    acknowledged = Acknowledged()
    with Postgres() as server, start_store(server.url("postgres"), 7) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            acknowledged.add(line)
            if number in (30, 60, 90, 120):
                server.kill()
                server.start()
            if number == 200:
                process.kill()
        process.wait()
        engine = open_jobs(server.url("postgres"))
        with engine.begin() as connection:
            check_jobs(connection)
            acknowledged.check(connection)
        engine.dispose()
    assert process.returncode == -9, "the process ended by itself"


def test_a_truncated_write_ahead_log_leaves_complete_transactions(tmp_path: Path) -> None:
    # After a power failure only a prefix of the write-ahead log is left.
    database, acknowledged = tmp_path / "jobs.db", Acknowledged()
    run_and_kill(database, 99, acknowledged, 40, "--keep-log")
    log = database.with_name("jobs.db-wal")
    whole, chance, counts = log.read_bytes(), random.Random(1), set()
    assert len(whole) > 100_000
    for number in range(25):
        copy = tmp_path / f"copy-{number}.db"
        shutil.copy(database, copy)
        copy.with_name(f"{copy.name}-wal").write_bytes(whole[: chance.randrange(len(whole))])
        engine = open_jobs_sqlite(copy)
        with engine.begin() as connection:
            assert connection.exec_driver_sql("PRAGMA quick_check").scalar_one() == "ok"
            check_jobs(connection)
            counts.add(len(connection.execute(select(results.c.key)).all()))
        engine.dispose()
    assert len(counts) > 3, "all truncations left the same rows"
