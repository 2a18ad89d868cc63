"""Storage and deletion of API keys."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy.exc import IntegrityError

from cortex.state.database import Where, open_state
from cortex.state.queries.keys import KeyStore, StoredKey


@pytest.fixture
def store(where: Where) -> Iterator[KeyStore]:
    engine = open_state(where)
    yield KeyStore(engine)
    engine.dispose()


def key(key_id: str, second: int, *apis: str) -> StoredKey:
    return StoredKey(
        key_id, f"of {key_id} ü", apis, key_id * 64, datetime(2026, 1, 1, 0, 0, second, 250_000, tzinfo=UTC)
    )


def test_keys_are_listed_in_order_of_creation(store: KeyStore) -> None:
    assert list(store.all()) == []
    later, earlier = key("a", 2), key("b", 1, "iris", "sum")
    store.add(later)
    store.add(earlier)
    assert list(store.all()) == [earlier, later]
    with pytest.raises(IntegrityError):
        store.add(key("a", 3))
    assert store.remove("a") and not store.remove("a")
    assert list(store.all()) == [earlier]
