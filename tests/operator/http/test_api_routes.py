"""Descriptions of APIs that the operator returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.config.schema import Api
from cortex.operator.http.api_routes import describe_history
from cortex.state.database import open_state
from cortex.state.queries.apis import ApiChange, ApiStore, Revision
from harness.replicas.fleet import api

CANARY = {"canary": {"steps": ["10%"], "min_requests": 40, "max_error_increase": "1%"}}


@pytest.mark.parametrize(
    ("action", "by", "outcome"),
    [
        ("rollback to 1", "canary", "rolled back"),
        ("rollback to 1", "ada", "not promoted"),
        ("new model version", "canary", "not promoted"),
        ("deploy", "", "not promoted"),
    ],
)
def test_the_outcome_of_a_canary_stays_in_the_history(tmp_path: Path, action: str, by: str, outcome: str) -> None:
    store = ApiStore(open_state(tmp_path / "state.db", None))

    def deploy(revision: str, spec: Api, action: str, by: str) -> None:
        store.write([ApiChange(Revision(revision, spec, revision), "nonce", "spec", action=action, by=by)])

    deploy("old", api(), "deploy", "")
    (record,) = store.records()
    store.mark_serving(record.name, record.target)
    deploy("tried", api(update_strategy=CANARY), "deploy", "")
    deploy("old", api(), action, by)
    deploy("newest", api(update_strategy=CANARY), "deploy", "")
    (record,) = store.records()
    described = describe_history(store.history(record.name), record, {"revision_number": 4, "outcome": "trying"})
    assert [entry["canary"] for entry in described] == ["trying", None, outcome, None]
