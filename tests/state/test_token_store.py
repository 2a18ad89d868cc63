"""Storage and deletion of operator tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy.exc import IntegrityError

from cortex.lifecycle import TokenScope
from cortex.state.database import Where, open_state
from cortex.state.queries.tokens import StoredToken, TokenStore


@pytest.fixture
def store(where: Where) -> Iterator[TokenStore]:
    engine = open_state(where)
    yield TokenStore(engine)
    engine.dispose()


def test_tokens_are_listed_in_order_of_creation(store: TokenStore) -> None:
    created_at = datetime(2026, 1, 1, 0, 0, 1, 250_000, tzinfo=UTC)
    later = StoredToken("a", "ci", TokenScope.DEPLOY, "iris", "a" * 64, created_at, created_at.replace(year=2027))
    earlier = StoredToken("b", "prometheus", TokenScope.METRICS, None, "b" * 64, created_at.replace(second=0), None)
    assert list(store.all()) == []
    store.add(later)
    store.add(earlier)
    assert list(store.all()) == [earlier, later]
    for taken in (replace(later, name="other"), replace(later, id="c")):
        with pytest.raises(IntegrityError):
            store.add(taken)
    assert store.remove("a") and not store.remove("a")
    assert list(store.all()) == [earlier]
