"""ASGI application on the jobs socket, and the base class of the routes that clients reach through the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortex.errors import CortexError, MethodNotAllowedError, OperatorUnavailableError, UnsupportedMediaTypeError
from cortex.telemetry import Logger

#: Headers that the gateway sets on every request: the API, and the job or workload if the path names one.
API_HEADER = "x-cortex-api"
JOB_HEADER = "x-cortex-job"
#: Header that the gateway sets on requests for documentation: the backend or the splitter that it describes.
DOCS_HEADER = "x-cortex-docs"

#: Limits of what is received of a body after the response, as in the gateway.
_DRAIN_S = 30.0
_DRAIN_BYTES = 1024 * 1024 * 1024

_API_HEADER = API_HEADER.encode()
_DOCS_HEADER = DOCS_HEADER.encode()


class _Body:
    """The body of a request while it is received."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        self.is_complete = not message.get("more_body")  # also if the client disconnects
        return message

    async def drain(self) -> None:
        """Receive the rest of the body, for a bounded time and size, and drop it."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while not self.is_complete and size < _DRAIN_BYTES:
                    size += len((await self.receive()).get("body", b""))


class GatewayRoutes(ABC):
    """ASGI application that answers every request, whatever error occurs."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._is_stopping = False

    def stop(self) -> None:
        """Answer requests that are cancelled from now on: the operator is stopping."""
        self._is_stopping = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of any method and path."""
        body = _Body(receive)
        request = Request(scope, body.receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
            stopped = OperatorUnavailableError("the operator has stopped, and the request is not complete; try again")
            await self._error(request, stopped)(scope, receive, send)  # without a drain, for which no time is left
            return
        except CortexError as error:
            response = self._error(request, error)
        except Exception as error:
            self._logger.error("request failed", exc_info=error, method=request.method, path=request.url.path)
            response = self._error(request, CortexError("internal error; the operator's log has the details"))

        async def send_and_drain(message: Message) -> None:
            # A client that still sends would not see a response whose connection is closed at once.
            if message["type"] == "http.response.body" and not message.get("more_body") and not body.is_complete:
                await send({**message, "more_body": True})
                await body.drain()
                message = {"type": "http.response.body"}
            await send(message)

        await response(scope, body.receive, send_and_drain)

    def _error(self, request: Request, error: CortexError) -> Response:
        response = self._error_response(request, error)
        if isinstance(error, MethodNotAllowedError):
            response.headers["allow"] = error.allowed
        if isinstance(error, UnsupportedMediaTypeError) and error.accepted:
            response.headers["accept-encoding"] = error.accepted
        if error.http_status == 503:
            response.headers["retry-after"] = "1"
        return response

    @abstractmethod
    async def _answer(self, request: Request) -> Response:
        """Answer. Raises: CortexError, ClientDisconnect."""

    @abstractmethod
    def _error_response(self, request: Request, error: CortexError) -> Response:
        """Return the response for an error, in the format of these routes."""


def create_jobs_app(
    jobs: ASGIApp, workloads: ASGIApp, documentation: ASGIApp, workers: ASGIApp, is_async: Callable[[str], bool]
) -> ASGIApp:
    """Return the application that routes requests to jobs, workloads of AsyncAPIs, documentation, and job workers."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # The gateway sets one of the headers on everything it sends, so clients can't reach the routes of workers.
        headers = dict(scope["headers"])
        if _DOCS_HEADER in headers:
            route = documentation
        elif _API_HEADER in headers:
            route = workloads if is_async(headers[_API_HEADER].decode("latin-1")) else jobs
        else:
            route = workers
        await route(scope, receive, send)

    return app
