"""New versions of a model in a bucket as canaries, with real replicas, a real gateway and a real model agent."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.installations.installation import Installation, write_project
from harness.wait import wait_until

NAME = "modelled"
#: Its model is a number, and the remainders of five for which it fails. It answers with the number.
HANDLER = """
    import json, pathlib

    class Handler:
        def __init__(self, config, model_client):
            self.client = model_client

        def load_model(self, model_path):
            model = json.loads(pathlib.Path(model_path, "model.json").read_text())
            if model["number"] < 0:
                raise ValueError("negative weights")
            return model

        def handle_post(self, payload):
            model = self.client.get_model(model_version=payload.get("version", "latest"))
            if payload["number"] % 5 in model["fails"]:
                raise ValueError("this input is new to me")
            return model["number"]
"""
CONFIG = """
    - name: NAME
      kind: RealtimeAPI
      handler:
        type: python
        path: handler.py
        multi_model_reloading:
          path: SOURCE
          poll_interval: 1s
          canary: true
      update_strategy:
        canary:
          steps: [50%]
          confidence: CONFIDENCE
          min_requests: REQUESTS
          max_error_increase: 5%
          max_latency_increase: 900%
"""


class Bucket:
    """A folder with the versions of a model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, version: int, number: int | None = None, fails: str = "[]") -> None:
        folder = self.folder / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder.parent / f".part-{version}"
        part.write_text(f'{{"number": {version if number is None else number}, "fails": {fails}}}')
        part.rename(folder / "model.json")

    def delete(self, version: int) -> None:
        shutil.rmtree(self.folder / str(version))


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    made = Bucket(tmp_path / "bucket")
    made.put(1)
    return made


def deploy(
    cortex: Installation, folder: Path, bucket: Bucket, confidence: float = 0.99, requests: int = 1_000_000
) -> str:
    """Deploy the API; with so many `requests`, no trial is ever won."""
    cortex.cortex("delete", NAME, check=False)  # another test may have left it
    config = CONFIG
    values = {"NAME": NAME, "SOURCE": str(bucket.folder), "CONFIDENCE": confidence, "REQUESTS": requests}
    for word, value in values.items():
        config = config.replace(word, str(value))
    write_project(folder / "project", HANDLER, config)
    return cortex.cortex("deploy", folder / "project" / "cortex.yaml").stdout


def canary_of(cortex: Installation) -> dict[str, Any]:
    return cortex.get(NAME)["canary"] or {}


def is_trying(cortex: Installation, change: str) -> bool:
    canary = canary_of(cortex)
    return canary.get("models") == f"model: version {change}" and canary["outcome"] == "trying"


def sent_until(cortex: Installation, done: Callable[[], bool], timeout_s: float = 180.0) -> Counter[str]:
    """Send requests until `done`, of which every tenth names version 1; count answers by version or status."""
    seen: Counter[str] = Counter()
    number = 0
    with httpx.Client(timeout=60) as client:

        def some() -> bool:
            nonlocal number
            for _ in range(40):
                number += 1
                payload = {"number": number, **({"version": "1"} if number % 10 == 0 else {})}
                answer = client.post(cortex.url(f"/{NAME}"), json=payload)
                text = str(answer.json()) if answer.status_code == 200 else f"status {answer.status_code}"
                if "version" not in payload:
                    seen[text] += 1
                else:
                    assert text == "1"
            return done()

        wait_until(some, timeout_s)
    return seen


def answers(cortex: Installation) -> set[str]:
    return set(sent_until(cortex, lambda: True))


@pytest.mark.long
def test_a_good_version_replaces_the_old_one_although_the_operator_is_killed(
    cortex: Installation, bucket: Bucket, tmp_path: Path
) -> None:
    # Little confidence: to be sure that the 99th percentile is not worse takes thousands of requests.
    deploy(cortex, tmp_path, bucket, confidence=0.6, requests=20)
    assert answers(cortex) == {"1"}
    bucket.put(2)
    seen = sent_until(cortex, lambda: is_trying(cortex, "1 → 2"))
    seen += sent_until(cortex, lambda: canary_of(cortex).get("step_requests", 20) >= 20)  # or the trial is over
    assert seen.keys() == {"1", "2"}
    os.kill(cortex.status()["operator"]["pid"], signal.SIGKILL)
    seen += sent_until(cortex, lambda: True)
    cortex.up()
    seen += sent_until(cortex, lambda: not canary_of(cortex))
    wait_until(lambda: answers(cortex) == {"2"}, 60)
    assert seen.keys() == {"1", "2"}
    assert "model: version 1 → 2" in cortex.cortex("history", NAME).stdout


@pytest.mark.long
def test_a_worse_version_is_rolled_back_and_the_next_one_is_tried(
    cortex: Installation, bucket: Bucket, tmp_path: Path
) -> None:
    deploy(cortex, tmp_path, bucket)
    bucket.put(2, fails="[1, 2]")
    seen = sent_until(cortex, lambda: canary_of(cortex).get("outcome") == "rolled back")
    assert seen.keys() <= {"1", "2", "status 500"} and seen["status 500"] < 0.3 * seen.total()
    assert canary_of(cortex)["reason"].startswith("errors: ")
    wait_until(lambda: answers(cortex) == {"1"}, 60)
    bucket.put(3)
    assert sent_until(cortex, lambda: is_trying(cortex, "1 → 3")).keys() <= {"1", "3"}


@pytest.mark.long
def test_a_person_ends_the_trial_of_a_version(cortex: Installation, bucket: Bucket, tmp_path: Path) -> None:
    deploy(cortex, tmp_path, bucket)
    bucket.put(2)
    wait_until(lambda: is_trying(cortex, "1 → 2"), 60)
    bucket.put(3)  # waits
    wait_until(lambda: answers(cortex) == {"1", "2"}, 60)
    assert "model: version 1 → 2" in cortex.cortex("get", NAME, "--why").stdout
    cortex.cortex("rollback", NAME)
    wait_until(lambda: is_trying(cortex, "1 → 3"), 60)
    cortex.cortex("promote", NAME)
    wait_until(lambda: answers(cortex) == {"3"}, 60)
    cortex.cortex("rollback", NAME)
    wait_until(lambda: answers(cortex) == {"1"}, 60)
    bucket.put(4)  # and neither 2 nor 3, which were tried
    wait_until(lambda: is_trying(cortex, "1 → 4"), 60)


def test_deleted_and_broken_versions_do_not_interrupt_requests(
    cortex: Installation, bucket: Bucket, tmp_path: Path
) -> None:
    deploy(cortex, tmp_path, bucket)
    bucket.put(2)
    seen = sent_until(cortex, lambda: is_trying(cortex, "1 → 2"))
    seen += sent_until(cortex, lambda: answers(cortex) == {"1", "2"})
    bucket.delete(2)  # which ends its trial
    seen += sent_until(cortex, lambda: not canary_of(cortex))
    seen += sent_until(cortex, lambda: answers(cortex) == {"1"})
    bucket.put(3, number=-1)
    seen += sent_until(cortex, lambda: canary_of(cortex).get("outcome") == "rolled back")
    assert "negative weights" in canary_of(cortex)["reason"]
    assert seen.keys() == {"1", "2"}
    assert cortex.get(NAME)["status"]["status_code"] == "live"


def test_the_old_content_of_an_overwritten_version_is_served_on_by_a_new_replica(
    cortex: Installation, bucket: Bucket, tmp_path: Path
) -> None:
    def latest() -> set[str]:
        """Return the answers to a few requests without a version."""
        return {str(cortex.post(f"/{NAME}", {"number": 1}).json) for _ in range(20)}

    deploy(cortex, tmp_path, bucket)
    old = {process["id"] for process in cortex.status()["replicas"] if process["api"] == NAME}
    bucket.put(1, number=11)
    wait_until(lambda: is_trying(cortex, "1 → new content"), 60)
    wait_until(lambda: latest() == {"1", "11"}, 60)
    (process,) = (each for each in cortex.status()["replicas"] if each["id"] in old)
    os.kill(process["supervisor_pid"], signal.SIGKILL)
    wait_until(lambda: old.isdisjoint(each["id"] for each in cortex.status()["replicas"]), 60)
    wait_until(lambda: latest() == {"1", "11"}, 60)
