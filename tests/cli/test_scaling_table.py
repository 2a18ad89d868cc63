"""The table of `cortex get API --why`."""

from __future__ import annotations

from typing import Any

from cortex.cli.tables.scaling import decisions_table, policy_lines

POLICY = {"min_replicas": 1, "max_replicas": 3, "target": 4.0, "measure": "in flight", "window_s": 60.0}


def decision(**changes: Any) -> dict[str, Any]:
    base = {"at": 0.0, "samples": 60, "average": 12.34, "raw": 3.085, "recommended": 4, "current": 3, "requested": 4}
    return {**base, "reason": "because", **changes}


def test_a_decision_is_shown_with_its_inputs() -> None:
    unknown = decision(samples=0, average=None, raw=None, recommended=None, requested=3)
    headers, rows = decisions_table([decision(), unknown])
    assert headers[1:] == ["samples", "average", "wanted", "recommended", "replicas", "reason"]
    assert [row[1:] for row in rows] == [
        ["60", "12.3", "3.08", "4", "3 → 4", "because"],
        ["0", "-", "-", "-", "3", "because"],
    ]


def test_shows_the_policy_unless_the_api_is_not_autoscaled() -> None:
    lines = list(policy_lines({"api": "iris", "requested": 3, "policy": POLICY}))
    assert lines == [
        "iris: 3 replicas requested, of 1 to 3",
        "target: 4 in flight per replica, averaged over 60 s",
    ]
    one = list(policy_lines({"api": "iris", "requested": 1, "policy": POLICY}))[0]
    assert one == "iris: 1 replica requested, of 1 to 3"
    fixed = {**POLICY, "min_replicas": 3}
    assert "not autoscaled" in list(policy_lines({"api": "iris", "requested": 3, "policy": fixed}))[1]
