"""What replicas report of their signatures, and what is known of a revision afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from cortex.config.schema import Api
from cortex.home import Home
from cortex.operator.replicas.signatures import Signatures
from cortex.payloads.signature import ApiSignature, BodySignature, MethodSignature
from cortex.state.database import open_sqlite
from cortex.state.queries.apis import ApiChange, ApiStore
from cortex.state.queries.signatures import SignatureStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaStatus

SPEC = Api.model_validate({"name": "iris", "handler": {"interface": "handler", "type": "python", "path": "handler.py"}})
TARGET = Revision("r1", SPEC, "project")
POST = ApiSignature((MethodSignature("POST", "handle_post", BodySignature(), BodySignature()),))
GET = ApiSignature((MethodSignature("GET", "handle_get", None, BodySignature()),))


@pytest.fixture
def database(home: Home) -> Iterator[Engine]:
    engine = open_sqlite(home.database_file)
    ApiStore(engine).write([ApiChange(TARGET, "nonce", "spec")])
    yield engine
    engine.dispose()


def signatures(database: Engine) -> Signatures:
    """Return what the next operator has."""
    return Signatures(SignatureStore(database), Logger("test"))


def status(replica: str, signature: ApiSignature | str) -> ReplicaStatus:
    text = signature if isinstance(signature, str) else signature.to_json().decode()
    return ReplicaStatus(replica, "iris", "r1", 1, 0.0, (), signature=text)


def test_a_signature_is_known_after_a_restart_without_any_replica(database: Engine) -> None:
    first = signatures(database)
    assert first.of(TARGET) is None
    first.record([status("a", POST)])
    first.record([])
    assert first.of(TARGET) == signatures(database).of(TARGET) == POST
    assert first.of(replace(TARGET, hash="r2")) is None


def test_the_replica_that_changed_last_counts(database: Engine) -> None:
    known = signatures(database)
    known.record([status("a", POST), status("b", POST)])
    known.record([status("a", GET), status("b", POST)])  # it loaded a newer model
    assert known.of(TARGET) == GET
    known.record([status("a", GET), status("b", POST)])
    assert known.of(TARGET) == signatures(database).of(TARGET) == GET


@pytest.mark.parametrize("text", ["", "{", '"\ud800"', '{"methods": 1}', "[" * 100_000, '{"methods": [{"verb": 1}]}'])
def test_what_can_not_be_read_changes_nothing(database: Engine, text: str) -> None:
    known = signatures(database)
    known.record([status("a", POST), status("b", text)])
    assert known.of(TARGET) == POST
