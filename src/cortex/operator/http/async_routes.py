"""Routes of AsyncAPIs, reached through the gateway: send a workload, and fetch its result.

The gateway names the API and the workload in headers that no client can set.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from datetime import UTC, datetime
from typing import Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cortex.errors import CortexError, InputError, MethodNotAllowedError, UnknownWorkloadError
from cortex.jobs.intake.request_body import RequestMemory, check_charset, read_body
from cortex.jobs.spec import Workload, WorkloadView
from cortex.lifecycle import WorkloadStatus
from cortex.operator.http.gateway_routes import API_HEADER, JOB_HEADER, GatewayRoutes
from cortex.telemetry import Logger
from cortex.worker.monitoring.request_log import valid_traceparent

#: Maximum duration of a long poll.
MAX_WAIT_S = 300.0
#: Maximum concurrent long polls; beyond it, polls return immediately so that submissions are not starved.
MAX_WAITING = 256


class SentWorkloads(Protocol):
    """The workloads of the routes: those of the operator, or those in memory (`dev.job_server`)."""

    def max_body_bytes(self, api: str) -> int:
        """Return the size of the largest workload of an API. Raises: NotFoundError."""

    async def add(self, api: str, workload: Workload) -> None:
        """Store a workload. Raises: CortexError."""

    async def get(self, api: str, name: uuid.UUID, wait_s: float, /) -> WorkloadView | None:
        """Return a workload, None if there is none; wait up to `wait_s` for its end."""


class AsyncRoutes(GatewayRoutes):
    """ASGI application for AsyncAPIs."""

    def __init__(self, workloads: SentWorkloads, logger: Logger) -> None:
        super().__init__(logger)
        self._workloads = workloads
        self._memory = RequestMemory()
        self._polls: set[asyncio.Timeout] = set()  #: those that wait

    def stop(self) -> None:
        """Answer all requests that wait with the present status, and later ones at once."""
        super().stop()
        while self._polls:
            self._polls.pop().reschedule(0)

    async def _answer(self, request: Request) -> Response:
        api, name = request.headers[API_HEADER], request.headers.get(JOB_HEADER)
        if request.method == "POST" and name is None:
            return _json({"id": str(await self._submit(request, api))})
        if request.method in ("GET", "HEAD") and name is not None:
            return _json(await self._get(request, api, name))
        if name is None:
            raise MethodNotAllowedError.of(request.method, "POST", ", and GET with the id of a workload behind")
        raise MethodNotAllowedError.of(request.method, "GET")

    def _error_response(self, request: Request, error: CortexError) -> Response:
        return Response(f"error: {error}", error.http_status, media_type="text/plain")

    async def _submit(self, request: Request, api: str) -> uuid.UUID:
        content_type = request.headers.get("content-type", "").strip()
        if not content_type:
            raise InputError("the header Content-Type is missing; say what the body is, as application/json")
        check_charset(content_type)
        with self._memory.share() as share:
            body = await read_body(
                request, self._workloads.max_body_bytes(api), share.acquire, "raise networking.max_body_size of the API"
            )
            traceparent = valid_traceparent(request.headers.get("traceparent", ""))
            workload = Workload(uuid.uuid4(), content_type, body, traceparent)
            await self._workloads.add(api, workload)
        return workload.id

    async def _get(self, request: Request, api: str, name: str) -> dict[str, object]:
        wait_s = _wait_s(request.query_params.get("wait", "0"))
        try:
            parsed = uuid.UUID(name)
        except ValueError:
            raise UnknownWorkloadError(name[:100]) from None
        found = await self._poll(api, parsed, wait_s)
        if found is None:
            raise UnknownWorkloadError(name)
        return workload_json(found)

    async def _poll(self, api: str, name: uuid.UUID, wait_s: float) -> WorkloadView | None:
        if wait_s and not self._is_stopping and len(self._polls) < MAX_WAITING:
            poll = asyncio.timeout(None)
            self._polls.add(poll)
            try:
                async with poll:
                    return await self._workloads.get(api, name, wait_s)
            except TimeoutError:  # by `stop`
                pass
            finally:
                self._polls.discard(poll)
        return await self._workloads.get(api, name, 0.0)


def workload_json(view: WorkloadView) -> dict[str, object]:
    """Return the response for a workload, to be encoded by orjson."""
    shown: dict[str, object] = {"id": str(view.id), "status": view.status.value}
    if view.ended_at is not None:
        is_completed = view.status is WorkloadStatus.COMPLETED
        shown |= {"result": orjson.Fragment(view.value)} if is_completed else {"error": view.value.decode()}
        shown["timestamp"] = datetime.fromtimestamp(view.ended_at, UTC).isoformat(timespec="milliseconds")
    return shown


def _json(data: dict[str, object]) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


def _wait_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:  # NaN is in no range
        raise InputError(f"wait: must be a number of seconds (got {text[:50]}); write wait=30")
    return min(seconds, MAX_WAIT_S)
