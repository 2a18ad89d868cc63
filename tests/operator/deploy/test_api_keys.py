"""A key that the gateway does not take is none; one that is revoked stays so, whatever the gateway does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.errors import GatewayError, NotFoundError
from cortex.operator.deploy.keys import Keys
from cortex.state.database import open_sqlite
from cortex.state.keys import KeyStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyStore]:
    engine = open_sqlite(tmp_path / "state.db")
    yield KeyStore(engine)
    engine.dispose()


async def refused() -> None:
    raise GatewayError("HAProxy does not answer")


async def taken() -> None:
    pass


def test_a_key_that_can_not_be_put_in_force_is_not_made(store: KeyStore) -> None:
    keys = Keys(store, refused)
    with pytest.raises(GatewayError):
        asyncio.run(keys.create("a", []))
    assert keys.list() == [] and not keys.in_force() and not store.all()


def test_a_revoked_key_is_gone_though_the_gateway_could_not_be_told(store: KeyStore) -> None:
    made = asyncio.run(Keys(store, taken).create("a", ["iris", "iris"]))
    keys = Keys(store, refused)
    assert [key["id"] for key in keys.list()] == [made["id"]]
    with pytest.raises(GatewayError):
        asyncio.run(keys.revoke(made["id"]))
    assert keys.list() == [] and not keys.in_force() and not store.all()
    with pytest.raises(NotFoundError):
        asyncio.run(keys.revoke(made["id"]))


def test_keys_are_long_differ_and_show_their_ids(store: KeyStore) -> None:
    keys = Keys(store, taken)
    made = [asyncio.run(keys.create("a", ["iris"])) for _ in range(3)]
    assert len({each["key"] for each in made}) == 3
    for each in made:
        prefix, key_id, secret = each["key"].split("_", 2)
        assert (prefix, key_id) == ("ck", each["id"]) and len(secret) >= 43
    assert [key.apis for key in keys.in_force()] == [("iris",)] * 3
