"""What `cortex get` shows of a canary."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.cli.tables.canary import canary_notes, findings_table

CANARY = {
    "revision_number": 4,
    "old_revision_number": 3,
    "outcome": "trying",
    "reason": "",
    "percent": 10,
    "step": 2,
    "steps": [1, 10, 50],
    "step_requests": 7,
    "findings": [],
}


READY = {"failure": None, "replica_counts": {"updated": {"ready": 1}}}
STARTING = {"failure": None, "replica_counts": {"updated": {"ready": 0}}}
FAILING = {**STARTING, "failure": {"message": "ValueError: bad weights", "traceback": ""}}


def notes(status: dict[str, Any] = READY, **changes: Any) -> list[str]:
    return list(canary_notes({"spec": {"name": "iris"}, "status": status, "canary": {**CANARY, **changes}}))


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, "canary:   revision 4 gets 10 % of the requests (step 2 of 3), revision 3 the rest"),
        (
            {"shadow": True, "percent": 0},
            "canary:   revision 4 gets copies of all requests (shadow), revision 3 answers",
        ),
        (
            {"outcome": "held", "reason": "no decision"},
            "canary:   revision 4 gets 10 % of the requests (step 2 of 3, held: no decision), revision 3 the rest",
        ),
        (
            {"outcome": "rolled back", "reason": "errors: 5.00% instead of 1.00%"},
            "canary:   revision 4 was rolled back: errors: 5.00% instead of 1.00%",
        ),
    ],
)
def test_the_state_of_a_trial_is_one_sentence(changes: dict[str, Any], first: str) -> None:
    assert notes(**changes)[0] == first


@pytest.mark.parametrize("changes", [{}, {"shadow": True, "percent": 0}, {"outcome": "held", "reason": "no decision"}])
def test_a_revision_without_a_ready_replica_gets_no_requests(changes: dict[str, Any]) -> None:
    assert notes(FAILING, **changes) == [
        "canary:   revision 4 does not start and gets no requests; revision 3 answers",
        "          `cortex rollback iris` ends the trial",
    ]
    assert notes(STARTING, **changes)[0] == "canary:   revision 4 is not ready and gets no requests; revision 3 answers"
    partly = {**FAILING, **READY, "failure": FAILING["failure"]}
    assert " gets no requests" not in notes(partly, **changes)[0]


def test_a_promoted_revision_and_an_api_without_a_canary_have_no_note() -> None:
    assert notes(outcome="promoted") == []
    assert list(canary_notes({"spec": {"name": "iris"}, "canary": None})) == []
    assert list(canary_notes({"spec": {"name": "iris"}})) == []


def test_each_property_has_a_row() -> None:
    errors = {"name": "errors", "finding": "not known", "old": 0.01, "new": 0.02, "margin": 0.005, "missing": 1234}
    worse = {**errors, "name": "predictions of cat", "finding": "worse", "old": None, "missing": None}
    soon = {**errors, "missing": 4, "missing_blocks": 2}
    assert findings_table({**CANARY, "findings": [soon]})[1][0][-1] == "about 4, in 2 half-minutes or more"
    slow = {**errors, "name": "p99", "margin": 0.0, "finding": "not worse"}
    headers, rows = findings_table({**CANARY, "findings": [errors, worse, slow], "max_latency_increase": "25%"})
    assert headers[1:3] == ["revision 3", "revision 4"]
    assert rows == [
        ["requests with an error", "1.00 %", "2.00 %", "+0.5 %", "not known", "about 1,234"],
        ["predictions of cat", "-", "2.00 %", "+0.5 %", "worse", ""],
        ["requests slower than the old p99", "1.00 %", "2.00 %", "25 % longer", "not worse", ""],
    ]
    _, (of_older_operator,) = findings_table({**CANARY, "findings": [slow]})
    assert of_older_operator[3] == "+0 %"
