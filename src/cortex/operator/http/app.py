"""The operator's HTTP API: the application, and the routes of the operator itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from cortex.errors import ConfigError, CortexError, DatabaseUnavailableError, InputError, UserError, is_disk_full
from cortex.operator.access.audit import AuditMiddleware
from cortex.operator.access.auth import AuthMiddleware, HostCheck, caller_of
from cortex.operator.access.routes import audit_routes, key_routes, token_routes
from cortex.operator.dashboard.security import PREFIX
from cortex.operator.dashboard.sessions import CODE_S, Sessions
from cortex.operator.http.api_routes import api_routes, deploy_routes
from cortex.operator.http.documentation_routes import documentation_routes
from cortex.operator.http.job_routes import job_routes
from cortex.operator.http.services import Services
from cortex.payloads.json_object import Json
from cortex.telemetry import Logger

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#f2f2f2;padding:.1em .3em}td,th{text-align:left;vertical-align:top;padding:.3em 1em .3em 0}"
)


def create_app(services: Services, host: str, is_own_name: HostCheck, logger: Logger) -> FastAPI:
    """Return the application; `host` and `is_own_name` are as in `AuthMiddleware`."""
    app = FastAPI(title="cortex operator", version="1", docs_url=None, redoc_url=None)
    add_error_handlers(app, logger)
    app.include_router(operator_routes(services))
    app.include_router(deploy_routes(services))
    app.include_router(api_routes(services))
    app.include_router(job_routes(services.jobs.service, services.log_sources))
    app.include_router(key_routes(services.access.keys))
    app.include_router(token_routes(services.access.tokens))
    app.include_router(audit_routes(services.access.audit_log))
    app.include_router(documentation_routes(services.replicas.documentation, services.identity.gateway_url))
    sessions = Sessions(services.access.tokens)
    app.include_router(_code_routes(sessions))
    app.mount(PREFIX, _Dashboard(services, sessions, logger))
    app.add_middleware(AuthMiddleware, tokens=services.access.tokens, host=host, is_own_name=is_own_name)
    app.add_middleware(AuditMiddleware, log=services.access.audit_log)  # around the other, so that it records refusals

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """Return the OpenAPI description as a page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return HTMLResponse(docs_page(app.openapi()), headers={"content-security-policy": policy})

    return app


class _Dashboard:
    """The dashboard, created by its first request: many operators never show it, and it takes several megabytes."""

    def __init__(self, services: Services, sessions: Sessions, logger: Logger) -> None:
        self._services = services
        self._sessions = sessions
        self._logger = logger
        self._app: ASGIApp | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._lock:
            if self._app is None:
                self._app = await asyncio.to_thread(self._create)
        await self._app(scope, receive, send)

    def _create(self) -> ASGIApp:
        from cortex.operator.dashboard.app import create_dashboard  # noqa: PLC0415 - see above

        return create_dashboard(self._services, self._sessions, self._logger)


def _code_routes(sessions: Sessions) -> APIRouter:
    """Return the route for one-time codes of the dashboard."""
    router = APIRouter(prefix="/v1/dashboard")

    @router.post("/codes")
    async def create_code(request: Request) -> dict[str, object]:
        """Return a path of the dashboard with a code that signs one browser in, once and within a minute."""
        code = sessions.create_code(request.state.principal, caller_of(request))
        return {"path": f"{PREFIX}/sign-in?code={code}", "expires_in_s": CODE_S}

    return router


def add_error_handlers(app: FastAPI, logger: Logger) -> None:
    """Return every error as JSON with the keys `error` and `code`."""

    async def on_cortex_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, CortexError)
        body: dict[str, Any] = {"error": str(error), "code": error.code}
        if isinstance(error, ConfigError):
            body["diagnostics"] = [asdict(diagnostic) for diagnostic in error.diagnostics]
        if isinstance(error, UserError):
            body["traceback"] = error.traceback
        headers = {"retry-after": "1"} if isinstance(error, DatabaseUnavailableError) else None
        return JSONResponse(body, error.http_status, headers)

    async def on_http_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_input")
        return JSONResponse({"error": str(error.detail).lower(), "code": code}, error.status_code, error.headers)

    async def on_invalid_parameter(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        problems = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
        return JSONResponse({"error": problems, "code": InputError.code}, 400)

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        logger.error("request failed", exc_info=error, method=request.method, path=request.url.path)
        if is_disk_full(error):
            full = DatabaseUnavailableError("the disk of the operator is full; free some space on it, and try again")
            return await on_cortex_error(request, full)
        return JSONResponse({"error": "internal error; the operator's log has the details", "code": "internal"}, 500)

    app.add_exception_handler(CortexError, on_cortex_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_parameter)
    app.add_exception_handler(Exception, on_bug)


def docs_page(description: dict[str, Any]) -> str:
    """Return an OpenAPI description as plain HTML, without scripts or external resources; all texts are escaped."""
    title = escape(description["info"]["title"])
    rows = "".join(_rows(description["paths"]))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>Every route except <code>/livez</code> and this page requires the header "
        "<code>Authorization: Bearer TOKEN</code>: the token in the file <code>token</code> of CORTEX_HOME, or one of "
        "<code>cortex tokens create</code> with the scope of the route. "
        "The same description as JSON: <a href=openapi.json>openapi.json</a>. "
        "The routes of the deployed APIs: <a href=apis/docs>apis/docs</a>.</p>"
        f"<table><tr><th>route<th>parameters<th>description</tr>{rows}</table></html>"
    )


def _rows(paths: dict[str, dict[str, Any]]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            parameters = ", ".join(
                f"<code>{escape(parameter['name'])}</code> ({escape(parameter['in'])})"
                for parameter in operation.get("parameters", [])
            )
            text = escape(operation.get("description", ""))
            yield f"<tr><td><code>{escape(method.upper())} {escape(path)}</code><td>{parameters}<td>{text}</tr>"


def operator_routes(services: Services) -> APIRouter:
    """Return the routes of the operator itself: liveness, status, metrics, shutdown."""
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Json:
        """Return 200 while the operator is alive; needs no token."""
        return {"ok": True}

    @router.get("/v1/status")
    async def status() -> Json:
        """Return the operator, the gateway and every process of every replica."""
        return _status(services)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return all metrics in the Prometheus text format."""
        return Response(await services.monitoring.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.post("/v1/shutdown")
    async def shutdown(all: bool = False) -> Json:
        """Shut down the operator; with `all`, stop the gateway and every replica first."""
        services.shut_down(all)
        return {"stopping": True}

    return router


def _status(services: Services) -> Json:
    identity, cluster = services.identity, services.infrastructure.cluster
    replicas = sorted(
        (status for _, status in services.infrastructure.engine.replicas().values()), key=lambda status: status.id
    )
    return {
        "operator": {
            "pid": identity.pid,
            "url": identity.url,
            "version": identity.version,
            "started_at": identity.started_at,
        },
        "gateway": {
            "pid": services.infrastructure.gateway.pid,
            "url": identity.gateway_url,
            "refused_connections": services.infrastructure.gateway.refused_connections,
        },
        "gateways": cluster.fleet.describe() if cluster else [],
        "cluster": cluster and {"problem": cluster.placer.reason, "nodes": _nodes_up(services)},
        "models": services.model_agent.describe(),
        "replicas": [process for status in replicas for process in status.describe_processes()],
    }


def _nodes_up(services: Services) -> list[str]:
    links = services.infrastructure.cluster.engine.nodes if services.infrastructure.cluster else {}
    return sorted(host for host, link in links.items() if link.is_up)
