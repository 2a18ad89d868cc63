from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from cortex.config.schema import Api
from cortex.state.database import Where, open_state
from cortex.state.queries.apis import ApiChange, ApiStore
from cortex.state.queries.history import KEPT_ENTRIES
from cortex.state.queries.signatures import SignatureStore
from cortex.state.revision import Revision

SPEC = Api.model_validate({"name": "iris", "handler": {"interface": "handler", "type": "python", "path": "handler.py"}})


@pytest.fixture
def engine(where: Where) -> Iterator[Engine]:
    engine = open_state(where)
    yield engine
    engine.dispose()


def deploy(engine: Engine, revision: str) -> None:
    ApiStore(engine).write([ApiChange(Revision(revision, SPEC, "project"), "nonce", "spec")])


def test_a_revision_has_the_signature_that_was_stored_last(engine: Engine) -> None:
    store = SignatureStore(engine)
    deploy(engine, "r1")
    assert store.get("iris", "r1") is None
    store.put("iris", "r1", '{"methods":[]}')
    store.put("iris", "r1", '{"methods":[],"models":[]}')
    assert store.get("iris", "r1") == '{"methods":[],"models":[]}'
    assert store.get("iris", "r2") is None


def test_signatures_are_deleted_with_their_revisions(engine: Engine) -> None:
    store = SignatureStore(engine)
    deploy(engine, "r0")
    store.put("iris", "r0", "0")
    for number in range(1, KEPT_ENTRIES + 1):
        deploy(engine, f"r{number}")
    store.put("iris", f"r{KEPT_ENTRIES}", "10")
    assert (store.get("iris", "r0"), store.get("iris", f"r{KEPT_ENTRIES}")) == (None, "10")
    store.put("iris", "r0", "0")  # a job of that revision still runs
    assert store.get("iris", "r0") is None
    ApiStore(engine).write([], ["iris"])
    assert store.get("iris", f"r{KEPT_ENTRIES}") is None
    store.put("iris", "r1", "1")
    assert store.get("iris", "r1") is None
