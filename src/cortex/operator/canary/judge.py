"""Judge whether the newest revision of an API is worse than the one that serves. Pure.

Both revisions serve at the same time. From one observation to the next, their numbers form a window, and `evidence`
compares the windows. Five properties are judged:

| property | the part of the requests that … | may grow by |
|---|---|---|
| errors | got a status from 400, except 499, or an incomplete response | `max_error_increase` |
| p50, p99 | took longer than the old revision's quantile; of the new one, 1 + `max_latency_increase` times that | 0 |
| predictions | had a class, for each class; and those that had another one | `max_prediction_shift` |
| disagreement | had another prediction, of those copied to the new revision | `max_disagreement`, from 0 |

"Worse" refutes that the part grew by at most that, "not worse" that it grew by at least that. A revision is worse as
soon as one property is, and not worse once all are not, in each step anew, because more requests may be what makes it
worse. The confidence is divided among the properties for "worse", and for each of them among the whole trial and its
later segments: a revision within all margins is rolled back with a probability of at most 1 - confidence, however often
it is judged.

Latency is the time in user code: the time in the queue depends on the number of replicas, which differs. The quantile
is that of the windows before, so it is known before the requests that it judges. It lies between two bounds of the
histogram. Requests above the upper one count whole, and those between them in part, so that the part of the old
revision is that of the quantile, however narrow the distribution is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from cortex.config.schema import Api, CanaryConfig
from cortex.config.values import fraction
from cortex.operator.canary.evidence import Claim, CountWindow, Evidence, log_mean
from cortex.operator.monitoring.prediction_summary import categories
from cortex.payloads.json_object import Json
from cortex.worker.monitoring.metrics import ABORTED, HANDLER, REQUESTS, SeriesKind, parse_key

#: Quantiles of the latency that are compared.
QUANTILES = {"p50": 0.5, "p99": 0.99}
#: Number of properties without that of predictions: errors, and the quantiles.
PROPERTIES = 1 + len(QUANTILES)
#: Latencies count while every replica of the new revision has served for this time: its caches are cold before.
WARM_UP_S = 30.0
#: Requests that are slow together, because one pause of a process delays all that are inside or wait.
SLOW_TOGETHER = 2.0
#: Length of a block of `evidence`, and the blocks that a verdict takes at least: a burst of errors in one process, for
#: example while its connection to a database hangs, is no property of a revision.
BLOCK_S, MIN_BLOCKS = 30.0, 3
#: Evidence that a revision is worse is also collected from the beginning of each segment on: of each further step, and
#: after this time. The evidence of the whole trial has that part of the risk, and the segments share the rest.
SEGMENT_S, PART_OF_WHOLE_TRIAL = 3600.0, 0.5
#: Classes that are compared; further ones are not.
MAX_CLASSES = 20
_DISCONNECTED = "499"


class Finding(StrEnum):
    """Result of the comparison of one property, or of all."""

    WORSE = "worse"
    NOT_WORSE = "not worse"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class RevisionNumbers:
    """Counts of the replicas of one revision since they started."""

    requests: int = 0
    errors: int = 0
    durations: Mapping[float, int] = field(default_factory=dict)  #: by upper bound in seconds
    classes: Mapping[str, int] = field(default_factory=dict)
    replicas: Collection[str] = frozenset()  #: ids of those that counted

    @classmethod
    def of(cls, series: Mapping[str, float], replicas: Collection[str] = frozenset()) -> RevisionNumbers:
        """Return the numbers in the series of `worker.monitoring.metrics`, merged over `replicas`."""
        requests = errors = 0
        durations: dict[float, int] = {}
        for key, value in series.items():
            parsed = parse_key(key) if any(name in key for name in (REQUESTS, ABORTED, HANDLER)) else None
            if parsed is None:
                continue
            labels = dict(parsed.labels)
            if parsed.name == REQUESTS:
                code = labels.get("code", "")
                requests += int(value)
                errors += int(value) if code >= "400" and code != _DISCONNECTED else 0
            elif parsed.name == ABORTED:
                errors += int(value)
            elif parsed.kind is SeriesKind.BUCKET:
                durations[float(labels.get("le", "inf"))] = int(value)
        return cls(requests, errors, durations, categories(series, counts_classes=True), replicas)

    def since(self, before: RevisionNumbers) -> RevisionNumbers | None:
        """Return the difference; None if a replica has ended, whose numbers are missing now."""
        durations = _difference(self.durations, before.durations)
        classes = _difference(self.classes, before.classes)
        requests, errors = self.requests - before.requests, self.errors - before.errors
        counts = (requests, errors, *durations.values(), *classes.values())
        has_ended = any(replica not in self.replicas for replica in before.replicas) or min(counts) < 0
        return None if has_ended else RevisionNumbers(requests, errors, durations, classes)

    def slower_than(self, bound: float) -> int:
        """Count the requests that took longer than one of the bounds."""
        return sum(count for upper, count in self.durations.items() if upper > bound)

    def slower_in_part(self, low: float, high: float, part: float) -> float:
        """Count the requests that took longer than `high`, and a part of those that took longer than `low`."""
        above = self.slower_than(high)
        return above + part * (self.slower_than(low) - above)


@dataclass
class Comparison:
    """Evidence about one part of a property: a share of the requests of both revisions."""

    within: Evidence  #: against the claim that the difference is within the margin
    beyond: Evidence  #: against the claim that it is at the margin or beyond
    old: float = 0
    old_of: int = 0
    new: float = 0
    new_of: int = 0

    @classmethod
    def at(cls, margin: float, cluster: float, rate: float, cap: float) -> Comparison:
        """Return a comparison whose new rate may exceed the old one by `margin`; see `Evidence` for the others."""
        return cls(
            Evidence(Claim.AT_MOST, margin, cluster, rate, cap=cap),
            Evidence(Claim.AT_LEAST, margin, cluster, rate, cap=cap),
        )

    def begin_block(self) -> None:
        """Begin the next block of time."""
        self.within.begin_block()
        self.beyond.begin_block()

    def begin_segment(self, weight: float, is_step: bool) -> None:
        """Begin the next segment; if it is a step, that the rate is within the margin has to be shown anew."""
        self.within.collect_anew(weight)
        if is_step:
            self.beyond.restart()

    def observe(self, window: CountWindow) -> None:
        """Add one window."""
        self.within.observe(window)
        self.beyond.observe(window)
        self.old_of, self.old = self.old_of + window.na, self.old + window.a
        self.new_of, self.new = self.new_of + window.nb, self.new + window.b

    def missing(self, worse: float, not_worse: float) -> tuple[float, int]:
        """Return what is missing until either claim is refuted, at the present rates.

        These are further requests of the new revision, and blocks of time, with the present one.
        """
        total = CountWindow(self.old_of, self.old, self.new_of, self.new)
        expected = [
            (max(0.0, (needed - evidence.log) / growth), evidence.blocks_until(needed))
            for evidence, needed in ((self.within, worse), (self.beyond, not_worse))
            if (growth := evidence.growth(total)) > 0
        ]
        return min(expected, default=(math.inf, 0))


@dataclass(frozen=True)
class PropertyFinding:
    """Finding about one property, with the numbers behind it."""

    name: str
    finding: Finding
    old: float | None  #: the part of the old revision's requests; None without any
    new: float | None
    margin: float
    missing: float  #: further requests of the new revision until it is known; infinite: none can be foreseen
    missing_blocks: int = 0  #: of `BLOCK_S`, over which these are spread at least

    def to_json(self) -> Json:
        """Return the JSON form, in which `missing` is null if it is not known."""
        missing = None if math.isinf(self.missing) else math.ceil(self.missing)
        return {**asdict(self), "finding": self.finding.value, "missing": missing}


class Judge:
    """Judge of one canary; its state has a JSON form."""

    def __init__(self, api: Api) -> None:
        canary = api.update_strategy.canary
        assert canary is not None
        self._tolerances = _tolerances(canary)
        self._latency = 1 + fraction(canary.max_latency_increase)
        shift = canary.max_prediction_shift
        self._shift = None if shift is None else fraction(shift)
        together = float(api.handler.threads_per_process)
        more = (shift is not None) + (canary.max_disagreement is not None)
        self._needed = needed_evidence(PROPERTIES + more, canary.confidence)
        self._cap = evidence_per_block(self._needed[0])
        self._errors = Comparison.at(fraction(canary.max_error_increase), together, 0.01, self._cap)
        self._slow = {name: Comparison.at(0.0, SLOW_TOGETHER, 1 - at, self._cap) for name, at in QUANTILES.items()}
        limit = canary.max_disagreement
        # A revision never disagrees with itself, so the old rate is 0.
        self._disagreement = None if limit is None else Comparison.at(fraction(limit), 1.0, 0.0, self._cap)
        self._more: dict[str, Comparison] = {}  #: classes, and whether they become more
        self._fewer: dict[str, Comparison] = {}
        self._durations: dict[float, int] = {}  #: of the old revision, in all windows so far
        self._block_began_s = -math.inf
        self._segment_began_s = math.inf  #: not yet
        self._segments = 0  #: after the first one
        self._late_errors = [0, 0]  #: of both revisions: more than a window had requests, as streams break off late

    def judges_by(self, canary: CanaryConfig) -> bool:
        """Return whether the evidence is about these tolerances; with others, it has to start over."""
        return self._tolerances == _tolerances(canary)

    def observe(self, old: RevisionNumbers, new: RevisionNumbers, is_warm: bool, time_s: float) -> None:
        """Add one window: the numbers of both revisions since the last one, and the time at its end.

        `is_warm`: latencies are comparable.
        """
        if not 0 <= time_s - self._block_began_s < BLOCK_S:
            self._block_began_s = time_s
            self._segment_began_s = min(self._segment_began_s, time_s)
            if time_s - self._segment_began_s >= SEGMENT_S:
                self._begin_segment(time_s, is_step=False)
            for each in self._comparisons():
                each.begin_block()
        self._observe_errors(old, new)
        if is_warm:
            self._observe_latency(old, new)
        if self._shift is not None:
            self._observe_classes(old, new, self._shift)

    def begin_step(self) -> None:
        """Judge the next step, in which the new revision gets more requests."""
        self._begin_segment(math.inf, is_step=True)
        self._block_began_s = -math.inf

    def _begin_segment(self, time_s: float, is_step: bool) -> None:
        self._segment_began_s = time_s
        self._segments += 1
        for each in self._comparisons():
            if each is not self._disagreement:  # which is known before the first step
                each.begin_segment(segment_weight(self._segments), is_step)

    def observe_pairs(self, pairs: int, different: int) -> None:
        """Add the requests of one window that both revisions answered, and how many of their predictions differ."""
        if self._disagreement is not None:
            self._disagreement.observe(CountWindow(pairs, 0, pairs, different))

    def findings(self) -> list[PropertyFinding]:
        """Return the finding about each property."""
        worse, not_worse = self._needed
        found = [_finding("errors", self._errors, worse, not_worse)]
        found += [_finding(name, each, worse, not_worse) for name, each in self._slow.items()]
        if self._shift is not None:
            found.append(self._classes_finding(worse, not_worse))
        if self._disagreement is not None:
            found.append(replace(_finding("disagreement", self._disagreement, worse, not_worse), old=None))
        return found

    def _comparisons(self) -> list[Comparison]:
        judged = [self._errors, *self._slow.values(), *self._more.values(), *self._fewer.values()]
        return judged if self._disagreement is None else [*judged, self._disagreement]

    def _observe_errors(self, old: RevisionNumbers, new: RevisionNumbers) -> None:
        found = [errors + late for errors, late in zip((old.errors, new.errors), self._late_errors, strict=True)]
        a, b = min(found[0], old.requests), min(found[1], new.requests)
        self._late_errors = [found[0] - a, found[1] - b]
        self._errors.observe(CountWindow(old.requests, a, new.requests, b))

    def _observe_latency(self, old: RevisionNumbers, new: RevisionNumbers) -> None:
        bounds = self._durations.keys() & new.durations.keys() & old.durations.keys()
        of_old, of_new = sum(old.durations.values()), sum(new.durations.values())
        for name, at in QUANTILES.items():
            bucket = _quantile_bucket(self._durations, at, bounds)
            if bucket is None:
                continue
            low, high, part = bucket
            allowed = [
                min((each for each in bounds if each >= bound * self._latency), default=math.inf)
                for bound in (low, high)
            ]
            if math.isfinite(allowed[1]):
                slow = old.slower_in_part(low, high, part), new.slower_in_part(allowed[0], allowed[1], part)
                self._slow[name].observe(CountWindow(of_old, slow[0], of_new, slow[1]))
        for bound, count in old.durations.items():
            self._durations[bound] = self._durations.get(bound, 0) + count

    def _observe_classes(self, old: RevisionNumbers, new: RevisionNumbers, shift: float) -> None:
        of_old, of_new = sum(old.classes.values()), sum(new.classes.values())
        for name, more in self._more.items():
            window = CountWindow(of_old, old.classes.get(name, 0), of_new, new.classes.get(name, 0))
            more.observe(window)
            # The part of the other classes grows by as much as that of this one falls.
            self._fewer[name].observe(window._replace(a=window.na - window.a, b=window.nb - window.b))
        # Only from the next window on: a class must not be chosen by the requests that judge it.
        for name in sorted({*old.classes, *new.classes}):
            if name not in self._more and len(self._more) < MAX_CLASSES:
                rate = old.classes.get(name, 0) / of_old if of_old else 0.0
                self._more[name] = Comparison.at(shift, 1.0, rate, self._cap)
                self._fewer[name] = Comparison.at(shift, 1.0, 1 - rate, self._cap)

    def _classes_finding(self, worse: float, not_worse: float) -> PropertyFinding:
        assert self._shift is not None
        compared = [*self._more.values(), *self._fewer.values()]
        logs = [each.within.log for each in compared]
        is_worse = bool(logs) and log_mean([*logs, *([0.0] * (2 * MAX_CLASSES - len(logs)))]) >= worse
        is_fine = bool(compared) and min(each.beyond.log for each in compared) >= not_worse
        finding = Finding.WORSE if is_worse else Finding.NOT_WORSE if is_fine else Finding.UNKNOWN
        unknown = [] if is_worse else [each for each in compared if each.beyond.log < not_worse]
        missing, blocks = max((each.missing(worse, not_worse) for each in unknown), default=(0.0, 0))
        name, most = max(
            self._more.items(),
            key=lambda item: abs(_rate(item[1].new, item[1].new_of) - _rate(item[1].old, item[1].old_of)),
            default=("", None),
        )
        if most is None:
            return PropertyFinding("predictions", finding, None, None, self._shift, math.inf)
        shown = f"predictions of {name}"
        return PropertyFinding(
            shown, finding, _share(most.old, most.old_of), _share(most.new, most.new_of), self._shift, missing, blocks
        )

    def dump(self) -> Json:
        """Return the JSON form of the state."""
        return {
            "tolerances": self._tolerances,
            "errors": asdict(self._errors),
            "disagreement": None if self._disagreement is None else asdict(self._disagreement),
            "slow": {name: asdict(each) for name, each in self._slow.items()},
            "more": {name: asdict(each) for name, each in self._more.items()},
            "fewer": {name: asdict(each) for name, each in self._fewer.items()},
            "durations": {f"{bound:g}": count for bound, count in self._durations.items()},
            "block_began_s": self._block_began_s if math.isfinite(self._block_began_s) else None,
            "segment_began_s": self._segment_began_s if math.isfinite(self._segment_began_s) else None,
            "segments": self._segments,
            "late_errors": self._late_errors,
        }

    def load(self, data: Json) -> None:
        """Continue from the JSON form, unless it has other tolerances.

        Raises: KeyError, TypeError, ValueError for anything else.
        """
        if data["tolerances"] != self._tolerances:
            return
        self._errors = _load(data["errors"])
        self._disagreement = None if data["disagreement"] is None else _load(data["disagreement"])
        self._slow = {name: _load(each) for name, each in data["slow"].items()}
        self._more = {name: _load(each) for name, each in data["more"].items()}
        self._fewer = {name: _load(each) for name, each in data["fewer"].items()}
        self._durations = {float(bound): int(count) for bound, count in data["durations"].items()}
        began_s = data["block_began_s"]
        self._block_began_s = -math.inf if began_s is None else float(began_s)
        began_s = data["segment_began_s"]
        self._segment_began_s = math.inf if began_s is None else float(began_s)
        self._segments = int(data["segments"])
        old, new = data.get("late_errors", (0, 0))  # an operator of another version may have stored it
        self._late_errors = [int(old), int(new)]


def needed_evidence(properties: int, confidence: float) -> tuple[float, float]:
    """Return the logarithms of the evidence to find one of the properties worse, and to find it not worse."""
    return math.log(properties / PART_OF_WHOLE_TRIAL / (1 - confidence)), math.log(1 / (1 - confidence))


def segment_weight(number: int) -> float:
    """Return the weight of the evidence since the beginning of a further segment, 1 for the first of them."""
    part = (1 - PART_OF_WHOLE_TRIAL) / (number * (number + 1))  # of all segments: a sum of 1
    return part / PART_OF_WHOLE_TRIAL


def evidence_per_block(worse: float) -> float:
    """Return by how much evidence grows in one block at most, so that `MIN_BLOCKS` of them reach `worse`."""
    return worse / MIN_BLOCKS + 1e-9  # sums of a third are rounded


def overall(findings: Iterable[PropertyFinding]) -> Finding:
    """Return the verdict about the revision."""
    found = {each.finding for each in findings}
    if Finding.WORSE in found:
        return Finding.WORSE
    return Finding.UNKNOWN if Finding.UNKNOWN in found else Finding.NOT_WORSE


def _tolerances(canary: CanaryConfig) -> list[Any]:
    increases = [canary.max_error_increase, canary.max_latency_increase]
    return [*increases, canary.max_prediction_shift, canary.max_disagreement, canary.confidence]


def _finding(name: str, comparison: Comparison, worse: float, not_worse: float) -> PropertyFinding:
    finding, missing, blocks = Finding.UNKNOWN, *comparison.missing(worse, not_worse)
    if comparison.within.log >= worse:
        finding, missing, blocks = Finding.WORSE, 0.0, 0
    elif comparison.beyond.log >= not_worse:
        finding, missing, blocks = Finding.NOT_WORSE, 0.0, 0
    old, new = _share(comparison.old, comparison.old_of), _share(comparison.new, comparison.new_of)
    return PropertyFinding(name, finding, old, new, comparison.within.margin, missing, blocks)


def _load(data: Json) -> Comparison:
    def evidence(fields: Json) -> Evidence:
        return Evidence(**{**fields, "claim": Claim(fields["claim"])})

    return Comparison(**{**data, "within": evidence(data["within"]), "beyond": evidence(data["beyond"])})


def _difference(after: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    return {key: after.get(key, 0) - before.get(key, 0) for key in {**before, **after}}


def _quantile_bucket(
    durations: Mapping[float, int], at: float, bounds: Collection[float]
) -> tuple[float, float, float] | None:
    """Return the bounds around a quantile, and the part of the requests between them that are above it.

    None without requests, or if the quantile is above all finite bounds.
    """
    above = sum(durations.values())
    low, within, slow = 0.0, 0, (1 - at) * above
    for high in sorted(durations):
        within += durations[high]
        if high in bounds:
            if math.isfinite(high) and above - within < slow <= above:
                return low, high, (slow - (above - within)) / within
            low, above, within = high, above - within, 0
    return None


def _share(count: float, of: int) -> float | None:
    return count / of if of else None


def _rate(count: float, of: int) -> float:
    return count / of if of else 0.0
