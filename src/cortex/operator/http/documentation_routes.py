"""Routes of documentation: of one API, below its endpoint at the gateway, and of all APIs, at the operator.

The gateway names the API in a header that no client can set.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cortex.errors import CortexError, MethodNotAllowedError, NotFoundError
from cortex.gateway.maps import api_of
from cortex.operator.documentation import Documentation
from cortex.operator.http.documentation_page import asset_response, page_response, security_headers
from cortex.operator.http.gateway_routes import DOCS_HEADER, GatewayRoutes
from cortex.payloads.json_bodies import dump_json
from cortex.telemetry import Logger


class DocumentationRoutes(GatewayRoutes):
    """ASGI application for `openapi.json` and `docs` below the endpoints of APIs."""

    def __init__(self, documentation: Documentation, logger: Logger) -> None:
        super().__init__(logger)
        self._documentation = documentation

    async def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowedError.of(request.method, "GET")
        key = request.headers[DOCS_HEADER]
        api, path = api_of(key) or key, request.url.path
        match path.removeprefix(self._documentation.endpoint(api).rstrip("/")):
            case "/openapi.json":
                return _json(self._documentation.document(api))
            case "/docs":
                return page_response(api)
            case "/docs/":
                return RedirectResponse("../docs", headers=security_headers())
            case below if below.startswith("/docs/"):
                return asset_response(below.removeprefix("/docs/"), request)
        raise NotFoundError(f"{api} has no documentation at {path}")

    def _error_response(self, request: Request, error: CortexError) -> Response:
        body = {"error": str(error), "request_id": request.headers.get("x-cortex-request-id", "")}
        return _json(body, error.http_status)


def documentation_routes(documentation: Documentation, gateway_url: str) -> APIRouter:
    """Return the operator's routes; `gateway_url` is that of its gateway for clients on this machine."""
    router = APIRouter(prefix="/apis")

    @router.get("/openapi.json")
    async def common_document(request: Request) -> Response:
        """Return the OpenAPI document of all APIs; with a token limited to one API, only of that one."""
        url = _url_for_client(gateway_url, request)
        return _json(await documentation.common_document(url, only=request.state.principal.api))

    @router.get("/docs", include_in_schema=False)
    async def page(request: Request) -> Response:
        """Return the page of all APIs, which asks for a token."""
        return page_response("APIs", calls=_url_for_client(gateway_url, request))

    @router.get("/docs/{file}", include_in_schema=False)
    async def asset(file: str, request: Request) -> Response:
        """Return a file of the page."""
        return asset_response(file, request)

    return router


def _url_for_client(gateway_url: str, request: Request) -> str:
    """Return the gateway's URL with the host name by which the client knows this machine."""
    gateway, host = urlsplit(gateway_url), request.url.hostname or ""
    return f"{gateway.scheme}://{f'[{host}]' if ':' in host else host}:{gateway.port}"


def _json(data: object, status: int = 200) -> Response:
    headers = {**security_headers(), "cache-control": "no-cache"}
    return Response(dump_json(data), status, headers, media_type="application/json")
