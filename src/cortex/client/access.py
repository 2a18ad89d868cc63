"""Methods of the client for API keys, operator tokens, the audit log and the dashboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from cortex.client.environments import OperatorClient


class AccessClient(OperatorClient):
    """Base class of `Client` with the methods for API keys, operator tokens, the audit log and the dashboard."""

    # API keys, for callers of APIs.

    def create_key(self, name: str, apis: Sequence[str] = ()) -> dict[str, Any]:
        """Create an API key for some APIs, deployed or not, or for all if `apis` is empty; return its `id` and `key`.

        The key is valid at once. The operator stores only a hash: `key` can't be shown again. Raises: InputError.
        """
        if isinstance(apis, str):
            raise ValueError("`apis` must be a list (got a string)")
        return self._object("POST", "/v1/keys", body=json.dumps({"name": name, "apis": list(apis)}).encode())

    def list_keys(self) -> list[dict[str, Any]]:
        """Return `id`, `name`, `apis` (empty: all) and `created_at` of every key, oldest first."""
        return self._objects("GET", "/v1/keys")

    def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Revoke a key. Once this returns, no new request is admitted with it. Raises: NotFoundError."""
        return self._object("DELETE", f"/v1/keys/{quote(key_id, safe='')}")

    # Operator tokens, for users of the operator.

    def create_token(
        self, scope: str, name: str | None = None, api: str | None = None, expires_in_s: float | None = None
    ) -> dict[str, Any]:
        """Create an operator token and return its `name` and `token`; with `api`, it is limited to this API.

        `scope` is metrics, read, deploy or admin; `name` defaults to the scope and the API. The operator stores only a
        hash: `token` can't be shown again. Raises: InputError, ConflictError.
        """
        body = {"scope": scope, "name": name, "api": api, "expires_in_s": expires_in_s}
        return self._object("POST", "/v1/tokens", body=json.dumps(body).encode())

    def list_tokens(self) -> list[dict[str, Any]]:
        """Return `id`, `name`, `scope`, `api` and times of every token but that of CORTEX_HOME, oldest first."""
        return self._objects("GET", "/v1/tokens")

    def revoke_token(self, token: str) -> dict[str, Any]:
        """Revoke the token with this id or name. Once this returns, requests with it fail. Raises: NotFoundError."""
        path = f"/v1/tokens/{quote(token, safe='')}"
        return self._object("DELETE", path)

    def audit_log(
        self, api: str | None = None, since: datetime | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Return the latest changes that clients of the operator requested, the refused ones included, newest first.

        Each has `at`, `token`, `address`, `action`, `api`, `result` and `detail`. With `api` those of one API, with
        `since` those from then on.
        """
        query = {"api": api, "since": since and since.astimezone().isoformat(), "limit": limit}
        return self._objects("GET", "/v1/audit", query=query)

    # The dashboard.

    def create_dashboard_url(self) -> str:
        """Return a URL of the operator's dashboard that signs one browser in, once and within a minute.

        The browser may then do what the token of this environment permits.
        """
        transport = self.environment.connect()
        return f"{transport.url}{transport.call('POST', '/v1/dashboard/codes')['path']}"
