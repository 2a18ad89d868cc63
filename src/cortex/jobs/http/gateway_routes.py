"""What all routes that callers reach through the gateway have in common: they answer whatever goes wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cortex.errors import CortexError, InputError
from cortex.telemetry import Logger

#: What the gateway tells of a request: its API, and the job where the path names one.
API_HEADER = "x-cortex-api"
JOB_HEADER = "x-cortex-job"


class MethodNotAllowedError(InputError):
    """A path has no such verb; `hint` goes on where `allowed` ends."""

    code = "method_not_allowed"
    http_status = 405

    def __init__(self, method: str, allowed: str, hint: str = "") -> None:
        super().__init__(f"{method} is not a method of this path, which has {allowed}{hint}")
        self.allowed = allowed


class GatewayRoutes(ABC):
    """An ASGI application that answers every request, whatever goes wrong."""

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
            response = self._refused(request, error)
        except Exception as error:
            self._logger.error("request failed", exc_info=error, method=request.method, path=request.url.path)
            response = self._refused(request, CortexError("internal error; the operator's log has the details"))
        await response(scope, receive, send)

    def _refused(self, request: Request, error: CortexError) -> Response:
        response = self._refusal(request, error)
        if isinstance(error, MethodNotAllowedError):
            response.headers["allow"] = error.allowed
        if error.http_status == 503:
            response.headers["retry-after"] = "1"
        return response

    @abstractmethod
    async def _answer(self, request: Request) -> Response:
        """Answer. Raises: CortexError, ClientDisconnect."""

    @abstractmethod
    def _refusal(self, request: Request, error: CortexError) -> Response:
        """Say what is wrong, in the form of these routes."""
