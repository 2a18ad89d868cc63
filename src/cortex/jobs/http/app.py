"""The application on the jobs socket: users of jobs and callers of AsyncAPIs, through the gateway, and workers."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from cortex.jobs.http.async_endpoints import AsyncRoutes, WorkloadsPort
from cortex.jobs.http.endpoints import JobsPort, UserRoutes
from cortex.jobs.http.gateway_routes import API_HEADER
from cortex.jobs.http.worker_endpoints import WorkerRoutes, WorkersPort
from cortex.telemetry import Logger

_API_HEADER = API_HEADER.encode()


def create_jobs_app(
    jobs: JobsPort,
    workloads: WorkloadsPort,
    dispatcher: WorkersPort,
    worker_token: Callable[[str], str],
    logger: Logger,
) -> ASGIApp:
    """Return the application. `worker_token` returns the token of a worker by its id."""
    users = UserRoutes(jobs, logger)
    callers = AsyncRoutes(workloads, logger)
    workers = WorkerRoutes(dispatcher, worker_token, logger)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # The gateway sets this header on all that it sends, so that no path of a user's can reach what is for workers.
        api = next((value.decode("latin-1") for name, value in scope["headers"] if name == _API_HEADER), None)
        route = workers if api is None else callers if workloads.is_async(api) else users
        await route(scope, receive, send)

    return app
