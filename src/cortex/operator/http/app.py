"""The operator's HTTP API: routes that call the deployer, the store and the reconciler, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from cortex.config.archive import MAX_PROJECT_BYTES
from cortex.errors import ConfigError, CortexError, DatabaseUnavailableError, InputError, NotFoundError, UserError
from cortex.jobs.intake.request_body import read_body
from cortex.operator.http.access_log import stream_access_log
from cortex.operator.http.auth import Guard, IsName
from cortex.operator.http.docs_page import docs_page
from cortex.operator.http.job_routes import job_routes
from cortex.operator.http.key_routes import key_routes
from cortex.operator.http.log_streams import stream_logs
from cortex.operator.http.log_view import DEFAULT_TAIL, MAX_TAIL, LogForm
from cortex.operator.http.scaling_routes import scaling_routes
from cortex.operator.http.tracking_routes import tracking_routes
from cortex.operator.views import Operator
from cortex.telemetry import Logger

#: A configuration file is some kilobytes.
MAX_CONFIG_BYTES = 1024 * 1024
#: The archive holds the project, its names and the configuration.
MAX_UPLOAD_BYTES = MAX_PROJECT_BYTES + 16 * 1024 * 1024
MAX_WAIT_S = 60.0
#: How long an answer waits at most for the routes to follow a deletion.
_DELETED_S = 5.0
_NAME = re.compile(r"[a-z][-a-z0-9]{0,63}")

Json = dict[str, Any]


def create_app(
    operator: Operator,
    token: str,
    host: str,
    logger: Logger,
    shut_down: Callable[[bool], None],
    version: str,
    is_name: IsName | None = None,
) -> FastAPI:
    """Return the application. `shut_down(all)` ends the operator soon, with replicas and gateway if `all`."""
    app = FastAPI(title="cortex operator", version=version, docs_url=None, redoc_url=None)
    answer_errors(app, logger)
    app.include_router(_own_routes(operator, shut_down))
    app.include_router(_change_routes(operator))
    app.include_router(_api_routes(operator))
    app.include_router(scaling_routes(operator))
    app.include_router(tracking_routes(operator))
    app.include_router(job_routes(operator.jobs, operator.log_sources))
    app.include_router(key_routes(operator.keys))
    app.add_middleware(Guard, token=token, host=host, is_name=is_name)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """Return the OpenAPI description as a page."""
        return HTMLResponse(docs_page(app.openapi()))

    return app


def answer_errors(app: FastAPI, logger: Logger) -> None:
    """Have every error answered in the form of these routes."""

    async def on_cortex_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, CortexError)
        body: Json = {"error": str(error), "code": error.code}
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

    async def on_bad_parameter(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        problems = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
        return JSONResponse({"error": problems, "code": InputError.code}, 400)

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        logger.error("request failed", exc_info=error, method=request.method, path=request.url.path)
        return JSONResponse({"error": "internal error; the operator's log has the details", "code": "internal"}, 500)

    app.add_exception_handler(CortexError, on_cortex_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_bad_parameter)
    app.add_exception_handler(Exception, on_bug)


def _own_routes(operator: Operator, shut_down: Callable[[bool], None]) -> APIRouter:
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Json:
        """Tell that the operator lives; needs no token."""
        return {"ok": True}

    @router.get("/v1/status")
    async def status() -> Json:
        """Return the operator, the gateway and every process of every replica."""
        return operator.describe_self()

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return every number, for Prometheus."""
        return Response(await operator.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.post("/v1/shutdown")
    async def shutdown(all: bool = False) -> Json:
        """End the operator; with `all`, stop the gateway and every replica first."""
        shut_down(all)
        return {"stopping": True}

    return router


def _change_routes(operator: Operator) -> APIRouter:
    router = APIRouter(prefix="/v1")
    deployer = operator.deployer

    @router.post("/deploy")
    async def deploy(
        request: Request,
        config: str | None = None,
        force: bool = False,
        x_cortex_config: Annotated[str | None, Header()] = None,
    ) -> list[Json]:
        """Deploy the APIs of a project: the body is a zip of it, with the configuration file inside."""
        body = await read_body(request, MAX_UPLOAD_BYTES)
        name = config or x_cortex_config or "cortex.yaml"
        return [asdict(result) for result in await deployer.deploy(body, name, force)]

    @router.post("/patch")
    async def patch(request: Request, force: bool = False) -> list[Json]:
        """Change the configuration of deployed APIs: the body is a `cortex.yaml`."""
        body = await read_body(request, MAX_CONFIG_BYTES)
        return [asdict(result) for result in await deployer.patch(body, force)]

    @router.post("/apis/{api}/refresh")
    async def refresh(api: str, force: bool = False) -> Json:
        """Replace every replica of an API."""
        return asdict(await deployer.refresh(api, force))

    @router.delete("/apis/{api}")
    async def delete(api: str, keep_cache: bool = False, force: bool = False) -> Json:
        """Delete an API; `keep_cache` keeps its history. `force` is what the CLI asks its user about."""
        result = await deployer.delete(api, keep_cache)
        await operator.jobs.api_deleted(api, keep_cache)
        await operator.reconciler.settled(api, _DELETED_S)  # callers may count on it: its endpoint answers no more
        return asdict(result)

    return router


def _api_routes(operator: Operator) -> APIRouter:
    router = APIRouter(prefix="/v1/apis")

    @router.get("")
    async def list_apis() -> list[Json]:
        """Return every API."""
        return await operator.describe_all()

    @router.get("/{api}")
    async def get_api(api: str) -> Json:
        """Return one API."""
        return await operator.describe(operator.require(api))

    @router.get("/{api}/wait")
    async def wait(api: str, timeout: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 30.0) -> Json:
        """Return one API as soon as it is not `updating` any more, or after `timeout` seconds."""
        operator.require(api)
        await operator.reconciler.settled(api, timeout)
        return await operator.describe(operator.require(api))

    @router.get("/{api}/logs")
    async def logs(
        api: str,
        follow: bool = False,
        replica: str | None = None,
        tail: Annotated[int, Query(ge=0, le=MAX_TAIL)] = DEFAULT_TAIL,
        request: str | None = None,
        json: bool = False,
        access: bool = False,
    ) -> StreamingResponse:
        """Stream the lines of all replicas of an API, past ones too, in the order of time.

        `request` leaves out what is not of that request, `json` makes each line an object; with `access`
        the lines are the gateway's, one per request.
        """
        folder = operator.home.logs_dir / api
        is_known = _NAME.fullmatch(api) and (operator.store.get(api) or folder.is_dir())
        if not is_known:
            raise NotFoundError(f"{api} is not deployed")
        if access:
            return stream_access_log(operator.access_sources(), api, request, follow, tail, json)
        return stream_logs(operator.log_sources(), api, replica, follow, tail, form=LogForm(json, request))

    return router
