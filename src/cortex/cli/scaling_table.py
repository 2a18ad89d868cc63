"""The autoscaler's decisions as `cortex get API --why` shows them, from the operator's JSON."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from cortex.cli.job_progress import counted
from cortex.cli.output import Console

#: So many decisions are shown; `-o json` has all that are kept.
_SHOWN = 20

Json = dict[str, Any]


def show_scaling(scaling: Json, console: Console) -> None:
    """Write the policy and the last decisions, the newest last."""
    for line in policy_lines(scaling):
        console.line(line)
    if not scaling["decisions"]:
        console.line("\nno decision was made yet since the operator started or the API was deployed")
        return
    console.line()
    console.table(*decisions_table(scaling["decisions"]))


def policy_lines(scaling: Json) -> Iterator[str]:
    """Say what the autoscaler aims at."""
    policy = scaling["policy"]
    low, high = policy["min_replicas"], policy["max_replicas"]
    yield f"{scaling['api']}: {counted(scaling['requested'], 'replica', 'replicas')} requested, of {low} to {high}"
    if low == high:
        yield "min_replicas and max_replicas are the same: nothing is decided"
        return
    yield f"target: {policy['target']:g} {policy['measure']} per replica, averaged over {policy['window_s']:g} s"


def decisions_table(decisions: list[Json]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows: what was decided from which figures, and why."""
    headers = ["time", "samples", "average", "wanted", "recommended", "replicas", "reason"]
    return headers, [_row(decision) for decision in decisions[-_SHOWN:]]


def _row(decision: Json) -> list[str]:
    at = datetime.fromtimestamp(decision["at"]).astimezone()
    before, now = decision["current"], decision["requested"]
    return [
        at.strftime("%H:%M:%S"),
        str(decision["samples"]),
        _figure(decision["average"]),
        _figure(decision["raw"]),
        _figure(decision["recommended"]),
        str(now) if before == now else f"{before} → {now}",
        decision["reason"],
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
