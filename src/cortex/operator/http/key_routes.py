"""The operator's routes for API keys."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from cortex.operator.deploy.keys import Keys


class NewKey(BaseModel):
    """What a key is to be."""

    name: str
    apis: list[str] = []


def key_routes(keys: Keys) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/keys")

    @router.get("")
    async def list_keys() -> list[dict[str, Any]]:
        """Return the id, name and APIs of every key, the oldest first; no APIs: it is for all."""
        return keys.list()

    @router.post("")
    async def create_key(new: NewKey) -> dict[str, Any]:
        """Make a key, which only this answer shows; it can be used at once."""
        return await keys.create(new.name, new.apis)

    @router.delete("/{key_id}")
    async def revoke_key(key_id: str) -> dict[str, Any]:
        """Revoke a key: no new request gets in with it."""
        return await keys.revoke(key_id)

    return router
