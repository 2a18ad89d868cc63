"""The dashboard: an application of its own below `/dashboard/` on the operator's port.

How a page is added: its route and scope in `DASHBOARD_ROUTES` (`operator/access/scopes.py`); a router in `pages/`; a
template; an item of `NAVIGATION` (`rendering.py`). This package's pages are imported by the first request for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp

from cortex.errors import CortexError, InputError, MethodNotAllowedError, NotFoundError
from cortex.operator.dashboard.pages.access import audit_pages, key_pages, token_pages
from cortex.operator.dashboard.pages.apis import api_pages
from cortex.operator.dashboard.pages.cluster import cluster_pages, describe_machines
from cortex.operator.dashboard.pages.jobs import job_pages
from cortex.operator.dashboard.pages.logs import log_pages
from cortex.operator.dashboard.pages.revisions import revision_pages
from cortex.operator.dashboard.pages.schedules import schedule_pages
from cortex.operator.dashboard.pages.workloads import workload_pages
from cortex.operator.dashboard.rendering import Pages, static_file
from cortex.operator.dashboard.security import PREFIX, DashboardSecurity, cookies_of
from cortex.operator.dashboard.sessions import SESSION_S, Sessions
from cortex.operator.http.services import Services
from cortex.telemetry import Logger


def create_dashboard(services: Services, sessions: Sessions, logger: Logger) -> ASGIApp:
    """Return the application; mount it at `PREFIX`."""
    pages = Pages(urlsplit(services.identity.url).netloc)
    routers = (
        api_pages(services, pages),
        log_pages(services, pages),
        revision_pages(services, pages),
        job_pages(services, pages),
        workload_pages(services, pages),
        schedule_pages(services, pages),
        key_pages(services.access.keys, services.apis, pages),
        token_pages(services.access.tokens, services.apis, pages),
        audit_pages(services.access.audit_log, pages),
        cluster_pages(lambda: describe_machines(services), pages),
    )
    return with_sessions(routers, services.identity.url, sessions, pages, logger)


def with_sessions(routers: Iterable[APIRouter], url: str, sessions: Sessions, pages: Pages, logger: Logger) -> ASGIApp:
    """Return an application of pages for browsers that are signed in; `url` is the operator's."""
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    # Cookies do not distinguish ports, and one host may have several operators. With the prefix, only pages over TLS
    # can set the cookie. `__Host-` would require the path /, and then APIs of this host would receive it.
    cookie = f"{'__Secure-' if is_secure else ''}cortex_{parts.port}"
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(_session_routes(sessions, pages, cookie, is_secure))
    for router in routers:
        app.include_router(router)
    _add_error_pages(app, pages, logger)
    return DashboardSecurity(app, sessions, cookie, pages.error)


def _session_routes(sessions: Sessions, pages: Pages, cookie: str, is_secure: bool) -> APIRouter:
    router = APIRouter()

    @router.get("/sign-in")
    async def ask(request: Request, code: str = "") -> Response:
        """Ask before a code is used: the address may be a link from elsewhere, to a session of somebody else."""
        return pages.page(request, "sign_in.html", principal=sessions.check_code(code))

    @router.post("/sign-in")
    async def sign_in(code: str = "") -> Response:
        """Use a code."""
        value = sessions.sign_in(code)
        response = RedirectResponse(f"{PREFIX}/", 303)
        options = {"httponly": True, "samesite": "strict", "secure": is_secure, "path": PREFIX}
        response.set_cookie(cookie, value, max_age=int(SESSION_S), **options)  # type: ignore[arg-type]
        return response

    @router.post("/sign-out")
    async def sign_out(request: Request) -> Response:
        """End the session."""
        sessions.sign_out(*cookies_of(request, cookie))
        response = pages.page(request, "signed_out.html")
        response.delete_cookie(cookie, path=PREFIX, secure=is_secure)
        return response

    @router.get("/static/{name}")
    async def static(request: Request, name: str) -> Response:
        """Return the stylesheet, the script or the icon."""
        return static_file(name, request)

    return router


def _add_error_pages(app: FastAPI, pages: Pages, logger: Logger) -> None:
    async def on_cortex_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, CortexError)
        return pages.error(request, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return pages.error(request, MethodNotAllowedError.of(request.method, "GET, POST"))
        return pages.error(request, NotFoundError(f"the dashboard has no page {request.scope['path'][:200]}"))

    async def on_invalid_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
        return pages.error(request, InputError(problems))

    async def on_bug(request: Request, error: Exception) -> Response:
        logger.error("request failed", exc_info=error, method=request.method, path=request.scope["path"])
        return pages.error(request, CortexError("internal error; the operator's log has the details"))

    app.add_exception_handler(CortexError, on_cortex_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_parameter)
    app.add_exception_handler(Exception, on_bug)
