"""The table of `cortex get API --why`."""

from __future__ import annotations

from typing import Any

from cortex.cli.tables.scaling import decisions_table, policy_lines, room_note, shortage_note

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


def test_says_how_many_replicas_have_no_room() -> None:
    api: dict[str, Any] = {"spec": {"name": "iris", "autoscaling": {"max_replicas": 8}}}
    assert (shortage_note(api), room_note(api)) == ("", "")
    api["scaling_shortage"] = "4 replicas are wanted, but there is room for 2: a replica needs 1 core"
    api["room"] = {"replicas": 2, "shortage": "a replica needs 1 core"}
    assert shortage_note(api) == f"autoscaling of iris: {api['scaling_shortage']}"
    assert room_note(api) == "autoscaling: there is room for 2 of max_replicas 8: a replica needs 1 core"
    api["spec"]["autoscaling"]["max_replicas"] = 100  # the default
    assert room_note(api) == ""
