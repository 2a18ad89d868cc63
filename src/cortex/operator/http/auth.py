"""Authentication middleware of the operator's HTTP API: checks token, Host and Origin of every request."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cortex.errors import UnauthorizedError
from cortex.gateway.addresses import numeric

#: Paths that need no token. Liveness discloses nothing else.
OPEN_PATHS = frozenset({"/livez"})
HostCheck = Callable[[str], bool]

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class AuthMiddleware:
    """ASGI middleware that rejects requests without the token, for a foreign Host, or from a foreign Origin.

    `host` is the address that the operator listens on; `is_own_name` accepts further host names of this operator.
    """

    def __init__(self, app: ASGIApp, token: str, host: str, is_own_name: HostCheck) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = _LOCAL_HOSTS | {host.lower()}
        self._listens_on_all = host in _WILDCARDS
        self._is_own_name = is_own_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an accepted request; answer any other with 401 or 403."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        if refusal := self._refuse(scope["path"], headers):
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refuse(self, path: str, headers: Headers) -> JSONResponse | None:
        # DNS rebinding: a web page whose domain resolves to this machine sends its own name as Host.
        # Cross-site request: a page that posts here sends its Origin. Both are rejected even with a valid token.
        host = headers.get("host", "")
        if not self._is_own_host(host):
            return _refusal(403, "forbidden", f"{host!r} is not a host name of this operator")
        origin = headers.get("origin")
        if origin is not None and not _is_same_origin(origin, host):
            return _refusal(403, "forbidden", f"requests from pages of {origin} are rejected")
        if path not in OPEN_PATHS and not self._has_token(headers.get("authorization", "")):
            error = UnauthorizedError("the operator's token is missing or wrong")
            response = _refusal(error.http_status, error.code, str(error))
            response.headers["www-authenticate"] = "Bearer"
            return response
        return None

    def _has_token(self, authorization: str) -> bool:
        scheme, _, value = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(value.strip().encode(), self._token)

    def _is_own_host(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._hosts or (self._listens_on_all and numeric(name) is not None) or self._is_own_name(name)


def _is_same_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _refusal(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": message, "code": code}, status)
