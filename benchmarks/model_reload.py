"""Measure the effect of a model reload on latency: `python -m benchmarks.model_reload`.

Two APIs receive requests at a constant rate: one with a large model, and a neighbour that does nothing. Each repetition
measures both twice without a reload, and then while a new version of the model is loaded and swapped in. The windows
last as long as a reload, plus two seconds. Goal: the p99 of both is at most 1.3 times the p99 before. The ratio of the
two windows without a reload shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tools import machine, processes, report, results
from benchmarks.tools.big_models import PREDICTORS, WRITERS
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, NotServingError
from benchmarks.tools.open_loop import OpenLoad, open_loop
from benchmarks.tools.workloads import JSON, NOOP, Workload

GOAL = 1.3
_ASK = Workload("big", b'{"x": 1}', JSON, None)
_LIMIT_S = 120.0
_Loads = tuple[OpenLoad, OpenLoad]
_EXTRA_S = 2.0  #: two polls begin at any time


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_reload", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(WRITERS), default=list(WRITERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rate", type=float, default=300, help="requests per second to each of the two APIs")
    arguments = parser.parse_args()
    processes.adopt_orphans()
    facts = machine.facts()
    found = {kind: _measure(kind, arguments) for kind in arguments.kinds}
    goals = [goal for kind, repeats in found.items() for goal in _goals(kind, repeats)]
    title = f"# Reload of a {arguments.megabytes} MB model at {arguments.rate:g} requests/s"
    text = f"{title}, medians of {arguments.repeats}\n\n{report.goals_table(goals)}\n\n{_details(found)}\n"
    results.write("model-reload", text, {"facts": facts, "repeats": found})


def _measure(kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="cortex-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        cortex = Cortex.in_folder(folder)
        models, size_bytes = folder / "models", arguments.megabytes * 1_000_000
        with cortex.up():
            cortex.deploy("noop")
            _publish(kind, models, folder, 1, size_bytes).rename(models / "1")
            cortex.run("deploy", str(_project(kind, folder, models)))
            big, neighbour = Endpoint(cortex.gateway_port, "/big"), Endpoint(cortex.gateway_port, "/noop")
            # The first reload is not counted: it tells how long one takes.
            window_s = _EXTRA_S + _reload(_publish(kind, models, folder, 2, size_bytes), models / "2", big)
            found = []
            for number in range(3, 3 + arguments.repeats):
                staged = _publish(kind, models, folder, number, size_bytes)
                shutil.rmtree(models / str(number - 2))
                time.sleep(2.0)
                quiet = _load(big, neighbour, arguments.rate, window_s)
                before = _load(big, neighbour, arguments.rate, window_s)
                served: list[float] = []
                reload = threading.Thread(
                    target=lambda staged=staged, number=number, served=served: served.append(  # type: ignore[misc]
                        _reload(staged, models / str(number), big)
                    )
                )
                reload.start()
                during = _load(big, neighbour, arguments.rate, window_s)
                reload.join()
                found.append(_sample(quiet, before, during, served[0], window_s))
                print(f"{kind}: {found[-1]}", flush=True)
    return found


def _publish(kind: str, models: Path, folder: Path, number: int, size_bytes: int) -> Path:
    """Write and sync a version outside the folder, so that one rename publishes it."""
    models.mkdir(exist_ok=True)
    staged = folder / f"staged-{number}"
    staged.mkdir()
    WRITERS[kind](staged, number, size_bytes)
    for file in staged.iterdir():
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
    return staged


def _project(kind: str, folder: Path, models: Path) -> Path:
    project = folder / "big"
    project.mkdir()
    (project / "predictor.py").write_text(PREDICTORS[kind])
    field = "multi_model_reloading" if kind == "python" else "models"
    predictor = {"type": kind, "path": "predictor.py", field: {"path": str(models), "poll_interval": "1s"}}
    (project / "cortex.yaml").write_text(
        yaml.safe_dump([{"name": "big", "kind": "RealtimeAPI", "predictor": predictor}])
    )
    return project


def _reload(staged: Path, target: Path, endpoint: Endpoint) -> float:
    """Publish a version; return the seconds until it is served. Raises: NotServingError."""
    start = time.monotonic()
    staged.rename(target)
    while (now := time.monotonic()) - start < _LIMIT_S:
        status, body = endpoint.ask(_ASK)
        if status == 200 and json.loads(body)["y"] == int(target.name):
            return time.monotonic() - start
        # Asked rarely, so that it is no load of its own.
        time.sleep(max(0.0, now + 0.1 - time.monotonic()))
    raise NotServingError(f"version {target.name} does not answer after {_LIMIT_S:.0f} s: {body[:300]!r}")


def _load(big: Endpoint, neighbour: Endpoint, rate: float, seconds: float) -> _Loads:
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(open_loop, *each, rate, seconds, 32) for each in ((big, _ASK), (neighbour, NOOP))]
        return loads[0].result(), loads[1].result()


def _sample(quiet: _Loads, before: _Loads, during: _Loads, served_s: float, window_s: float) -> dict[str, Any]:
    sample: dict[str, Any] = {"served_s": round(served_s, 2), "window_s": round(window_s, 2)}
    for index, name in enumerate(("big", "neighbour")):
        first, second, last = (loads[index] for loads in (quiet, before, during))
        before_us = (first.p99_us + second.p99_us) / 2
        sample[name] = {
            "before_p99_ms": round(before_us / 1e3, 2),
            "during_p99_ms": round(last.p99_us / 1e3, 2),
            "ratio": round(last.p99_us / before_us, 2),
            "noise": round(second.p99_us / first.p99_us, 2),
            "errors": first.errors + second.errors + last.errors,
            "generator_late_p99_ms": round(last.late_p99_us / 1e3, 2),
        }
    return sample


def _goals(kind: str, repeats: list[dict[str, Any]]) -> list[report.Goal]:
    goals = []
    for name in ("big", "neighbour"):
        ratio = statistics.median(sample[name]["ratio"] for sample in repeats)
        errors = sum(sample[name]["errors"] for sample in repeats)
        what = {"big": f"{kind}: p99 of the API during its reload ÷ before", "neighbour": f"{kind}: of its neighbour"}
        noise = sorted(sample[name]["noise"] for sample in repeats)
        measured = f"{ratio:.2f} (without a reload {noise[0]:.2f} to {noise[-1]:.2f})"
        goals.append(report.Goal(what[name], f"≤ {GOAL:g}", measured, ratio <= GOAL))
        goals.append(report.Goal(f"{kind}: failed requests, {name}", "0", str(errors), errors == 0))
    return goals


def _details(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| kind | served after | API p99 before | during | neighbour p99 before | during | generator late |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, repeats in found.items():
        for sample in repeats:
            big, neighbour = sample["big"], sample["neighbour"]
            lines.append(
                f"| {kind} | {sample['served_s']} s | {big['before_p99_ms']} ms | {big['during_p99_ms']} ms "
                f"| {neighbour['before_p99_ms']} ms | {neighbour['during_p99_ms']} ms "
                f"| {big['generator_late_p99_ms']} ms |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
