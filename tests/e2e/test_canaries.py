"""Canaries with real replicas and a real gateway: a worse revision is rolled back, a good one replaces the old one."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.installations.installation import Installation, write_project
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
      tracker:
        model_type: classification
        key: label
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
            return {"label": "dog" if payload["number"] % 100 < self.different else "cat"}
"""


@pytest.mark.long
def test_a_shadow_whose_predictions_differ_never_answers_and_is_rolled_back(cortex: Installation, folder: Path) -> None:
    def deploy_model(different: int) -> str:
        config = CONFIG.format(config=json.dumps({"different": different}), steps="[50%]", confidence=0.9)
        write_project(folder, MODEL, config.partition("      update_strategy:")[0] + SHADOW.lstrip("\n"))
        return cortex.cortex("deploy", folder / "cortex.yaml").stdout

    deploy_model(0)
    assert "gets copies of all requests (shadow), revision" in deploy_model(3)
    seen = sent_until(cortex, lambda: (canary_of(cortex) or {})["step_requests"] >= 200)
    os.kill(cortex.status()["operator"]["pid"], signal.SIGKILL)
    cortex.up()
    seen += sent_until(cortex, lambda: outcome_of(cortex) == "rolled back", 600.0)
    assert seen.keys() == {"{'label': 'cat'}"}
    reason = (canary_of(cortex) or {})["reason"]
    assert reason.startswith("disagreement: ") and reason.endswith(", tolerated: 1.00%"), reason


@pytest.mark.long
def test_a_good_canary_replaces_the_old_revision_although_the_operator_is_killed(
    cortex: Installation, folder: Path
) -> None:
    deploy(cortex, folder, version=1)
    # Little confidence: to be sure that the 99th percentile is not worse takes thousands of requests.
    deploy(cortex, folder, version=2, steps="[50%]", confidence=0.6)
    seen = sent_until(cortex, lambda: (canary_of(cortex) or {})["step_requests"] >= 20)
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
    cortex.cortex("rollback", "tried")
    wait_until(lambda: sent_until(cortex, lambda: True).keys() == {"12"}, 60)
