"""Compare cortex with other model servers: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import dataclasses

from benchmarks.tools import machine, measure, processes, report, results, systems
from benchmarks.tools.load import require_wrk
from benchmarks.tools.workloads import NOOP, SMALL

PARTS = ("small", "open", "large")
QUICK = measure.Plan(rounds=1, seconds=2, probe_s=1, open_s=3, open_rounds=1)


def main() -> None:
    """Measure, and write the report."""
    arguments = _arguments()
    require_wrk()
    chosen = systems.named(arguments.systems)
    systems.prepare(chosen)
    processes.adopt_orphans()
    facts = machine.facts()
    plan = _plan(arguments)
    facts["rounds"] = f"{plan.rounds} of {plan.seconds:g} s; one system runs at a time"
    outcome: measure.Outcome = []
    try:
        if "small" in arguments.parts:
            outcome += measure.closed_rounds(chosen, SMALL, plan)
        if "open" in arguments.parts:
            outcome += measure.open_rounds(chosen, lambda _: NOOP, plan)
        if "large" in arguments.parts:
            outcome += measure.large_rounds(chosen, plan)
    except KeyboardInterrupt:
        facts["stopped"] = "by hand, before the end"
    data = {
        "facts": facts,
        "plan": dataclasses.asdict(plan),
        "medians": [dataclasses.asdict(sample) for sample in report.medians(outcome)],
        "samples": [dataclasses.asdict(each) for each in outcome],
    }
    results.write("serve", report.markdown(outcome, facts), data)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, as a functional check")
    parser.add_argument("--systems", default="", help="comma-separated list of systems (default: all)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="duration of each measurement, in whole seconds")
    parser.add_argument(
        "--concurrency",
        type=lambda text: tuple(map(int, text.split(","))),
        help="comma-separated numbers of connections (default: 1,16,64)",
    )
    return parser.parse_args()


def _plan(arguments: argparse.Namespace) -> measure.Plan:
    plan = QUICK if arguments.quick else measure.Plan()
    given = {
        "rounds": arguments.rounds,
        "open_rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "concurrencies": arguments.concurrency,
    }
    return dataclasses.replace(plan, **{name: value for name, value in given.items() if value is not None})


if __name__ == "__main__":
    main()
