"""The client's methods for the keys that callers of APIs show. Knows the routes only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from cortex.client.environments import Environment


class KeyClient:
    """The part of `Client` that is about API keys."""

    environment: Environment

    def create_key(self, name: str, apis: Sequence[str] = ()) -> dict[str, Any]:
        """Make a key for some APIs, deployed or not, or for all without any; return it with `id` and `key`.

        It can be used at once. Nothing can show `key` again. Raises: InputError.
        """
        if isinstance(apis, str):
            raise ValueError("`apis` must be a list (got a string)")
        body = {"name": name, "apis": list(apis)}
        answer: dict[str, Any] = self.environment.connect().call("POST", "/v1/keys", body=json.dumps(body).encode())
        return answer

    def list_keys(self) -> list[dict[str, Any]]:
        """Return `id`, `name`, `apis` (none: all) and `created_at` of every key, the oldest first."""
        answer: list[dict[str, Any]] = self.environment.connect().call("GET", "/v1/keys")
        return answer

    def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Revoke a key: once this returns, no new request gets in with it. Raises: NotFoundError."""
        path = f"/v1/keys/{quote(key_id, safe='')}"
        answer: dict[str, Any] = self.environment.connect().call("DELETE", path)
        return answer
