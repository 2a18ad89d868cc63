"""API keys: makes and revokes them, and has the gateway follow before it says that it is done."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from cortex.errors import GatewayError, InputError, NotFoundError
from cortex.gateway.routes import ApiKey
from cortex.state.keys import KeyStore, StoredKey

Json = dict[str, Any]

#: How long the gateway may take to know of a change; most take milliseconds.
_IN_FORCE_S = 10.0
_ID_BYTES = 5
_SECRET_BYTES = 32
_NAME_MAX_LENGTH = 100
_API = re.compile(r"[a-z][-a-z0-9]{0,63}")
#: The gateway holds all of them in memory, and is told each when it starts.
MAX_KEYS = 10_000


class Keys:
    """The keys of this operator. `publish` puts what `in_force` returns in force in the gateway, and returns then."""

    def __init__(self, store: KeyStore, publish: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._publish = publish
        self._keys = {key.id: key for key in store.all()}

    def in_force(self) -> Sequence[ApiKey]:
        """Return what the gateway is to let in."""
        return [ApiKey(key.id, key.digest, key.apis) for key in self._keys.values()]

    def list(self) -> list[Json]:
        """Return every key as JSON, the oldest first; none can be used as one."""
        return [_shown(key) for key in self._keys.values()]

    async def create(self, name: str, apis: Sequence[str]) -> Json:
        """Make a key for some APIs, or for all without any; return it as `list` does, with `key`, once it opens them.

        The APIs need not be deployed. Raises: InputError.
        """
        if not name.isprintable() or not name.strip() or len(name) > _NAME_MAX_LENGTH:
            raise InputError(f"a key needs a name of 1 to {_NAME_MAX_LENGTH} printable characters (got {name!r})")
        for api in apis:
            if not _API.fullmatch(api):
                raise InputError(f"{api!r} can't be the name of an API; leave it out for a key to all APIs")
        if len(self._keys) >= MAX_KEYS:
            raise InputError(f"there are {MAX_KEYS} keys already; revoke some first: `cortex keys list` shows them")
        key_id = secrets.token_hex(_ID_BYTES)
        text = f"ck_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
        # One round of SHA-256 is right here: slow, salted hashes protect what people choose. This has 256 random bits,
        # of which no list can be made and none can be tried; and the gateway hashes at every request.
        digest = hashlib.sha256(text.encode()).hexdigest()
        key = StoredKey(key_id, name, tuple(sorted(set(apis))), digest, datetime.now(UTC))
        self._store.add(key)
        self._keys[key.id] = key
        try:
            await self._in_force("no key was made: the gateway does not take it; `cortex status` shows how it is")
        except GatewayError:  # nobody was shown the key
            self._store.remove(key.id)
            self._keys.pop(key.id, None)
            raise
        return {**_shown(key), "key": text}

    async def revoke(self, key_id: str) -> Json:
        """Revoke a key; return it once it opens nothing any more. Raises: NotFoundError, GatewayError."""
        key = self._keys.get(key_id)
        if key is None:
            raise NotFoundError(f"there is no key {key_id!r}; `cortex keys list` shows the ids of all")
        self._store.remove(key_id)
        self._keys.pop(key_id, None)
        await self._in_force(
            f"the key {key_id} is revoked, but the gateway does not know of it yet; it is told again until it does."
            " `cortex status` shows how it is"
        )
        return _shown(key)

    async def _in_force(self, otherwise: str) -> None:
        try:
            async with asyncio.timeout(_IN_FORCE_S):
                await self._publish()
        except TimeoutError:
            raise GatewayError(otherwise) from None


def _shown(key: StoredKey) -> Json:
    return {"id": key.id, "name": key.name, "apis": list(key.apis), "created_at": key.created_at.isoformat()}
