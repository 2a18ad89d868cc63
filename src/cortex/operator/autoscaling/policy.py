"""Decides how many replicas an API is to have: policy, load and earlier recommendations in, a decision out. Pure.

The rules, in the order in which they bind; names are those of the `autoscaling` section:
1. As many replicas as the load takes: its average over `window`, divided by what one replica is to carry.
2. A difference within the tolerance is no reason to move.
3. One step changes the number by no more than a factor, and may always change it by one.
4. Within `min_replicas` and `max_replicas`. None at all only once no request came during the whole window.
5. Down no further than the highest recommendation of the last `downscale_stabilization_period`, up no further than the
   lowest of the last `upscale_stabilization_period`; not before such a period is over since the API was deployed or the
   operator started. Stabilisation holds a number; it never moves it the other way.
6. No replica is added for which the machine has no room.

From none to one it takes a single waiting request, at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from cortex.config.schema import Api, Compute
from cortex.lifecycle import ApiKind

#: Time between two decisions about one API.
TICK_S = 10.0
#: Time between two looks at the load.
SAMPLE_S = 1.0
#: Samples come a little late at times: a window counts as covered if so much of its beginning is missing at most.
_SLACK_S = 2.0
#: What is wanted is rounded to so many: the last digits of an average change while the load does not.
_DIGITS = 9
#: Files of 0.10 to 0.12 that say nothing else aim at so many percent of CPU.
_DEFAULT_CPU_PERCENT = 80
#: What Kubernetes did for these files: tolerance both ways, no wait on the way up, at most so much at once.
_CPU_TOLERANCE = 0.1
_CPU_UPSCALE_FACTOR = 2.0
_CPU_UPSCALE_AT_LEAST = 4


class Measure(StrEnum):
    """What the load is counted in; the value is what readers see."""

    IN_FLIGHT = "in flight"  #: requests in the gateway and in replicas, waiting ones included
    WORKLOADS = "workloads"  #: of an AsyncAPI: waiting and in progress
    CORES = "cores"  #: CPU time per second of all processes that are ready


@dataclass(frozen=True)
class Policy:
    """The autoscaling of one API."""

    measure: Measure
    target: float  #: load that one replica is to carry
    min_replicas: int
    max_replicas: int
    window_s: float
    downscale_stabilization_s: float
    upscale_stabilization_s: float
    max_downscale_factor: float
    max_upscale_factor: float
    downscale_tolerance: float
    upscale_tolerance: float
    upscale_at_least: int = 0  #: a step up may always reach this number, whatever the factor says

    @classmethod
    def of(cls, api: Api) -> Policy:
        """Return the policy of an API that has replicas."""
        scaling = api.autoscaling
        policy = cls(
            Measure.WORKLOADS if api.kind is ApiKind.ASYNC else Measure.IN_FLIGHT,
            api.target_concurrency,
            scaling.min_replicas,
            scaling.max_replicas,
            scaling.window_s,
            scaling.downscale_stabilization_period_s,
            scaling.upscale_stabilization_period_s,
            scaling.max_downscale_factor,
            scaling.max_upscale_factor,
            scaling.downscale_tolerance,
            scaling.upscale_tolerance,
        )
        percent = scaling.target_cpu_utilization
        if percent is None and api.deployment is not None:
            percent = _DEFAULT_CPU_PERCENT
        if percent is None:
            return policy
        return replace(
            policy,
            measure=Measure.CORES,
            target=(api.compute.cpu or Compute().cpu or 1.0) * percent / 100,
            upscale_stabilization_s=0.0,
            max_downscale_factor=0.0,
            max_upscale_factor=_CPU_UPSCALE_FACTOR,
            downscale_tolerance=_CPU_TOLERANCE,
            upscale_tolerance=_CPU_TOLERANCE,
            upscale_at_least=_CPU_UPSCALE_AT_LEAST,
        )

    @property
    def memory_s(self) -> float:
        """Tell for how long recommendations have to be kept."""
        return max(self.downscale_stabilization_s, self.upscale_stabilization_s)


@dataclass(frozen=True)
class Sample:
    """The load at one moment."""

    at: float  #: seconds of a steady clock, as every time here
    load: float


@dataclass(frozen=True)
class Recommendation:
    """What was recommended before stabilisation."""

    at: float
    replicas: int


@dataclass(frozen=True)
class History:
    """What is remembered between two decisions."""

    since: float  #: beginning of the first stabilisation period
    recommendations: tuple[Recommendation, ...] = ()

    def after(self, decision: Decision, policy: Policy) -> History:
        """Return the history with a decision in it, without what is too old to matter."""
        if decision.recommended is None:
            return self
        kept = [made for made in self.recommendations if made.at > decision.at - policy.memory_s]
        return replace(self, recommendations=(*kept, Recommendation(decision.at, decision.recommended)))


@dataclass(frozen=True)
class Ceiling:
    """How many replicas the machine has room for."""

    replicas: int
    lack: str  #: what one more would be short of


@dataclass(frozen=True)
class Decision:
    """A number of replicas, what it was made from, and why."""

    at: float
    measure: Measure
    window_s: float
    samples: int  #: how many the average is over
    average: float | None  #: None: there were no samples
    target: float
    raw: float | None  #: average / target
    current: int
    recommended: int | None  #: before stabilisation; None: nothing is known
    requested: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return what the operator's route shows."""
        return asdict(self)


def decide(
    policy: Policy,
    history: History,
    samples: Sequence[Sample],
    now: float,
    current: int,
    ceiling: Ceiling | None = None,
) -> Decision:
    """Return how many replicas an API with `current` ones is to have. `samples` are sorted by time."""
    nothing = f"no figures of the last {policy.window_s:g} s"
    known = Decision(
        now, policy.measure, policy.window_s, 0, None, policy.target, None, current, None, current, nothing
    )
    loads = [sample.load for sample in samples if now - policy.window_s < sample.at <= now]
    if not loads:
        return known
    average = math.fsum(loads) / len(loads)
    raw = round(average / policy.target, _DIGITS)
    known = replace(known, samples=len(loads), average=average, raw=raw)
    if current == 0:
        wanted, why = _from_none(loads[-1])
        return replace(known, recommended=wanted, requested=wanted, reason=why)
    is_idle = average == 0 and samples[0].at <= now - policy.window_s + _SLACK_S
    recommended, notes = _recommend(policy, raw, current, is_idle)
    requested, note = _stabilise(policy, history, recommended, now, current)
    if note:
        notes.append(note)
    if ceiling is not None and requested > (most := max(ceiling.replicas, policy.min_replicas, current)):
        requested = most
        notes.append(f"no room for more: {ceiling.lack}")
    why = "; ".join([_arithmetic(policy, average, raw), *notes])
    return replace(known, recommended=recommended, requested=requested, reason=why)


def _from_none(latest: float) -> tuple[int, str]:
    if latest > 0:
        return 1, f"{latest:g} waiting at no replica: one is started at once"
    return 0, "nothing waits"


def _recommend(policy: Policy, raw: float, current: int, is_idle: bool) -> tuple[int, list[str]]:
    """Return the recommendation, and what changed it on the way."""
    notes: list[str] = []
    recommended = math.ceil(raw)
    if _is_tolerated(policy, raw, current):
        recommended = current
        notes.append("within the tolerance")
    low = min(current - 1, math.ceil(current * policy.max_downscale_factor))
    high = max(current + 1, math.ceil(current * policy.max_upscale_factor), policy.upscale_at_least)
    if recommended < low:
        notes.append(f"not below {low} in one step (max_downscale_factor)")
    if recommended > high:
        notes.append(f"not above {high} in one step (max_upscale_factor)")
    recommended = min(max(recommended, low), high)
    if not (is_idle and policy.min_replicas == 0):
        recommended = max(recommended, 1)
    if recommended < policy.min_replicas:
        notes.append(f"min_replicas is {policy.min_replicas}")
    if recommended > policy.max_replicas:
        notes.append(f"max_replicas is {policy.max_replicas}")
    return min(max(recommended, policy.min_replicas), policy.max_replicas), notes


def _is_tolerated(policy: Policy, raw: float, current: int) -> bool:
    if raw < current:
        return raw > current * (1 - policy.downscale_tolerance)
    return raw > current and raw < current * (1 + policy.upscale_tolerance)


def _stabilise(policy: Policy, history: History, recommended: int, now: float, current: int) -> tuple[int, str]:
    """Return what is requested, and why that is not what is recommended."""
    if recommended < current:
        name, period_s = "downscale_stabilization_period", policy.downscale_stabilization_s
        earlier = max(_since(history, now - period_s), default=recommended)
        requested, word = min(max(recommended, earlier), current), "highest"
    elif recommended > current:
        name, period_s = "upscale_stabilization_period", policy.upscale_stabilization_s
        earlier = min(_since(history, now - period_s), default=recommended)
        requested, word = max(min(recommended, earlier), current), "lowest"
    else:
        return current, ""
    if now - history.since < period_s:
        return current, f"{recommended} only after the first {name} ({period_s:g} s)"
    if requested == recommended:
        return requested, ""
    return requested, f"{recommended} waits for {name}: {word} recommendation of {period_s:g} s is {earlier}"


def _since(history: History, begin: float) -> Iterable[int]:
    return (made.replicas for made in history.recommendations if made.at > begin)


def _arithmetic(policy: Policy, average: float, raw: float) -> str:
    what = "cores used" if policy.measure is Measure.CORES else policy.measure.value
    wanted = f"{average:.3g} / target {policy.target:g} = {raw:.3g} → {math.ceil(raw)}"
    return f"{what} averaged over {policy.window_s:g} s: {wanted}"
