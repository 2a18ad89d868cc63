"""Compare `/metrics` with the responses that clients received, under kills: `python -m benchmarks.numbers`.

An API is called at a constant rate while `kill -9` ends 20 of its processes and supervisors, and twice the operator,
which is then restarted and updates the API. After each kill the counters are checked for decreases. Finally `/metrics`
is compared with the received responses. The code is shared with the tests:
`tests/harness/installations/number_chaos.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tools import machine, report, results
from benchmarks.tools.paths import REPOSITORY


def main() -> None:
    """Run, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numbers", description=__doc__)
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second")
    arguments = parser.parse_args()
    facts = machine.facts()
    outcome = _run(arguments.rate)
    goal = report.Goal(
        "the sum of counters is what callers saw, and none went back",
        "no mistake",
        f"{len(outcome.mistakes)} mistakes in {outcome.sent} requests",
        not outcome.mistakes,
    )
    shown = {name: outcome.numbers[name] for name in sorted(outcome.numbers) if "_total{" in name}
    lines = "\n".join(f"{name} {value:g}" for name, value in shown.items())
    text = f"callers saw: {outcome.statuses}\n{lines}\n" + "\n".join(outcome.mistakes)
    print(text, flush=True)
    page = f"# Numbers through kills\n\n{report.goals_table([goal])}\n\n```\n{text}\n```\n"
    results.write("numbers", page, {"facts": facts, "outcome": dataclasses.asdict(outcome)})
    if outcome.mistakes:
        raise SystemExit(1)


def _run(rate: float) -> Any:
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from harness.installations.installation import installation
    from harness.installations.number_chaos import NumberChaos, Plan

    plan = Plan(process_kills=10, replica_kills=10, operator_kills=2, rate=rate)
    with installation() as cortex, tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        return NumberChaos(cortex, Path(folder), plan).run()


if __name__ == "__main__":
    main()
