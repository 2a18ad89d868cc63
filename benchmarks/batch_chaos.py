"""Count lost and duplicated items of a batch job under kills: `python -m benchmarks.batch_chaos`.

100,000 items in batches of 10 go to three workers; 20 items crash the process with a segmentation fault. In the first
run, `kill -9` ends 50 workers, supervisors and operators; operators are restarted. In the second run, three simulated
power cuts end all processes at once while the operator writes. Finally results, dead letters, counts and calls of
`on_job_complete` are compared with the submission. The code is shared with the tests:
`tests/harness/installations/chaos.py`.
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

RUNS = {"kills": {"kills": 50, "power_cuts": 0}, "power cuts": {"kills": 0, "power_cuts": 3}}


def main() -> None:
    """Run both parts, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    arguments = parser.parse_args()
    facts = machine.facts()
    outcomes = {name: _run(RUNS[name], arguments.seed, arguments.items) for name in arguments.runs}
    goals = [
        report.Goal(
            f"{name}: nothing lost, nothing doubled, finished once, counts exact",
            "no mistake",
            f"{len(outcome.mistakes)} mistakes",
            not outcome.mistakes,
        )
        for name, outcome in outcomes.items()
    ]
    texts = "\n\n".join(f"## {name}\n\n```\n{outcome}\n```" for name, outcome in outcomes.items())
    text = f"# Chaos\n\nSeed {arguments.seed}.\n\n{report.goals_table(goals)}\n\n{texts}\n"
    data = {"facts": facts, **{name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}}
    results.write("batch-chaos", text, data)
    if any(outcome.mistakes for outcome in outcomes.values()):
        raise SystemExit(1)


def _run(events: dict[str, int], seed: int, items: int) -> Any:
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from harness.installations.chaos import Chaos, Plan
    from harness.installations.installation import installation

    with installation() as cortex, tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        outcome = Chaos(cortex, Path(folder), Plan(seed=seed, items=items, **events)).run()
        print(outcome, flush=True)
        return outcome


if __name__ == "__main__":
    main()
