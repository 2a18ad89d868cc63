"""An AsyncAPI whose processes are killed keeps each workload that was acknowledged, and records one result of it.

Small here; `python -m benchmarks.async_chaos` does it in full.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.installations.async_chaos import AsyncChaos, AsyncPlan
from harness.installations.installation import installation

pytestmark = pytest.mark.long

SMALL = AsyncPlan(seed=3, workloads=300, replicas=2, senders=4, poison=0, kills=3, power_cuts=1, limit_s=60)


@pytest.mark.timeout(300)
def test_workloads_survive_kills_and_a_power_cut(tmp_path: Path) -> None:
    with installation() as cortex:
        outcome = AsyncChaos(cortex, tmp_path, SMALL).run()
        assert not outcome.mistakes, outcome
