"""Routes of API keys, operator tokens and the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from cortex.lifecycle import TokenScope
from cortex.operator.access.audit import AuditLog, record_change
from cortex.operator.access.keys import Keys
from cortex.operator.access.tokens import Tokens
from cortex.payloads.json_object import Json

_MAX_ENTRIES = 10_000


class NewKey(BaseModel):
    """Body of a request to create a key."""

    name: str
    apis: list[str] = []


class NewToken(BaseModel):
    """Body of a request to create a token."""

    scope: TokenScope
    name: str | None = None
    api: str | None = None
    expires_in_s: float | None = None


def key_routes(keys: Keys) -> APIRouter:
    """Return the routes of API keys."""
    router = APIRouter(prefix="/v1/keys")

    @router.get("")
    async def list_keys() -> list[Json]:
        """Return id, name and APIs of every key, oldest first; a key without APIs is valid for all."""
        return keys.list()

    @router.post("")
    async def create_key(new: NewKey, request: Request) -> Json:
        """Create a key that is valid on return; only this response contains it."""
        return await create_recorded_key(request, keys, new.name, new.apis)

    @router.delete("/{key_id}")
    async def revoke_key(key_id: str, request: Request) -> Json:
        """Revoke a key: new requests with it are rejected."""
        return await revoke_recorded_key(request, keys, key_id)

    return router


def token_routes(tokens: Tokens) -> APIRouter:
    """Return the routes of operator tokens."""
    router = APIRouter(prefix="/v1/tokens")

    @router.get("")
    async def list_tokens() -> list[Json]:
        """Return id, name, scope, API and expiry of every token, oldest first, except the one in CORTEX_HOME."""
        return tokens.list()

    @router.post("")
    async def create_token(new: NewToken, request: Request) -> Json:
        """Create a token that is valid on return; only this response contains it."""
        return await create_recorded_token(request, tokens, new)

    @router.delete("/{token_id}")
    async def revoke_token(token_id: str, request: Request) -> Json:
        """Revoke the token with this id or name: requests with it are rejected."""
        return await revoke_recorded_token(request, tokens, token_id)

    return router


def audit_routes(log: AuditLog) -> APIRouter:
    """Return the route of the audit log."""
    router = APIRouter(prefix="/v1/audit")

    @router.get("")
    async def list_changes(
        api: str | None = None,
        since: datetime | None = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_ENTRIES)] = 100,
    ) -> list[Json]:
        """Return the latest changes that clients requested, newest first. A `since` without time zone is UTC."""
        if since is not None and since.tzinfo is None:
            since = since.replace(tzinfo=UTC)
        return await log.entries(api, since, limit)

    return router


# Changes with their entries in the audit log, also for the dashboard.


async def create_recorded_key(request: Request, keys: Keys, name: str, apis: Sequence[str]) -> Json:
    """Create a key as `Keys.create` does."""
    key = await keys.create(name, apis)
    record_change(request, f"{key['id']} ({key['name']}) for {', '.join(key['apis']) or 'all APIs'}")
    return key


async def revoke_recorded_key(request: Request, keys: Keys, key_id: str) -> Json:
    """Revoke a key as `Keys.revoke` does."""
    key = await keys.revoke(key_id)
    record_change(request, f"{key['id']} ({key['name']})")
    return key


async def create_recorded_token(request: Request, tokens: Tokens, new: NewToken) -> Json:
    """Create a token as `Tokens.create` does."""
    token = await tokens.create(new.name, new.scope, new.api, new.expires_in_s)
    expiry = f", expires {token['expires_at'][:19]}" if token["expires_at"] else ""
    record_change(request, f"{token['id']} ({token['name']}), scope {token['scope']}{expiry}", token["api"])
    return token


async def revoke_recorded_token(request: Request, tokens: Tokens, token_id: str) -> Json:
    """Revoke a token as `Tokens.revoke` does."""
    token = await tokens.revoke(token_id)
    record_change(request, f"{token['id']} ({token['name']}), scope {token['scope']}", token["api"])
    return token
