"""Chaos for AsyncAPIs: workloads are sent and processed while processes are killed, then each result is fetched.

Every choice comes from a seed. A sender that gets no response sends again: a workload that was not acknowledged may
exist or not, an acknowledged one must exist, with one result that never changes.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from harness.installations import job_processes
from harness.installations.chaos import damage
from harness.installations.installation import Installation, write_project
from harness.installations.job_processes import OPERATOR, SUPERVISOR, WORKER
from harness.wait import wait_until

HANDLER = """
    import ctypes
    import os
    import pathlib
    import time


    class Handler:
        def __init__(self, config):
            self.pause_s = config["pause_s"]
            self.poison = frozenset(config["poison"])
            self.calls = open(pathlib.Path(config["folder"]) / f"calls-{os.getpid()}", "ab", buffering=0)

        def handle_async(self, payload, request_id):
            self.calls.write(f"{request_id}\\n".encode())
            if payload["n"] in self.poison:
                ctypes.string_at(0)
            if payload["n"] % 100 == 99:
                raise ValueError(payload["n"])
            time.sleep(self.pause_s)
            return {"square": payload["n"] ** 2, "id": request_id}
"""
CONFIG = """
    - name: chaos
      kind: AsyncAPI
      handler:
        type: python
        path: handler.py
        config:
          folder: {folder}
          poison: {poison}
          pause_s: {pause_s}
      compute:
        cpu: 20m
        mem: 50Mi
      autoscaling:
        min_replicas: {replicas}
"""
_CALL_BYTES = 37
_PAUSE = threading.Event()


@dataclass(frozen=True)
class AsyncPlan:
    """What is sent, and what is done meanwhile."""

    seed: int
    workloads: int = 10_000
    replicas: int = 3
    senders: int = 8
    poison: int = 5  #: workloads that end the process with a segmentation fault
    kills: int = 30
    power_cuts: int = 2
    pause_s: float = 0.005  #: what a workload takes
    limit_s: float = 900.0


@dataclass
class AsyncOutcome:
    """What came of it."""

    plan: AsyncPlan
    seconds: float = 0.0
    killed: dict[str, int] = field(default_factory=dict)  #: by role
    power_cuts: int = 0
    refused: int = 0  #: requests that got no answer, or another than 200, and were sent again
    stored: int = 0  #: workloads in the database
    calls: int = 0
    repeated: int = 0  #: of the calls: the same workload again
    statuses: dict[str, int] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.plan}",
            f"killed: {self.killed}; power cuts: {self.power_cuts}",
            f"{self.seconds:.1f} s; {self.stored} workloads stored, {self.refused} requests sent again",
            f"{self.calls} calls, {self.repeated} of them again; {self.statuses}",
            *(f"WRONG: {mistake}" for mistake in self.mistakes[:20]),
        ]
        return "\n".join(lines)


class AsyncChaos:
    """One run of a plan in an installation that nothing else uses."""

    def __init__(self, cortex: Installation, folder: Path, plan: AsyncPlan) -> None:
        self.cortex, self.folder, self.plan = cortex, folder, plan
        self.outcome = AsyncOutcome(plan)
        self._choose = random.Random(plan.seed)
        self._poison = sorted(self._choose.sample(range(plan.workloads), plan.poison))

    def run(self) -> AsyncOutcome:
        """Deploy, send and kill, wait, audit."""
        plan, start = self.plan, time.monotonic()
        notes = self.folder / "notes"
        notes.mkdir()
        config = CONFIG.format(folder=notes, poison=self._poison, pause_s=plan.pause_s, replicas=plan.replicas)
        self.cortex.cortex("deploy", write_project(self.folder / "project", HANDLER, config))
        with ThreadPoolExecutor(plan.senders) as pool:
            sent = pool.map(self._send, range(plan.workloads))
            self._kill_some()
            names = list(sent)
            answers = list(pool.map(self._ended, names))
        self.outcome.seconds = time.monotonic() - start
        self._audit(names, answers)
        return self.outcome

    def _send(self, n: int) -> str:
        """Send until it is acknowledged; return the id."""
        deadline = time.monotonic() + self.plan.limit_s
        while time.monotonic() < deadline:
            try:
                reply = self.cortex.post("/chaos", {"n": n})
                if reply.status == 200:
                    return str(reply.json["id"])
            except (OSError, HTTPException):  # it may be stored all the same
                pass
            self.outcome.refused += 1
            _PAUSE.wait(0.05)
        raise AssertionError(f"{n} was never acknowledged; {self.cortex.log()}")

    def _kill_some(self) -> None:
        plan, choose = self.plan, self._choose
        roles = choose.choices((WORKER, SUPERVISOR, OPERATOR), weights=(2, 1, 1), k=plan.kills)
        roles[: min(3, plan.kills)] = (WORKER, SUPERVISOR, OPERATOR)[: plan.kills]
        events = [*roles, *["power cut"] * plan.power_cuts]
        choose.shuffle(events)
        for index, event in enumerate(events):
            count = int((index + choose.random()) / len(events) * 0.9 * plan.workloads)
            self._wait_for_calls(count)
            _PAUSE.wait(choose.uniform(0, 0.03))
            self._do(event)

    def _do(self, event: str) -> None:
        if event == "power cut":
            job_processes.cut_power(self.cortex.home, within_s=1.0)
            self.outcome.power_cuts += 1
            self.cortex.up()
            return
        job_processes.kill_one(self.cortex.home, event, self._choose)
        self.outcome.killed[event] = self.outcome.killed.get(event, 0) + 1
        if event == OPERATOR:
            wait_until(lambda: not self._pids(OPERATOR))
            _PAUSE.wait(self._choose.uniform(0, 0.5))
            self.cortex.up()

    def _pids(self, role: str) -> list[int]:
        return [each.pid for each in job_processes.of_home(self.cortex.home) if each.role == role]

    def _calls(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "notes").glob("calls-*")) // _CALL_BYTES

    def _wait_for_calls(self, count: int) -> None:
        wait_until(lambda: self._calls() >= count, self.plan.limit_s, f"{count} calls; {self.cortex.log()}")

    def _ended(self, name: str) -> Any:
        deadline = time.monotonic() + self.plan.limit_s
        while time.monotonic() < deadline:
            reply = self.cortex.post(f"/chaos/{name}?wait=20", method="GET")
            if reply.status != 200 or reply.json["status"] in ("completed", "failed"):
                return reply.json if reply.status == 200 else {"status": reply.body.decode()}
        return {"status": "never over"}

    def _audit(self, names: list[str], answers: list[Any]) -> None:
        outcome = self.outcome
        for n, (name, answer) in enumerate(zip(names, answers, strict=True)):
            kept = {key: value for key, value in answer.items() if key != "timestamp"}
            if kept != self._expected(n, name):
                outcome.mistakes.append(f"{n}: {answer}")
        if len(set(names)) != len(names):
            outcome.mistakes.append("an id was given twice")
        again = [self._ended(name) for name in names[:: max(1, len(names) // 100)]]
        if again != answers[:: max(1, len(names) // 100)]:
            outcome.mistakes.append("a result has changed")
        outcome.statuses = dict(Counter(answer["status"] for answer in answers))
        calls = Counter(line for path in (self.folder / "notes").glob("calls-*") for line in path.read_text().split())
        outcome.calls, outcome.repeated = calls.total(), calls.total() - len(calls)
        if (sum(outcome.killed.values()), outcome.power_cuts) != (self.plan.kills, self.plan.power_cuts):
            outcome.mistakes.append(f"not all was killed that should have been: {outcome.killed}")
        database = self.cortex.home / "jobs.db"
        settled = wait_until(lambda: _settled(database), 120, "unacknowledged workloads are over, too")
        assert settled is not None
        outcome.stored, left = settled
        if not len(names) <= outcome.stored <= len(names) + outcome.refused:
            outcome.mistakes.append(f"{outcome.stored} workloads are stored, {len(names)} were acknowledged")
        outcome.mistakes += [*left, *damage(database)]

    def _expected(self, n: int, name: str) -> dict[str, Any]:
        if n in self._poison:
            error = "the worker's process died: segmentation fault (SIGSEGV)"
            return {"id": name, "status": "failed", "error": error}
        if n % 100 == 99:
            return {"id": name, "status": "failed", "error": f"ValueError: {n}"}
        return {"id": name, "status": "completed", "result": {"square": n**2, "id": name}}


def _settled(database: Path) -> tuple[int, list[str]] | None:
    """Wait until all workloads are over; return the number of stored workloads and the remains of their processing."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:

        def count(query: str) -> int:
            return int(connection.execute(f"SELECT count(*) FROM {query}").fetchone()[0])

        if count("workloads WHERE status IS NULL"):
            return None
        tables = ("batches", "results", "dead_letters", "pending", "leases")
        left = [f"{number} rows are left in {table}" for table in tables if (number := count(table))]
        job = "jobs WHERE presence = 'standing' AND next_seq = succeeded + failed AND batches = next_seq + 1"
        return count("workloads"), left + ([] if count(job) == 1 else ["the counts of the queue are wrong"])
    finally:
        connection.close()
