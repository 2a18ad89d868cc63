"""A canary whose replicas run on the nodes of a real Ray cluster."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import httpx
import pytest

from harness.cluster.cluster_installation import OnRay
from harness.installations.installation import write_project
from harness.wait import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(600)]
SOURCE = """
    class Handler:
        def __init__(self, config):
            self.version = config["version"]

        def handle_post(self, payload):
            if self.version == 2 and payload % 2:
                raise ValueError("this class is new to me")
            return self.version
"""
CONFIG = """
    - name: tried
      kind: RealtimeAPI
      handler: {{type: python, path: handler.py, config: {{version: {version}}}}}
      compute: {{cpu: 0.5}}
      update_strategy: {{canary: {{steps: [50%], max_latency_increase: 900%}}}}
"""


def test_a_bad_version_is_rolled_back_and_no_other_request_fails(on_ray: OnRay, tmp_path: Path) -> None:
    cortex = on_ray.cortex
    seen: Counter[str] = Counter()

    def is_rolled_back() -> bool:
        with httpx.Client(timeout=60) as client:
            for number in range(40):
                answer = client.post(cortex.url("/tried"), json=number)
                seen["own failure" if "ValueError in handle_post" in answer.text else answer.text] += 1
        return (cortex.get("tried")["canary"] or {}).get("outcome") == "rolled back"

    for version in (1, 2):
        cortex.cortex("deploy", write_project(tmp_path, SOURCE, CONFIG.format(version=version)), timeout_s=300)
    wait_until(is_rolled_back, 300)
    assert seen.keys() == {"1", "2", "own failure"}

    def answers_again() -> bool:
        seen.clear()
        return is_rolled_back() and seen.keys() == {"1"}

    wait_until(answers_again, 60)
    cortex.cortex("delete", "tried")
