"""Owns the running totals of answers over HAProxy's workers, which each count from 0; does no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cortex.gateway.maps import api_of
from cortex.gateway.runtime_api import BackendState
from cortex.processes.identity import Identity

#: Over so many requests HAProxy averages their times.
_AVERAGED = 1024

#: Answers of each API by class of status: 1 to 5, and 0 for a client that went before its answer.
Counts = dict[str, dict[int, int]]


class ResponseCounters:
    """Totals that never go back when workers come and go."""

    def __init__(self) -> None:
        self._ended: Counts = {}
        self._living: dict[Identity, Counts] = {}
        self._shown: Counts = {}

    def update(self, seen: Mapping[Identity, Mapping[str, BackendState] | None]) -> None:
        """Take what each living worker has counted, None where it did not say. Those not in `seen` have ended."""
        living: dict[Identity, Counts] = {}
        for worker, backends in seen.items():
            known = next((each for each in self._living if each.is_same(worker)), worker)
            before = self._living.pop(known, {})
            living[worker] = before if backends is None else _by_api(backends)
        for counts in self._living.values():
            _add(self._ended, counts)
        self._living = living

    def forget(self, apis: Collection[str]) -> None:
        """Drop the totals of APIs that are neither in `apis` nor known to a living worker."""
        kept = set(apis).union(*self._living.values())
        for counts in (self._ended, self._shown):
            for name in counts.keys() - kept:
                del counts[name]

    def totals(self) -> Counts:
        """Return the totals by API. What an answer is counted as may change within moments; no total goes back."""
        totals: Counts = {}
        for counts in (self._ended, *self._living.values()):
            _add(totals, counts)
        for api, responses in totals.items():
            shown = self._shown.setdefault(api, {})
            for kind, count in responses.items():
                responses[kind] = shown[kind] = max(count, shown.get(kind, 0))
        return totals

    def dump(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        living = [{**worker.as_json(), "responses": counts} for worker, counts in self._living.items()]
        return {"ended": self._ended, "living": living}

    def load(self, data: Any) -> None:
        """Take what `dump` returned. Raises: ValueError, TypeError, KeyError, AttributeError for anything else."""
        ended = _read(data["ended"])
        living = {Identity.from_json(each): _read(each["responses"]) for each in data["living"]}
        self._ended, self._living, self._shown = ended, living, {}


def average_ms(states: Iterable[BackendState]) -> float | None:
    """Return the average duration of a backend's latest requests over its workers, or None without any."""
    weights = [(min(sum(state.responses.values()), _AVERAGED), state.average_ms) for state in states]
    total = sum(weight for weight, _ in weights)
    return sum(weight * average for weight, average in weights) / total if total else None


def _by_api(backends: Mapping[str, BackendState]) -> Counts:
    counts: Counts = {}
    for name, state in backends.items():
        api = api_of(name)
        if api is not None:
            _add(counts, {api: state.responses})
    return counts


def _add(totals: Counts, counts: Mapping[str, Mapping[int, int]]) -> None:
    for api, responses in counts.items():
        total = totals.setdefault(api, {})
        for kind, count in responses.items():
            total[kind] = total.get(kind, 0) + count


def _read(data: Any) -> Counts:
    return {str(api): {int(kind): int(count) for kind, count in responses.items()} for api, responses in data.items()}
