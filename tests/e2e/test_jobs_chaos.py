"""A job whose processes are killed loses nothing, doubles nothing, and finishes once.

Small here; `python -m benchmarks.batch_chaos` does it in full, or a JSON object in CORTEX_CHAOS, such as
`{"seed": 7, "items": 100000, "kills": 50, "poison": 20, "pause_s": 0.01}`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.installations.chaos import Chaos, Plan, from_environ
from harness.installations.installation import Installation, installation

pytestmark = pytest.mark.long

SMALL = Plan(seed=4, items=4000, poison=2, kills=8, pause_s=0.02, limit_s=60)


@pytest.fixture
def alone() -> Iterator[Installation]:
    """An installation of one test: everything in it is killed."""
    with installation() as made:
        yield made


@pytest.mark.timeout(1200 if "CORTEX_CHAOS" in os.environ else 300)
def test_job_survives_kills_of_workers_supervisors_and_the_operator(alone: Installation, tmp_path: Path) -> None:
    outcome = Chaos(alone, tmp_path, from_environ(dict(os.environ), SMALL)).run()
    assert not outcome.mistakes, outcome


@pytest.mark.timeout(1200 if "CORTEX_CHAOS" in os.environ else 300)
def test_job_survives_power_cuts(alone: Installation, tmp_path: Path) -> None:
    plan = from_environ(dict(os.environ), Plan(**{**vars(SMALL), "poison": 1, "kills": 0}))
    outcome = Chaos(alone, tmp_path, Plan(**{**vars(plan), "kills": 0, "power_cuts": 3})).run()
    assert not outcome.mistakes, outcome
