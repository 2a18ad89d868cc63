"""ASGI application on the jobs socket, and the base class of the routes that clients reach through the gateway."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cortex.errors import CortexError, MethodNotAllowedError, UnsupportedMediaTypeError
from cortex.telemetry import Logger

#: Headers that the gateway sets on every request: the API, and the job or workload if the path names one.
API_HEADER = "x-cortex-api"
JOB_HEADER = "x-cortex-job"
#: Header that the gateway sets on requests for documentation: the backend or the splitter that it describes.
DOCS_HEADER = "x-cortex-docs"

_API_HEADER = API_HEADER.encode()
_DOCS_HEADER = DOCS_HEADER.encode()


class GatewayRoutes(ABC):
    """ASGI application that answers every request, whatever error occurs."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of any method and path."""
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        except CortexError as error:
            response = self._error(request, error)
        except Exception as error:
            self._logger.error("request failed", exc_info=error, method=request.method, path=request.url.path)
            response = self._error(request, CortexError("internal error; the operator's log has the details"))
        await response(scope, receive, send)

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
