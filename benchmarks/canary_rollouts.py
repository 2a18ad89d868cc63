"""Simulate thousands of rollouts: false rollbacks, and what is noticed when: `python -m benchmarks.canary_rollouts`.

Each rollout has requests, processes and steps of its own, and three rules judge the same requests: cortex, with the
code that judges real canaries; Kayenta's rule; and Flagger's rule, both as their documentation describes them.

A/A: both versions are the same, so every rollback is an error. A/B: the new version is worse in one property.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from benchmarks.tools import machine, results
from cortex.config.schema import Api
from cortex.operator.canary.judge import WARM_UP_S, Judge, RevisionNumbers
from cortex.operator.canary.trials import Trial, TrialOutcome, advance
from cortex.worker.monitoring.metrics import FINE_BOUNDS_S

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

_BOUNDS = (*FINE_BOUNDS_S, math.inf)
_CLASSES = ("cat", "dog", "bird")
_CLASS_SHARES = (0.7, 0.25, 0.05)
#: Latency in user code: median, and deviation of its logarithm.
_MEDIAN_S, _DEVIATION = 0.02, 0.4
_P99_S = _MEDIAN_S * math.exp(2.326 * _DEVIATION)
#: Processes of the old version; the new one has as many as its share needs.
_PROCESSES = 10
#: A process is slow after its start, three times at first.
_COLD_S = 20.0
_PAUSE_S, _FAULT_S, _OUTAGE_S = 0.5, 20.0, 60.0
_HOUR_S = 3600.0
#: Of the simulation; real windows have 5 s, and take six times as long to simulate.
_WINDOW_S = 30.0


@dataclass(frozen=True)
class Scenario:
    """Traffic and troubles that both versions share, and what is worse in the new one."""

    name: str
    per_s: float = 50.0
    duration_s: float = _HOUR_S
    error_rate: float = 0.005
    has_bursts: bool = False  #: ten times the traffic in one minute of ten
    has_days: bool = False  #: traffic, errors and latency follow the time of day
    starts_cold: bool = False
    pauses: float = 0.0  #: part of the time in which a process pauses, by itself
    faults: float = 0.0  #: part of the time in which all requests in a process fail, by itself
    outages: float = 0.0  #: part of the time in which a dependency of both versions fails 60 % of requests
    more_errors: float = 0.0
    slower_tail: float = 0.0  #: increase of the p99: as many requests take that much longer as are needed
    disagreement: float = 0.0  #: part of the copied requests with another prediction; 1 % is tolerated
    shift: float = 0.0  #: part of the requests that are a dog for the new version instead of a cat

    @property
    def is_worse(self) -> bool:
        """Return whether the new version is worse."""
        return bool(self.more_errors or self.slower_tail or self.shift or self.disagreement)


SAME = (
    Scenario("steady, 50 requests/s"),
    Scenario("bursts: ten times the requests", has_bursts=True),
    Scenario("time of day: requests, errors, latency", per_s=10, has_days=True, duration_s=6 * _HOUR_S),
    Scenario("10 requests an hour, for two weeks", per_s=10 / 3600, duration_s=14 * 24 * _HOUR_S),
    Scenario("new processes are cold at each step", per_s=200, starts_cold=True),
    Scenario("outages of a shared dependency", outages=0.05),
    Scenario("pauses of single processes (0.5 s)", pauses=0.02),
    Scenario("faults of single processes (20 s)", faults=0.01),
)
WORSE = (
    Scenario("errors 0.5 % → 1.5 %", more_errors=0.01),
    Scenario("errors 0.5 % → 3 %", more_errors=0.025),
    Scenario("errors 0.5 % → 10 %", more_errors=0.095),
    Scenario("errors 0.5 % → 100 %", more_errors=0.995),
    Scenario("the same, 10 requests an hour", per_s=10 / 3600, duration_s=14 * 24 * _HOUR_S, more_errors=0.995),
    Scenario("p99 +50 %", slower_tail=0.5),
    Scenario("p99 +100 %", slower_tail=1.0),
    Scenario("5 % of cats become dogs", shift=0.05),
    Scenario("20 % of cats become dogs", shift=0.2),
    Scenario("another prediction for 3 % (shadow)", disagreement=0.03),
)


@dataclass
class Window:
    """Outcomes of some requests to one version."""

    latencies: Floats
    is_error: Mask
    classes: Integers

    def part(self, mask: Mask) -> Window:
        """Return the requests for which `mask` is true."""
        return Window(self.latencies[mask], self.is_error[mask], self.classes[mask])

    def numbers(self) -> RevisionNumbers:
        """Return what replicas would count."""
        slots = np.searchsorted(FINE_BOUNDS_S, self.latencies)
        durations = dict(zip(_BOUNDS, np.bincount(slots, minlength=len(_BOUNDS)).tolist(), strict=True))
        counts = np.bincount(self.classes, minlength=len(_CLASSES)).tolist()
        return RevisionNumbers(
            len(self.latencies), int(self.is_error.sum()), durations, dict(zip(_CLASSES, counts, strict=True))
        )


@dataclass
class World:
    """The course of one rollout, apart from the share of the new version, which depends on the rule."""

    scenario: Scenario
    generator: Generator
    troubles: dict[str, Mask] = field(default_factory=dict)
    processes: int = _PROCESSES

    def __post_init__(self) -> None:
        """Draw the pauses, faults and outages: of each process, old ones first, and of both versions."""
        for name, share, length_s in self._kinds():
            slots = int(self.scenario.duration_s / length_s) + 2
            rows = 1 if name == "outage" else 2 * _PROCESSES
            if share:
                self.troubles[name] = self.generator.random((rows, slots)) < share

    def _kinds(self) -> tuple[tuple[str, float, float], ...]:
        of = self.scenario
        return ("pause", of.pauses, _PAUSE_S), ("fault", of.faults, _FAULT_S), ("outage", of.outages, _OUTAGE_S)

    def window(self, time_s: float, length_s: float, share: float, started_s: Floats) -> tuple[Window, Window]:
        """Draw the requests of one window: of the old version, and of the new one, whose processes started then."""
        generator, scenario = self.generator, self.scenario
        count = generator.poisson(self._rate(time_s) * length_s)
        times = time_s + generator.random(count) * length_s
        is_new = generator.random(count) < share
        process = np.where(
            is_new,
            _PROCESSES + generator.integers(len(started_s), size=count),
            generator.integers(_PROCESSES, size=count),
        )
        day = 0.5 + 0.5 * np.sin(2 * math.pi * times / (24 * _HOUR_S)) if scenario.has_days else np.zeros(count)
        latencies = _MEDIAN_S * np.exp(_DEVIATION * generator.standard_normal(count)) * (1 + day)
        error_rate = scenario.error_rate * (1 + 4 * day) + scenario.more_errors * is_new
        if (outage := self._hit("outage", np.zeros(count, np.int64), times, _OUTAGE_S)) is not None:
            error_rate = np.where(outage, 0.6, error_rate)
            latencies = np.where(outage, latencies * 5, latencies)
        is_error = generator.random(count) < error_rate
        if (fault := self._hit("fault", process, times, _FAULT_S)) is not None:
            is_error |= fault
        if (pause := self._hit("pause", process, times, _PAUSE_S)) is not None:
            latencies += np.where(pause, _PAUSE_S - times % _PAUSE_S, 0.0)
        if scenario.starts_cold:
            age_s = times - np.where(is_new, started_s[np.where(is_new, process - _PROCESSES, 0)], -math.inf)
            latencies *= 1 + 2 * np.maximum(0.0, 1 - age_s / _COLD_S)
        if scenario.slower_tail:
            slow = is_new & (generator.random(count) < 0.03)
            latencies = np.where(
                slow, _P99_S * (1 + scenario.slower_tail) * (0.8 + 0.4 * generator.random(count)), latencies
            )
        classes = generator.choice(len(_CLASSES), size=count, p=_CLASS_SHARES)
        if scenario.shift:
            classes = np.where(is_new & (classes == 0) & (generator.random(count) < scenario.shift), 1, classes)
        both = Window(latencies, is_error, classes)
        return both.part(~is_new), both.part(is_new)

    def _rate(self, time_s: float) -> float:
        of = self.scenario
        if of.has_bursts and time_s % 600 >= 540:
            return of.per_s * 10
        return of.per_s * (1 + 0.9 * math.sin(2 * math.pi * time_s / (24 * _HOUR_S))) if of.has_days else of.per_s

    def _hit(self, name: str, row: Integers, times: Floats, length_s: float) -> Mask | None:
        trouble = self.troubles.get(name)
        return None if trouble is None else trouble[row, (times / length_s).astype(np.int64)]


@dataclass(frozen=True)
class End:
    """End of one rollout by one rule; `worse` is None if there was no decision."""

    worse: bool | None
    time_s: float
    requests: int  #: that the new version answered


class Processes:
    """The processes of the new version: as many as its share needs, each with the time of its start."""

    def __init__(self) -> None:
        self.started_s = np.zeros(0)

    def scale(self, share: float, time_s: float) -> Floats:
        """Start those that are missing."""
        missing = max(1, math.ceil(share * _PROCESSES)) - len(self.started_s)
        self.started_s = np.concatenate([self.started_s, np.full(max(0, missing), time_s)])
        return self.started_s


def cortex_rule(scenario: Scenario, seed: int) -> End:
    """Judge as the operator does, with the default configuration."""
    canary = {"max_prediction_shift": "2%"} if scenario.shift or "steady" in scenario.name else {}
    if scenario.disagreement:
        canary = {"shadow": True, "max_disagreement": "1%"}
    tracker = {"model_type": "classification", "key": "label"} if canary else None
    api = Api.model_validate(
        {
            "name": "iris",
            "kind": "RealtimeAPI",
            "handler": {"type": "python", "path": "handler.py", "interface": "handler"},
            "tracker": tracker,
            "update_strategy": {"canary": canary},
        }
    )
    config = api.update_strategy.canary
    assert config is not None
    world, judge, processes = World(scenario, default_rng(seed)), Judge(api), Processes()
    trial = Trial("r2", 2, "r1", 1, is_shadow=config.shadow)
    length_s = max(_WINDOW_S, 1 / scenario.per_s)
    time_s, requests, old, new = 0.0, 0, RevisionNumbers(), RevisionNumbers()
    while time_s < scenario.duration_s:
        # With copies, both versions get the same number of requests: half of those that are drawn.
        share = 0.5 if trial.is_shadow else int(config.steps[trial.step].rstrip("%")) / 100
        started_s = processes.scale(share, time_s)
        warm_from_s = float(started_s.max())
        drawn = world.window(time_s, length_s, share, started_s)
        time_s += length_s
        old, new = _sum(old, drawn[0].numbers()), _sum(new, drawn[1].numbers())
        if not (old.requests and new.requests):
            continue  # as in the operator, the window becomes longer
        judge.observe(old, new, time_s - warm_from_s > WARM_UP_S, time_s)
        if trial.is_shadow:
            judge.observe_pairs(new.requests, int(world.generator.binomial(new.requests, scenario.disagreement)))
        trial = Trial(**{**asdict(trial), "step_requests": trial.step_requests + new.requests})
        requests += new.requests
        old, new = RevisionNumbers(), RevisionNumbers()
        before, trial = trial, advance(trial, config, judge.findings(), 0.0)
        if trial.step != before.step:
            judge.begin_step()
        if not trial.is_open:
            return End(trial.outcome is TrialOutcome.ROLLED_BACK, time_s, requests)
    return End(None, time_s, requests)


def _sum(one: RevisionNumbers, other: RevisionNumbers) -> RevisionNumbers:
    durations = {bound: one.durations.get(bound, 0) + count for bound, count in other.durations.items()}
    classes = {name: one.classes.get(name, 0) + count for name, count in other.classes.items()}
    return RevisionNumbers(one.requests + other.requests, one.errors + other.errors, durations, classes)


def kayenta_rule(scenario: Scenario, seed: int) -> End:
    """Judge as Kayenta does: three hours, each hour a score over the time series since the beginning.

    The canary gets 10 % of the requests, and a fresh baseline as many. Metrics are points of one minute: the part of
    errors, p50 and p99 latency, and the part of the class. A metric fails if the Mann-Whitney test at 98 % finds a
    difference beyond 25 % of the Hodges-Lehmann estimate in the bad direction, or the effect (the ratio of the means)
    exceeds 1.25 as well. Metrics weigh the same: a score below 75 fails the canary, 95 and more pass it.
    """
    world, processes = World(scenario, default_rng(seed)), Processes()
    minute_s = max(60.0, scenario.duration_s / 1000)
    looks = 3
    look_s = max(_HOUR_S, scenario.duration_s / looks)
    points: list[tuple[list[float], list[float]]] = [([], []) for _ in range(4)]
    time_s, requests = 0.0, 0
    started_s = processes.scale(0.1, 0.0)
    for look in range(looks):
        while time_s < (look + 1) * look_s:
            old, new = world.window(time_s % scenario.duration_s, minute_s, 0.1, started_s)
            baseline = old.part(world.generator.random(len(old.latencies)) < 1 / 9)
            time_s += minute_s
            requests += len(new.latencies)
            if len(new.latencies) and len(baseline.latencies):
                for pair, before, after in zip(points, _metrics(baseline), _metrics(new), strict=True):
                    pair[0].append(before)
                    pair[1].append(after)
        score = 100 * statistics.mean(not _is_high(*pair) for pair in points)
        if score < 75:
            return End(True, time_s, requests)
    return End(score < 95, time_s, requests)


def _metrics(window: Window) -> tuple[float, float, float, float]:
    p50, p99 = np.quantile(window.latencies, (0.5, 0.99))
    return float(window.is_error.mean()), float(p50), float(p99), float((window.classes == 1).mean())


def _is_high(baseline: list[float], canary: list[float]) -> bool:
    """Apply the Mann-Whitney test: the interval of the shift lies above 25 % of the estimated shift."""
    if len(baseline) < 5:
        return False
    before, after = np.array(baseline), np.array(canary)
    shifts = np.sort(np.subtract.outer(after, before).ravel())
    n, m = len(after), len(before)
    # Normal approximation of the rank statistic: the bounds of the interval are order statistics of the differences.
    rank = int(max(0, n * m / 2 - 2.326 * math.sqrt(n * m * (n + m + 1) / 12)))
    low, estimate = float(shifts[rank]), float(np.median(shifts))
    return low > 0.25 * abs(estimate)


def flagger_rule(scenario: Scenario, seed: int) -> End:
    """Judge as Flagger does: each minute, success rate at least 99 % and p99 at most a limit; 5 failed checks end it.

    The share grows by 10 points with each check that passes, up to 50. The limit is 1.25 times the p99 of the old
    version in quiet times. A minute without requests is a failed check.
    """
    world, processes = World(scenario, default_rng(seed)), Processes()
    share, failed, time_s, requests = 0.1, 0, 0.0, 0
    while time_s < scenario.duration_s:
        _, new = world.window(time_s, 60.0, share, processes.scale(share, time_s))
        time_s += 60.0
        requests += len(new.latencies)
        passes = (
            len(new.latencies) > 0 and new.is_error.mean() <= 0.01 and np.quantile(new.latencies, 0.99) <= 1.25 * _P99_S
        )
        if passes:
            if share >= 0.5:
                return End(False, time_s, requests)
            share = min(0.5, share + 0.1)
        else:
            failed += 1
            if failed >= 5:
                return End(True, time_s, requests)
    return End(None, time_s, requests)


RULES: dict[str, Callable[[Scenario, int], End]] = {
    "cortex": cortex_rule,
    "kayenta": kayenta_rule,
    "flagger": flagger_rule,
}


def _run(task: tuple[str, Scenario, int]) -> End:
    rule, scenario, seed = task
    return RULES[rule](scenario, seed)


def main() -> None:
    """Simulate, and write the report. Exit with 1 if cortex rolls back more good versions than it promises."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.canary_rollouts", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000, help="of each scenario in which both are the same")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    data: dict[str, Any] = {"facts": machine.facts(), "ends": {}}
    lines: dict[bool, list[str]] = {True: [], False: []}
    broken = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for scenario in (*SAME, *WORSE):
            if arguments.only not in scenario.name:
                continue
            count = arguments.rollouts if not scenario.is_worse else -(-arguments.rollouts // 5)
            cells = []
            for rule in RULES:
                # A fifth of them shows what the other rules do; only the promise of cortex needs as many.
                tasks = [(rule, scenario, seed) for seed in range(count if rule == "cortex" else -(-count // 5))]
                ends = pool.map(_run, tasks, chunksize=4)
                cells.append(_cell(ends, scenario.is_worse))
                data["ends"][f"{scenario.name}: {rule}"] = [asdict(end) for end in ends]
                false = sum(end.worse is True for end in ends)
                if rule == "cortex" and not scenario.is_worse and not _is_kept(false, count):
                    broken.append(scenario.name)
            lines[scenario.is_worse].append(f"| {scenario.name} | {' | '.join(cells)} |")
            print(lines[scenario.is_worse][-1], flush=True)
    text = "\n".join(
        [
            "# Simulated rollouts",
            "",
            f"Both versions are the same: rolled back (wrong) / promoted / undecided, of {arguments.rollouts} rollouts",
            "",
            "| scenario | cortex | Kayenta's rule | Flagger's rule |\n|---|---|---|---|",
            *lines[False],
            "",
            "The new version is worse: rolled back / promoted (wrong) / undecided; time and its requests until then",
            "",
            "| scenario | cortex | Kayenta's rule | Flagger's rule |\n|---|---|---|---|",
            *lines[True],
            "",
        ]
    )
    results.write("canary-rollouts", text, data)
    if broken:
        raise SystemExit(f"more false rollbacks than promised: {', '.join(broken)}")


def _cell(ends: list[End], is_worse: bool) -> str:
    worse, better = (sum(end.worse is value for end in ends) for value in (True, False))
    shares = " / ".join(f"{100 * count / len(ends):.1f}" for count in (worse, better, len(ends) - worse - better))
    found = [end for end in ends if end.worse]
    if not (is_worse and found):
        return f"{shares} %"
    time_s = statistics.median(end.time_s for end in found)
    requests = statistics.median(end.requests for end in found)
    shown = f"{time_s / 60:.1f} min" if time_s < 2 * _HOUR_S else f"{time_s / _HOUR_S:.0f} h"
    return f"{shares} %; {shown}, {requests:,.0f}"


def _is_kept(false: int, count: int) -> bool:
    """Return whether so many errors are plausible at a rate of 1 %, at a significance of 0.1 %."""
    return false <= 0.01 * count + 3.1 * math.sqrt(0.01 * 0.99 * count) + 1


if __name__ == "__main__":
    main()
