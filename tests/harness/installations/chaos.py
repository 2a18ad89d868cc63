"""Chaos for jobs: a job runs while its processes are killed, then its records are compared with its input.

Every choice comes from a seed. The user's code notes each call in a file that outlives its process: how far the job is,
and how many batches were called more than once, is known without asking those that are killed.
"""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.installations import job_processes
from harness.installations.installation import Installation, write_project
from harness.installations.job_audit import mistakes
from harness.installations.job_processes import OPERATOR, SUPERVISOR, WORKER
from harness.wait import wait_until

HANDLER = """
    import ctypes
    import os
    import pathlib
    import time


    class Handler:
        def __init__(self, config):
            self.folder = pathlib.Path(config["folder"])
            self.poison = frozenset(config["poison"])
            self.pause_s = config["pause_s"]
            self.calls = open(self.folder / f"calls-{os.getpid()}", "ab", buffering=0)

        def handle_batch(self, payload):
            self.calls.write(b"%09d %05d\\n" % (payload[0], len(payload)))
            for item in payload:
                if item in self.poison:
                    ctypes.string_at(0)
            time.sleep(self.pause_s)
            return payload

        def on_job_complete(self):
            with open(self.folder / "completed", "a") as file:
                file.write("completed\\n")
"""
CONFIG = """
    - name: chaos
      kind: BatchAPI
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
"""
_CALL_BYTES = 16
#: Between an event and the next: kills must not keep step with what they hit.
_PAUSE = threading.Event()
#: Nothing is killed after this share of the calls: the hook, which may run twice if killed, is left alone.
_LAST_KILL = 0.9


@dataclass(frozen=True)
class Plan:
    """What is submitted, and what is done to it."""

    seed: int
    items: int = 100_000
    batch_size: int = 10
    workers: int = 3
    poison: int = 20  #: items that end the process with a segmentation fault
    kills: int = 50
    power_cuts: int = 0
    pause_s: float = 0.01  #: what a batch takes
    limit_s: float = 900.0


@dataclass
class Outcome:
    """What came of it."""

    plan: Plan
    seconds: float = 0.0
    killed: dict[str, int] = field(default_factory=dict)  #: by role
    power_cuts: int = 0
    caught_writing: int = 0  #: of the power cuts
    calls: int = 0
    repeated: int = 0  #: of the calls: the same batch again
    status: dict[str, Any] = field(default_factory=dict)
    results: int = 0
    dead_letters: int = 0
    hooks: int = 0
    events: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.plan}",
            f"killed: {self.killed}; power cuts: {self.power_cuts}, {self.caught_writing} of them mid-write",
            f"{self.seconds:.1f} s; {self.calls} calls, {self.repeated} of them again",
            f"{self.results} results + {self.dead_letters} dead letters; on_job_complete: {self.hooks}",
            f"counts: { ({k: self.status.get(k) for k in ('status', 'batch_metrics', 'items', 'failed_attempts')}) }",
            *(f"WRONG: {mistake}" for mistake in self.mistakes),
        ]
        return "\n".join(lines)


@dataclass
class Chaos:
    """One run of a plan in an installation that nothing else uses."""

    cortex: Installation
    folder: Path
    plan: Plan
    say: Callable[[str], None] = print

    def run(self) -> Outcome:
        """Deploy, submit, kill, wait, audit."""
        plan = self.plan
        self.say(f"chaos: {plan}")
        choose = random.Random(plan.seed)
        poison = sorted(choose.sample(range(plan.items), plan.poison))
        self._deploy(poison)
        outcome = Outcome(plan)
        start = time.monotonic()
        job = self._submit()
        for share, event in schedule(plan, choose):
            self._wait_for_calls(int(share * plan.items / plan.batch_size))
            _PAUSE.wait(choose.uniform(0, 0.03))
            self._do(event, choose, outcome)
        outcome.status = self._ended(job)
        outcome.seconds = time.monotonic() - start
        self._audit(job, poison, outcome)
        return outcome

    def _deploy(self, poison: list[int]) -> None:
        notes = self.folder / "notes"
        notes.mkdir()
        config = CONFIG.format(folder=notes, poison=poison, pause_s=self.plan.pause_s)
        write_project(self.folder / "project", HANDLER, config)
        self.cortex.cortex("deploy", self.folder / "project")

    def _submit(self) -> str:
        plan = self.plan
        query = f"workers={plan.workers}&batch_size={plan.batch_size}&isolate_failures=true"
        body = b"\n".join(map(b"%d".__mod__, range(plan.items)))
        reply = self.cortex.post(f"/chaos?{query}", body=body, content_type="application/x-ndjson")
        assert reply.status == 200, reply
        return str(reply.json["job_id"])

    def _do(self, event: str, choose: random.Random, outcome: Outcome) -> None:
        at = f"after {self._calls()} calls"
        if event == "power cut":
            outcome.caught_writing += job_processes.cut_power(self.cortex.home, within_s=1.0)
            outcome.power_cuts += 1
            self._note(outcome, f"{at}: power cut")
            self.cortex.up()
            return
        victim = job_processes.kill_one(self.cortex.home, event, choose)
        outcome.killed[event] = outcome.killed.get(event, 0) + 1
        self._note(outcome, f"{at}: killed {event} {victim}")
        if event == OPERATOR:
            wait_until(lambda: not self._pids(OPERATOR))
            _PAUSE.wait(choose.uniform(0, 0.5))
            self.cortex.up()

    def _pids(self, role: str) -> list[int]:
        return [each.pid for each in job_processes.of_home(self.cortex.home) if each.role == role]

    def _calls(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "notes").glob("calls-*")) // _CALL_BYTES

    def _wait_for_calls(self, count: int) -> None:
        def reached() -> bool:
            return self._calls() >= count

        wait_until(reached, self.plan.limit_s, f"{count} batches were called; {self.cortex.log()}")

    def _ended(self, job: str) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            try:
                reply = self.cortex.post(f"/chaos?jobID={job}", method="GET")
            except OSError:
                return None
            if reply.status != 200:
                return None
            status: dict[str, Any] = reply.json["job_status"]
            return status if status["end_time"] else None

        return wait_until(over, self.plan.limit_s, f"the job ends; {self.cortex.log()}") or {}

    def _audit(self, job: str, poison: list[int], outcome: Outcome) -> None:
        client = self.cortex.client
        results = list(client.job_results("chaos", job))
        dead_letters = list(client.dead_letters("chaos", job))
        outcome.results, outcome.dead_letters = len(results), len(dead_letters)
        completed = self.folder / "notes" / "completed"
        outcome.hooks = len(completed.read_text().splitlines()) if completed.exists() else 0
        calls = Counter(
            line for path in (self.folder / "notes").glob("calls-*") for line in path.read_bytes().splitlines()
        )
        outcome.calls, outcome.repeated = calls.total(), calls.total() - len(calls)
        outcome.mistakes = mistakes(self.plan.items, poison, outcome.status, results, dead_letters)
        if outcome.hooks != 1:
            outcome.mistakes.append(f"on_job_complete was called {outcome.hooks} times")
        if (sum(outcome.killed.values()), outcome.power_cuts) != (self.plan.kills, self.plan.power_cuts):
            outcome.mistakes.append(f"not all was killed that should have been: {outcome.events}")
        # The last attempt may have ended by a kill instead of by the item.
        unnamed = [letter for letter in dead_letters if "process died" not in letter["error"]]
        outcome.mistakes += [f"the error of {letter['payload']} is {letter['error']!r}" for letter in unnamed]
        outcome.mistakes += damage(self.cortex.home / "jobs.db")

    def _note(self, outcome: Outcome, event: str) -> None:
        outcome.events.append(event)
        self.say(event)


def schedule(plan: Plan, choose: random.Random) -> list[tuple[float, str]]:
    """Return each action with the share of called batches at which it is due, in order."""
    roles = choose.choices((WORKER, SUPERVISOR, OPERATOR), weights=(2, 1, 1), k=plan.kills)
    # Each role at least once, where there are enough.
    for index, role in enumerate((WORKER, SUPERVISOR, OPERATOR)[: plan.kills]):
        roles[index] = role
    choose.shuffle(roles)
    events = [*roles, *["power cut"] * plan.power_cuts]
    choose.shuffle(events)
    return sorted(((index + choose.random()) / len(events) * _LAST_KILL, event) for index, event in enumerate(events))


def damage(database: Path) -> list[str]:
    """Return the errors that SQLite finds in a database that another process has open."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        found = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    finally:
        connection.close()
    return [] if found == ["ok"] else found


def from_environ(environ: dict[str, str], plan: Plan) -> Plan:
    """Return the plan with the fields of CORTEX_CHAOS, a JSON object, replaced."""
    return Plan(**{**vars(plan), **json.loads(environ.get("CORTEX_CHAOS", "{}"))})
