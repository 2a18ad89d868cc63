"""Security of the dashboard: who a browser is, what it may do, and what its pages may load.

`AuthMiddleware` has checked Host and Origin before. Here each request needs the cookie of a session, whose token must
permit the route; a change is a POST from a page of this operator, with the token of its session in the form.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortex.errors import ForbiddenError, InputError, MethodNotAllowedError
from cortex.jobs.intake.request_body import read_body
from cortex.operator.access.scopes import authorize
from cortex.operator.access.tokens import Principal
from cortex.operator.dashboard.sessions import DashboardSession, Sessions

PREFIX = "/dashboard"
MAX_FORM_BYTES = 2 * 1024 * 1024
_MAX_FIELDS = 1_000
#: Paths below `PREFIX` that need no session. They disclose nothing about this installation.
_SIGN_IN = "/sign-in"
_OPEN = (_SIGN_IN, "/static/")
#: A day, which each visit renews: browsers apply this to all ports of the host.
_HSTS = "max-age=86400"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
#: `same-origin`: with `no-referrer`, browsers send `Origin: null` with forms.
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

Form = dict[str, str]


class DashboardSecurity:
    """ASGI middleware of the dashboard. Sets `request.state.session`, `.principal` and, for changes, `.form`.

    `refuse` makes the response to a request that is not permitted.
    """

    def __init__(
        self, app: ASGIApp, sessions: Sessions, cookie: str, refuse: Callable[[Request, InputError], Response]
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._cookie = cookie
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request that is permitted; the pages' headers are on every response."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("cache-control", "no-store")
                headers.update(_HEADERS)
                if scope["scheme"] == "https":
                    headers["strict-transport-security"] = _HSTS
            await send(message)

        request, path = Request(scope, receive), scope["path"].removeprefix(PREFIX)
        try:
            if not path.startswith(_OPEN):
                self._identify(request)
            if request.method not in ("GET", "HEAD"):
                _check_origin(request)
                if path != _SIGN_IN:
                    await _check_form(request)
        except InputError as error:
            await self._refuse(request, error)(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _identify(self, request: Request) -> None:
        session = self._sessions.find(*cookies_of(request, self._cookie))
        request.state.session = session
        request.state.principal = session.principal
        authorize(session.principal, "GET" if request.method == "HEAD" else request.method, request.scope["path"])


def cookies_of(request: Request, name: str) -> list[str]:
    """Return the values of all cookies with a name."""
    pairs = (part.split("=", 1) for header in request.headers.getlist("cookie") for part in header.split(";"))
    return [pair[1].strip() for pair in pairs if pair[0].strip() == name and len(pair) > 1]


def _check_origin(request: Request) -> None:
    """Raises: InputError if a change is not from a page of this operator."""
    if request.method != "POST":
        raise MethodNotAllowedError.of(request.method, "GET, POST")
    if "origin" not in Headers(scope=request.scope):  # `AuthMiddleware` has compared it with the Host
        raise ForbiddenError("a change needs the header Origin, which browsers send; use the command line otherwise")


async def _check_form(request: Request) -> None:
    """Read the form of a change. Raises: InputError if it is not from a page of this session."""
    session = session_of(request)  # before the body, for which a client without a session could take its time
    body = await read_body(request, MAX_FORM_BYTES)
    try:
        form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError as error:
        raise InputError(f"the form can't be read: {error}") from error
    session.check_csrf(form.pop("csrf", ""))
    request.state.form = form


def session_of(request: Request) -> DashboardSession:
    """Return the session of a request. Raises: ForbiddenError without one."""
    session: DashboardSession | None = getattr(request.state, "session", None)
    if session is None:
        raise ForbiddenError("a change needs a session; open the dashboard with `cortex dashboard`")
    return session


def form_of(request: Request) -> Form:
    """Return the fields of a change."""
    form: Form = request.state.form
    return form


def permits(principal: Principal, method: str, path: str) -> bool:
    """Return True if a token permits a request: pages show only links and buttons that work."""
    try:
        authorize(principal, method, path)
    except InputError:
        return False
    return True
