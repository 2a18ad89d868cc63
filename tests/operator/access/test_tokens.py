"""Operator tokens: creation, validity, revocation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cortex.errors import ConflictError, InputError, NotFoundError, UnauthorizedError
from cortex.lifecycle import TokenScope
from cortex.operator.access.tokens import Principal, Tokens
from cortex.state.database import open_sqlite
from cortex.state.queries.tokens import TokenStore

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TokenStore]:
    engine = open_sqlite(tmp_path / "state.db")
    yield TokenStore(engine)
    engine.dispose()


@pytest.fixture
def tokens(store: TokenStore) -> Tokens:
    return Tokens(store, "a" * 64, lambda: NOW)


def create(tokens: Tokens, scope: str = "read", **options: Any) -> dict[str, Any]:
    return asyncio.run(tokens.create(options.pop("name", None), TokenScope(scope), **options))


def test_the_token_of_the_home_is_an_admins(tokens: Tokens) -> None:
    assert tokens.identify("Bearer " + "a" * 64) == Principal("admin", TokenScope.ADMIN)


def test_a_token_is_valid_from_its_creation_until_it_is_revoked_also_for_the_next_operator(
    store: TokenStore, tokens: Tokens
) -> None:
    made = create(tokens, "deploy", name="ci", api="iris", expires_in_s=60)
    principal = Principal("ci", TokenScope.DEPLOY, "iris", NOW + timedelta(seconds=60), made["id"])
    for each in (tokens, Tokens(store, "b" * 64, lambda: NOW)):
        assert each.identify(f"bearer {made['token']}") == principal
        assert each.list() == [{key: value for key, value in made.items() if key != "token"}]
    asyncio.run(tokens.revoke("ci"))
    assert tokens.list() == Tokens(store, "b" * 64).list() == []
    with pytest.raises(UnauthorizedError, match="missing or wrong"):
        tokens.identify(f"Bearer {made['token']}")
    with pytest.raises(NotFoundError):
        asyncio.run(tokens.revoke("ci"))


def test_a_token_can_be_revoked_by_its_id(tokens: Tokens) -> None:
    made = create(tokens)
    assert asyncio.run(tokens.revoke(made["id"]))["name"] == "read"


def test_only_a_hash_of_a_token_is_stored(store: TokenStore, tokens: Tokens) -> None:
    made = create(tokens)
    prefix, token_id, secret = made["token"].split("_", 2)
    assert (prefix, token_id) == ("ct", made["id"]) and len(secret) >= 43
    assert secret not in repr(store.all())


@pytest.mark.parametrize(
    "change",
    ["", "Bearer", "Bearer ", "Basic {}", "Bearer {}x", "Bearer ct_{id}_", "Bearer ct_{id}", "Bearer x{}", "Bearer é"],
)
def test_rejects_wrong_tokens(tokens: Tokens, change: str) -> None:
    made = create(tokens)
    with pytest.raises(UnauthorizedError, match="missing or wrong"):
        tokens.identify(change.format(made["token"], id=made["id"]))


def test_an_expired_token_is_rejected_with_the_time(store: TokenStore, tokens: Tokens) -> None:
    made = create(tokens, expires_in_s=30.5)
    later = Tokens(store, "a", lambda: NOW + timedelta(seconds=31))
    tokens.check_validity(tokens.identify(f"Bearer {made['token']}"))
    with pytest.raises(UnauthorizedError, match="the token 'read' expired at 2026-11-22 12:00 UTC"):
        later.check_validity(later.identify(f"Bearer {made['token']}"))
    assert [token["is_expired"] for token in (*tokens.list(), *later.list())] == [False, True]


def test_names_are_unique_and_derived_from_scope_and_api(tokens: Tokens) -> None:
    made = [create(tokens), create(tokens), create(tokens, "deploy", api="iris"), create(tokens, "admin")]
    assert [token["name"] for token in made] == ["read", "read-2", "deploy-iris", "admin-2"]
    for name in ("read", "admin"):
        with pytest.raises(ConflictError, match="choose another"):
            create(tokens, name=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "metrics", "api": "iris"}, "scope metrics can't be limited to an API"),
        ({"scope": "admin", "api": "iris"}, "scope admin can't be limited to an API"),
        ({"api": "*"}, "can't be the name of an API"),
        ({"name": ""}, "not a valid name"),
        ({"name": "a b"}, "not a valid name"),
        ({"expires_in_s": 0}, "more than 0 seconds"),
        ({"expires_in_s": float("nan")}, "more than 0 seconds"),
        ({"expires_in_s": 1e20}, "less than 100 years"),
    ],
)
def test_rejects_an_invalid_request(tokens: Tokens, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        create(tokens, **options)
    assert tokens.list() == []
