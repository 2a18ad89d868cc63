"""Compare server-side batching with other systems, each with and without it: `python -m benchmarks.batching`.

The systems with batching are then measured under an open load of half of their peak, and cortex also at half of that of
its fastest peer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.tools import environments, machine, measure, processes, report, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, free_ports, wait_until_right
from benchmarks.tools.load import require_wrk
from benchmarks.tools.paths import PEERS, USER_CODE
from benchmarks.tools.systems import START_LIMIT_S, System, environ_of, running
from benchmarks.tools.workloads import JSON, Workload

_PAYLOAD = {"x": [0.5, -1.25, 2.0, 0.75]}
WIDTHS = ("light", "heavy")
_VENVS = ("mosec", "litserve", "bentoml")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement, in whole seconds")
    parser.add_argument("--concurrency", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2, 16, 64))
    parser.add_argument("--systems", default="", help="comma-separated list of systems (default: all)")
    parser.add_argument("--widths", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    arguments = parser.parse_args()
    require_wrk()
    wanted = [name for name in arguments.systems.split(",") if name]
    chosen = tuple(system for system in _systems() if not wanted or system.name in wanted)
    for venv in sorted({system.venv for system in chosen if system.venv}):
        environments.prepare(venv)
    processes.adopt_orphans()
    plan = measure.Plan(
        arguments.rounds, arguments.seconds, concurrencies=arguments.concurrency, open_rounds=arguments.rounds
    )
    outcome: measure.Outcome = []
    for width in arguments.widths:
        outcome += _rounds(chosen, width, plan)
        batched = tuple(system for system in chosen if system.name.endswith("-batched"))
        outcome += measure.open_rounds(batched, partial(_workload_of, width), plan, shares=(0.5,))
    samples = [each for each in outcome if isinstance(each, measure.Sample)]
    facts = machine.facts()
    failures = [
        f"{each.system} {each.workload}: {each.message}" for each in outcome if isinstance(each, measure.Failed)
    ]
    text = "\n".join([f"# Server-side batching\n\n{json.dumps(facts)}\n", *_table(samples, plan), *failures, ""])
    results.write("batching", text, {"facts": facts, "samples": [dataclasses.asdict(each) for each in samples]})


def _workload_of(width: str, system: System) -> Workload:
    """Return the request for a width; BentoML's requests contain a list, because it joins lists to batches."""
    sys.path.insert(0, str(USER_CODE))
    from mlp_model import WIDTHS as NUMBERS  # type: ignore[import-not-found]
    from mlp_model import Mlp

    answer = Mlp(NUMBERS[width]).predict_one(_PAYLOAD)
    in_list = system.venv == "bentoml"
    body = {"payloads": [_PAYLOAD]} if in_list else _PAYLOAD
    return Workload(width, json.dumps(body).encode(), JSON, [answer] if in_list else answer)


def _rounds(systems: tuple[System, ...], width: str, plan: measure.Plan) -> measure.Outcome:
    def one_visit(system: System, workload: Workload, endpoint: Endpoint) -> Iterator[measure.Sample]:
        for concurrency in plan.concurrencies:
            yield measure.closed(system, workload, endpoint, concurrency, plan.seconds)

    outcome: measure.Outcome = []
    for _ in range(plan.rounds):
        for system in systems:
            outcome += measure.visit(system, _workload_of(width, system), plan, one_visit)
    return outcome


def _systems() -> tuple[System, ...]:
    """Return every system twice, with and without batching."""
    serves: dict[str, Callable[[bool], Callable[[Workload, Path], contextlib.AbstractContextManager[Endpoint]]]] = {
        "cortex": lambda batched: partial(_cortex, batched),
        **{peer: partial(_peer_of, peer) for peer in _VENVS},
    }
    return tuple(
        System(
            f"{name}{'-batched' if batched else ''}",
            "cortex" if name == "cortex" else "peer",
            frozenset(WIDTHS),
            serve(batched),
            None if name == "cortex" else name,
        )
        for name, serve in serves.items()
        for batched in (True, False)
    )


@contextlib.contextmanager
def _cortex(batched: bool, workload: Workload, folder: Path) -> Iterator[Endpoint]:
    cortex = Cortex.in_folder(folder)
    with cortex.up():
        cortex.deploy(f"{workload.name}_batched" if batched else workload.name)
        path = f"/{workload.name}-batched" if batched else f"/{workload.name}"
        endpoint = Endpoint(cortex.gateway_port, path)
        wait_until_right(endpoint, workload, START_LIMIT_S)
        yield endpoint


def _peer_of(peer: str, batched: bool) -> Callable[[Workload, Path], contextlib.AbstractContextManager[Endpoint]]:
    return partial(_peer, peer, batched)


def _peer(peer: str, batched: bool, workload: Workload, folder: Path) -> contextlib.AbstractContextManager[Endpoint]:
    endpoint = Endpoint(free_ports(1)[0], "/predict")
    python, server = str(environments.python_of(peer)), str(PEERS / peer / "batching.py")
    environ = environ_of(WORKLOAD=workload.name, BATCHED=str(int(batched)), PORT=str(endpoint.port), **_ONE_THREAD)
    command = [python, server]
    if peer == "mosec":
        command += ["--address", endpoint.host, "--port", str(endpoint.port), "--log-level", "warning"]
        command += ["--path", str(folder / "ipc"), "--timeout", "30000"]
    if peer == "bentoml":
        environ |= {"BENTOML_HOME": str(folder), "BENTOML_DO_NOT_TRACK": "True"}
        environ["PYTHONPATH"] = os.pathsep.join([str(PEERS / peer), environ["PYTHONPATH"]])
        command = [python, "-m", "bentoml", "serve", "batching:Service"]
        command += ["--host", endpoint.host, "--port", str(endpoint.port)]
    return running(command, environ, folder, endpoint, workload)


def _table(samples: list[measure.Sample], plan: measure.Plan) -> list[str]:
    """Return a table of medians over the rounds, with a line per width and system."""
    lines: list[str] = []
    closed = [sample for sample in samples if sample.load == "closed"]
    for width in dict.fromkeys(sample.workload for sample in samples):
        lines += [f"\n## {width}\n", "| system | " + " | ".join(f"{c} open" for c in plan.concurrencies) + " |"]
        lines.append("|---|" + "---:|" * len(plan.concurrencies))
        for name in dict.fromkeys(each.system for each in closed if each.workload == width):
            cells = []
            for concurrency in plan.concurrencies:
                mine = [s for s in closed if (s.system, s.workload, s.concurrency) == (name, width, concurrency)]
                rate = statistics.median(s.per_s or 0.0 for s in mine)
                late = statistics.median(s.p99_us or 0.0 for s in mine) / 1e3
                errors = sum(s.errors for s in mine)
                cells.append(f"{rate:,.0f}/s, p99 {late:.1f} ms{f', {errors} errors' if errors else ''}")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines += ["", "\n\n".join(report.open_tables(report.medians([*samples]), width))]
    return lines


if __name__ == "__main__":
    main()
