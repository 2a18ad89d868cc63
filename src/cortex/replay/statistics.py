"""Findings of a replay in bounded memory: counts, differences by field with examples, distributions of durations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cortex.recording.exchange import Exchange
from cortex.replay.comparison import Difference

#: Examples that are kept of each field and kind.
MAX_EXAMPLES = 5
#: Differences in further fields are counted together.
MAX_FIELDS = 500
OTHER_FIELDS = "(other fields)"
_MAX_STATUSES = 100
#: Width of a bucket: quantiles have this relative error at most.
_GROWTH = 1.01
_LOG_GROWTH = math.log(_GROWTH)
_LEAST_MS = 1e-3


class DurationHistogram:
    """Durations in buckets, each 1 % wider than the one before."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.longest_ms = 0.0

    def add(self, duration_ms: float) -> None:
        """Count a duration."""
        self._buckets[math.ceil(math.log(max(duration_ms, _LEAST_MS)) / _LOG_GROWTH)] += 1
        self.count += 1
        self.longest_ms = max(self.longest_ms, duration_ms)

    def quantile_ms(self, share: float) -> float | None:
        """Return the duration below which this share of all is; None without any."""
        rank = max(1, math.ceil(share * self.count))
        below = 0
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            if below >= rank:
                return min(math.exp(bucket * _LOG_GROWTH), self.longest_ms)
        return None

    def curve(self) -> list[tuple[float, float]]:
        """Return points of the distribution: a duration in ms, and the share of durations up to it."""
        points, below = [], 0
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            points.append((math.exp(bucket * _LOG_GROWTH), below / self.count))
        return points


@dataclass
class FieldDifferences:
    """All differences of one kind in one field."""

    name: str
    kind: str
    answers: int = 0  #: with at least one of them
    largest: float | None = None  #: distance of two numbers
    examples: list[tuple[str, Difference]] = field(default_factory=list)  #: with `file:line` of the request

    def add(self, place: str, differences: Sequence[Difference]) -> None:
        """Add those of one answer."""
        self.answers += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append((place, differences[0]))
        distances = [each.distance for each in differences if each.distance is not None]
        if distances:
            self.largest = max([*distances, self.largest or 0.0])


@dataclass
class ReplayStatistics:
    """The counts of a replay."""

    compared: int = 0
    different: int = 0  #: answers with at least one difference, and requests without an answer
    unanswered: int = 0
    recorded_requests: int = 0  #: those read from the recording
    original_requests: float = 0.0  #: those that there were, with an estimate of those that are not recorded
    skipped: int = 0  #: requests that are not recorded completely
    redacted: int = 0  #: requests that were sent without the values that the recording lacks
    unfinished: int = 0  #: lines that a killed process left behind
    seconds: float = 0.0
    late_s: float = 0.0  #: largest delay of a request after its time
    statuses: Counter[tuple[int, int]] = field(default_factory=Counter)  #: recorded, now
    recorded: DurationHistogram = field(default_factory=DurationHistogram)
    now: DurationHistogram = field(default_factory=DurationHistogram)
    recorded_handler: DurationHistogram = field(default_factory=DurationHistogram)
    now_handler: DurationHistogram = field(default_factory=DurationHistogram)
    fields: dict[tuple[str, str], FieldDifferences] = field(default_factory=dict)

    def add(self, exchange: Exchange, status: int, differences: Sequence[Difference]) -> None:
        """Count a compared answer; status 0 is none."""
        self.compared += 1
        self.different += bool(differences)
        self.unanswered += not status
        self.redacted += exchange.request.is_redacted
        key = (exchange.status, status)
        if key in self.statuses or len(self.statuses) < _MAX_STATUSES:
            self.statuses[key] += 1
        by_field: dict[tuple[str, str], list[Difference]] = {}
        for each in differences:
            by_field.setdefault((each.field, each.kind), []).append(each)
        for (name, kind), some in by_field.items():
            if (name, kind) not in self.fields and len(self.fields) >= MAX_FIELDS:
                name = OTHER_FIELDS  # noqa: PLW2901
            self.fields.setdefault((name, kind), FieldDifferences(name, kind)).add(exchange.place, some)

    def add_durations(self, exchange: Exchange, duration_ms: float, handler_ms: float | None) -> None:
        """Count the durations of a request, recorded and now."""
        self.recorded.add(exchange.duration_ms)
        self.now.add(duration_ms)
        if exchange.handler_ms is not None and handler_ms is not None:
            self.recorded_handler.add(exchange.handler_ms)
            self.now_handler.add(handler_ms)

    @property
    def share(self) -> float:
        """Return the share of answers that differ."""
        return self.different / self.compared if self.compared else 0.0

    @property
    def by_frequency(self) -> list[FieldDifferences]:
        """Return the differences by field, the most frequent ones first."""
        return sorted(self.fields.values(), key=lambda each: (-each.answers, each.name, each.kind))
