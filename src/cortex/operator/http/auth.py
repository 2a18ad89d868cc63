"""The one door of the operator's HTTP: token, Host and Origin of every request, before any route sees it."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cortex.errors import UnauthorizedError
from cortex.gateway.addresses import numeric

#: The only path that needs no token: it tells nothing but that the operator lives.
OPEN_PATHS = frozenset({"/livez"})
IsName = Callable[[str], bool]

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class Guard:
    """ASGI middleware that refuses what it does not know.

    `host` is the address that the operator listens on, `is_name` tells what names it has besides.
    """

    def __init__(
        self, app: ASGIApp, token: str, host: str, hosts: Collection[str] = (), is_name: IsName | None = None
    ) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = _LOCAL_HOSTS | {host.lower()} | {name.lower() for name in hosts}
        self._any_address = host in _WILDCARDS
        self._is_name = is_name or _nobody

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that may come in; answer any other."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        if refusal := self._refuse(scope["path"], headers):
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refuse(self, path: str, headers: Headers) -> JSONResponse | None:
        # A web page whose name was made to point at this machine sends its own name as Host; one that merely posts
        # here sends its Origin. Both are refused even where they know the token.
        host = headers.get("host", "")
        if not self._is_ours(host):
            return _refusal(403, "forbidden", f"this operator is not called {host!r}")
        origin = headers.get("origin")
        if origin is not None and not _is_of(origin, host):
            return _refusal(403, "forbidden", f"requests from pages of {origin} are refused")
        if path not in OPEN_PATHS and not self._has_token(headers.get("authorization", "")):
            error = UnauthorizedError("the operator's token is missing or wrong")
            response = _refusal(error.http_status, error.code, str(error))
            response.headers["www-authenticate"] = "Bearer"
            return response
        return None

    def _has_token(self, authorization: str) -> bool:
        scheme, _, value = authorization.partition(" ")
        given = value.strip().encode()
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self._token)

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._hosts or (self._any_address and numeric(name) is not None) or self._is_name(name)


def _nobody(_: str) -> bool:
    return False


def _is_of(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _refusal(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": message, "code": code}, status)
