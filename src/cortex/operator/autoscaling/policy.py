"""Decide the number of replicas of an API. Pure: policy, load and earlier recommendations in, a decision out.

The rules, in the order in which they apply; quoted names are those of the `autoscaling` section:

1. The load, averaged over `window`, divided by the target load of one replica, is the number of replicas.
2. A difference within the tolerance changes nothing.
3. One step changes the number by a limited factor, but always by at least one.
4. The number stays within `min_replicas` and `max_replicas`. It is zero only if no request arrived during the whole
   window.
5. Stabilisation: the number falls no further than to the highest recommendation of the last
   `downscale_stabilization_period`, and rises no further than to the lowest of the last `upscale_stabilization_period`.
   Nothing changes before the first such period is over, counted from the deploy or the start of the operator.
   Stabilisation holds a number; it never moves it in the other direction.
6. No replica is added beyond the capacity of the machine.

An API at zero replicas gets its first replica as soon as one request waits.
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
#: Time between two samples of the load.
SAMPLE_S = 1.0
#: Samples can be late: a window counts as covered if at most this much of its beginning is missing.
_SLACK_S = 2.0
#: Digits that the raw result is rounded to: the last digits of an average change even under constant load.
_DIGITS = 9
#: Kubernetes' behaviour for files with a target of CPU usage: tolerance in both directions, no upscale
#: stabilisation, limited upscale step.
_CPU_TOLERANCE = 0.1
_CPU_UPSCALE_FACTOR = 2.0
_CPU_UPSCALE_AT_LEAST = 4


class Measure(StrEnum):
    """Unit of the load; the values are shown to users."""

    IN_FLIGHT = "in flight"  #: requests in the gateway and in replicas, including queued ones
    WORKLOADS = "workloads"  #: of an AsyncAPI: queued and in progress
    CORES = "cores"  #: CPU time per second of all ready processes


@dataclass(frozen=True)
class ScalingPolicy:
    """Autoscaling parameters of one API."""

    measure: Measure
    target: float  #: load of one replica
    min_replicas: int
    max_replicas: int
    window_s: float
    downscale_stabilization_s: float
    upscale_stabilization_s: float
    max_downscale_factor: float
    max_upscale_factor: float
    downscale_tolerance: float
    upscale_tolerance: float
    upscale_at_least: int = 0  #: a step up may always reach this number, regardless of the factor

    @classmethod
    def of(cls, api: Api) -> ScalingPolicy:
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
        """Time for which recommendations must be kept."""
        return max(self.downscale_stabilization_s, self.upscale_stabilization_s)


@dataclass(frozen=True)
class LoadSample:
    """Load at one moment."""

    at: float  #: seconds of a monotonic clock, like all times here
    load: float


@dataclass(frozen=True)
class Recommendation:
    """Number of replicas before stabilisation."""

    at: float
    replicas: int


@dataclass(frozen=True)
class ScalingHistory:
    """State between two decisions."""

    since: float  #: start of the first stabilisation period
    recommendations: tuple[Recommendation, ...] = ()

    def after(self, decision: Decision, policy: ScalingPolicy) -> ScalingHistory:
        """Return the history including a decision, without expired recommendations."""
        if decision.recommended is None:
            return self
        kept = [made for made in self.recommendations if made.at > decision.at - policy.memory_s]
        return replace(self, recommendations=(*kept, Recommendation(decision.at, decision.recommended)))


@dataclass(frozen=True)
class Ceiling:
    """Maximum number of replicas that the machine can hold."""

    replicas: int
    shortage: str  #: what one more replica would lack


@dataclass(frozen=True)
class Decision:
    """A desired number of replicas, the input, and the reason."""

    at: float
    measure: Measure
    window_s: float
    samples: int  #: number of samples in the average
    average: float | None  #: None without samples
    target: float
    raw: float | None  #: average / target
    current: int
    recommended: int | None  #: before stabilisation; None if the load is unknown
    requested: int
    reason: str
    shortage: str = ""  #: why there is no room for more replicas, if more are wanted

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the operator's route."""
        return asdict(self)


def decide(
    policy: ScalingPolicy,
    history: ScalingHistory,
    samples: Sequence[LoadSample],
    now: float,
    current: int,
    ceiling: Ceiling | None = None,
) -> Decision:
    """Return the decision for an API with `current` replicas. `samples` are sorted by time."""
    nothing = f"no samples of the last {policy.window_s:g} s"
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
        wanted, why = _from_zero(loads[-1])
        return replace(known, recommended=wanted, requested=wanted, reason=why)
    is_idle = average == 0 and samples[0].at <= now - policy.window_s + _SLACK_S
    recommended, notes = _recommend(policy, raw, current, is_idle)
    requested, note = _stabilise(policy, history, recommended, now, current)
    if note:
        notes.append(note)
    shortage = ""
    if ceiling is not None and requested > (most := max(ceiling.replicas, policy.min_replicas, current)):
        shortage = f"{requested} replicas are wanted, but there is room for {most}: {ceiling.shortage}"
        requested = most
        notes.append(f"no capacity for more: {ceiling.shortage}")
    why = "; ".join([_arithmetic(policy, average, raw), *notes])
    return replace(known, recommended=recommended, requested=requested, reason=why, shortage=shortage)


def _from_zero(latest: float) -> tuple[int, str]:
    if latest > 0:
        return 1, f"{latest:g} waiting at zero replicas: starting one at once"
    return 0, "nothing is waiting"


def _recommend(policy: ScalingPolicy, raw: float, current: int, is_idle: bool) -> tuple[int, list[str]]:
    """Return the recommendation, and notes about the rules that changed it."""
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
    if recommended < policy.min_replicas:
        notes.append(f"min_replicas is {policy.min_replicas}")
    if recommended == policy.min_replicas == 0 and not is_idle:
        notes.append("not idle for the whole window, so not zero")
        recommended = 1
    if recommended > policy.max_replicas:
        notes.append(f"max_replicas is {policy.max_replicas}")
    return min(max(recommended, policy.min_replicas), policy.max_replicas), notes


def _is_tolerated(policy: ScalingPolicy, raw: float, current: int) -> bool:
    if raw < current:
        return raw > current * (1 - policy.downscale_tolerance)
    return raw > current and raw < current * (1 + policy.upscale_tolerance)


def _stabilise(
    policy: ScalingPolicy, history: ScalingHistory, recommended: int, now: float, current: int
) -> tuple[int, str]:
    """Return the stabilised number, and a note if it differs from the recommendation."""
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


def _since(history: ScalingHistory, begin: float) -> Iterable[int]:
    return (made.replicas for made in history.recommendations if made.at > begin)


def _arithmetic(policy: ScalingPolicy, average: float, raw: float) -> str:
    what = "cores used" if policy.measure is Measure.CORES else policy.measure.value
    wanted = f"{average:.3g} / target {policy.target:g} = {raw:.3g} → {math.ceil(raw)}"
    return f"{what} averaged over {policy.window_s:g} s: {wanted}"
