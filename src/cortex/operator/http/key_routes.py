"""Routes of API keys."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from cortex.operator.deploy.keys import Keys


class NewKey(BaseModel):
    """Body of a request to create a key."""

    name: str
    apis: list[str] = []


def key_routes(keys: Keys) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/keys")

    @router.get("")
    async def list_keys() -> list[dict[str, Any]]:
        """Return id, name and APIs of every key, oldest first; a key without APIs is valid for all."""
        return keys.list()

    @router.post("")
    async def create_key(new: NewKey) -> dict[str, Any]:
        """Create a key that is valid on return; only this response contains it."""
        return await keys.create(new.name, new.apis)

    @router.delete("/{key_id}")
    async def revoke_key(key_id: str) -> dict[str, Any]:
        """Revoke a key: new requests with it are rejected."""
        return await keys.revoke(key_id)

    return router
