"""API keys while the gateway applies changes, and while it fails to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.errors import GatewayError, NotFoundError
from cortex.operator.access.keys import ActiveKeys, Keys
from cortex.state.database import open_sqlite
from cortex.state.queries.keys import KeyStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyStore]:
    engine = open_sqlite(tmp_path / "state.db")
    yield KeyStore(engine)
    engine.dispose()


async def refused() -> None:
    raise GatewayError("HAProxy does not answer")


async def applied() -> None:
    pass


def test_does_not_create_a_key_that_the_gateway_fails_to_apply(store: KeyStore) -> None:
    active = ActiveKeys(store)
    keys = Keys(active, refused)
    with pytest.raises(GatewayError):
        asyncio.run(keys.create("a", []))
    assert keys.list() == [] and not active.for_gateway() and not store.all()


def test_revokes_a_key_even_if_the_gateway_fails_to_apply_that(store: KeyStore) -> None:
    made = asyncio.run(Keys(ActiveKeys(store), applied).create("a", ["iris", "iris"]))
    active = ActiveKeys(store)
    keys = Keys(active, refused)
    assert [key["id"] for key in keys.list()] == [made["id"]]
    with pytest.raises(GatewayError):
        asyncio.run(keys.revoke(made["id"]))
    assert keys.list() == [] and not active.for_gateway() and not store.all()
    with pytest.raises(NotFoundError):
        asyncio.run(keys.revoke(made["id"]))


def test_keys_are_long_unique_and_contain_their_ids(store: KeyStore) -> None:
    active = ActiveKeys(store)
    keys = Keys(active, applied)
    made = [asyncio.run(keys.create("a", ["iris"])) for _ in range(3)]
    assert len({each["key"] for each in made}) == 3
    for each in made:
        prefix, key_id, secret = each["key"].split("_", 2)
        assert (prefix, key_id) == ("ck", each["id"]) and len(secret) >= 43
    assert [key.apis for key in active.for_gateway()] == [("iris",)] * 3
