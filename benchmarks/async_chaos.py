"""Count lost and duplicated workloads of an AsyncAPI under kills: `python -m benchmarks.async_chaos`.

It sends 10,000 workloads. Meanwhile `kill -9` ends 30 workers, supervisors and operators, and two simulated power cuts
end all processes at once. Five workloads kill their own process, and one in a hundred raises. Finally every result is
fetched and compared with the submission. The code is shared with the tests:
`tests/harness/installations/async_chaos.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tools import machine, report, results
from benchmarks.tools.paths import REPOSITORY


def main() -> None:
    """Run, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--workloads", type=int, default=10_000)
    arguments = parser.parse_args()
    facts = machine.facts()
    outcome = _run(arguments.seed, arguments.workloads)
    goal = report.Goal(
        "each acknowledged workload has its one result, nothing else is left",
        "no mistake",
        f"{len(outcome.mistakes)} mistakes",
        not outcome.mistakes,
    )
    text = f"# Chaos of an AsyncAPI\n\n{report.goals_table([goal])}\n\n```\n{outcome}\n```\n"
    results.write("async-chaos", text, {"facts": facts, "outcome": dataclasses.asdict(outcome)})
    if outcome.mistakes:
        raise SystemExit(1)


def _run(seed: int, workloads: int) -> Any:
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from harness.installations.async_chaos import AsyncChaos, AsyncPlan
    from harness.installations.installation import installation

    with installation() as cortex, tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        outcome = AsyncChaos(cortex, Path(folder), AsyncPlan(seed=seed, workloads=workloads)).run()
        print(outcome, flush=True)
        return outcome


if __name__ == "__main__":
    main()
