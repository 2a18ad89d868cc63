"""Chaos for numbers: processes of a busy API are killed, and `/metrics` is compared with the callers' counts."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from harness.installations.installation import Installation, write_project
from harness.wait import wait_until

HANDLER = """
    VERSION = {version}

    class Handler:
        def __init__(self, config, metrics_client):
            self.metrics = metrics_client
            metrics_client.gauge("version", VERSION)

        def handle_post(self, payload):
            self.metrics.increment("hits")
            self.metrics.histogram("sizes", payload["x"], {{"parity": payload["x"] % 2}})
            return payload
"""
CONFIG = """
    - name: numbers
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      autoscaling: {min_replicas: 2, max_replicas: 2}
"""
#: Of a line that must never go back.
_GROWS = re.compile(r"(\w+_(total|count|bucket|sum)|hits)\{")


@dataclass(frozen=True)
class Plan:
    """How much is done to them; the API is updated after each kill of the operator."""

    process_kills: int
    replica_kills: int  #: supervisors
    operator_kills: int
    rate: float = 100.0  #: requests per second


@dataclass
class Outcome:
    """What was seen."""

    sent: int = 0
    statuses: dict[str, int] = field(default_factory=dict)  #: as callers got them; "error": no answer at all
    numbers: dict[str, float] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)


def read_metrics(cortex: Installation) -> str:
    """Return the text of the operator's `/metrics`."""
    token = (cortex.home / "token").read_text().strip()
    url, headers = f"http://127.0.0.1:{cortex.operator_port}/metrics", {"authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return str(answer.read().decode())


def numbers(cortex: Installation) -> dict[str, float]:
    """Return the lines of `/metrics` about an API, by name and the other labels."""
    found = {}
    for family in text_string_to_metric_families(read_metrics(cortex)):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "api")
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


class NumberChaos:
    """One run; the API of the project is the only one there."""

    def __init__(self, cortex: Installation, folder: Path, plan: Plan) -> None:
        self._cortex = cortex
        self._project = folder / "project"
        self._plan = plan
        self._version = 0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Deploy, kill, compare."""
        plan, outcome = self._plan, self._outcome
        self._deploy()
        with self._cortex.load("/numbers", plan.rate) as summary:
            for kill in self._kills():
                kill()
                self._look()
        outcome.sent, outcome.statuses = summary["sent"], summary["statuses"]
        self._look(wait_until(self._idle))
        self._compare()
        return outcome

    def _kills(self) -> list[Callable[[], None]]:
        """Return the actions, spread evenly."""
        plan = self._plan
        things = [(plan.process_kills, self._kill_process), (plan.replica_kills, self._kill_replica)]
        things.append((plan.operator_kills, self._kill_operator))
        timed = [((number + 1) / (count + 1), kill) for count, kill in things for number in range(count)]
        return [kill for _, kill in sorted(timed, key=lambda item: item[0])]

    def _deploy(self) -> None:
        self._version += 1
        self._cortex.cortex("deploy", write_project(self._project, HANDLER.format(version=self._version), CONFIG))
        self._wait_for_two(set())

    def _kill_process(self) -> None:
        self._kill("pid")

    def _kill_replica(self) -> None:
        self._kill("supervisor_pid")

    def _kill(self, name: str) -> None:
        victim = self._processes()[0]
        os.kill(victim[name], signal.SIGKILL)
        self._wait_for_two({victim["pid"]})

    def _kill_operator(self) -> None:
        os.kill(self._cortex.status()["operator"]["pid"], signal.SIGKILL)
        self._cortex.up()
        self._deploy()

    def _processes(self) -> list[dict[str, Any]]:
        processes = self._cortex.status()["replicas"]
        return [process for process in processes if process["api"] == "numbers" and process["state"] == "ready"]

    def _wait_for_two(self, gone: set[int]) -> None:
        """Wait until two processes of the newest version are ready, none of those in `gone`."""

        def are_there() -> bool:
            found = self._processes()
            return len(found) == 2 and len({p["revision"] for p in found}) == 1 and not gone & {p["pid"] for p in found}

        wait_until(are_there, timeout_s=60)

    def _idle(self) -> dict[str, float] | None:
        """Return the numbers once no request is in a replica; None also where the gateway does not tell its own."""
        now = numbers(self._cortex)
        return now if now.get("cortex_requests_in_flight{}") == 0 else None

    def _look(self, now: dict[str, float] | None = None) -> None:
        now = now or numbers(self._cortex)
        for name, before in self._outcome.numbers.items():
            # The gateway may not tell its own at some moment: a gap is no step back.
            if _GROWS.match(name) and now.get(name, before) < before:
                self._outcome.mistakes.append(f"{name} went back from {before:g} to {now[name]:g}")
        self._outcome.numbers |= now

    def _compare(self) -> None:
        seen, outcome = self._outcome.numbers, self._outcome
        good, lost = outcome.statuses.get("200", 0), outcome.statuses.get("error", 0)
        by_class = {name: value for name, value in seen.items() if name.startswith("cortex_requests_total{")}
        # What is inside a process that is killed is answered by its supervisor; what is inside a killed supervisor's
        # processes, by these: all but a request that the gateway sends as they end.
        kills = self._plan.replica_kills
        self._check("lost", lost, 0, kills)
        self._check("failed", outcome.sent - good, 0, self._plan.process_kills + 16 * kills)
        self._check("all answers of the gateway", sum(by_class.values()), outcome.sent - lost, outcome.sent)
        self._check("its 2xx", seen["cortex_requests_total{code=2xx}"], good)
        self._check("200s of replicas", seen["cortex_replica_requests_total{code=200}"], good)
        deaths = seen.get("cortex_process_deaths_total{cause=killed}", 0)
        self._check("deaths", deaths, self._plan.process_kills)
        self._check("version", seen["version{}"], self._version)
        self._check("replicas", seen["cortex_replicas{state=ready}"], 2)
        self._check("calls", seen["hits{}"], good, outcome.sent)
        self._check("sizes", seen["sizes_count{parity=1}"], good, outcome.sent)

    def _check(self, name: str, value: float, least: float, most: float | None = None) -> None:
        most = least if most is None else most
        if not least <= value <= most:
            self._outcome.mistakes.append(f"{name}: {value:g}, not {least:g} to {most:g}")
