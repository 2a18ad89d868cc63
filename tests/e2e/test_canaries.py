"""Canaries with real replicas and a real gateway: a worse revision is rolled back, a good one replaces the old one."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.installations.installation import Installation, write_project
from harness.installations.number_chaos import read_metrics
from harness.wait import wait_until

HANDLER = """
    class Handler:
        def __init__(self, config):
            self.version, self.fails = config["version"], config.get("fails", False)

        def handle_post(self, payload):
            if self.fails and payload["number"] % 5 == 0:
                raise ValueError("this class is new to me")
            return self.version
"""
CONFIG = """
    - name: tried
      kind: RealtimeAPI
      handler:
        type: python
        path: handler.py
        config: {config}
      update_strategy:
        canary:
          steps: {steps}
          confidence: {confidence}
          min_requests: 20
          max_error_increase: 5%
          max_latency_increase: 900%
"""


@pytest.fixture
def folder(cortex: Installation, tmp_path: Path) -> Path:
    """Return the folder of the project, whose API is not deployed: another test may have left a revision."""
    cortex.cortex("delete", "tried", check=False)
    return tmp_path / "project"


def deploy(
    cortex: Installation, folder: Path, *, steps: str = "[20%, 50%]", confidence: float = 0.99, **config: Any
) -> str:
    write_project(folder, HANDLER, CONFIG.format(config=json.dumps(config), steps=steps, confidence=confidence))
    return cortex.cortex("deploy", folder / "cortex.yaml").stdout


def canary_of(cortex: Installation) -> dict[str, Any] | None:
    found: dict[str, Any] | None = cortex.get("tried")["canary"]
    return found


def outcome_of(cortex: Installation) -> str | None:
    canary = canary_of(cortex)
    return canary["outcome"] if canary else None


def has_compared(cortex: Installation, requests: int) -> bool:
    """Return whether the canary got so many requests, or its trial is over, which further requests may cause."""
    canary = canary_of(cortex)
    return canary is None or canary["outcome"] != "trying" or canary["step_requests"] >= requests


def sent_until(cortex: Installation, done: Callable[[], bool], timeout_s: float = 120.0) -> Counter[str]:
    """Send requests until `done`; count versions, and failures by status."""
    seen: Counter[str] = Counter()
    number = 0
    with httpx.Client() as client:

        def some() -> bool:
            nonlocal number
            for _ in range(40):
                number += 1
                answer = client.post(cortex.url("/tried"), json={"number": number})
                seen[str(answer.json() if answer.status_code == 200 else answer.status_code)] += 1
            return done()

        wait_until(some, timeout_s)
    return seen


@pytest.mark.long
def test_a_canary_that_fails_on_some_inputs_is_rolled_back(cortex: Installation, folder: Path) -> None:
    deploy(cortex, folder, version=1)
    shown = deploy(cortex, folder, version=2, fails=True)
    assert "revision 2 gets 20 % of the requests (step 1 of 2), revision 1 the rest" in shown
    seen = sent_until(cortex, lambda: outcome_of(cortex) == "rolled back")
    assert set(seen) == {"1", "2", "500"}
    assert seen["500"] < 0.1 * seen.total()
    wait_until(lambda: sent_until(cortex, lambda: True).keys() == {"1"}, 30)
    history = cortex.cortex("history", "tried").stdout
    assert "rollback to 1" in history
    assert "revision 2 was rolled back: errors: " in cortex.cortex("get", "tried").stdout


SHADOW = """
      update_strategy:
        canary:
          shadow: true
          max_disagreement: 1%
          steps: [50%]
          confidence: 0.9
          min_requests: 20
          max_error_increase: 5%
          max_latency_increase: 900%
"""
MODEL = """
    class Handler:
        def __init__(self, config):
            self.different = config["different"]

        def handle_post(self, payload):
            # A rounding error is no disagreement.
            score = 0.5 + 1e-9 * self.different
            return {"label": "dog" if payload["number"] % 100 < self.different else "cat", "score": score}
"""


@pytest.mark.long
def test_a_shadow_whose_answers_differ_never_answers_and_is_rolled_back(cortex: Installation, folder: Path) -> None:
    def deploy_model(different: int) -> str:
        config = CONFIG.format(config=json.dumps({"different": different}), steps="[50%]", confidence=0.9)
        write_project(folder, MODEL, config.partition("      update_strategy:")[0] + SHADOW.lstrip("\n"))
        return cortex.cortex("deploy", folder / "cortex.yaml").stdout

    deploy_model(0)
    assert "gets copies of all requests (shadow), revision" in deploy_model(3)
    seen = sent_until(cortex, lambda: has_compared(cortex, 200))
    os.kill(cortex.status()["operator"]["pid"], signal.SIGKILL)
    cortex.up()
    seen += sent_until(cortex, lambda: outcome_of(cortex) == "rolled back", 600.0)
    assert seen.keys() == {"{'label': 'cat', 'score': 0.5}"}
    reason = (canary_of(cortex) or {})["reason"]
    assert reason.startswith("disagreement: ") and reason.endswith(", tolerated: 1.00%"), reason
    counted = [line for line in read_metrics(cortex).splitlines() if line.startswith("cortex_replica_requests_total{")]
    assert sum(float(line.split()[-1]) for line in counted if 'api="tried"' in line) == seen.total()


@pytest.mark.long
def test_a_good_canary_replaces_the_old_revision_although_the_operator_is_killed(
    cortex: Installation, folder: Path
) -> None:
    deploy(cortex, folder, version=1)
    # Little confidence: to be sure that the 99th percentile is not worse takes thousands of requests.
    deploy(cortex, folder, version=2, steps="[50%]", confidence=0.6)
    seen = sent_until(cortex, lambda: has_compared(cortex, 20))
    assert seen["2"] > 0 and seen["1"] > 0
    os.kill(cortex.status()["operator"]["pid"], signal.SIGKILL)
    cortex.up()
    seen += sent_until(cortex, lambda: outcome_of(cortex) in (None, "promoted"))
    wait_until(lambda: sent_until(cortex, lambda: True).keys() == {"2"}, 60)
    assert seen.keys() == {"1", "2"}
    assert "live" in cortex.cortex("get", "tried").stdout


def test_a_person_ends_a_trial(cortex: Installation, folder: Path) -> None:
    deploy(cortex, folder, version=11)
    assert "has no canary" in cortex.cortex("promote", "tried", check=False).stderr
    deploy(cortex, folder, version=12)
    assert "promoting revision" in cortex.cortex("promote", "tried").stdout
    wait_until(lambda: sent_until(cortex, lambda: True).keys() == {"12"}, 60)
    deploy(cortex, folder, version=13)
    assert "live, canary: " in cortex.cortex("get").stdout
    assert "canary: trying" in cortex.cortex("history", "tried").stdout
    cortex.cortex("rollback", "tried")
    wait_until(lambda: sent_until(cortex, lambda: True).keys() == {"12"}, 60)
    never_live = next(each["number"] for each in cortex.client.history("tried") if each["canary"])
    assert " of the requests (step 1 of " in cortex.cortex("rollback", "tried", str(never_live)).stdout


def test_a_canary_that_does_not_start_is_shown_without_requests(cortex: Installation, folder: Path) -> None:
    deploy(cortex, folder, version=1)
    file = folder / "handler.py"
    file.write_text(file.read_text().replace("self.version, self.fails =", "raise ValueError #", 1))
    assert cortex.cortex("deploy", folder / "cortex.yaml", check=False).returncode == 1
    canary = canary_of(cortex) or {}
    new, old = canary["revision_number"], canary["old_revision_number"]
    shown = f"revision {new} does not start and gets no requests; revision {old} answers"
    assert f"canary:   {shown}\n" in cortex.cortex("get", "tried").stdout
    assert f"\n{shown}; `cortex get tried` shows why\n" in cortex.cortex("get", "tried", "--why").stdout
    assert sent_until(cortex, lambda: True).keys() == {"1"}


@pytest.mark.long
def test_deploys_and_a_rollback_at_once_during_a_trial_fail_no_request(cortex: Installation, folder: Path) -> None:
    def project(version: int) -> Path:
        config = CONFIG.format(config=json.dumps({"version": version}), steps="[20%, 50%]", confidence=0.99)
        return write_project(folder.with_name(f"project-{version}"), HANDLER, config)

    cortex.cortex("deploy", project(1))
    cortex.cortex("deploy", project(2))
    seen = sent_until(cortex, lambda: (canary_of(cortex) or {"step_requests": 0})["step_requests"] >= 20)
    commands = [("deploy", project(3), "--force"), ("deploy", project(4), "--force"), ("rollback", "tried", "--force")]

    def run_all() -> list[str]:
        with ThreadPoolExecutor(len(commands)) as pool:
            ends = pool.map(lambda command: cortex.cortex(*command, check=False), commands)
            return [end.stderr for end in ends if end.returncode]

    with ThreadPoolExecutor(1) as pool:
        errors = pool.submit(run_all)
        seen += sent_until(cortex, errors.done)
    assert errors.result() == []
    os.kill(cortex.status()["operator"]["pid"], signal.SIGKILL)
    cortex.up()
    cortex.cortex("rollback", "tried", "1", "--force", check=False)
    wait_until(lambda: sent_until(cortex, lambda: True).keys() == {"1"}, 60)
    assert seen.keys() <= {"1", "2", "3", "4"} and outcome_of(cortex) != "trying"
