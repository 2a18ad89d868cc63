"""API keys: create and revoke them, and wait until the gateway has applied the change."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from cortex.errors import GatewayError, InputError, NotFoundError
from cortex.gateway.routes import ApiKey
from cortex.payloads.json_object import Json
from cortex.state.queries.keys import KeyStore, StoredKey

#: Timeout of the gateway's update, which usually takes milliseconds.
_PUBLISH_TIMEOUT_S = 10.0
_ID_BYTES = 5
_SECRET_BYTES = 32
_NAME_MAX_LENGTH = 100
_API = re.compile(r"[a-z][-a-z0-9]{0,63}")
#: The gateway holds all keys in memory, and gets each one by one when it starts.
MAX_KEYS = 10_000


class ActiveKeys:
    """The keys that the gateway accepts, in memory; their changes are stored first."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self.by_id = {key.id: key for key in store.all()}

    def for_gateway(self) -> Sequence[ApiKey]:
        """Return what the gateway needs of each key."""
        return [ApiKey(key.id, key.digest, key.apis) for key in self.by_id.values()]

    def add(self, key: StoredKey) -> None:
        """Store a key."""
        self._store.add(key)
        self.by_id[key.id] = key

    def remove(self, key_id: str) -> None:
        """Delete a key, which need not exist."""
        self._store.remove(key_id)
        self.by_id.pop(key_id, None)


class Keys:
    """The API keys of this operator. `publish` applies the active ones in the gateway and returns once that is done."""

    def __init__(self, active: ActiveKeys, publish: Callable[[], Awaitable[None]]) -> None:
        self._active = active
        self._publish = publish

    def list(self) -> list[Json]:
        """Return id, name, APIs and creation time of every key, oldest first."""
        return [_to_json(key) for key in self._active.by_id.values()]

    async def create(self, name: str, apis: Sequence[str]) -> Json:
        """Create a key for some APIs, or for all if `apis` is empty; return it once the gateway accepts it.

        The result is that of `list`, with the secret in `key`. The APIs need not be deployed.
        Raises: InputError; GatewayError, after which there is no such key.
        """
        if not name.isprintable() or not name.strip() or len(name) > _NAME_MAX_LENGTH:
            raise InputError(f"the name of a key must be 1 to {_NAME_MAX_LENGTH} printable characters (got {name!r})")
        for api in apis:
            if not _API.fullmatch(api):
                raise InputError(f"{api!r} can't be the name of an API; leave it out for a key to all APIs")
        if len(self._active.by_id) >= MAX_KEYS:
            raise InputError(f"there are {MAX_KEYS} keys already; revoke some first: `cortex keys list` shows them")
        key_id = secrets.token_hex(_ID_BYTES)
        text = f"ck_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
        # One round of SHA-256 is enough: slow, salted hashes protect low-entropy passwords, and this has 256 random
        # bits. The gateway computes the hash for every request.
        digest = hashlib.sha256(text.encode()).hexdigest()
        key = StoredKey(key_id, name, tuple(sorted(set(apis))), digest, datetime.now(UTC))
        self._active.add(key)
        try:
            await self._apply("no key was created: the gateway does not apply it; see `cortex status`")
        except GatewayError:  # the secret was not returned: nobody can use the key
            self._active.remove(key.id)
            raise
        return {**_to_json(key), "key": text}

    async def revoke(self, key_id: str) -> Json:
        """Revoke a key; return it once the gateway rejects it. Raises: NotFoundError, GatewayError."""
        key = self._active.by_id.get(key_id)
        if key is None:
            raise NotFoundError(f"there is no key {key_id!r}; `cortex keys list` shows all ids")
        self._active.remove(key_id)
        await self._apply(
            f"the key {key_id} is revoked, but the gateway has not applied that yet; the operator keeps trying."
            " See `cortex status`"
        )
        return _to_json(key)

    async def _apply(self, failure: str) -> None:
        try:
            async with asyncio.timeout(_PUBLISH_TIMEOUT_S):
                await self._publish()
        except TimeoutError:
            raise GatewayError(failure) from None


def _to_json(key: StoredKey) -> Json:
    return {"id": key.id, "name": key.name, "apis": list(key.apis), "created_at": key.created_at.isoformat()}
