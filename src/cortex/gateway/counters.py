"""Owns the running totals of answers over HAProxy's workers, which each count from 0; does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cortex.gateway.runtime import BackendState

#: Over so many requests HAProxy averages their times.
_AVERAGED = 1024


class ResponseCounters:
    """Totals that never go back when workers come and go."""

    def __init__(self) -> None:
        self._gone: dict[str, dict[int, int]] = {}
        self._seen: dict[int, dict[str, dict[int, int]]] = {}

    def update(self, seen: Mapping[int, Mapping[str, BackendState]]) -> dict[str, dict[int, int]]:
        """Take what each living worker (by its pid) has counted; return the total by backend and class of status."""
        for pid in self._seen.keys() - seen.keys():
            for name, responses in self._seen.pop(pid).items():
                self._gone[name] = _sum(self._gone.get(name, {}), responses)
        for pid, backends in seen.items():
            self._seen[pid] = {name: dict(state.responses) for name, state in backends.items()}
        totals: dict[str, dict[int, int]] = {name: dict(responses) for name, responses in self._gone.items()}
        for responses_by_name in self._seen.values():
            for name, responses in responses_by_name.items():
                totals[name] = _sum(totals.get(name, {}), responses)
        return totals


def average_ms(states: Iterable[BackendState]) -> float | None:
    """Return the average duration of a backend's latest requests over its workers, or None without any."""
    weights = [(min(sum(state.responses.values()), _AVERAGED), state.average_ms) for state in states]
    total = sum(weight for weight, _ in weights)
    return sum(weight * average for weight, average in weights) / total if total else None


def _sum(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in one.keys() | other.keys()}
