"""Table of the autoscaler's decisions, printed by `cortex get API --why`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from cortex.cli.output import Console, Table, format_count
from cortex.payloads.json_object import Json

#: Maximum number of decisions in the table; `-o json` prints all that the operator has kept.
_SHOWN = 20
#: Without this key in their file, users expect as many replicas as fit.
_DEFAULT_MAX_REPLICAS = 100


def show_scaling(scaling: Json, console: Console) -> None:
    """Print the policy and the last decisions, newest last."""
    for line in policy_lines(scaling):
        console.line(line)
    if not scaling["decisions"]:
        console.line("\nno decision has been made since the operator was started or the API was deployed")
        return
    console.line()
    console.table(*decisions_table(scaling["decisions"]))


def shortage_note(api: Json) -> str:
    """Return a line about replicas that the autoscaler wants and that have no room; empty if there are none."""
    shortage = api.get("scaling_shortage")  # older operators send none
    return f"autoscaling of {api['spec']['name']}: {shortage}" if shortage else ""


def room_note(api: Json) -> str:
    """Return a line if the machine has no room for `max_replicas`; empty if it has, or if that is the default."""
    room, most = api.get("room"), api["spec"].get("autoscaling", {}).get("max_replicas", _DEFAULT_MAX_REPLICAS)
    if room is None or most == _DEFAULT_MAX_REPLICAS:
        return ""
    return f"autoscaling: there is room for {room['replicas']} of max_replicas {most}: {room['shortage']}"


def policy_lines(scaling: Json) -> Iterator[str]:
    """Yield the lines of the autoscaling policy."""
    policy = scaling["policy"]
    low, high = policy["min_replicas"], policy["max_replicas"]
    yield f"{scaling['api']}: {format_count(scaling['requested'], 'replica', 'replicas')} requested, of {low} to {high}"
    if low == high:
        yield "min_replicas equals max_replicas: the API is not autoscaled"
        return
    yield f"target: {policy['target']:g} {policy['measure']} per replica, averaged over {policy['window_s']:g} s"


def decisions_table(decisions: list[Json]) -> Table:
    """Return a table with one row per decision: inputs, numbers of replicas and reason."""
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
