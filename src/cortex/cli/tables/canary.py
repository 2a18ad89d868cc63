"""The trial of an API's newest revision, printed by `cortex get API`, with its evidence by `cortex get API --why`."""

from __future__ import annotations

from collections.abc import Iterator

from cortex.cli.output import Console, Table
from cortex.payloads.json_object import Json

#: What the two columns of a property's parts are parts of.
_MEANINGS = {
    "errors": "requests with an error",
    "p50": "requests slower than the old p50",
    "p99": "requests slower than the old p99",
    "disagreement": "requests with another prediction",
}


def is_tried(api: Json) -> bool:
    """Return whether the newest revision is a canary, beside the one that is live."""
    canary: Json = api.get("canary") or {}
    return canary.get("outcome") in ("trying", "held")


def canary_notes(api: Json) -> Iterator[str]:
    """Yield lines about the trial of the newest revision; none without a trial."""
    canary = api.get("canary")  # older operators send none
    if not canary:
        return
    new, old, outcome = canary["revision_number"], canary["old_revision_number"], canary["outcome"]
    name, reason = api["spec"]["name"], f": {canary['reason']}" if canary["reason"] else ""
    if missing := _note_without_requests(api):
        yield f"canary:   {missing}"
        yield f"          `cortex rollback {name}` ends the trial"
    elif is_tried(api):
        step = f"step {canary['step']} of {len(canary['steps'])}"
        held = f", held{reason}" if outcome == "held" else ""
        share = f"{canary['percent']} % of the requests"
        if canary.get("shadow"):
            yield f"canary:   revision {new} gets copies of all requests (shadow{held}), revision {old} answers"
        else:
            yield f"canary:   revision {new} gets {share} ({step}{held}), revision {old} the rest"
        yield f"          `cortex get {name} --why` compares them; `cortex promote {name}` or"
        yield f"          `cortex rollback {name}` ends the trial"
    elif outcome == "rolled back":
        yield f"canary:   revision {new} was rolled back{reason}"


def _note_without_requests(api: Json) -> str:
    """Return that the newest revision, which is tried, has no replica that gets requests; empty if it has one."""
    status = api.get("status")  # older operators send none with the decisions of the autoscaler
    if not is_tried(api) or status is None or status["replica_counts"]["updated"]["ready"]:
        return ""
    state = "does not start" if status["failure"] else "is not ready"
    new, old = api["canary"]["revision_number"], api["canary"]["old_revision_number"]
    return f"revision {new} {state} and gets no requests; revision {old} answers"


def show_canary(api: Json, console: Console) -> None:
    """Print the findings about the newest revision, a row for each property."""
    canary = api["canary"]
    new, old = canary["revision_number"], canary["old_revision_number"]
    steps = " → ".join(f"{step} %" for step in canary["steps"])
    console.line(f"canary: revision {new} against revision {old}: {canary['outcome']}")
    if models := canary.get("models"):  # older operators send none
        console.line(models)
    if missing := _note_without_requests(api):
        hint = f"; `cortex get {api['api']}` shows why" if api["status"]["failure"] else ""
        console.line(f"{missing}{hint}")
    if canary["reason"]:
        console.line(f"reason: {canary['reason']}")
    step = "shadow before" if canary.get("shadow") else f"step {canary['step']} of"
    console.line(f"{step} {steps}: {canary['step_requests']} requests to revision {new}\n")
    console.table(*findings_table(canary))


def findings_table(canary: Json) -> Table:
    """Return a table with one row per property."""
    new, old = canary["revision_number"], canary["old_revision_number"]
    headers = ["part of the", f"revision {old}", f"revision {new}", "tolerated", "verdict", "more requests"]
    return headers, [_row(finding, canary.get("max_latency_increase")) for finding in canary["findings"]]


def _row(finding: Json, longer: str | None) -> list[str]:
    is_latency = finding["name"] in ("p50", "p99")
    missing = finding["missing"]
    blocks = finding.get("missing_blocks", 0)  # older operators send none
    spread = f", in {blocks} half-minutes or more" if blocks > 1 else ""
    needed = "" if finding["finding"] != "not known" else "?" if missing is None else f"about {missing:,}{spread}"
    return [
        _MEANINGS.get(finding["name"], finding["name"]),
        _percent(finding["old"]),
        _percent(finding["new"]),
        f"{longer.replace('%', ' %')} longer" if longer and is_latency else f"+{100 * finding['margin']:g} %",
        finding["finding"],
        needed,
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
