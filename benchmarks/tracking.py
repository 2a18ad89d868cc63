"""Measure the cost of tracking, the rate of false drift alarms, and the delay of real ones.

Run `python -m benchmarks.tracking`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng

from benchmarks.tools import machine, processes, results
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, wait_until_right
from benchmarks.tools.load import closed_loop, require_wrk
from benchmarks.tools.systems import START_LIMIT_S
from benchmarks.tools.workloads import NOOP
from cortex.operator.monitoring.drift import DriftSettings, begin, compare, observe
from cortex.worker.monitoring.metrics import MetricFile
from cortex.worker.monitoring.tracker import PredictionTracker, bucket_of
from cortex.worker.spec import ReplicaSpec

_APIS = ("untracked", "classes", "numbers")
_WINDOW = 1000
_RATES = (0.01, 0.001)
#: An operator looks every few seconds: so many predictions come between two looks.
_STEP = 50
_MAX_WINDOWS = 20
_CALLS = 100_000

Counts = dict[str, int]
Draw = Callable[[Generator, int], Counts]


@dataclass(frozen=True)
class Stream:
    """Predictions before a change and after it."""

    name: str
    change: str
    counts_classes: bool
    before: Draw
    after: Draw


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracking", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="number of streams of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the load test; 0 skips it")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement in seconds")
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    chance = [_chance(stream, arguments.seeds) for stream in _streams()]
    delays = [_delay(stream, max(1, arguments.seeds // 10)) for stream in _streams()]
    costs = _costs(arguments.rounds, arguments.seconds, arguments.concurrency) if arguments.rounds else {}
    own, facts = _own_costs(), machine.facts()
    lines = [f"# Tracking\n\n{json.dumps(facts)}\n", *_table(chance, delays), *_cost_table(own, costs), ""]
    data = {"facts": facts, "chance": chance, "delays": delays, "track_us": own, "per_s": costs}
    results.write("tracking", "\n".join(lines), data)


def _streams() -> Iterator[Stream]:
    def classes(*shares: float) -> Draw:
        p = np.array(shares) / sum(shares)
        return lambda rng, n: {f"c{i}": int(count) for i, count in enumerate(rng.multinomial(n, p)) if count}

    def numbers(draw: Callable[[Generator, int], Any]) -> Draw:
        return lambda rng, n: {str(b): count for b, count in Counter(map(bucket_of, draw(rng, n).tolist())).items()}

    zipf = [1 / rank for rank in range(1, 101)]
    normal = numbers(lambda rng, n: rng.normal(size=n))
    yield Stream("2 classes, 50:50", "2:1", True, classes(1, 1), classes(2, 1))
    yield Stream("2 classes, 99:1", "95:5", True, classes(99, 1), classes(95, 5))
    yield Stream("10 classes", "one twice as often", True, classes(*[1] * 10), classes(2, *[1] * 9))
    yield Stream("100 classes, 1/rank", "the order turned round", True, classes(*zipf), classes(*zipf[::-1]))
    yield Stream("normal", "mean + 0.4 deviations", False, normal, numbers(lambda rng, n: rng.normal(0.4, size=n)))
    lognormal = numbers(lambda rng, n: rng.lognormal(size=n))
    yield Stream("log-normal", "twice as large", False, lognormal, numbers(lambda rng, n: 2 * rng.lognormal(size=n)))


def _chance(stream: Stream, seeds: int) -> dict[str, Any]:
    """Return the number of flagged windows of an unchanging stream for the given rate."""
    seeds = seeds if stream.counts_classes else max(1, seeds // 5)  # as long as those take
    flagged = dict.fromkeys(map(str, _RATES), 0)
    for seed in range(seeds):
        rng = default_rng(seed)
        baseline, window = stream.before(rng, _WINDOW), stream.before(rng, _WINDOW)
        for rate in _RATES:
            psi, threshold = compare(baseline, window, DriftSettings(stream.counts_classes, _WINDOW, rate))
            flagged[str(rate)] += psi > threshold
    return {"stream": stream.name, "seeds": seeds, "flagged": flagged}


def _delay(stream: Stream, seeds: int) -> dict[str, Any]:
    """Return the number of predictions from a change until it is flagged, at the default rate."""
    seeds = seeds if stream.counts_classes else max(1, seeds // 5)
    settings = DriftSettings(stream.counts_classes, _WINDOW, 0.001)
    needed = [_needed(stream, settings, default_rng(seed)) for seed in range(seeds)]
    return {
        "stream": stream.name, "change": stream.change, "seeds": seeds, "p50": statistics.median(needed),
        "p99": float(np.quantile(needed, 0.99)), "max": max(needed),
    }  # fmt: skip


def _needed(stream: Stream, settings: DriftSettings, rng: Generator) -> int:
    totals: Counter[str] = Counter()
    drift = begin("m", totals, {})
    # The change comes anywhere in a window.
    for _ in range(_WINDOW // _STEP + int(rng.integers(_WINDOW // _STEP))):
        totals.update(stream.before(rng, _STEP))
        drift = observe(drift, totals, settings, 0.0)
    flagged = drift.drifted
    for step in range(1, _MAX_WINDOWS * _WINDOW // _STEP):
        totals.update(stream.after(rng, _STEP))
        drift = observe(drift, totals, settings, 0.0)
        if drift.drifted > flagged:
            return step * _STEP
    return _MAX_WINDOWS * _WINDOW


def _own_costs() -> dict[str, float]:
    """Return the microseconds of tracking alone, which are small against the variation of the load test."""
    found = {}
    for model_type in ("classification", "regression"):
        with tempfile.TemporaryDirectory(prefix="tracking-", dir="/dev/shm") as folder:
            spec = ReplicaSpec(
                "a-1-1", "a", "1", "handler", "", "", "", "", (), "", "", metrics_dir=folder,
                tracker_key="y", tracker_type=model_type,
            )  # fmt: skip
            track = partial(
                PredictionTracker(spec, MetricFile(Path(folder) / "0-1")).track, {"y": 1}, b"1763690000000-4711-1"
            )
            found[model_type] = min(timeit.repeat(track, number=_CALLS, repeat=7)) / _CALLS * 1e6
    return found


def _costs(rounds: int, seconds: float, concurrency: int) -> dict[str, list[float]]:
    """Return requests per second of a function that does nothing, round by round, without a tracker and with each."""
    require_wrk()
    processes.adopt_orphans()
    per_s: dict[str, list[float]] = {api: [] for api in _APIS}
    with tempfile.TemporaryDirectory(prefix="tracking-") as folder:
        cortex = Cortex.in_folder(Path(folder) / "cortex")
        with cortex.up():
            cortex.deploy("tracked")
            for number in range(rounds):
                for api in _APIS if number % 2 == 0 else _APIS[::-1]:
                    endpoint = Endpoint(cortex.gateway_port, f"/{api}")
                    wait_until_right(endpoint, NOOP, START_LIMIT_S)
                    closed_loop(endpoint, NOOP, concurrency, 1)
                    per_s[api].append(closed_loop(endpoint, NOOP, concurrency, seconds).per_s)
                    print(f"{api}: {per_s[api][-1]:,.0f}/s", flush=True)
    return per_s


def _table(chance: list[dict[str, Any]], delays: list[dict[str, Any]]) -> Iterator[str]:
    yield f"## Flagged by chance, windows of {_WINDOW:,} against a baseline of {_WINDOW:,}\n"
    yield "| stream | windows | " + " | ".join(f"flagged at {rate}" for rate in _RATES) + " |"
    yield "|---|---:|" + "---:|" * len(_RATES)
    for row in chance:
        cells = [f"{count} ({count / row['seeds']:.5f})" for count in row["flagged"].values()]
        yield f"| {row['stream']} | {row['seeds']:,} | " + " | ".join(cells) + " |"
    yield f"\n## Predictions until a change is flagged, at 0.001, a look every {_STEP} predictions\n"
    yield "| stream | change | streams | median | p99 | most |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in delays:
        figures = f"{row['p50']:,.0f} | {row['p99']:,.0f} | {row['max']:,}"
        yield f"| {row['stream']} | {row['change']} | {row['seeds']:,} | {figures} |"


def _cost_table(own: dict[str, float], costs: dict[str, list[float]]) -> Iterator[str]:
    yield "\n## Tracking one prediction, on the thread of the call\n"
    yield "| model_type | microseconds |"
    yield "|---|---:|"
    for model_type, microseconds in own.items():
        yield f"| {model_type} | {microseconds:.2f} |"
    if costs:
        yield "\n## Requests per second of a function that does nothing\n"
        yield "| tracker | median | of untracked | rounds |"
        yield "|---|---:|---:|---|"
        base = statistics.median(costs["untracked"])
        for api, rounds in costs.items():
            middle = statistics.median(rounds)
            yield f"| {api} | {middle:,.0f} | {middle / base:.1%} | {', '.join(f'{each:,.0f}' for each in rounds)} |"


if __name__ == "__main__":
    main()
