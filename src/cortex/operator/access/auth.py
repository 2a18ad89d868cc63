"""Authentication middleware of the operator's HTTP API: checks token, Host, Origin and size of every request."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortex.errors import CortexError, ForbiddenError, UnauthorizedError
from cortex.gateway.addresses import numeric
from cortex.jobs.intake.request_body import read_body
from cortex.operator.access.scopes import DASHBOARD, OPEN_PATHS, authorize, find_route
from cortex.operator.access.tokens import Tokens

#: Name of the user on the client's machine, percent-encoded. Not verified: any client may send any name.
USER_HEADER = "x-cortex-user"
HostCheck = Callable[[str], bool]

#: Size of a body, unless its route has a limit of its own (`Access.reads_body`).
MAX_BODY_BYTES = 1024 * 1024
_USER_CHARACTERS = 64
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class AuthMiddleware:
    """ASGI middleware that rejects requests that their token does not permit, or with a foreign Host or Origin.

    Sets `request.state.principal`, the `Principal`, for routes. `host` is the address that the operator listens on;
    `is_own_name` accepts further host names of this operator. The dashboard has cookies instead of tokens, which
    `operator/dashboard/security.py` checks.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, host: str, is_own_name: HostCheck) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = _LOCAL_HOSTS | {host.lower()}
        self._listens_on_all = host in _WILDCARDS
        self._is_own_name = is_own_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an accepted request; answer any other with an error."""
        if scope["type"] != "http":
            return
        try:
            self._check(scope, Headers(scope=scope))
            route = find_route(scope["method"], scope["path"])
            if not (_is_dashboard(scope["path"]) or (route and route.access.reads_body)):
                receive = await _read(scope, receive)
        except ClientDisconnect:
            return
        except CortexError as error:
            await _refusal(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        # DNS rebinding: a web page whose domain resolves to this machine sends its own name as Host.
        # Cross-site request: a page that posts here sends its Origin. Both are rejected even with a valid token.
        host = headers.get("host", "")
        if not self._is_own_host(host):
            raise ForbiddenError(f"{host!r} is not a host name of this operator")
        origin = headers.get("origin")
        if origin is not None and not _is_same_origin(origin, host):
            raise ForbiddenError(f"requests from pages of {origin} are rejected")
        if scope["path"] in OPEN_PATHS or _is_dashboard(scope["path"]):
            return
        principal = self._tokens.identify(headers.get("authorization", ""))
        scope.setdefault("state", {})["principal"] = principal
        self._tokens.check_validity(principal)
        authorize(principal, scope["method"], scope["path"])

    def _is_own_host(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._hosts or (self._listens_on_all and numeric(name) is not None) or self._is_own_name(name)


def caller_of(request: Request) -> str:
    """Return who sent a request, for the history: the name of its token and, if it sent one, that of its user."""
    user = unquote(request.headers.get(USER_HEADER, ""))
    user = "".join(character for character in user if character.isprintable())[:_USER_CHARACTERS]
    token = request.state.principal.name
    return f"{token} ({user})" if user else token


def _is_dashboard(path: str) -> bool:
    return f"{path}/".startswith(DASHBOARD)


async def _read(scope: Scope, receive: Receive) -> Receive:
    """Return a `receive` that has the whole body. Raises: TooLargeError, InputError, ClientDisconnect."""
    unread: list[Message] = [{"type": "http.request", "body": await read_body(Request(scope, receive), MAX_BODY_BYTES)}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay


def _is_same_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _refusal(error: CortexError) -> JSONResponse:
    headers = {"www-authenticate": "Bearer"} if isinstance(error, UnauthorizedError) else None
    return JSONResponse({"error": str(error), "code": error.code}, error.http_status, headers)
