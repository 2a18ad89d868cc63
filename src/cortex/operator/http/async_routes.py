"""Routes of AsyncAPIs, reached through the gateway: send a workload, and fetch its result.

The gateway names the API and the workload in headers that no client can set. APIs of files of older generations answer
as Cortex 0.31 to 0.33 did: errors are text, a stored workload gets 200, and no body is validated.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cortex.errors import CortexError, InputError, MethodNotAllowedError, UnknownWorkloadError
from cortex.jobs.intake.request_body import RequestMemory, as_input_error, check_charset, read_body
from cortex.jobs.spec import Workload, WorkloadView
from cortex.lifecycle import WorkloadStatus
from cortex.operator.http.gateway_routes import API_HEADER, JOB_HEADER, GatewayRoutes
from cortex.payloads.validation import BadBody, PayloadError
from cortex.telemetry import Logger
from cortex.worker.monitoring.request_log import valid_traceparent

#: Maximum duration of a long poll.
MAX_WAIT_S = 300.0
#: Maximum concurrent long polls; beyond it, polls return immediately so that submissions are not starved.
MAX_WAITING = 256
#: A larger body is validated in a thread.
_LARGE_BYTES = 64 * 1024
_MAX_KEY_CHARACTERS = 255
_RETRY_SOON = {"retry-after": "1"}

#: Validates the content type and body of a workload of an API. Raises: BadBody, PayloadError.
BodyCheck = Callable[[str, str, bytes], None]


class _InvalidPayloadError(InputError):
    """A payload that is not of the type that the user's method annotates."""

    http_status = 422

    def __init__(self, error: PayloadError) -> None:
        super().__init__(str(error))
        self.detail = error.detail


class SentWorkloads(Protocol):
    """The workloads of the routes: those of the operator, or those in memory (`dev.job_server`)."""

    def max_body_bytes(self, api: str) -> int:
        """Return the size of the largest workload of an API. Raises: NotFoundError."""

    def is_of_older_file(self, api: str) -> bool:
        """Return whether the file of an API is of an older generation, whose callers expect its responses."""

    async def add(self, api: str, workload: Workload, key: str) -> uuid.UUID:
        """Store a workload and return its id; once for an idempotency key that is not empty. Raises: CortexError."""

    async def get(self, api: str, name: uuid.UUID, wait_s: float, /) -> WorkloadView | None:
        """Return a workload, None if there is none; wait up to `wait_s` for its end."""


class AsyncRoutes(GatewayRoutes):
    """ASGI application for AsyncAPIs."""

    def __init__(self, workloads: SentWorkloads, check_body: BodyCheck, logger: Logger) -> None:
        super().__init__(logger)
        self._workloads = workloads
        self._check_body = check_body
        self._memory = RequestMemory()
        self._polls: set[asyncio.Timeout] = set()  #: those that wait

    def stop(self) -> None:
        """Answer all requests that wait with the present status, and later ones at once."""
        super().stop()
        while self._polls:
            self._polls.pop().reschedule(0)

    async def _answer(self, request: Request) -> Response:
        api, name = request.headers[API_HEADER], request.headers.get(JOB_HEADER)
        is_older = self._workloads.is_of_older_file(api)
        if request.method == "POST" and name is None:
            submitted = str(await self._submit(request, api, is_older))
            place = {"location": f"{request.url.path.rstrip('/')}/{submitted}"}
            return _json({"id": submitted}) if is_older else _json({"id": submitted}, 202, place | _RETRY_SOON)
        if request.method in ("GET", "HEAD") and name is not None:
            found = await self._get(request, api, name)
            return _json(workload_json(found), headers={} if is_older or found.status.is_over else _RETRY_SOON)
        if name is None:
            raise MethodNotAllowedError.of(request.method, "POST", ", and GET with the id of a workload behind")
        raise MethodNotAllowedError.of(request.method, "GET")

    def _error_response(self, request: Request, error: CortexError) -> Response:
        if self._workloads.is_of_older_file(request.headers[API_HEADER]):
            return Response(f"error: {error}", error.http_status, media_type="text/plain")
        shown: dict[str, object] = {"error": str(error)}
        if isinstance(error, _InvalidPayloadError):
            shown["detail"] = error.detail
        return _json({**shown, "request_id": request.headers.get("x-cortex-request-id", "")}, error.http_status)

    async def _submit(self, request: Request, api: str, is_older: bool) -> uuid.UUID:
        content_type = request.headers.get("content-type", "").strip()
        if is_older and not content_type:
            raise InputError("the header Content-Type is missing; say what the body is, as application/json")
        check_charset(content_type)
        key = _idempotency_key(request)
        with self._memory.share() as share:
            body = await read_body(
                request, self._workloads.max_body_bytes(api), share.acquire, "raise networking.max_body_size of the API"
            )
            if not is_older:
                await self._validate(api, content_type, body)
            traceparent = valid_traceparent(request.headers.get("traceparent", ""))
            workload = Workload(uuid.uuid4(), content_type, body, traceparent)
            return await self._workloads.add(api, workload, key)

    async def _validate(self, api: str, content_type: str, body: bytes) -> None:
        try:
            if len(body) > _LARGE_BYTES:
                await asyncio.to_thread(self._check_body, api, content_type, body)
            else:
                self._check_body(api, content_type, body)
        except BadBody as error:
            raise as_input_error(error) from None
        except PayloadError as error:
            raise _InvalidPayloadError(error) from None

    async def _get(self, request: Request, api: str, name: str) -> WorkloadView:
        wait_s = _wait_s(request.query_params.get("wait", "0"))
        try:
            parsed = uuid.UUID(name)
        except ValueError:
            raise UnknownWorkloadError(name[:100]) from None
        found = await self._poll(api, parsed, wait_s)
        if found is None:
            raise UnknownWorkloadError(name)
        return found

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


def _json(data: dict[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(data), status, headers, media_type="application/json")


def _idempotency_key(request: Request) -> str:
    """Return the key of a submission that may be sent again, "" without one; quotes around it are optional."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return ""
    key = given.strip().strip('"')
    if not 0 < len(key) <= _MAX_KEY_CHARACTERS:
        raise InputError(f"Idempotency-Key: must have 1 to {_MAX_KEY_CHARACTERS} characters (got {len(key)})")
    return key


def _wait_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:  # NaN is in no range
        raise InputError(f"wait: must be a number of seconds (got {text[:50]}); write wait=30")
    return min(seconds, MAX_WAIT_S)
